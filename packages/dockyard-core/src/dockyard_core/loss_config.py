"""Which loss is minimised: one closed record, validated once, read by the oracle and by every trainer."""

from __future__ import annotations

from typing import Literal

from pydantic import BaseModel, ConfigDict, Field, model_validator

Variant = Literal["clip", "cispo", "gspo", "reinforce"]
Proximal = Literal["current", "given", "bypass"]
Correction = Literal["none", "is", "tis", "icepop", "seq_mask"]
KlEstimator = Literal["k1", "k2", "k3"]
KlGradient = Literal["plain", "score"]
Aggregation = Literal["token", "sequence", "dr_grpo"]


class LossConfig(BaseModel):
    """The policy loss of one optimizer step; every combination that would mislead is refused.

    Ratios are ``exp(logprobs - proximal_logprobs)``; behaviour ratios, which the correction acts
    on, are ``exp(proximal_logprobs - sampled_logprobs)``.
    """

    model_config = ConfigDict(frozen=True, extra="forbid", allow_inf_nan=False)

    variant: Variant = "clip"
    clip_low: float = Field(default=0.2, ge=0.0)
    """The ratio is clipped below 1 - clip_low."""
    clip_high: float = Field(default=0.2, ge=0.0)
    """The ratio is clipped above 1 + clip_high; larger than clip_low = DAPO's clip-higher."""
    dual_clip: float | None = None
    """c > 1: the loss of a token with negative advantage is at most -c * advantage. None = off."""
    cispo_max: float = Field(default=5.0, gt=0.0)
    """Absolute upper bound of the detached ratio."""
    proximal: Proximal = "current"
    """What the ratio is taken to: the weights of now (detached), a recompute, or the sampler."""
    correction: Correction = "tis"
    """Detached weight for tokens sampled by other weights or another engine."""
    tis_max: float = Field(default=2.0, gt=0.0)
    correction_low: float = Field(default=0.5, ge=0.0)
    correction_high: float = Field(default=2.0, gt=0.0)
    seq_low: float = Field(default=0.99, ge=0.0)
    seq_high: float = Field(default=1.01, gt=0.0)
    kl_coef: float = Field(default=0.0, ge=0.0)
    """Weight of the KL to the reference; 0 = no reference is loaded."""
    kl_estimator: KlEstimator = "k3"
    kl_gradient: KlGradient = "plain"
    kl_max: float | None = Field(default=None, gt=0.0)
    """Upper bound of a token's KL estimate, straight-through; None = off."""
    entropy_coef: float = 0.0
    """Weight of the entropy bonus."""
    aggregation: Aggregation = "token"
    max_tokens: int | None = Field(default=None, ge=1)
    """Fixed completion length that `dr_grpo` divides by."""

    @model_validator(mode="after")
    def _refuse_traps(self) -> LossConfig:
        self._check_ranges()
        self._check_variant()
        if self.kl_coef > 0 and (self.kl_estimator, self.kl_gradient) == ("k1", "plain"):
            raise ValueError(
                "kl_estimator='k1' with kl_gradient='plain' has zero expected gradient; "
                "use 'k3', or kl_gradient='score'"
            )
        if self.kl_coef > 0 and (self.kl_estimator, self.kl_gradient) == ("k2", "score"):
            raise ValueError("kl_estimator='k2' with kl_gradient='score' counts the gradient twice; use 'plain'")
        if self.aggregation == "dr_grpo" and self.max_tokens is None:
            raise ValueError("aggregation='dr_grpo' divides by max_tokens, got None; set it to the completion limit")
        return self

    def _check_ranges(self) -> None:
        if self.clip_low >= 1:
            raise ValueError(f"clip_low must be < 1 or nothing is clipped below, got {self.clip_low}; use e.g. 0.2")
        if self.dual_clip is not None and self.dual_clip <= 1:
            raise ValueError(f"dual_clip must be > 1, got {self.dual_clip}; use e.g. 3.0, or None to turn it off")
        if self.correction_low > self.correction_high:
            raise ValueError(
                f"correction_low must be <= correction_high, got {self.correction_low} > {self.correction_high}; "
                "swap them"
            )
        if self.seq_low > self.seq_high:
            raise ValueError(f"seq_low must be <= seq_high, got {self.seq_low} > {self.seq_high}; swap them")

    def _check_variant(self) -> None:
        given = {"clip_low", "clip_high"} & self.model_fields_set
        if self.variant == "gspo" and len(given) < 2:
            raise ValueError(
                f"variant='gspo' needs its own clip range, got only {sorted(given)}; "
                "set clip_low and clip_high, of the order of 3e-4 and 4e-4"
            )
        if self.dual_clip is not None and self.variant in ("cispo", "reinforce"):
            raise ValueError(
                f"dual_clip acts on 'clip' and 'gspo', got variant={self.variant!r}; set dual_clip to None"
            )
        if self.variant == "gspo" and self.aggregation == "dr_grpo":
            raise ValueError("variant='gspo' averages over sequences, got aggregation='dr_grpo'; use 'sequence'")

    @property
    def effective_correction(self) -> Correction:
        """`none` under ``proximal="bypass"``, where the ratio already compares with the sampler."""
        return "none" if self.proximal == "bypass" else self.correction

    @property
    def effective_aggregation(self) -> Aggregation:
        """`sequence` for `gspo`, whose surrogate is one number per sequence."""
        return "sequence" if self.variant == "gspo" else self.aggregation

    @property
    def needs_reference(self) -> bool:
        """Whether the loss reads logprobs of the reference."""
        return self.kl_coef > 0

    @property
    def can_skip_zero_advantage(self) -> bool:
        """Whether rows with advantage 0 have zero gradient, so that they may be left out."""
        return self.kl_coef == 0 and self.entropy_coef == 0
