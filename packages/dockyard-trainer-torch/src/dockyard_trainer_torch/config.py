"""Configuration of a TorchPolicy: closed, frozen, and refused early when it contradicts itself."""

from __future__ import annotations

from typing import Literal

from pydantic import BaseModel, ConfigDict, Field, model_validator

from dockyard_core.loss_config import LossConfig


class TorchPolicyConfig(BaseModel):
    """Optimizer, precision and loss of one policy."""

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
    dtype: Literal["float32", "bfloat16"] = "float32"
    """Of the computation and of streamed weights; the optimizer always holds float32 weights."""
    loss: LossConfig = LossConfig()
    logprob_chunk_tokens: int = Field(default=1024, ge=1)
    """Positions whose logits exist at one time: peak memory is this times the vocabulary."""
    share_prefixes: bool = True
    """Compute what several sequences of a micro-batch start with once; exact. One rank only."""
    num_threads: int | None = Field(default=None, ge=1)
    """Intra-op threads of the process; None = leave as it is."""
    seed: int = 0
    device: str = "cpu"
    load_reference: bool = False
    """Keep a frozen copy of the initial weights even if the loss has no KL term."""

    @model_validator(mode="after")
    def _refuse_contradictions(self) -> TorchPolicyConfig:
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
        if self.loss.proximal == "given":
            raise ValueError(
                "loss.proximal='given' needs logprobs that a batch does not carry; "
                "use 'current' with one update per batch"
            )
        return self

    @property
    def needs_reference(self) -> bool:
        """Whether a frozen copy of the initial weights is kept."""
        return self.load_reference or self.loss.needs_reference
