"""The policy loss in JAX: one pure function per variant, over the trained tokens of arrays of fixed shape.

Definitions are those of ``dockyard_core.loss``, the float64 oracle this file is tested against:
the gradient of ``policy_loss`` in ``logprobs_M`` is ``oracle.grad``.

Shapes never depend on how many tokens are trained, and counts are arrays, so that no batch compiles anew. A slot
that is not trained is replaced by a harmless one before anything is computed from it.

Shape legend: M = token slots of a micro-batch, S = sequences.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from functools import partial

import jax
import jax.numpy as jnp
from jax import Array
from jax.lax import stop_gradient

from dockyard_core.loss_config import LossConfig

EXPONENT_LIMIT = 20.0


@partial(
    jax.tree_util.register_dataclass,
    data_fields=[
        "logprobs_M",
        "sampled_logprobs_M",
        "advantages_M",
        "sequence_M",
        "mask_M",
        "proximal_logprobs_M",
        "ref_logprobs_M",
        "entropy_M",
    ],
    meta_fields=["num_rows"],
)
@dataclass(frozen=True, kw_only=True)
class TokenBatch:
    """Token slots of one micro-batch, flattened; those that are not trained may hold anything, NaN included."""

    logprobs_M: Array  # carries gradient
    sampled_logprobs_M: Array
    advantages_M: Array
    sequence_M: Array  # integers in [0, num_rows)
    mask_M: Array
    """True on trained tokens."""
    num_rows: int
    """Number of slots for sequences, fixed when compiled; ``sequence_M`` may leave some empty."""
    proximal_logprobs_M: Array | None = None
    ref_logprobs_M: Array | None = None
    entropy_M: Array | None = None

    def cleaned(self) -> TokenBatch:
        """The same with 0 in every slot that is not trained: no NaN gets from there into a value or a gradient."""
        if self.mask_M.dtype != jnp.bool_:
            raise ValueError(f"mask_M must be boolean, got {self.mask_M.dtype}; compare it with 0")

        def clean(values_M: Array | None) -> Array | None:
            return None if values_M is None else jnp.where(self.mask_M, values_M, jnp.zeros_like(values_M))

        return replace(
            self,
            logprobs_M=clean(self.logprobs_M),
            sampled_logprobs_M=clean(self.sampled_logprobs_M),
            advantages_M=clean(self.advantages_M),
            sequence_M=clean(self.sequence_M),
            proximal_logprobs_M=clean(self.proximal_logprobs_M),
            ref_logprobs_M=clean(self.ref_logprobs_M),
            entropy_M=clean(self.entropy_M),
        )

    @property
    def tangent_M(self) -> Array:
        """0 in value and 1 in gradient: added to a detached number, it makes it grow with ``logprobs_M``."""
        return self.logprobs_M - stop_gradient(self.logprobs_M)

    def total(self, values_M: Array) -> Array:
        """Sum over trained tokens, in the dtype of the logprobs."""
        return jnp.where(self.mask_M, values_M, False).sum(dtype=self.logprobs_M.dtype)

    def largest(self, values_M: Array) -> Array:
        """Maximum over trained tokens of numbers >= 0; 0 when there are none."""
        return jnp.where(self.mask_M, values_M, 0.0).max(initial=0.0)

    def sequence_mean(self, values_M: Array) -> Array:
        """Mean over each sequence's trained tokens, [S]; 0 where a sequence has none."""
        in_sequences = partial(jax.ops.segment_sum, segment_ids=self.sequence_M, num_segments=self.num_rows)
        counts_S = in_sequences(self.mask_M.astype(values_M.dtype))
        return in_sequences(jnp.where(self.mask_M, values_M, 0.0)) / jnp.maximum(counts_S, 1.0)


@partial(
    jax.tree_util.register_dataclass,
    data_fields=["loss", "sums", "offpolicy_abs_diff_max", "mismatch_abs_diff_max"],
    meta_fields=[],
)
@dataclass(frozen=True, kw_only=True)
class LossTerms:
    """Loss of a micro-batch, already divided by the counts of the whole step, and its metric sums."""

    loss: Array
    sums: Mapping[str, Array]
    """Detached sums over trained tokens; dividing by their number gives the step's means."""
    offpolicy_abs_diff_max: Array
    """Largest |logpi - logmu| of a trained token."""
    mismatch_abs_diff_max: Array
    """Largest |logpi_old - logmu|, which is what the correction acts on."""


def _clamp(exponent: Array) -> Array:
    return jnp.clip(exponent, -EXPONENT_LIMIT, EXPONENT_LIMIT)


