"""The JAX loss against the float64 oracle and against torch, compiled, with slots that hold garbage."""

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch
from loss_material import CONFIGS, GSPO

from dockyard_core.loss import policy_loss as oracle
from dockyard_core.loss_config import LossConfig
from dockyard_trainer_jax.loss import LossTerms, TokenBatch, policy_loss
from dockyard_trainer_torch.loss import TokenBatch as TorchTokenBatch
from dockyard_trainer_torch.loss import policy_loss as torch_policy_loss

SHAPE = (5, 7)
POISONS = (np.nan, np.inf, -np.inf, 1e30)


def make_arrays(seed: int, *, spread: float = 0.3) -> dict[str, np.ndarray]:
    """Random arrays; slots outside the mask, all of row 3 among them, hold what must never be read."""
    rng = np.random.default_rng(seed)
    logprobs = rng.normal(-1.5, 0.5, SHAPE)
    mask = rng.random(SHAPE) < 0.7
    mask[3] = False
    arrays = {
        "logprobs": logprobs,
        "sampled_logprobs": logprobs + rng.normal(0, spread, SHAPE),
        "proximal_logprobs": logprobs + rng.normal(0, spread, SHAPE),
        "ref_logprobs": logprobs + rng.normal(0, spread, SHAPE),
        "entropy": rng.uniform(0, 2, SHAPE),
        "advantages": rng.normal(0, 1, SHAPE),
    }
    return {name: np.where(mask, array, POISONS[seed % 4]) for name, array in arrays.items()} | {"loss_mask": mask}


def token_batch(config: LossConfig, arrays: dict[str, np.ndarray]) -> TokenBatch:
    """All slots, in an order that mixes sequences; sequence numbers outside the mask are garbage."""
    mask = arrays["loss_mask"]
    order = np.random.default_rng(0).permutation(mask.size)
    at = {f"{name}_M": jnp.asarray(array.ravel()[order]) for name, array in arrays.items() if name != "loss_mask"}
    if config.proximal != "given":
        del at["proximal_logprobs_M"]
    rows = np.where(mask, np.arange(len(mask))[:, None], np.arange(mask.shape[1]) * 3 - 5)
    return TokenBatch(
        **at,
        mask_M=jnp.asarray(mask.ravel()[order]),
        sequence_M=jnp.asarray(rows.ravel()[order]),
        num_rows=len(mask),
    )


@partial(jax.jit, static_argnums=0)
def loss_and_gradients(config: LossConfig, tokens: TokenBatch, **counts) -> tuple[LossTerms, jax.Array, jax.Array]:
    def loss_of(logprobs_M: jax.Array, entropy_M: jax.Array) -> tuple[jax.Array, LossTerms]:
        changed = {**vars(tokens), "logprobs_M": logprobs_M, "entropy_M": entropy_M}
        terms = policy_loss(config, TokenBatch(**changed), **counts)
        return terms.loss, terms

    grads, terms = jax.grad(loss_of, argnums=(0, 1), has_aux=True)(tokens.logprobs_M, tokens.entropy_M)
    return terms, *grads


def jax_side(config: LossConfig, arrays: dict[str, np.ndarray], **counts) -> tuple[LossTerms, np.ndarray, np.ndarray]:
    """Terms, and gradients in logprobs and entropy [B, T], all in float64."""
    with jax.enable_x64(True):
        terms, *grads = loss_and_gradients(config, token_batch(config, arrays), **counts)
    back = np.argsort(np.random.default_rng(0).permutation(arrays["loss_mask"].size))
    assert terms.loss.dtype == np.float64
    return terms, *(np.asarray(grad)[back].reshape(arrays["loss_mask"].shape) for grad in grads)


def counts_of(config: LossConfig, mask: np.ndarray) -> dict[str, int]:
    num_sequences = int(mask.any(axis=1).sum()) if config.effective_aggregation == "sequence" else len(mask)
    return {"num_valid_tokens": int(mask.sum()), "num_sequences": num_sequences}


def run_oracle(config: LossConfig, arrays: dict[str, np.ndarray]):
    return oracle(config, **(arrays if config.proximal == "given" else arrays | {"proximal_logprobs": None}))


