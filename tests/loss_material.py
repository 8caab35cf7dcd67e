"""Random batches and configurations of the loss, and what the float64 oracle says of them: for each trainer's tests."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from typing import Any

import numpy as np
from hypothesis import assume
from hypothesis import strategies as st

from dockyard_core.loss import EXPONENT_LIMIT, LossOutput
from dockyard_core.loss import policy_loss as oracle
from dockyard_core.loss_config import LossConfig

Arrays = dict[str, np.ndarray]


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


PROXIMAL = {"current": "logprobs", "given": "proximal_logprobs", "bypass": "sampled_logprobs"}


RANGES = {"clip_low": 0.1, "clip_high": 0.15, "cispo_max": 1.2, "tis_max": 1.3, "seq_low": 0.8, "seq_high": 1.25}


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


def counts_of(config: LossConfig, mask: np.ndarray) -> dict[str, int]:
    num_sequences = int(mask.any(axis=1).sum()) if config.effective_aggregation == "sequence" else len(mask)
    return {"num_valid_tokens": int(mask.sum()), "num_sequences": num_sequences}


def run_oracle(config: LossConfig, batch: Arrays) -> LossOutput:
    return oracle(config, **(batch if config.proximal == "given" else batch | {"proximal_logprobs": None}))  # type: ignore[arg-type]


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


def combinations() -> Iterator[dict[str, Any]]:
    for values in itertools.product(*DISCRETE.values()):
        yield dict(zip(DISCRETE, values, strict=True)) | RANGES | {"max_tokens": 9}


GSPO = {"variant": "gspo", "clip_low": 0.05, "clip_high": 0.08}
# Every term of the loss at given log-probabilities.
CONFIGS: list[dict[str, Any]] = [
    {},
    {"correction": "none"},
    {"correction": "is"},
    {"correction": "icepop", "correction_low": 0.8, "correction_high": 1.2},
    {"correction": "seq_mask", "seq_low": 0.9, "seq_high": 1.1},
    {"proximal": "bypass", "clip_low": 0.1, "clip_high": 0.28},
    {"proximal": "given", "clip_low": 0.1, "clip_high": 0.28},
    {"proximal": "given", "dual_clip": 1.2, "aggregation": "sequence"},
    {"proximal": "given", "variant": "cispo", "cispo_max": 1.2},
    {"proximal": "given", "variant": "reinforce", "aggregation": "dr_grpo", "max_tokens": 7},
    {"proximal": "given", **GSPO},
    GSPO | {"correction": "seq_mask", "seq_low": 0.9, "seq_high": 1.1, "dual_clip": 1.01, "proximal": "given"},
    *[{"kl_coef": 0.2, "kl_estimator": k, "kl_max": m} for k in ("k2", "k3") for m in (None, 0.1)],
    *[{"kl_coef": 0.2, "kl_estimator": k, "kl_gradient": "score", "proximal": "given"} for k in ("k1", "k3")],
    {"entropy_coef": 0.05, "kl_coef": 0.1, "aggregation": "sequence"},
]

# Every term of the loss through a model.
EVEN_GSPO = {"variant": "gspo", "clip_low": 0.05, "clip_high": 0.05}
LOSSES: dict[str, dict[str, Any]] = {
    "default": {},
    "clip to the sampler": {"proximal": "bypass", "clip_low": 0.2, "clip_high": 0.28, "dual_clip": 1.3},
    "clip to given logprobs": {"proximal": "given", "correction": "icepop", "aggregation": "sequence"},
    "sequence mean": {"aggregation": "sequence", "correction": "is"},
    "kl and entropy": {"kl_coef": 0.3, "entropy_coef": 0.05, "aggregation": "dr_grpo", "max_tokens": 12},
    "kl alone": {"kl_coef": 0.3, "kl_gradient": "score", "correction": "none", "variant": "reinforce"},
    "bounded k2": {"kl_coef": 0.3, "kl_estimator": "k2", "kl_max": 0.05, "correction": "seq_mask", "seq_high": 1.1},
    "cispo": {"variant": "cispo", "proximal": "bypass", "cispo_max": 1.1},
    "gspo": EVEN_GSPO | {"proximal": "bypass"},
    "gspo with kl": EVEN_GSPO | {"proximal": "given", "kl_coef": 0.1, "kl_estimator": "k1", "kl_gradient": "score"},
    "supervised": {"variant": "reinforce", "correction": "none"},
}
