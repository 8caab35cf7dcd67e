"""Configuration of the Transformers engine."""

from __future__ import annotations

from typing import Literal

from pydantic import BaseModel, ConfigDict, Field


class TransformersConfig(BaseModel):
    """How to start one Transformers engine. An unknown key is an error."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    model: str
    """Directory of a Hugging Face checkpoint."""
    dtype: Literal["float32", "bfloat16", "float16"] = "float32"
    device: str = "cpu"
    max_model_len: int = Field(default=2048, ge=2)
    """Prompt and completion together, tokens."""
    max_num_seqs: int = Field(default=256, ge=1)
    """Sequences that are sampled at once; later ones wait."""
    max_queued: int | None = Field(default=None, ge=0)
    """Requests that may wait; a further one is refused with EngineBusy. None = any number."""
    batch_window_s: float = Field(default=0.002, ge=0)
    """Requests that arrive within this time are prefilled as one batch."""
    seed: int = 0
    trust_remote_code: bool = False
    policy_version: int = Field(default=0, ge=0)
    """Version of the checkpoint's weights."""
    incarnation: int = Field(default=0, ge=0)

    @property
    def num_workers(self) -> int:
        """Ranks that the engine takes in a refit group."""
        return 1
