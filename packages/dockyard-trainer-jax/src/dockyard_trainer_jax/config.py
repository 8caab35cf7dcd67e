"""Configuration of a JaxPolicy: closed, frozen, and refused early when it contradicts itself."""

from __future__ import annotations

from typing import Literal

from pydantic import Field, field_validator

from dockyard_core.optimizer_config import LoraConfig, OptimizerConfig


class JaxPolicyConfig(OptimizerConfig):
    """Optimizer, loss, precision, parallelism, memory and compilation of one policy."""

    dtype: Literal["float32", "bfloat16"] = "float32"
    """Of the computation and of streamed weights; the optimizer always holds float32 weights."""
    lora: LoraConfig | None = None
    """Train adapters on a frozen base; None = every weight is trained."""
    fsdp_size: int | None = Field(default=1, ge=1)
    """Devices over which the rows of a batch, and a part of every matrix, are dealt; None = all that
    ``tensor_parallel_size`` leaves."""
    tensor_parallel_size: int = Field(default=1, ge=1)
    """Devices that share each layer. Times ``fsdp_size``: all devices, or 1 for the first of them."""
    activation_checkpointing: bool = False
    """Keep each block's input only and compute the block again in the backward pass."""
    logprob_chunk_tokens: int | None = Field(default=None, ge=1)
    """Positions whose logits exist at one time; None = as many as fit in a buffer of fixed size."""
    share_prefixes: bool = True
    """Compute what several sequences of a micro-batch start with once; exact. One data-parallel device only."""
    load_reference: bool = False
    """Keep a frozen copy of the initial weights even if the loss has no KL term."""
    row_length_buckets: tuple[int, ...] | None = None
    """Lengths that packed rows are padded to; longer ones, None, and the suffixes of shared prefixes are rounded up to
    3 binary digits."""
    compilation_cache_dir: str | None = "~/.cache/dockyard/jax"
    """Where compiled programs are kept for the next process; None = nowhere. JAX's own setting, if there is one,
    goes first."""

    @field_validator("row_length_buckets")
    @classmethod
    def _refuse_unsorted(cls, lengths: tuple[int, ...] | None) -> tuple[int, ...] | None:
        if lengths is not None and (not lengths or lengths[0] < 1 or sorted(set(lengths)) != list(lengths)):
            raise ValueError(
                f"row_length_buckets must be growing lengths >= 1, got {list(lengths)}; sort them, or leave them out"
            )
        return lengths

    @property
    def needs_reference(self) -> bool:
        """Whether a frozen copy of the initial weights is kept."""
        return self.load_reference or self.loss.needs_reference