@pytest.mark.parametrize("options", CONFIGS, ids=str)
def test_compiled_value_gradient_and_metrics_are_the_oracles(options) -> None:
    config = LossConfig(**options)
    for seed, spread in [(0, 0.05), (1, 0.05), (2, 0.3), (3, 0.3), (0, 40.0), (1, 40.0)]:
        arrays = make_arrays(seed, spread=spread)
        mask = arrays["loss_mask"]
        wanted = run_oracle(config, arrays)
        terms, grad, entropy_grad = jax_side(config, arrays, **counts_of(config, mask))
        # With exponents at their clamp, e^20 cancels against itself in k3's gradient: eight digits go.
        rtol = 1e-8 if spread > 1 else 1e-12
        assert float(terms.loss) == pytest.approx(wanted.loss, rel=1e-12, abs=1e-12)
        np.testing.assert_allclose(grad, wanted.grad, rtol=rtol, atol=1e-13)
        np.testing.assert_allclose(entropy_grad, wanted.entropy_grad, rtol=1e-12)
        assert set(terms.sums) | {"offpolicy_abs_diff_max", "mismatch_abs_diff_max"} == set(wanted.metrics) | {
            "num_tokens"
        }
        assert float(terms.sums["num_tokens"]) == mask.sum()
        for name, total in terms.sums.items():
            if name != "num_tokens":
                assert float(total) / mask.sum() == pytest.approx(wanted.metrics[name], rel=1e-9, abs=1e-12), name
        for name in ("offpolicy_abs_diff_max", "mismatch_abs_diff_max"):
            assert float(getattr(terms, name)) == pytest.approx(wanted.metrics[name])


@pytest.mark.parametrize("options", CONFIGS, ids=str)
def test_values_gradients_and_metrics_are_those_of_torch(options) -> None:
    config = LossConfig(**options)
    for seed in range(4):
        arrays = make_arrays(seed)
        mask = arrays["loss_mask"]
        counts = counts_of(config, mask)
        at = {f"{n}_M": torch.from_numpy(a[mask]) for n, a in arrays.items() if n != "loss_mask"}
        at["logprobs_M"].requires_grad_()
        at["entropy_M"].requires_grad_()
        tokens = TorchTokenBatch(**at, sequence_M=torch.from_numpy(np.nonzero(mask)[0]), num_rows=len(mask))
        wanted = torch_policy_loss(config, tokens, **counts)
        wanted.loss.backward()
        terms, grad, entropy_grad = jax_side(config, arrays, **counts)
        assert float(terms.loss) == pytest.approx(wanted.loss.item(), rel=1e-12, abs=1e-14)
        np.testing.assert_allclose(grad[mask], at["logprobs_M"].grad, rtol=1e-11, atol=1e-15)
        if config.entropy_coef:
            np.testing.assert_allclose(entropy_grad[mask], at["entropy_M"].grad, rtol=1e-12)
        assert set(terms.sums) == set(wanted.sums)
        for name, total in wanted.sums.items():
            assert float(terms.sums[name]) == pytest.approx(float(total), rel=1e-12, abs=1e-14), name
        assert float(terms.mismatch_abs_diff_max) == pytest.approx(float(wanted.mismatch_abs_diff_max), rel=1e-14)


@pytest.mark.parametrize("options", CONFIGS, ids=str)
def test_no_trained_token_gives_zero_loss_and_zero_gradient(options) -> None:
    arrays = make_arrays(0) | {"loss_mask": np.zeros(SHAPE, bool)}
    terms, grad, entropy_grad = jax_side(LossConfig(**options), arrays, num_valid_tokens=0, num_sequences=0)
    assert float(terms.loss) == 0.0
    assert not grad.any()
    assert not entropy_grad.any()
    assert float(terms.offpolicy_abs_diff_max) == 0.0
    assert {float(total) for total in terms.sums.values()} == {0.0}


def test_batches_with_other_counts_and_masks_run_what_was_compiled_for_the_first() -> None:
    config = LossConfig(proximal="given", kl_coef=0.1)
    loss_and_gradients.clear_cache()
    for seed in range(4):
        arrays = make_arrays(seed)
        jax_side(config, arrays, **counts_of(config, arrays["loss_mask"]))
    assert loss_and_gradients._cache_size() == 1
    jax_side(LossConfig(), make_arrays(0), num_valid_tokens=3, num_sequences=2)
    assert loss_and_gradients._cache_size() == 2


def test_counts_whose_product_is_beyond_int32_are_not_wrapped() -> None:
    config = LossConfig(aggregation="dr_grpo", max_tokens=2**20, variant="reinforce", correction="none")
    arrays = make_arrays(0)
    terms, *_ = jax_side(config, arrays, num_valid_tokens=1, num_sequences=jnp.int32(2**15))
    few = float(jax_side(config, arrays, num_valid_tokens=1, num_sequences=1)[0].loss)
    assert float(terms.loss) == pytest.approx(few / 2**15)


