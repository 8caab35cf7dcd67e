"""What every trainer's configuration shares: the optimizer, its schedule, and adapters.

A trainer's configuration derives from `OptimizerConfig`, so that names, defaults, refusals and the schedule are
the same in each, and offline training can rely on them.
"""

from __future__ import annotations

import math
from typing import Literal

from pydantic import BaseModel, ConfigDict, Field, field_validator, model_validator

from dockyard_core.loss_config import LossConfig

LINEAR_LAYERS = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")
"""The linear layers of a decoder block."""


class LoraConfig(BaseModel):
    """Which layers get adapters, of which rank, and how much they count."""

    model_config = ConfigDict(frozen=True, extra="forbid", allow_inf_nan=False)

    rank: int = Field(default=16, ge=1)
    alpha: float = Field(default=32.0, gt=0.0)
    """The adapters' product is multiplied by alpha / rank."""
    target_modules: tuple[str, ...] = LINEAR_LAYERS
    use_rslora: bool = False
    """Multiply by alpha / sqrt(rank) instead (arXiv:2312.03732), which keeps large ranks learning."""

    @field_validator("target_modules")
    @classmethod
    def _refuse_unknown_targets(cls, targets: tuple[str, ...]) -> tuple[str, ...]:
        if not targets or len(set(targets)) < len(targets) or not set(targets) <= set(LINEAR_LAYERS):
            raise ValueError(
                f"target_modules must be one or more of {', '.join(LINEAR_LAYERS)}, each once, got {list(targets)}; "
                "leave it out for all of them"
            )
        return targets

    @property
    def scale(self) -> float:
        """Factor of B A."""
        return self.alpha / (math.sqrt(self.rank) if self.use_rslora else self.rank)


class OptimizerConfig(BaseModel):
    """AdamW, its schedule and the loss: what an update does, whatever computes it."""

    model_config = ConfigDict(frozen=True, extra="forbid", allow_inf_nan=False)

    learning_rate: float = Field(default=1e-6, ge=0.0)
    """Peak, after warm-up."""
    betas: tuple[float, float] = (0.9, 0.95)
    eps: float = Field(default=1e-8, gt=0.0)
    weight_decay: float = Field(default=0.0, ge=0.0)
    """Decoupled; acts on matrices only, never on norms and biases."""
    warmup_steps: int = Field(default=0, ge=0)
    """Step k of the warm-up (from 1) has k/warmup_steps of the peak."""
    schedule: Literal["constant", "linear", "cosine"] = "constant"
    total_steps: int | None = Field(default=None, ge=1)
    """Where `linear` and `cosine` reach their floor."""
    min_lr_ratio: float = Field(default=0.0, ge=0.0, le=1.0)
    """Floor of the decay, as a share of the peak."""
    max_grad_norm: float = Field(default=1.0, gt=0.0)
    loss: LossConfig = LossConfig()
    updates_per_batch: int = Field(default=1, ge=1)
    """Optimizer updates on each batch (GRPO's mu, arXiv:2402.03300): `train_step` takes them all."""
    seed: int = 0

    @model_validator(mode="after")
    def _refuse_contradictory_updates(self) -> OptimizerConfig:
        if self.schedule != "constant" and self.total_steps is None:
            raise ValueError(
                f"schedule={self.schedule!r} needs total_steps, got None; set it to the run's number of steps"
            )
        if self.total_steps is not None and self.warmup_steps > self.total_steps:
            raise ValueError(
                f"warmup_steps must be <= total_steps, got {self.warmup_steps} > {self.total_steps}; "
                "shorten the warm-up"
            )
        if not all(0 <= beta < 1 for beta in self.betas):
            raise ValueError(f"betas must lie in [0, 1), got {self.betas}; use e.g. (0.9, 0.95)")
        if self.updates_per_batch > 1 and self.loss.proximal == "current":
            raise ValueError(
                f"updates_per_batch={self.updates_per_batch} needs logprobs from before the first update, got "
                "loss.proximal='current'; set it to 'given'"
            )
        return self


def learning_rate_at(config: OptimizerConfig, version: int) -> float:
    """Learning rate of the step that turns ``version`` into ``version + 1``.

    Linear warm-up to the peak, then constant, or a linear or cosine decay that reaches
    ``min_lr_ratio`` of the peak at ``total_steps``.
    """
    warmup = min(1.0, (version + 1) / config.warmup_steps) if config.warmup_steps else 1.0
    if config.schedule == "constant":
        return config.learning_rate * warmup
    assert config.total_steps is not None  # OptimizerConfig refuses a decay without it
    span = max(config.total_steps - config.warmup_steps, 1)
    progress = min(1.0, max(0.0, (version - config.warmup_steps) / span))
    shape = 1 - progress if config.schedule == "linear" else (1 + math.cos(math.pi * progress)) / 2
    return config.learning_rate * warmup * (config.min_lr_ratio + (1 - config.min_lr_ratio) * shape)
