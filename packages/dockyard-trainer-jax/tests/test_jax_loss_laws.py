"""On every combination that LossConfig admits, the JAX loss is the float64 oracle, however the batch is cut."""

import itertools
from collections.abc import Iterator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from pydantic import ValidationError

from dockyard_core.loss import EXPONENT_LIMIT, LossOutput
from dockyard_core.loss import policy_loss as oracle
from dockyard_core.loss_config import LossConfig
from dockyard_trainer_jax.loss import LossTerms, TokenBatch, policy_loss

Arrays = dict[str, np.ndarray]

LAWS = settings(deadline=None, derandomize=True, database=None)
DISCRETE = {
    "variant": ["clip", "cispo", "gspo", "reinforce"],
    "proximal": ["current", "given", "bypass"],
    "correction": ["none", "is", "tis", "icepop", "seq_mask"],
    "kl_coef": [0.0, 0.3],
    "kl_estimator": ["k1", "k2", "k3"],
    "kl_gradient": ["plain", "score"],
    "kl_max": [None, 0.1],
    "entropy_coef": [0.0, 0.05],
    "aggregation": ["token", "sequence", "dr_grpo"],
    "dual_clip": [None, 1.2],
}
NUM_SLOTS, NUM_ROWS = 40, 6
PROXIMAL = {"current": "logprobs", "given": "proximal_logprobs", "bypass": "sampled_logprobs"}
RANGES = {"clip_low": 0.1, "clip_high": 0.15, "cispo_max": 1.2, "tis_max": 1.3, "seq_low": 0.8, "seq_high": 1.25}


# ---- material -------------------------------------------------------------------------------------


def make_batch(
    seed: int,
    *,
    shape: tuple[int, int] = (4, 6),
    spread: float = 0.3,
    tied: float = 0.2,
    extreme: float = 0.05,
    density: float = 0.7,
    poison: float = np.nan,
    is_per_token: bool = False,
) -> Arrays:
    """Random arrays whose gaps are 0 with probability ``tied`` and beyond the clamp with ``extreme``.

    Masked slots hold ``poison``. Advantages are 0 in some rows, or in all, as equal rewards make them.
    """
    rng = np.random.default_rng(seed)
    mask = rng.random(shape) < density
    logprobs = -rng.exponential(1.5, shape)

    def moved() -> np.ndarray:
        kind = rng.random(shape)
        gap = np.where(kind < extreme, rng.choice([-60, -20.5, -19.5, 20.5, 60], shape), rng.normal(0, spread, shape))
        return np.where(kind > 1 - tied, logprobs, logprobs + gap)

    advantages = rng.normal(0, 1, shape if is_per_token else (shape[0], 1)) * rng.choice([0, 1, 1], (shape[0], 1))
    arrays = {
        "logprobs": logprobs,
        "sampled_logprobs": moved(),
        "proximal_logprobs": moved(),
        "ref_logprobs": moved(),
        "entropy": rng.uniform(0, 3, shape),
        "advantages": np.broadcast_to(advantages, shape),
    }
    return {name: np.where(mask, array, poison) for name, array in arrays.items()} | {"loss_mask": mask}


batches = st.builds(
    make_batch,
    st.integers(0, 10**6),
    shape=st.tuples(st.integers(1, 5), st.integers(1, 7)),
    spread=st.sampled_from([0.0, 1e-6, 0.01, 0.3, 3.0]),
    tied=st.sampled_from([0.0, 0.3, 1.0]),
    extreme=st.sampled_from([0.0, 0.1, 1.0]),
    density=st.sampled_from([0.0, 0.2, 0.7, 1.0]),
    poison=st.sampled_from([np.nan, np.inf, -np.inf]),
    is_per_token=st.booleans(),
)


def ranges(low: float, high: float, *special: float) -> st.SearchStrategy[float]:
    return st.one_of(st.sampled_from([low, high, *special]), st.floats(low, high).map(lambda value: round(value, 6)))


@st.composite
def configs(draw: st.DrawFn) -> LossConfig:
    """Any LossConfig that is not refused, extreme ranges and edges at a ratio of exactly 1 included."""
    options: dict[str, Any] = {name: draw(st.sampled_from(values)) for name, values in DISCRETE.items()}
    options |= {
        "clip_low": draw(ranges(0.0, 0.999, 3e-4, 0.2)),
        "clip_high": draw(ranges(0.0, 1e6, 4e-4, 0.28)),
        "cispo_max": draw(ranges(1e-6, 1e12, 1.0, 5.0)),
        "tis_max": draw(ranges(1e-6, 1e12, 1.0, 2.0)),
        "kl_coef": draw(ranges(0.0, 10.0, 0.04)),
        "entropy_coef": draw(ranges(-1.0, 1.0, 0.0, 0.01)),
        "max_tokens": draw(st.sampled_from([1, 7, 32768])),
    }
    options["dual_clip"] = options["dual_clip"] and draw(ranges(1.0001, 1e9, 3.0))
    options["kl_max"] = options["kl_max"] and draw(ranges(1e-6, 1e9, 0.1))
    for name in ("correction", "seq"):
        low, high = sorted([draw(ranges(0.0, 2.0, 1.0, 0.99)), draw(ranges(1e-6, 1e12, 1.0, 1.01))])
        options |= {f"{name}_low": low, f"{name}_high": high}
    assume(not refusal(options))
    return LossConfig(**options)


