"""The soak of refits finds the faults that it is there for: each is planted in an engine of a few lines."""

from __future__ import annotations

import asyncio
import math
import random
from collections.abc import Coroutine, Sequence
from itertools import pairwise
from typing import Any

import pytest

from dockyard_core.generator import Completion, EngineHealth, GenerateRequest, VersionSpan
from dockyard_core.refit import RefitReport, RefitUpdate, TensorSpec
from dockyard_core.testing.refit_soak import RefitSoak

VOCAB_SIZE = 23
MODEL = (TensorSpec("weight", "float32", (1000,)),)
MODEL_BYTES = 4000


def _logprobs(version: int, last: int) -> list[float]:
    """The whole model: the next token depends on the last one and on the version."""
    logits = [2 * math.sin((token + 1) * (last + 2) + 1.7 * version) for token in range(VOCAB_SIZE)]
    norm = math.log(math.fsum(math.exp(logit) for logit in logits))
    return [logit - norm for logit in logits]


class Engine:
    """Samples a token of every request in each turn of the event loop."""

    def __init__(self, fault: str = "") -> None:
        self.version, self._fault = 0, fault
        self._rng = random.Random(7)
        self._num_running, self._num_refits = 0, 0
        self._gate, self._idle = asyncio.Event(), asyncio.Event()
        self._gate.set()

    @property
    def memory_bytes(self) -> int:
        return 10 * MODEL_BYTES + 1000 * MODEL_BYTES + (self._num_refits * MODEL_BYTES if self._fault == "leak" else 0)

    async def generate(self, request: GenerateRequest) -> Completion:
        await self._gate.wait()
        self._num_running += 1
        self._idle.clear()
        versions: list[int] = []
        tokens: list[int] = []
        logprobs: list[float] = []
        first, limit = self.version, request.sampling.max_new_tokens
        while len(tokens) < limit and not (self._fault == "abort" and self.version > first):
            is_stale = self._fault == "stale weights" and self.version > first
            weights = _logprobs(first if is_stale else self.version, (*request.prompt_token_ids, *tokens)[-1])
            is_greedy = request.sampling.temperature == 0 and self._fault != "never greedy"
            chances = [math.exp(value) for value in weights]
            token = weights.index(max(weights)) if is_greedy else self._rng.choices(range(VOCAB_SIZE), chances)[0]
            tokens.append(token)
            logprobs.append(weights[token])
            versions.append(first if self._fault == "stale tags" else self.version)
            await asyncio.sleep(0)
        if self._fault == "token lost" and self.version > first:
            tokens, logprobs, versions = tokens[:-1], logprobs[:-1], versions[:-1]
        self._num_running -= 1
        if not self._num_running:
            self._idle.set()
        if self._fault == "request lost" and self.version == 30:
            await asyncio.Event().wait()
        spans = [VersionSpan(v, versions.index(v), versions.index(v) + versions.count(v)) for v in sorted({*versions})]
        reason = "length" if len(tokens) == limit or self._fault != "abort" else "abort"
        return Completion(
            token_ids=tuple(tokens),
            logprobs=tuple(logprobs),
            version_spans=tuple(spans),
            finish_reason=reason,  # type: ignore[arg-type]
        )

    async def score(self, token_ids: Sequence[int]) -> tuple[float, ...]:
        version = 0 if self._fault == "stale score" else self.version
        return tuple(Harness.witness(None, token_ids, version))  # type: ignore[arg-type]

    async def refit(self, update: RefitUpdate) -> RefitReport:
        if self._fault == "drains":
            self._gate.clear()
            await self._idle.wait()
        self.version = update.policy_version
        self._num_refits += 1
        self._gate.set()
        return RefitReport(policy_version=self.version, num_tensors=1, num_elements=1000, num_bytes=MODEL_BYTES)

    async def health(self) -> EngineHealth:
        return EngineHealth(True, self.version, self._num_running)


class Harness:
    vocab_size, max_model_len = VOCAB_SIZE, 128

    def __init__(self, fault: str) -> None:
        self.generator: Any = Engine(fault)

    def run(self, work: Coroutine[Any, Any, Any]) -> Any:
        return asyncio.run(work)

    def manifest(self) -> tuple[TensorSpec, ...]:
        return MODEL

    def witness(self, token_ids: Sequence[int], version: int, temperature: float = 1.0) -> list[float]:
        return [_logprobs(version, a)[b] for a, b in pairwise(token_ids)]

    def best(self, token_ids: Sequence[int], version: int) -> list[float]:
        return [max(_logprobs(version, last)) for last in token_ids[:-1]]

    def memory_bytes(self) -> int:
        return int(self.generator.memory_bytes)

    def make_version(self) -> int:
        return int(self.generator.version) + 1

    async def send(self, update: RefitUpdate, *, is_corrupt: bool = False) -> None:
        await asyncio.sleep(0)

    async def reconnect(self) -> None: ...


def _soak(fault: str) -> None:
    law = RefitSoak.test_fifty_refits_under_load_lose_no_request_mix_no_versions_and_keep_no_memory
    law(RefitSoak(), Harness(fault))


def test_an_engine_without_a_fault_passes() -> None:
    _soak("")


@pytest.mark.parametrize(
    ("fault", "message"),
    [
        ("abort", "ended with"),
        ("token lost", "ended with"),
        ("stale tags", "went on at"),
        ("stale weights", "logprobs differ"),
        ("stale score", "logprobs differ"),
        ("never greedy", "logprobs differ"),
        ("drains", "refits landed in flight"),
        ("leak", "memory grew"),
    ],
)
def test_a_planted_fault_is_found(fault: str, message: str) -> None:
    with pytest.raises(AssertionError, match=message):
        _soak(fault)


def test_a_request_that_is_never_answered_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("dockyard_core.testing.refit_soak.SETTLE_S", 1.0)
    with pytest.raises(ExceptionGroup) as caught:
        _soak("request lost")
    assert caught.group_contains(TimeoutError)
