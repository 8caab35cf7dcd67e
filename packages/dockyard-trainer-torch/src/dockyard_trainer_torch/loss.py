"""The policy loss in PyTorch: one pure function per variant, over trained tokens only.

Definitions are those of ``dockyard_core.loss``, the float64 oracle this file is tested against:
autograd of ``policy_loss`` equals ``logprobs.backward(oracle.grad)``.

Shape legend: M = trained tokens of a micro-batch (masked slots never get here), S = sequences.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from dockyard_core.loss_config import LossConfig

EXPONENT_LIMIT = 20.0


@dataclass(frozen=True, kw_only=True)
class TokenBatch:
    """Trained tokens of one micro-batch, flattened."""

    logprobs_M: Tensor  # carries gradient
    sampled_logprobs_M: Tensor
    advantages_M: Tensor
    sequence_M: Tensor  # int64 in [0, num_rows)
    num_rows: int
    """Number of slots for sequences; ``sequence_M`` may leave some empty."""
    proximal_logprobs_M: Tensor | None = None
    ref_logprobs_M: Tensor | None = None
    entropy_M: Tensor | None = None

    @property
    def tangent_M(self) -> Tensor:
        """0 in value and 1 in gradient: added to a detached number, it makes it grow with ``logprobs_M``."""
        return self.logprobs_M - self.logprobs_M.detach()

    def sequence_mean(self, values_M: Tensor) -> Tensor:
        """Mean over each sequence's trained tokens, [S]; 0 where a sequence has none."""
        zeros_S = values_M.new_zeros(self.num_rows)
        counts_S = zeros_S.index_add(0, self.sequence_M, torch.ones_like(values_M))
        return zeros_S.index_add(0, self.sequence_M, values_M) / counts_S.clamp(min=1.0)


@dataclass(frozen=True, kw_only=True)
class LossTerms:
    """Loss of a micro-batch, already divided by the counts of the whole step, and its metric sums."""

    loss: Tensor
    sums: Mapping[str, Tensor]
    """Detached sums over trained tokens; dividing by their number gives the step's means."""
    offpolicy_abs_diff_max: Tensor
    """Largest |logpi - logmu| of a trained token."""
    mismatch_abs_diff_max: Tensor
    """Largest |logpi_old - logmu|, which is what the correction acts on."""


def _clamp(exponent: Tensor) -> Tensor:
    return exponent.clamp(-EXPONENT_LIMIT, EXPONENT_LIMIT)


def _clipped_surrogate(config: LossConfig, ratio_M: Tensor, advantages_M: Tensor) -> tuple[Tensor, Tensor]:
    """max(-rho A, -clip(rho) A), with the gradient of the unclipped branch at ties and at an edge."""
    free_M = -ratio_M * advantages_M
    bound_M = -ratio_M.clamp(1 - config.clip_low, 1 + config.clip_high) * advantages_M
    is_clipped_M = bound_M > free_M
    loss_M = torch.where(is_clipped_M, bound_M.detach(), free_M)
    if config.dual_clip is not None:
        ceiling_M = -config.dual_clip * advantages_M
        is_capped_M = (advantages_M < 0) & (loss_M > ceiling_M)
        loss_M = torch.where(is_capped_M, ceiling_M, loss_M)
        is_clipped_M = is_clipped_M | is_capped_M
    return loss_M, is_clipped_M


def clip_loss(config: LossConfig, tokens: TokenBatch, log_ratio_M: Tensor) -> tuple[Tensor, Tensor]:
    """PPO's clipped surrogate per token; asymmetric bounds are DAPO's (arXiv:2503.14476)."""
    ratio_M = (_clamp(log_ratio_M) + tokens.tangent_M).exp()
    return _clipped_surrogate(config, ratio_M, tokens.advantages_M)


def cispo_loss(config: LossConfig, tokens: TokenBatch, log_ratio_M: Tensor) -> tuple[Tensor, Tensor]:
    """Bounded detached ratio on a policy-gradient term (arXiv:2506.13585): no token loses its gradient."""
    ratio_M = _clamp(log_ratio_M).exp()
    loss_M = -ratio_M.clamp(max=config.cispo_max) * tokens.advantages_M * tokens.logprobs_M
    return loss_M, ratio_M > config.cispo_max


