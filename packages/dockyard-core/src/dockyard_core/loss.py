"""The policy loss in float64 numpy, with its gradient derived by hand: the oracle of every trainer.

A trainer is right when autograd of its loss equals ``logprobs.backward(policy_loss(...).grad)``.
Written for reading, not for speed; nothing here is differentiated automatically.

Shape legend: B = sequences, T = tokens of a sequence.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

import numpy as np

from dockyard_core.loss_config import LossConfig

EXPONENT_LIMIT = 20.0


@dataclass(frozen=True, kw_only=True)
class LossOutput:
    """Value and gradient of one batch's loss."""

    loss: float
    grad: np.ndarray
    """[B, T], d loss / d logprobs; 0 where the mask is False."""
    entropy_grad: np.ndarray
    """[B, T], d loss / d entropy; 0 unless the loss has an entropy bonus."""
    metrics: Mapping[str, float] = field(default_factory=dict)


@dataclass(frozen=True, kw_only=True)
class _Tokens:
    """Inputs with every masked slot replaced by 0, before anything is exponentiated."""

    mask: np.ndarray
    logprobs: np.ndarray
    sampled: np.ndarray
    proximal: np.ndarray
    ref: np.ndarray
    entropy: np.ndarray
    advantages: np.ndarray

    @property
    def log_ratio(self) -> np.ndarray:
        difference: np.ndarray = self.logprobs - self.proximal
        return difference

    @property
    def log_r(self) -> np.ndarray:
        return _clamp(self.proximal - self.sampled)

    def sequence_mean(self, values: np.ndarray) -> np.ndarray:
        """Mean over each row's trained tokens, [B, 1]; 0 for a row without any."""
        counts = np.maximum(self.mask.sum(axis=1, keepdims=True), 1)
        mean: np.ndarray = np.where(self.mask, values, 0.0).sum(axis=1, keepdims=True) / counts
        return mean


def _clamp(exponent: np.ndarray) -> np.ndarray:
    clamped: np.ndarray = np.clip(exponent, -EXPONENT_LIMIT, EXPONENT_LIMIT)
    return clamped


# ---- variants: (value, d value / d logprob, was a clip active), each [B, T] -----------------------

_Surrogate = tuple[np.ndarray, np.ndarray, np.ndarray]


def _clipped(config: LossConfig, ratio: np.ndarray, advantages: np.ndarray) -> _Surrogate:
    """max(-rho A, -clip(rho) A) and its derivative in log rho; the free branch wins ties."""
    free = -ratio * advantages
    bound = -np.clip(ratio, 1 - config.clip_low, 1 + config.clip_high) * advantages
    is_active = bound > free
    value, slope = np.where(is_active, bound, free), np.where(is_active, 0.0, free)
    if config.dual_clip is not None:
        ceiling = -config.dual_clip * advantages
        is_capped = (advantages < 0) & (value > ceiling)
        value, slope = np.where(is_capped, ceiling, value), np.where(is_capped, 0.0, slope)
        is_active = is_active | is_capped
    return value, slope, is_active


def _clip(config: LossConfig, tokens: _Tokens) -> _Surrogate:
    return _clipped(config, np.exp(_clamp(tokens.log_ratio)), tokens.advantages)


def _cispo(config: LossConfig, tokens: _Tokens) -> _Surrogate:
    ratio = np.exp(_clamp(tokens.log_ratio))
    slope = -np.minimum(ratio, config.cispo_max) * tokens.advantages
    return slope * tokens.logprobs, slope, ratio > config.cispo_max


def _gspo(config: LossConfig, tokens: _Tokens) -> _Surrogate:
    # The slope is in log s; policy_loss spreads it over the sequence's tokens.
    ratio = np.exp(_clamp(tokens.sequence_mean(tokens.log_ratio)))
    return _clipped(config, np.broadcast_to(ratio, tokens.mask.shape), tokens.advantages)


def _reinforce(config: LossConfig, tokens: _Tokens) -> _Surrogate:
    slope = -tokens.advantages
    return slope * tokens.logprobs, slope, np.zeros(slope.shape, bool)


_VARIANTS: Mapping[str, Callable[[LossConfig, _Tokens], _Surrogate]] = {
    "clip": _clip,
    "cispo": _cispo,
    "gspo": _gspo,
    "reinforce": _reinforce,
}


