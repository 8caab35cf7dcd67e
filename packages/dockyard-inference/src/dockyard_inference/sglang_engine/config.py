"""Configuration of an SGLang engine."""

from __future__ import annotations

from pathlib import Path
from typing import Any, Literal

from pydantic import BaseModel, ConfigDict, Field, model_validator

_DETERMINISTIC = "enable_deterministic_inference"


class SglangConfig(BaseModel):
    """How to start one SGLang server, or which one to use. An unknown key is an error."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    model: str
    """Directory of a Hugging Face checkpoint; of a server of yours, the one that it serves."""
    python: Path | None = None
    """Interpreter of an environment with SGLang (``tools/sglang_env.py`` makes one): start a server with it."""
    url: str | None = None
    """A running SGLang server that nobody else refits, ``http://HOST:PORT``, instead of ``python``."""
    api_key_file: Path | None = None
    """File with the key of the server at ``url``."""
    dtype: Literal["float32", "bfloat16", "float16"] = "float32"
    device: str = "cpu"
    """``cpu`` or ``cuda``. Nobody has run this engine on a GPU yet."""
    max_model_len: int = Field(default=2048, ge=2)
    """Prompt and completion together, tokens."""
    max_num_seqs: int = Field(default=256, ge=1)
    """Sequences sampled in one step."""
    max_queued: int | None = Field(default=None, ge=0)
    """Requests that may wait besides; a further one is refused with EngineBusy. None = any number."""
    kv_cache_gib: float = Field(default=1.0, gt=0)
    """Memory for cached keys and values, GiB."""
    enable_prefix_caching: bool = True
    """Prompts of one group are computed once. Caches never survive a refit."""
    seed: int = 0
    trust_remote_code: bool = False
    policy_version: int = Field(default=0, ge=0)
    """Version of the checkpoint's weights."""
    incarnation: int = Field(default=0, ge=0)
    num_threads: int = Field(default=1, ge=1)
    """OpenMP threads of the server on a CPU."""
    start_timeout_s: float = Field(default=300.0, gt=0)
    """How long the server may take to start and to sample its first token."""
    answer_timeout_s: float = Field(default=30.0, gt=0)
    """How long the server may take to answer a pause, a resume or a health check; a refit has this on top
    of its own deadline."""
    weights_directory: Path | None = None
    """Where a refit's weights lie while the server reads them; None = shared memory if they fit, else the
    temporary directory. For a server at ``url``: a folder that it sees under the same path, which is faster;
    None = it is sent the weights."""
    server_args: dict[str, Any] = Field(default_factory=dict)
    """Further options of ``sglang.launch_server``, by name; ``true`` = the bare option, ``null`` = leave out ours."""

    @model_validator(mode="after")
    def _check_source(self) -> SglangConfig:
        if (self.python is None) == (self.url is None):
            raise ValueError("set either python (start a server) or url (use a running one)")
        if self.url is not None and not self.url.startswith(("http://", "https://")):
            raise ValueError("url must start with http:// or https://")
        if self.url is not None and self.server_args:
            raise ValueError("server_args are for a server that is started here, not for one at url")
        return self

    @property
    def max_live(self) -> float:
        """Requests under way beyond which a further one is refused."""
        return float("inf") if self.max_queued is None else self.max_num_seqs + self.max_queued

    @property
    def sees_folder(self) -> bool:
        """Whether the server can read where the weights lie."""
        return self.url is None or self.weights_directory is not None

    @property
    def takes_seeds(self) -> bool:
        """Whether a request's seed fixes its sample: SGLang ignores seeds otherwise, and always on a CPU."""
        return bool(self.server_args.get(_DETERMINISTIC))

    @property
    def num_workers(self) -> int:
        """Ranks that the engine takes in a refit group."""
        return 1
