"""The serving side: token ids in, sampled token ids with their logprobs and versions out."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal, NamedTuple, Protocol

from dockyard_core.refit import PauseMode, RefitEndpoint, RefitReport, RefitUpdate

FinishReason = Literal["stop", "length", "abort"]


class VersionSpan(NamedTuple):
    """Tokens ``start <= t < end`` of a completion were sampled by ``policy_version``."""

    policy_version: int
    start: int
    end: int


@dataclass(frozen=True, kw_only=True, slots=True)
class SamplingParams:
    """How to sample. Nothing here may bias the importance ratio (no top_p, top_k, penalties)."""

    temperature: float = 1.0
    """0 = greedy; then ``logprobs`` are those of the unscaled distribution."""
    max_new_tokens: int = 256
    stop_token_ids: tuple[int, ...] = ()
    """Sampling stops after one of these; the stop token is part of the completion and is trained."""
    seed: int | None = None


@dataclass(frozen=True, kw_only=True, slots=True)
class GenerateRequest:
    """One prompt to complete once."""

    request_id: str
    """Unique among the live requests of a generator."""
    prompt_token_ids: tuple[int, ...]
    sampling: SamplingParams = SamplingParams()
    group_id: str | None = None
    """Requests of one group share their prompt and are best kept on one replica."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Completion:
    """What the generator sampled for one prompt."""

    token_ids: tuple[int, ...]  # [T], the stop token included
    logprobs: tuple[float, ...]  # [T]
    """Natural-log probability of each token under log_softmax(logits / temperature) of the policy
    that sampled it."""
    version_spans: tuple[VersionSpan, ...]
    """Ordered, contiguous, covering [0, T)."""
    finish_reason: FinishReason


class EngineHealth(NamedTuple):
    """Answer to a health check."""

    is_alive: bool
    policy_version: int
    num_running: int
    detail: str = ""


class Generator(Protocol):
    """An inference engine, or several behind one front."""

    @property
    def version(self) -> int:
        """The policy version that samples the next token (the last one committed)."""
        ...

    async def generate(self, request: GenerateRequest) -> Completion:
        """Sample one completion; survives a refit in ``keep`` mode. Raises GeneratorError."""
        ...

    async def score(self, token_ids: Sequence[int]) -> tuple[float, ...]:
        """Logprobs at temperature 1 of tokens 1..T-1 given what precedes them; [T-1]."""
        ...

    async def pause(self, mode: PauseMode = "keep") -> None:
        """Stop sampling and drop cached KV. ``keep`` keeps requests, ``wait`` drains them,
        ``abort`` returns them partial."""
        ...

    async def resume(self) -> None:
        """Go on sampling."""
        ...

    async def connect_refit(self, endpoint: RefitEndpoint) -> None:
        """Join the transport that the trainer's sender opened. Once per sender."""
        ...

    async def refit(self, update: RefitUpdate) -> RefitReport:
        """Pause, receive, verify, load, commit, resume: one transaction.

        After it returns, ``version == update.policy_version`` and every later token carries it.
        With ``staging="host"`` it receives and verifies before it pauses: a failure until then changes
        nothing, and one that follows is rolled back where the held version is in host memory.

        Raises:
            WeightMismatch: a tensor is unknown, missing, misshapen, or a bucket's digest differs.
            RefitTimeout: the deadline passed. The engine stays fenced (serves nothing).
        """
        ...

    async def health(self) -> EngineHealth:
        """Whether the engine lives, and at which version."""
        ...
