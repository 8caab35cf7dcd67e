"""An engine that takes a set time and no CPU, for measuring the loop around it.

`LatencyGenerator` loads, scores and takes refits like `TransformersGenerator`; only `generate` differs: it waits, and
answers with fixed tokens. Their logprobs are the real ones of the version that held when the request came, so the
trainer's importance ratios are what they would be. One forward pass per group and version pays for that.

It is steered by the environment, because the app gives every engine of another's making the same values:

    DOCKYARD_LATENCY_S                   seconds of a request (1.0)
    DOCKYARD_LATENCY_PER_TOKEN_S         seconds more per token of the completion (0)
    DOCKYARD_LATENCY_TOKENS              lengths of completions, from which a rollout's identity chooses (24)
    DOCKYARD_LATENCY_STRAGGLER_EVERY     every so many-th request of an engine is a straggler (0 = none)
    DOCKYARD_LATENCY_STRAGGLER_FACTOR    which takes so many times as long (50)
"""

from __future__ import annotations

import asyncio
import hashlib
import os
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from dockyard_core import ConfigError, Rollout
from dockyard_core.generator import Completion, GenerateRequest, VersionSpan
from dockyard_inference import TransformersConfig, TransformersGenerator


@dataclass(frozen=True, kw_only=True)
class Latency:
    """How long a request takes, and how long its completion is."""

    fixed_s: float = 1.0
    per_token_s: float = 0.0
    lengths: tuple[int, ...] = (24,)
    straggler_every: int = 0
    straggler_factor: float = 50.0

    @classmethod
    def from_environment(cls, values: Mapping[str, str]) -> Latency:
        """Read the variables listed above; what is not set keeps its default."""
        default = cls()
        lengths = values.get("DOCKYARD_LATENCY_TOKENS")
        return cls(
            fixed_s=float(values.get("DOCKYARD_LATENCY_S", default.fixed_s)),
            per_token_s=float(values.get("DOCKYARD_LATENCY_PER_TOKEN_S", default.per_token_s)),
            lengths=tuple(map(int, lengths.split(","))) if lengths else default.lengths,
            straggler_every=int(values.get("DOCKYARD_LATENCY_STRAGGLER_EVERY", default.straggler_every)),
            straggler_factor=float(values.get("DOCKYARD_LATENCY_STRAGGLER_FACTOR", default.straggler_factor)),
        )

    def seconds(self, number: int, num_tokens: int) -> float:
        """Duration of an engine's ``number``-th request, from 1."""
        is_straggler = self.straggler_every > 0 and number % self.straggler_every == 0
        return (self.fixed_s + self.per_token_s * num_tokens) * (self.straggler_factor if is_straggler else 1.0)


def length_of(group_id: str, index: int, lengths: Sequence[int]) -> int:
    """Tokens of the completion of a group's ``index``-th rollout, the stop token included."""
    digest = hashlib.sha256(f"{group_id}/{index}".encode()).digest()
    return lengths[int.from_bytes(digest[:4], "big") % len(lengths)]


def index_reward(rollout: Rollout) -> float:
    """1 for every second rollout of a group, whatever its verdict: every group then moves the weights."""
    return float(int(rollout.rollout_id.rpartition("/")[2]) % 2)


class LatencyGenerator(TransformersGenerator):
    """Real weights, real scores, real refits; a completion is a wait."""

    def __init__(self, values: Mapping[str, Any]) -> None:
        super().__init__(TransformersConfig.model_validate(dict(values)))
        self._latency = Latency.from_environment(os.environ)
        self._num_requests = 0
        self._scored: dict[tuple[int, tuple[int, ...]], asyncio.Task[tuple[float, ...]]] = {}

    async def generate(self, request: GenerateRequest) -> Completion:
        """Wait, then answer. Raises ConfigError for a temperature that `score` does not know."""
        if request.sampling.temperature != 1.0 or request.group_id is None:
            raise ConfigError("LatencyGenerator scores rollouts of groups at temperature 1; set it so")
        started = time.monotonic()
        self._num_requests += 1
        number, index = self._num_requests, int(request.request_id.rpartition("/")[2])
        length = min(length_of(request.group_id, index, self._latency.lengths), request.sampling.max_new_tokens)
        prompt, stop = request.prompt_token_ids, request.sampling.stop_token_ids[0]
        tokens = (*(prompt[at % len(prompt)] for at in range(length - 1)), stop)
        version, logprobs = await self._logprobs((*prompt, *tokens))
        await asyncio.sleep(started + self._latency.seconds(number, length) - time.monotonic())
        return Completion(
            token_ids=tokens,
            logprobs=logprobs[-length:],
            version_spans=(VersionSpan(version, 0, length),),
            finish_reason="stop",
        )

    async def _logprobs(self, token_ids: tuple[int, ...]) -> tuple[int, tuple[float, ...]]:
        """One version and the logprobs under it, computed once for all who ask for the same."""
        while True:
            version = self.version
            key = (version, token_ids)
            if key not in self._scored:
                self._scored = {other: task for other, task in self._scored.items() if other[0] == version}
                self._scored[key] = asyncio.create_task(self.score(token_ids))
            logprobs = await asyncio.shield(self._scored[key])  # a rollout past its deadline is cancelled; others wait
            if self.version == version:
                return version, logprobs