def refusal(options: dict[str, Any]) -> str:
    """Why a combination of the discrete fields is refused; empty when it is not."""
    if options["variant"] == "gspo" and options["aggregation"] == "dr_grpo":
        return "use 'sequence'"
    if options["dual_clip"] and options["variant"] in ("cispo", "reinforce"):
        return "dual_clip acts on"
    estimator = (options["kl_estimator"], options["kl_gradient"])
    if options["kl_coef"] and estimator == ("k1", "plain"):
        return "zero expected gradient"
    if options["kl_coef"] and estimator == ("k2", "score"):
        return "counts the gradient twice"
    return ""


# ---- both sides -----------------------------------------------------------------------------------


def counts_of(config: LossConfig, mask: np.ndarray) -> dict[str, int]:
    num_sequences = int(mask.any(axis=1).sum()) if config.effective_aggregation == "sequence" else len(mask)
    return {"num_valid_tokens": int(mask.sum()), "num_sequences": num_sequences}


def run_oracle(config: LossConfig, batch: Arrays) -> LossOutput:
    return oracle(config, **(batch if config.proximal == "given" else batch | {"proximal_logprobs": None}))  # type: ignore[arg-type]


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


def largest_term(config: LossConfig, batch: Arrays) -> float:
    """Upper bound of a token's loss or gradient before aggregation: what rounding is relative to."""
    at = {name: np.nan_to_num(np.where(batch["loss_mask"], array, 0.0)) for name, array in batch.items()}
    old = at[PROXIMAL[config.proximal]]

    def grown(difference: np.ndarray) -> float:
        return float(np.exp(np.minimum(np.abs(difference).max(initial=0.0), EXPONENT_LIMIT)))

    weighted = grown(at["logprobs"] - old)
    if config.effective_correction != "none":
        weighted *= grown(old - at["sampled_logprobs"])
    policy = weighted * np.abs(at["advantages"]).max(initial=0.0) * max(1.0, np.abs(at["logprobs"]).max(initial=0.0))
    kl = config.kl_coef * grown(at["ref_logprobs"] - at["logprobs"]) * EXPONENT_LIMIT
    return float(1 + policy + kl * (weighted if config.kl_gradient == "score" else 1))


def has_rounded_decision(config: LossConfig, batch: Arrays, margin: float) -> bool:
    """Whether a comparison with a bound could fall either way by rounding.

    A ratio of exactly 1 is exact on both sides, so that ties at a bound of 1 stay in.
    """
    mask = batch["loss_mask"]
    at = {name: np.where(mask, array, 0.0) for name, array in batch.items()}
    old = at[PROXIMAL[config.proximal]]
    log_ratio, log_r = at["logprobs"] - old, np.clip(old - at["sampled_logprobs"], -EXPONENT_LIMIT, EXPONENT_LIMIT)
    count = np.maximum(mask.sum(axis=1), 1)
    bounds = [1 - config.clip_low, 1 + config.clip_high, config.cispo_max, config.dual_clip or 0.0]
    r_bounds = [config.tis_max, config.correction_low, config.correction_high]
    seq_bounds = [config.seq_low, config.seq_high]
    for exponent, edges in [
        (log_ratio[mask], bounds),
        (log_ratio.sum(axis=1) / count, bounds),
        (log_r[mask], [*r_bounds, 1.0]),
        (log_r.sum(axis=1) / count, seq_bounds),
    ]:
        exponent = np.clip(exponent, -EXPONENT_LIMIT, EXPONENT_LIMIT)
        for edge in edges:
            is_near = np.abs(np.exp(exponent) - edge) <= margin * max(edge, 1e-3)
            if (is_near & (exponent != 0)).any():
                return True
    return False


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


# ---- laws -----------------------------------------------------------------------------------------


def combinations() -> Iterator[dict[str, Any]]:
    for values in itertools.product(*DISCRETE.values()):
        yield dict(zip(DISCRETE, values, strict=True)) | RANGES | {"max_tokens": 9}


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
