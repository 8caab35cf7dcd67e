"""Configuration of a TorchPolicy: closed, frozen, and refused early when it contradicts itself."""

from __future__ import annotations

from typing import Literal

from pydantic import Field, model_validator

from dockyard_core.optimizer_config import LoraConfig, OptimizerConfig


class TorchPolicyConfig(OptimizerConfig):
    """Optimizer, loss, precision, parallelism and memory of one policy."""

    dtype: Literal["float32", "bfloat16"] = "float32"
    """Of the computation and of streamed weights; the optimizer always holds float32 weights."""
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
    device: str = "cpu"
    load_reference: bool = False
    """Keep a frozen copy of the initial weights even if the loss has no KL term."""

    @model_validator(mode="after")
    def _refuse_contradictions(self) -> TorchPolicyConfig:
        if self.lora is not None and self.tensor_parallel_size > 1:
            raise ValueError(
                f"lora needs tensor_parallel_size=1, got {self.tensor_parallel_size}; shard over data ranks instead"
            )
        return self

    @property
    def needs_reference(self) -> bool:
        """Whether a frozen copy of the initial weights is kept."""
        return self.load_reference or self.loss.needs_reference
