"""On every combination that LossConfig admits, the JAX loss is the float64 oracle, however the batch is cut."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from loss_material import (
    DISCRETE,
    Arrays,
    batches,
    combinations,
    configs,
    counts_of,
    has_rounded_decision,
    largest_term,
    make_batch,
    refusal,
    run_oracle,
)
from pydantic import ValidationError

from dockyard_core.loss_config import LossConfig
from dockyard_trainer_jax.loss import LossTerms, TokenBatch, policy_loss

LAWS = settings(deadline=None, derandomize=True, database=None)
NUM_SLOTS, NUM_ROWS = 40, 6


def slots(array: np.ndarray, filler: float) -> np.ndarray:
    """Flat, filled up to NUM_SLOTS: with one shape, every operation is compiled once for all examples."""
    return np.concatenate([array.ravel(), np.full(NUM_SLOTS - array.size, filler)]).astype(array.dtype)


def run_jax(
    config: LossConfig, batch: Arrays, counts: dict[str, int], *, dtype: type = np.float64
) -> tuple[LossTerms, np.ndarray, np.ndarray]:
    """Loss terms, and the gradients in logprobs and entropy as [B, T]."""
    mask = batch["loss_mask"]
    with jax.enable_x64(dtype is np.float64):
        at = {f"{n}_M": jnp.asarray(slots(a, np.nan), dtype) for n, a in batch.items() if n != "loss_mask"}
        if config.proximal != "given":
            del at["proximal_logprobs_M"]
        at["mask_M"] = jnp.asarray(slots(mask, 0))
        at["sequence_M"] = jnp.asarray(slots(np.where(mask, np.arange(len(mask))[:, None], -7), 99))

        def loss_of(logprobs_M: jax.Array, entropy_M: jax.Array) -> tuple[jax.Array, LossTerms]:
            changed = at | {"logprobs_M": logprobs_M, "entropy_M": entropy_M}
            terms = policy_loss(config, TokenBatch(**changed, num_rows=NUM_ROWS), **counts)
            return terms.loss, terms

        grads, terms = jax.grad(loss_of, argnums=(0, 1), has_aux=True)(at["logprobs_M"], at["entropy_M"])
    assert terms.loss.dtype == dtype
    assert all(total.dtype == dtype for total in terms.sums.values())
    for grad_M in grads:
        assert not np.asarray(grad_M)[mask.size :].any()
    return terms, *(np.asarray(grad_M)[: mask.size].reshape(mask.shape).astype(np.float64) for grad_M in grads)


def assert_is_the_oracle(config: LossConfig, batch: Arrays, *, dtype: type, rtol: float, unit: float) -> None:
    """Value, both gradients and every metric, within ``rtol`` or ``unit`` times the largest term."""
    wanted = run_oracle(config, batch)
    terms, grad, entropy_grad = run_jax(config, batch, counts_of(config, batch["loss_mask"]), dtype=dtype)
    atol = unit * largest_term(config, batch)
    assert terms.loss.item() == pytest.approx(wanted.loss, rel=rtol, abs=atol)
    np.testing.assert_allclose(grad, wanted.grad, rtol=rtol, atol=atol)
    np.testing.assert_allclose(entropy_grad, wanted.entropy_grad, rtol=rtol, atol=0)
    count = max(float(terms.sums["num_tokens"]), 1.0)
    got = {name: float(total) / count for name, total in terms.sums.items() if name != "num_tokens"}
    got["offpolicy_abs_diff_max"] = float(terms.offpolicy_abs_diff_max)
    got["mismatch_abs_diff_max"] = float(terms.mismatch_abs_diff_max)
    assert set(wanted.metrics) == set(got)
    for name, value in got.items():
        assert value == pytest.approx(wanted.metrics[name], rel=10 * rtol, abs=10 * rtol), name


@pytest.mark.parametrize("variant", DISCRETE["variant"])
@pytest.mark.parametrize(
    "stride", [101, pytest.param(31, marks=pytest.mark.ci), pytest.param(7, marks=pytest.mark.nightly)]
)
def test_every_combination_is_refused_for_a_reason_or_is_the_oracles(variant: str, stride: int) -> None:
    """Of the 9600 that are admitted, one in 101 still has every pair of values that can be together, one in 31 every
    triple; one in 7 has every variant with every reference point, correction, aggregation and ceiling.
    """
    chosen = [(number, options) for number, options in enumerate(combinations()) if options["variant"] == variant]
    num_checked = 0
    for number, options in chosen[::stride]:
        if refusal(options):
            with pytest.raises(ValidationError, match=refusal(options)):
                LossConfig(**options)
            continue
        config, batch = LossConfig(**options), make_batch(number)
        assert_is_the_oracle(config, batch, dtype=np.float64, rtol=1e-9, unit=1e-14)
        num_checked += 1
    assert num_checked > 500 / stride


EXAMPLES = pytest.mark.parametrize(
    "max_examples", [4, pytest.param(40, marks=pytest.mark.ci), pytest.param(200, marks=pytest.mark.nightly)]
)


@pytest.mark.parametrize(
    "max_examples", [pytest.param(40, marks=pytest.mark.ci), pytest.param(200, marks=pytest.mark.nightly)]
)
def test_in_float64_value_gradients_and_metrics_are_the_oracles(max_examples: int) -> None:
    @settings(LAWS, max_examples=max_examples)
    @given(configs(), batches)
    def law(config: LossConfig, batch: Arrays) -> None:
        assume(not has_rounded_decision(config, batch, 1e-12))
        assert_is_the_oracle(config, batch, dtype=np.float64, rtol=1e-10, unit=1e-14)

    law()


@EXAMPLES
def test_in_float32_they_are_the_oracles_within_its_rounding(max_examples: int) -> None:
    @settings(LAWS, max_examples=max_examples)
    @given(configs(), batches)
    def law(config: LossConfig, batch: Arrays) -> None:
        single = {name: array.astype(np.float32).astype(array.dtype) for name, array in batch.items()}
        assume(not has_rounded_decision(config, single, 1e-4))
        assert_is_the_oracle(config, single, dtype=np.float32, rtol=2e-5, unit=1e-6)

    law()


@EXAMPLES
def test_micro_batches_add_up_to_the_batch_however_it_is_cut(max_examples: int) -> None:
    """Sequences go to micro-batches in any way; counts are those of the whole step."""

    @settings(LAWS, max_examples=max_examples // 2)
    @given(configs(), batches, st.data())
    def law(config: LossConfig, batch: Arrays, data: st.DataObject) -> None:
        num_sequences = len(batch["loss_mask"])
        place = data.draw(st.lists(st.integers(0, 2), min_size=num_sequences, max_size=num_sequences))
        assert_adds_up(config, batch, np.array(place))

    law()


def assert_adds_up(config: LossConfig, batch: Arrays, place: np.ndarray) -> None:
    """Micro-batch ``place[i]`` gets sequence i; one may be empty."""
    counts = counts_of(config, batch["loss_mask"])
    whole, grad, entropy_grad = run_jax(config, batch, counts)
    loss, sums, largest = 0.0, dict.fromkeys(whole.sums, 0.0), {"offpolicy": 0.0, "mismatch": 0.0}
    atol = 1e-14 * largest_term(config, batch)
    for number in range(3):
        rows = np.flatnonzero(place == number)
        part, part_grad, part_entropy_grad = run_jax(config, {n: a[rows] for n, a in batch.items()}, counts)
        np.testing.assert_allclose(part_grad, grad[rows], rtol=1e-12, atol=atol)
        np.testing.assert_allclose(part_entropy_grad, entropy_grad[rows], rtol=1e-12, atol=0)
        loss += part.loss.item()
        largest = {name: max(value, float(getattr(part, f"{name}_abs_diff_max"))) for name, value in largest.items()}
        sums = {name: sums[name] + float(part.sums[name]) for name in sums}
    assert loss == pytest.approx(whole.loss.item(), rel=1e-12, abs=atol)
    assert largest == {name: float(getattr(whole, f"{name}_abs_diff_max")) for name in largest}
    for name, total in sums.items():
        assert total == pytest.approx(float(whole.sums[name]), rel=1e-12, abs=1e-12), name
