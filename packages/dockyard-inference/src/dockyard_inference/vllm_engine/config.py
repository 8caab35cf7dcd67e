"""Configuration of a vLLM engine."""

from __future__ import annotations

from typing import Any, Literal

from pydantic import BaseModel, ConfigDict, Field


class VllmConfig(BaseModel):
    """How to start one vLLM engine. An unknown key is an error."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    model: str
    """Directory of a Hugging Face checkpoint."""
    dtype: Literal["float32", "bfloat16", "float16"] = "float32"
    max_model_len: int = Field(default=2048, ge=2)
    """Prompt and completion together, tokens. ``score`` takes one token less."""
    max_num_seqs: int = Field(default=256, ge=1)
    """Sequences sampled in one step; large batches are what makes a small model fast."""
    max_queued: int | None = Field(default=None, ge=0)
    """Requests that may wait besides; a further one is refused with EngineBusy. None = any number."""
    max_num_batched_tokens: int = Field(default=8192, ge=1)
    """Tokens computed in one step, prompts included."""
    kv_cache_gib: float = Field(default=1.0, gt=0)
    """Memory for cached keys and values, GiB per worker."""
    tensor_parallel_size: int = Field(default=1, ge=1)
    """Workers that share each layer."""
    pipeline_parallel_size: int = Field(default=1, ge=1)
    """Workers, or groups of them, that have some layers each."""
    enforce_eager: bool = True
    """False lets vLLM compile and capture graphs: slower start, faster steps on a GPU."""
    enable_prefix_caching: bool = True
    """Prompts of one group are computed once. Caches never survive a refit."""
    block_size: int | None = Field(default=32, ge=1)
    """Tokens per cached block; None leaves it to vLLM. Small blocks share short prompts."""
    seed: int = 0
    trust_remote_code: bool = False
    policy_version: int = Field(default=0, ge=0)
    """Version of the checkpoint's weights."""
    incarnation: int = Field(default=0, ge=0)
    num_threads: int = Field(default=1, ge=1)
    """OpenMP threads of the engine. On a CPU: 1 for a model of a few million parameters, up to the
    number of idle cores for larger ones; more threads than idle cores is slower by far."""
    answer_timeout_s: float = Field(default=30.0, gt=0)
    """How long the engine's process may take to answer a pause or a resume; a refit has this on top
    of its own deadline, for processing what was loaded."""
    engine_args: dict[str, Any] = Field(default_factory=dict)
    """Further arguments of vLLM's ``AsyncEngineArgs``, by name."""

    @property
    def max_live(self) -> float:
        """Requests under way beyond which a further one is refused."""
        return float("inf") if self.max_queued is None else self.max_num_seqs + self.max_queued

    @property
    def num_workers(self) -> int:
        """Ranks that the engine takes in a refit group."""
        return self.tensor_parallel_size * self.pipeline_parallel_size
