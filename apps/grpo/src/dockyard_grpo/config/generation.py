"""The section of the engines that sample, and what SGLang needs besides."""

from __future__ import annotations

from typing import Annotated, Any

from annotated_types import Ge, Gt
from pydantic import AfterValidator, Field, model_validator

from dockyard_grpo.config.sections import Count, Seconds, Section, WholePath


def _engine_name(value: str) -> str:
    if value not in ("vllm", "transformers", "sglang") and ":" not in value:
        raise ValueError(f"must be vllm, transformers or sglang, or package.module:Class, got {value!r}; choose one")
    return value


class SglangSection(Section):
    """For generation.backend=sglang: whose server samples."""

    python: WholePath | None = Field(
        None, description="Interpreter of an environment that tools/sglang_env.py made; each engine starts a server."
    )
    url: str | None = Field(None, description="A running SGLang server, http://HOST:PORT, in place of python.")
    api_key_file: WholePath | None = Field(None, description="File with the key of the server at url.")
    weights_directory: WholePath | None = Field(
        None, description="Where new weights wait for the server; null = shared memory, or with url: they are sent."
    )
    start_timeout_s: Seconds = Field(300.0, description="Deadline of a server's start.")
    server_args: dict[str, Any] = Field(
        default_factory=dict,
        description="Further options of sglang.launch_server by name; null leaves one of ours out.",
    )

    @model_validator(mode="after")
    def _check_source(self) -> SglangSection:
        prefix = "generation.sglang"
        if self.python is not None and self.url is not None:
            raise ValueError(f"{prefix}.url={self.url} is in place of {prefix}.python, got both; leave one out")
        if self.url is not None and not self.url.startswith(("http://", "https://")):
            raise ValueError(f"{prefix}.url must start with http:// or https://, got {self.url!r}; write the scheme")
        if self.url is not None and self.server_args:
            raise ValueError(f"{prefix}.server_args are for a server that is started here, got {prefix}.url; drop one")
        return self


class GenerationSection(Section):
    """The engines that sample rollouts. Nothing here may bias the importance ratio."""

    backend: Annotated[str, AfterValidator(_engine_name)] = Field(
        "vllm", description="Inference engine: vllm, transformers, sglang, or package.module:Class of your own."
    )
    sglang: SglangSection = SglangSection()
    temperature: Annotated[float, Gt(0)] = Field(1.0, description="Sampling temperature of rollouts.")
    max_new_tokens: Count = Field(1024, description="Sampled tokens per rollout; a longer one is truncated.")
    max_model_len: Count = Field(4096, description="Prompt and completion together, tokens.")
    max_num_seqs: Count = Field(256, description="Sequences an engine decodes at once.")
    max_queued: Annotated[int, Ge(0)] | None = Field(
        None, description="Requests that may wait in an engine besides; more are asked again later. null = any number."
    )
    num_engines: Count = Field(1, description="Engine replicas.")
    tensor_parallel_size: Count = Field(1, description="Devices that share each layer of an engine's model.")
    pipeline_parallel_size: Count = Field(1, description="Stages of layers, each on devices of its own; GPUs only.")
    kv_cache_gib: Annotated[float, Gt(0)] = Field(1.0, description="Memory for cached keys and values, GiB per device.")
    enforce_eager: bool = Field(True, description="No graph capture, no compilation: starts fastest.")
    num_threads: Count | None = Field(None, description="CPU threads of an engine; null = the fleet's share.")
    per_request_seeds: bool = Field(
        False, description="Seed each rollout by its identity, so that a re-run one samples the same; slower."
    )
    top_p: float = Field(1.0, description="Refused below 1: it biases the importance ratio.")
    top_k: int = Field(-1, description="Refused unless -1: it biases the importance ratio.")
    min_p: float = Field(0.0, description="Refused unless 0: it biases the importance ratio.")
    repetition_penalty: float = Field(1.0, description="Refused unless 1: it biases the importance ratio.")

    @property
    def num_workers(self) -> int:
        """Ranks of one engine in a refit group, and devices that it wants."""
        return self.tensor_parallel_size * self.pipeline_parallel_size

    @model_validator(mode="after")
    def _refuse_biased_sampling(self) -> GenerationSection:
        neutral = {"top_p": 1.0, "top_k": -1, "min_p": 0.0, "repetition_penalty": 1.0}
        for name, value in neutral.items():
            if (given := getattr(self, name)) != value:
                raise ValueError(
                    f"generation.{name} must stay {value} in training, got {given}: the logprobs of a reshaped "
                    "distribution bias the importance ratio; shape sampling with generation.temperature"
                )
        if self.max_new_tokens >= self.max_model_len:
            raise ValueError(
                f"generation.max_new_tokens must be < generation.max_model_len ({self.max_model_len}), "
                f"got {self.max_new_tokens}; raise max_model_len"
            )
        return self