def gspo_loss(config: LossConfig, tokens: TokenBatch, log_ratio_M: Tensor) -> tuple[Tensor, Tensor]:
    """Clipped surrogate of the length-normalised sequence ratio (arXiv:2507.18071), on each token."""
    ratio_S = (_clamp(tokens.sequence_mean(log_ratio_M)) + tokens.sequence_mean(tokens.tangent_M)).exp()
    return _clipped_surrogate(config, ratio_S[tokens.sequence_M], tokens.advantages_M)


def reinforce_loss(config: LossConfig, tokens: TokenBatch, log_ratio_M: Tensor) -> tuple[Tensor, Tensor]:
    """-A log pi, without a ratio."""
    loss_M = -tokens.advantages_M * tokens.logprobs_M
    return loss_M, torch.zeros_like(loss_M, dtype=torch.bool)


VARIANTS: Mapping[str, Callable[[LossConfig, TokenBatch, Tensor], tuple[Tensor, Tensor]]] = {
    "clip": clip_loss,
    "cispo": cispo_loss,
    "gspo": gspo_loss,
    "reinforce": reinforce_loss,
}


def correction_weight(config: LossConfig, tokens: TokenBatch, proximal_M: Tensor) -> Tensor:
    """Detached behaviour-correction weight [M] from r = exp(logpi_old - logmu)."""
    if config.effective_correction == "none":
        return torch.ones_like(proximal_M)
    log_r_M = _clamp(proximal_M - tokens.sampled_logprobs_M)
    r_M = log_r_M.exp()
    if config.effective_correction == "tis":
        return r_M.clamp(max=config.tis_max)
    if config.effective_correction == "icepop":
        return torch.where((r_M >= config.correction_low) & (r_M <= config.correction_high), r_M, 0.0)
    if config.effective_correction == "seq_mask":
        mean_r_M = tokens.sequence_mean(log_r_M).exp()[tokens.sequence_M]
        return torch.where((mean_r_M >= config.seq_low) & (mean_r_M <= config.seq_high), r_M, 0.0)
    return r_M