def test_a_mask_of_numbers_is_refused() -> None:
    tokens = token_batch(LossConfig(), make_arrays(0))
    floats = TokenBatch(**{**vars(tokens), "mask_M": tokens.mask_M.astype(jnp.float32)})
    with pytest.raises(ValueError, match="mask_M must be boolean, got float32"):
        policy_loss(LossConfig(), floats, num_valid_tokens=1, num_sequences=1)


@pytest.mark.parametrize("advantage", [1.0, -1.0])
def test_the_gradient_flows_exactly_at_a_clip_edge_as_in_the_oracle(advantage) -> None:
    # A range of no width around a ratio of 1: the only edge on which no rounding can be off.
    config = LossConfig(proximal="given", correction="none", clip_low=0.0, clip_high=0.0)
    one = np.full((1, 1), -1.0)
    arrays = dict.fromkeys(make_arrays(0), one) | {
        "advantages": np.full((1, 1), advantage),
        "loss_mask": np.ones((1, 1), bool),
    }
    _, grad, _ = jax_side(config, arrays, num_valid_tokens=1, num_sequences=1)
    assert oracle(config, **arrays).grad[0, 0] == -advantage
    assert grad[0, 0] == -advantage


def one_token(
    config: LossConfig, *, logprob: float = -1.0, sampled: float, ref: float, advantage: float, dtype: type
) -> tuple[float, float, float, float]:
    """Loss and gradient of one token: JAX's, the oracle's, JAX's, the oracle's."""
    values = {"logprobs": logprob, "sampled_logprobs": sampled, "ref_logprobs": ref, "advantages": advantage}
    at = {name: np.full((1, 1), value, dtype) for name, value in values.items()} | {"entropy": np.zeros((1, 1), dtype)}
    arrays = at | {"proximal_logprobs": at["logprobs"], "loss_mask": np.ones((1, 1), bool)}
    with jax.enable_x64(dtype is np.float64):
        tokens = token_batch(config, arrays)
        terms, grad_M, _ = loss_and_gradients(config, tokens, num_valid_tokens=1, num_sequences=1)
    assert terms.loss.dtype == dtype
    with np.errstate(invalid="ignore"):
        wanted = run_oracle(config, {name: array.astype(np.float64) for name, array in arrays.items()})
    return float(terms.loss), wanted.loss, float(grad_M[0]), wanted.grad[0, 0]


@pytest.mark.parametrize("gap", [1e-6, 1e-3, 0.1, 3.0, 12.0, 20.0, 40.0])
@pytest.mark.parametrize("sign", [1, -1])
@pytest.mark.parametrize("gradient", ["plain", "score"])
def test_the_kl_gradient_keeps_its_digits_in_float32_near_the_reference_and_far_from_it(gap, sign, gradient) -> None:
    """Differentiating e^d - 1 - d would leave 6e-8 / d of them near it, and the score form none at the clamp."""
    config = LossConfig(kl_coef=1.0, kl_gradient=gradient, correction="none")
    _, _, grad, wanted = one_token(config, sampled=-1.0, ref=-1.0 + sign * gap, advantage=0.0, dtype=np.float32)
    assert grad == pytest.approx(wanted, rel=5e-7)


@pytest.mark.parametrize("options", [{}, {"proximal": "bypass"}, {"kl_coef": 0.1}, {"correction": "is"}, GSPO], ids=str)
@pytest.mark.parametrize("sampled", [-np.inf, -1.0])
def test_an_infinite_gap_is_clamped_like_any_other(options, sampled) -> None:
    config = LossConfig(**options)
    loss, wanted_loss, grad, wanted_grad = one_token(
        config, sampled=sampled, ref=-np.inf, advantage=1.0, dtype=np.float64
    )
    assert np.isfinite([loss, grad]).all()
    assert (loss, grad) == (pytest.approx(wanted_loss), pytest.approx(wanted_grad))


def test_a_bounded_kl_keeps_its_value_in_float32_when_the_estimate_is_huge() -> None:
    config = LossConfig(kl_coef=1.0, kl_max=0.1, correction="none")
    loss, *_ = one_token(config, logprob=-30.0, sampled=-30.0, ref=-0.5, advantage=0.0, dtype=np.float32)
    assert loss == pytest.approx(0.1)
