"""Configuration of a TorchPolicy: closed, frozen, and refused early when it contradicts itself."""

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
    updates_per_batch: int = Field(default=1, ge=1)
    """Optimizer updates on each batch (GRPO's mu, arXiv:2402.03300): `train_step` takes them all."""
    lora: LoraConfig | None = None
    """Train low-rank adapters on a frozen base; None = every weight."""
    tensor_parallel_size: int = Field(default=1, ge=1)
    """Ranks that share each layer; the others are data-parallel. Divides the number of ranks."""
    activation_checkpointing: bool = False
    """Keep each block's input only and compute the block again in the backward pass."""
    reduce_every_micro_batch: bool = False
    """Reduce gradients over ranks after each micro-batch, which saves a whole model of gradients per rank;
    otherwise once per update."""
    cpu_offload: bool = False
    """FSDP2 keeps weights, gradients and moments in host memory (several ranks)."""
    optimizer_offload: bool = False
    """Keep the moments in host memory, and bring them to the device block by block."""
    reference_offload: bool = False
    """Keep the reference in host memory while it is not asked."""
    logprob_chunk_tokens: int | None = Field(default=None, ge=1)
    """Positions whose logits exist at one time; None = as many as fit in a buffer of fixed size."""
    share_prefixes: bool = True
    """Compute what several sequences of a micro-batch start with once; exact. One data-parallel rank only."""
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
        if self.updates_per_batch > 1 and self.loss.proximal == "current":
            raise ValueError(
                f"updates_per_batch={self.updates_per_batch} needs logprobs from before the first update, got "
                "loss.proximal='current'; set it to 'given'"
            )
        if self.lora is not None and self.tensor_parallel_size > 1:
            raise ValueError(
                f"lora needs tensor_parallel_size=1, got {self.tensor_parallel_size}; shard over data ranks instead"
            )
        return self

    @property
    def needs_reference(self) -> bool:
        """Whether a frozen copy of the initial weights is kept."""
        return self.load_reference or self.loss.needs_reference