def _clipped_surrogate(config: LossConfig, ratio_M: Array, advantages_M: Array) -> tuple[Array, Array]:
    """max(-rho A, -clip(rho) A), with the gradient of the unclipped branch at ties and at an edge."""
    free_M = -ratio_M * advantages_M
    bound_M = stop_gradient(-jnp.clip(ratio_M, 1 - config.clip_low, 1 + config.clip_high) * advantages_M)
    is_clipped_M = bound_M > free_M
    loss_M = jnp.where(is_clipped_M, bound_M, free_M)
    if config.dual_clip is not None:
        ceiling_M = -config.dual_clip * advantages_M
        is_capped_M = (advantages_M < 0) & (loss_M > ceiling_M)
        loss_M = jnp.where(is_capped_M, ceiling_M, loss_M)
        is_clipped_M = is_clipped_M | is_capped_M
    return loss_M, is_clipped_M


def clip_loss(config: LossConfig, tokens: TokenBatch, log_ratio_M: Array) -> tuple[Array, Array]:
    """PPO's clipped surrogate per token; asymmetric bounds are DAPO's (arXiv:2503.14476)."""
    ratio_M = jnp.exp(_clamp(log_ratio_M) + tokens.tangent_M)
    return _clipped_surrogate(config, ratio_M, tokens.advantages_M)


def cispo_loss(config: LossConfig, tokens: TokenBatch, log_ratio_M: Array) -> tuple[Array, Array]:
    """Bounded detached ratio on a policy-gradient term (arXiv:2506.13585): no token loses its gradient."""
    ratio_M = jnp.exp(_clamp(log_ratio_M))
    loss_M = -jnp.minimum(ratio_M, config.cispo_max) * tokens.advantages_M * tokens.logprobs_M
    return loss_M, ratio_M > config.cispo_max


def gspo_loss(config: LossConfig, tokens: TokenBatch, log_ratio_M: Array) -> tuple[Array, Array]:
    """Clipped surrogate of the length-normalised sequence ratio (arXiv:2507.18071), on each token."""
    ratio_S = jnp.exp(_clamp(tokens.sequence_mean(log_ratio_M)) + tokens.sequence_mean(tokens.tangent_M))
    return _clipped_surrogate(config, ratio_S[tokens.sequence_M], tokens.advantages_M)


def reinforce_loss(config: LossConfig, tokens: TokenBatch, log_ratio_M: Array) -> tuple[Array, Array]:
    """-A log pi, without a ratio."""
    return -tokens.advantages_M * tokens.logprobs_M, jnp.zeros_like(tokens.mask_M)


VARIANTS: Mapping[str, Callable[[LossConfig, TokenBatch, Array], tuple[Array, Array]]] = {
    "clip": clip_loss,
    "cispo": cispo_loss,
    "gspo": gspo_loss,
    "reinforce": reinforce_loss,
}


def correction_weight(config: LossConfig, tokens: TokenBatch, proximal_M: Array) -> tuple[Array, Array]:
    """Detached behaviour-correction weight [M] from r = exp(logpi_old - logmu), and where it is not r.

    The second is not read off a comparison of the two: compiled code may compute r twice, with two roundings.
    """
    log_r_M = _clamp(proximal_M - tokens.sampled_logprobs_M)
    r_M = jnp.exp(log_r_M)
    match config.effective_correction:
        case "none":
            return jnp.ones_like(r_M), r_M != 1
        case "is":
            return r_M, jnp.zeros_like(tokens.mask_M)
        case "tis":
            is_bound_M = r_M > config.tis_max
            return jnp.where(is_bound_M, config.tis_max, r_M), is_bound_M
        case "icepop":
            is_bound_M = (r_M < config.correction_low) | (r_M > config.correction_high)
        case "seq_mask":
            mean_r_M = jnp.exp(tokens.sequence_mean(log_r_M))[tokens.sequence_M]
            is_bound_M = (mean_r_M < config.seq_low) | (mean_r_M > config.seq_high)
    return jnp.where(is_bound_M, 0.0, r_M), is_bound_M


def kl_estimate(config: LossConfig, d_M: Array) -> tuple[Array, Array, Array]:
    """k1 = -d, k2 = d²/2 or k3 = e^d - 1 - d, with its slope in logpi = logpi_ref - d, and kl + slope.

    The slopes are written out because differentiation would make them of numbers that cancel: of e^d and 1
    where d is small, and in kl + slope of k3, which is -d, of two e^d where d is large.
    """
    match config.kl_estimator:
        case "k1":
            kl_M, slope_M, total_M = -d_M, jnp.ones_like(d_M), 1 - d_M
        case "k2":
            kl_M, slope_M, total_M = jnp.square(d_M) / 2, -d_M, jnp.square(d_M) / 2 - d_M
        case "k3":
            kl_M, slope_M, total_M = jnp.expm1(d_M) - d_M, -jnp.expm1(d_M), -d_M
    if config.kl_max is not None:
        is_bounded_M = kl_M > config.kl_max
        kl_M = jnp.where(is_bounded_M, config.kl_max, kl_M)
        total_M = jnp.where(is_bounded_M, slope_M + config.kl_max, total_M)
    return kl_M, slope_M, total_M