def kl_estimate(config: LossConfig, d_M: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """k1 = -d, k2 = d²/2 or k3 = e^d - 1 - d, with its slope in logpi = logpi_ref - d, and kl + slope.

    The slopes are written out because autograd would make them of numbers that cancel: of e^d and 1
    where d is small, and in kl + slope of k3, which is -d, of two e^d where d is large.
    """
    match config.kl_estimator:
        case "k1":
            kl_M, slope_M, total_M = -d_M, torch.ones_like(d_M), 1 - d_M
        case "k2":
            kl_M, slope_M, total_M = d_M.square() / 2, -d_M, d_M.square() / 2 - d_M
        case "k3":
            kl_M, slope_M, total_M = d_M.expm1() - d_M, -d_M.expm1(), -d_M
    if config.kl_max is not None:
        is_bounded_M = kl_M > config.kl_max
        kl_M = torch.where(is_bounded_M, config.kl_max, kl_M)
        total_M = torch.where(is_bounded_M, slope_M + config.kl_max, total_M)
    return kl_M, slope_M, total_M


def kl_loss(config: LossConfig, tokens: TokenBatch, log_ratio_M: Tensor, weight_M: Tensor) -> Tensor:
    """KL to the reference per token; ``score`` is the exact off-policy gradient (arXiv:2506.09477)."""
    assert tokens.ref_logprobs_M is not None
    kl_M, slope_M, total_M = kl_estimate(config, _clamp(tokens.ref_logprobs_M - tokens.logprobs_M.detach()))
    if config.kl_gradient == "plain":
        return kl_M + slope_M * tokens.tangent_M
    return weight_M * _clamp(log_ratio_M).exp() * (kl_M + total_M * tokens.tangent_M)


def aggregate(
    config: LossConfig, tokens: TokenBatch, loss_M: Tensor, *, num_valid_tokens: int, num_sequences: int
) -> Tensor:
    """Sum of token losses over the counts of the whole step, so that splitting changes nothing."""
    if config.effective_aggregation == "token":
        return loss_M.sum() / max(num_valid_tokens, 1)
    if config.effective_aggregation == "sequence":
        return tokens.sequence_mean(loss_M).sum() / max(num_sequences, 1)
    assert config.max_tokens is not None  # LossConfig refuses dr_grpo without it
    return loss_M.sum() / (max(num_sequences, 1) * config.max_tokens)


def policy_loss(config: LossConfig, tokens: TokenBatch, *, num_valid_tokens: int, num_sequences: int) -> LossTerms:
    """Loss of one micro-batch: w * variant + kl_coef * K - entropy_coef * H, aggregated.

    Args:
        tokens: trained tokens only; entropy is needed when ``entropy_coef`` is not 0, reference
            logprobs when ``kl_coef`` is not 0, proximal ones under ``proximal="given"``.
        num_valid_tokens, num_sequences: counts of the whole step over ranks and micro-batches.
    """
    proximal_M = _proximal(config, tokens)
    log_ratio_M = tokens.logprobs_M.detach() - proximal_M
    variant_M, is_clipped_M = VARIANTS[config.variant](config, tokens, log_ratio_M)
    weight_M = correction_weight(config, tokens, proximal_M)
    loss_M = weight_M * variant_M
    if config.kl_coef:
        loss_M = loss_M + config.kl_coef * kl_loss(config, tokens, log_ratio_M, weight_M)
    if config.entropy_coef:
        assert tokens.entropy_M is not None
        loss_M = loss_M - config.entropy_coef * tokens.entropy_M
    loss = aggregate(config, tokens, loss_M, num_valid_tokens=num_valid_tokens, num_sequences=num_sequences)
    with torch.no_grad():
        return _with_metrics(loss, tokens, is_clipped_M, weight_M, proximal_M)


def _proximal(config: LossConfig, tokens: TokenBatch) -> Tensor:
    if config.proximal == "bypass":
        return tokens.sampled_logprobs_M
    if config.proximal == "given":
        assert tokens.proximal_logprobs_M is not None
        return tokens.proximal_logprobs_M
    return tokens.logprobs_M.detach()


def _with_metrics(
    loss: Tensor, tokens: TokenBatch, is_clipped_M: Tensor, weight_M: Tensor, proximal_M: Tensor
) -> LossTerms:
    logprobs_M = tokens.logprobs_M
    drift_M = (logprobs_M - tokens.sampled_logprobs_M).abs()
    mismatch_M = (proximal_M - tokens.sampled_logprobs_M).abs()
    log_r_M = _clamp(proximal_M - tokens.sampled_logprobs_M)
    r_M = log_r_M.exp()
    sums = {
        "num_tokens": torch.ones_like(logprobs_M).sum(),
        "clip_fraction": is_clipped_M.float().sum(),
        "offpolicy_abs_diff_mean": drift_M.sum(),
        "mismatch_abs_diff_mean": mismatch_M.sum(),
        "correction_mean": weight_M.sum(),
        "correction_bound_fraction": (weight_M != r_M).float().sum(),
        "kl_sampled_proximal": (r_M - 1 - log_r_M).sum(),
    }
    if tokens.entropy_M is not None:
        sums["entropy"] = tokens.entropy_M.sum()
    if tokens.ref_logprobs_M is not None:
        d_M = _clamp(tokens.ref_logprobs_M - logprobs_M)
        sums["kl_ref"] = (d_M.expm1() - d_M).sum()
    return LossTerms(
        loss=loss,
        sums=sums,
        offpolicy_abs_diff_max=_largest(drift_M),
        mismatch_abs_diff_max=_largest(mismatch_M),
    )


def _largest(values_M: Tensor) -> Tensor:
    """Maximum of numbers >= 0; 0 when there are none."""
    return values_M.max() if len(values_M) else values_M.new_zeros(())