def correction_weight(config: LossConfig, tokens: _Tokens) -> np.ndarray:
    """Detached behaviour-correction weight w, [B, T], from r = exp(logpi_old - logmu)."""
    r: np.ndarray = np.exp(tokens.log_r)
    match config.effective_correction:
        case "none":
            return np.ones_like(r)
        case "is":
            return r
        case "tis":
            return np.where(r > config.tis_max, config.tis_max, r)
        case "icepop":
            return np.where((r >= config.correction_low) & (r <= config.correction_high), r, 0.0)
        case "seq_mask":
            mean_r = np.exp(tokens.sequence_mean(tokens.log_r))
            return np.where((mean_r >= config.seq_low) & (mean_r <= config.seq_high), r, 0.0)


def kl_estimate(config: LossConfig, logprobs: np.ndarray, ref: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """(kl, d kl / d logprob) of k1 = -d, k2 = d²/2, k3 = e^d - 1 - d with d = logpi_ref - logpi.

    |d| is clamped to 20 and the value to ``kl_max``, both with the gradient passed through.
    """
    d = _clamp(ref - logprobs)
    match config.kl_estimator:
        case "k1":
            value, slope = -d, np.ones_like(d)
        case "k2":
            value, slope = d**2 / 2, -d
        case "k3":
            value, slope = np.expm1(d) - d, -np.expm1(d)
    if config.kl_max is not None:
        value = np.minimum(value, config.kl_max)
    return value, slope


def token_coefficients(
    config: LossConfig, mask: np.ndarray, *, num_valid_tokens: int | None, num_sequences: int | None
) -> np.ndarray:
    """Weight of each token's loss in the total, [B, T]; 0 where the mask is False."""
    tokens_B1 = mask.sum(axis=1, keepdims=True)
    if config.effective_aggregation == "token":
        count = int(tokens_B1.sum()) if num_valid_tokens is None else num_valid_tokens
        return np.where(mask, 1.0 / max(count, 1), 0.0)
    if config.effective_aggregation == "sequence":
        count = int((tokens_B1 > 0).sum()) if num_sequences is None else num_sequences
        return np.where(mask, 1.0 / (np.maximum(tokens_B1, 1) * max(count, 1)), 0.0)
    assert config.max_tokens is not None  # LossConfig refuses dr_grpo without it
    count = mask.shape[0] if num_sequences is None else num_sequences
    return np.where(mask, 1.0 / (max(count, 1) * config.max_tokens), 0.0)


def policy_loss(
    config: LossConfig,
    *,
    logprobs: np.ndarray,
    sampled_logprobs: np.ndarray,
    proximal_logprobs: np.ndarray | None = None,
    ref_logprobs: np.ndarray | None = None,
    entropy: np.ndarray | None = None,
    advantages: np.ndarray,
    loss_mask: np.ndarray,
    num_valid_tokens: int | None = None,
    num_sequences: int | None = None,
) -> LossOutput:
    """Loss, gradient and metrics of one batch: sum_t c_t (w * variant + kl_coef * K - entropy_coef * H).

    Args:
        logprobs: [B, T], current weights; row b is one sequence.
        sampled_logprobs: [B, T], of the policy that sampled the tokens.
        proximal_logprobs: [B, T], required exactly when ``config.proximal == "given"``.
        ref_logprobs: [B, T], required when ``config.kl_coef`` is not 0.
        entropy: [B, T], nats, required when ``config.entropy_coef`` is not 0.
        advantages: [B] or [B, T].
        loss_mask: [B, T], True on trained tokens; masked slots may hold anything, NaN included.
        num_valid_tokens: trained tokens of the whole step; None = of this batch.
        num_sequences: rollouts of the whole step; None = of this batch (rows with a trained token
            under `sequence`, all rows under `dr_grpo`).

    Raises ValueError for misshapen, missing or superfluous arrays.
    """
    tokens = _tokens(
        config, loss_mask, logprobs, sampled_logprobs, proximal_logprobs, ref_logprobs, entropy, advantages
    )
    coef = token_coefficients(config, tokens.mask, num_valid_tokens=num_valid_tokens, num_sequences=num_sequences)
    value, slope, is_clipped = _VARIANTS[config.variant](config, tokens)
    weight = correction_weight(config, tokens)
    loss_BT, grad = weight * value, coef * weight * slope
    if config.variant == "gspo":
        # log s is the mean over the row, so each token gets an equal share of the row's slope.
        grad = np.where(tokens.mask, tokens.sequence_mean(grad), 0.0)
    if config.kl_coef:
        kl, kl_slope = kl_estimate(config, tokens.logprobs, tokens.ref)
        if config.kl_gradient == "score":
            kappa = weight * np.exp(_clamp(tokens.log_ratio))
            kl, kl_slope = kappa * kl, kappa * (kl_slope + kl)
        loss_BT = loss_BT + config.kl_coef * kl
        grad = grad + coef * config.kl_coef * kl_slope
    if config.entropy_coef:
        loss_BT = loss_BT - config.entropy_coef * tokens.entropy
    return LossOutput(
        loss=float((coef * loss_BT).sum()),
        grad=grad,
        entropy_grad=-config.entropy_coef * coef,
        metrics=_metrics(tokens, weight, is_clipped, has_ref=ref_logprobs is not None),
    )


def _tokens(
    config: LossConfig,
    loss_mask: np.ndarray,
    logprobs: np.ndarray,
    sampled: np.ndarray,
    proximal: np.ndarray | None,
    ref: np.ndarray | None,
    entropy: np.ndarray | None,
    advantages: np.ndarray,
) -> _Tokens:
    mask = np.asarray(loss_mask, bool)
    if (proximal is not None) != (config.proximal == "given"):
        raise ValueError(
            f"proximal_logprobs are required exactly when proximal='given', got proximal={config.proximal!r} "
            f"{'with' if proximal is not None else 'without'} them; change one of the two"
        )
    if config.kl_coef and ref is None:
        raise ValueError(f"kl_coef={config.kl_coef} needs ref_logprobs, got None; pass them or set kl_coef=0")
    if config.entropy_coef and entropy is None:
        raise ValueError(f"entropy_coef={config.entropy_coef} needs entropy, got None; pass it or set entropy_coef=0")

    def at_mask(name: str, array: np.ndarray | None) -> np.ndarray:
        if array is None:
            return np.zeros(mask.shape)
        array = np.asarray(array, np.float64)
        if array.shape != mask.shape:
            raise ValueError(f"{name} must have the mask's shape {mask.shape}, got {array.shape}; pad it")
        return np.where(mask, array, 0.0)

    advantages = np.asarray(advantages, np.float64)
    advantages_BT = np.broadcast_to(advantages[:, None], mask.shape) if advantages.ndim == 1 else advantages
    current, behaviour = at_mask("logprobs", logprobs), at_mask("sampled_logprobs", sampled)
    old = {"current": current, "bypass": behaviour, "given": at_mask("proximal_logprobs", proximal)}[config.proximal]
    return _Tokens(
        mask=mask,
        logprobs=current,
        sampled=behaviour,
        proximal=old,
        ref=at_mask("ref_logprobs", ref),
        entropy=at_mask("entropy", entropy),
        advantages=at_mask("advantages", advantages_BT),
    )


def _metrics(tokens: _Tokens, weight: np.ndarray, is_clipped: np.ndarray, *, has_ref: bool) -> dict[str, float]:
    count = max(int(tokens.mask.sum()), 1)

    def mean(values: np.ndarray) -> float:
        return float(np.where(tokens.mask, values, 0.0).sum() / count)

    r = np.exp(tokens.log_r)
    drift, mismatch = np.abs(tokens.logprobs - tokens.sampled), np.abs(tokens.proximal - tokens.sampled)
    d = _clamp(tokens.ref - tokens.logprobs)
    return {
        "clip_fraction": mean(is_clipped),
        "entropy": mean(tokens.entropy),
        "kl_ref": mean(np.expm1(d) - d) if has_ref else 0.0,
        "offpolicy_abs_diff_mean": mean(drift),
        "offpolicy_abs_diff_max": float(drift.max(initial=0.0)),
        "mismatch_abs_diff_mean": mean(mismatch),
        "mismatch_abs_diff_max": float(mismatch.max(initial=0.0)),
        "kl_sampled_proximal": mean(r - 1 - tokens.log_r),
        "correction_mean": mean(weight),
        "correction_bound_fraction": mean(weight != r),
    }