def kl_loss(config: LossConfig, tokens: TokenBatch, log_ratio_M: Array, weight_M: Array) -> Array:
    """KL to the reference per token; ``score`` is the exact off-policy gradient (arXiv:2506.09477)."""
    assert tokens.ref_logprobs_M is not None
    d_M = _clamp(tokens.ref_logprobs_M - stop_gradient(tokens.logprobs_M))
    kl_M, slope_M, total_M = kl_estimate(config, d_M)
    if config.kl_gradient == "plain":
        return kl_M + slope_M * tokens.tangent_M
    return weight_M * jnp.exp(_clamp(log_ratio_M)) * (kl_M + total_M * tokens.tangent_M)


def aggregate(
    config: LossConfig, tokens: TokenBatch, loss_M: Array, *, num_valid_tokens: Array | int, num_sequences: Array | int
) -> Array:
    """Sum of token losses over the counts of the whole step, so that splitting changes nothing."""

    def at_least_one(count: Array | int) -> Array:
        # Not an integer from here on: num_sequences * max_tokens may be more than int32 holds.
        return jnp.maximum(jnp.asarray(count, loss_M.dtype), 1.0)

    if config.effective_aggregation == "token":
        return tokens.total(loss_M) / at_least_one(num_valid_tokens)
    if config.effective_aggregation == "sequence":
        return tokens.sequence_mean(loss_M).sum() / at_least_one(num_sequences)
    assert config.max_tokens is not None  # LossConfig refuses dr_grpo without it
    return tokens.total(loss_M) / (at_least_one(num_sequences) * config.max_tokens)


def policy_loss(
    config: LossConfig, tokens: TokenBatch, *, num_valid_tokens: Array | int, num_sequences: Array | int
) -> LossTerms:
    """Loss of one micro-batch: w * variant + kl_coef * K - entropy_coef * H, aggregated.

    Args:
        config: fixed when compiled.
        tokens: of the micro-batch; entropy is needed when ``entropy_coef`` is not 0, reference
            logprobs when ``kl_coef`` is not 0, proximal ones under ``proximal="given"``.
        num_valid_tokens, num_sequences: counts of the whole step over devices and micro-batches.
    """
    tokens = tokens.cleaned()
    proximal_M = _proximal(config, tokens)
    log_ratio_M = stop_gradient(tokens.logprobs_M) - proximal_M
    variant_M, is_clipped_M = VARIANTS[config.variant](config, tokens, log_ratio_M)
    weight_M, is_bound_M = correction_weight(config, tokens, proximal_M)
    loss_M = weight_M * variant_M
    if config.kl_coef:
        loss_M = loss_M + config.kl_coef * kl_loss(config, tokens, log_ratio_M, weight_M)
    if config.entropy_coef:
        assert tokens.entropy_M is not None
        loss_M = loss_M - config.entropy_coef * tokens.entropy_M
    loss = aggregate(config, tokens, loss_M, num_valid_tokens=num_valid_tokens, num_sequences=num_sequences)
    counted = {"clip_fraction": is_clipped_M, "correction_bound_fraction": is_bound_M, "correction_mean": weight_M}
    return _with_metrics(loss, jax.tree.map(stop_gradient, tokens), counted, stop_gradient(proximal_M))


def _proximal(config: LossConfig, tokens: TokenBatch) -> Array:
    if config.proximal == "bypass":
        return tokens.sampled_logprobs_M
    if config.proximal == "given":
        assert tokens.proximal_logprobs_M is not None
        return tokens.proximal_logprobs_M
    return stop_gradient(tokens.logprobs_M)


def _with_metrics(loss: Array, tokens: TokenBatch, counted: Mapping[str, Array], proximal_M: Array) -> LossTerms:
    drift_M = jnp.abs(tokens.logprobs_M - tokens.sampled_logprobs_M)
    mismatch_M = jnp.abs(proximal_M - tokens.sampled_logprobs_M)
    log_r_M = _clamp(proximal_M - tokens.sampled_logprobs_M)
    values = {
        "num_tokens": tokens.mask_M,
        **counted,
        "offpolicy_abs_diff_mean": drift_M,
        "mismatch_abs_diff_mean": mismatch_M,
        "kl_sampled_proximal": jnp.exp(log_r_M) - 1 - log_r_M,
    }
    if tokens.entropy_M is not None:
        values["entropy"] = tokens.entropy_M
    if tokens.ref_logprobs_M is not None:
        d_M = _clamp(tokens.ref_logprobs_M - tokens.logprobs_M)
        values["kl_ref"] = jnp.expm1(d_M) - d_M
    return LossTerms(
        loss=loss,
        sums={name: tokens.total(values_M) for name, values_M in values.items()},
        offpolicy_abs_diff_max=tokens.largest(drift_M),
        mismatch_abs_diff_max=tokens.largest(mismatch_M),
    )
