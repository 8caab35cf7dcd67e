# ruff: noqa: D102 - the names of the laws are their documentation
"""Many refits in a row under load: a part of ``GeneratorContract``."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from itertools import pairwise

from dockyard_core.generator import Completion, GenerateRequest, SamplingParams
from dockyard_core.testing.generator_checks import SETTLE_S, GeneratorChecks, GeneratorHarness, assert_close

_log = logging.getLogger(__name__)
_SCORED = tuple(range(3, 20))
_BUCKET_BYTES = 1 << 18
_ENDED_BETWEEN_REFITS = 4
_NUM_WARM = 10
"""Refits after which an engine's memory should have settled."""
_NUM_COMPARED = 10


@dataclass
class SoakRequest:
    """One request of a soak, and what became of it."""

    request: GenerateRequest
    oldest: int
    """The version that the engine held when it was sent."""
    must_reach: int
    """It went on after the commit of this version, so that its last token is not older."""
    newest: int = -1
    """The version that the engine held when it was answered."""
    completion: Completion | None = None

    @property
    def answer(self) -> Completion:
        """The completion of a request that has ended."""
        assert self.completion is not None, f"{self.request.request_id} was lost"
        return self.completion


@dataclass
class RequestPool:
    """Keeps ``num_in_flight`` requests under way: the next one starts when one ends."""

    harness: GeneratorHarness
    num_in_flight: int
    requests: list[SoakRequest] = field(default_factory=list)
    num_ended: int = 0
    is_open: bool = True
    _change: asyncio.Event = field(default_factory=asyncio.Event)

    def start(self, group: asyncio.TaskGroup) -> None:
        """Send the first requests."""
        for _ in range(self.num_in_flight):
            group.create_task(self._serve())

    async def some_ended(self, number: int) -> None:
        """Wait until so many more requests have ended."""
        wanted = self.num_ended + number
        await self._until(lambda: self.num_ended >= wanted)

    async def close(self) -> None:
        """Start no further request, and wait for those under way."""
        self.is_open = False
        await self._until(lambda: self.num_ended == len(self.requests))

    def under_way(self) -> list[SoakRequest]:
        """Requests without an answer yet."""
        return [one for one in self.requests if one.completion is None]

    async def _serve(self) -> None:
        generator = self.harness.generator
        while self.is_open:
            held = generator.version
            one = SoakRequest(request_number(len(self.requests), self.harness.vocab_size), held, held)
            self.requests.append(one)
            completion = await generator.generate(one.request)
            one.newest, one.completion = generator.version, completion
            self.num_ended += 1
            self._change.set()

    async def _until(self, is_so: Callable[[], bool]) -> None:
        async with asyncio.timeout(SETTLE_S):
            while not is_so():
                self._change.clear()
                await self._change.wait()


def request_number(number: int, vocab_size: int) -> GenerateRequest:
    """Prompts and lengths differ; every fourth request is greedy."""
    prompt = tuple(3 + (7 * number + 11 * t) % (vocab_size - 3) for t in range(2 + 5 * number % 17))
    sampling = SamplingParams(temperature=0.0 if number % 4 == 3 else 1.0, max_new_tokens=8 + 13 * number % 41)
    return GenerateRequest(request_id=f"soak-{number}", prompt_token_ids=prompt, sampling=sampling)


def num_landed_in_flight(requests: Sequence[SoakRequest]) -> int:
    """Versions that some request was given between two of its tokens."""
    spans = [pair for one in requests for pair in pairwise(one.answer.version_spans)]
    return len({version for old, new in spans for version in range(old.policy_version + 1, new.policy_version + 1)})


def assert_none_lost(requests: Sequence[SoakRequest]) -> None:
    """Each request got one whole answer."""
    for one in requests:
        got = (one.answer.finish_reason, len(one.answer.token_ids))
        assert got == ("length", one.request.sampling.max_new_tokens), f"{one.request} ended with {got}"


def assert_tagged_with_held_versions(requests: Sequence[SoakRequest]) -> None:
    """Versions of a completion ascend, from the one at its start to at most the one at its end."""
    for one in requests:
        spans = one.answer.version_spans
        versions = [span.policy_version for span in spans]
        assert [0, *(span.end for span in spans)] == [*(span.start for span in spans), len(one.answer.token_ids)], spans
        assert versions == sorted(set(versions)), spans
        assert one.oldest <= versions[0], f"{one.request.request_id} was sent at version {one.oldest}: {spans}"
        assert one.must_reach <= versions[-1], f"{one.request.request_id} went on at {one.must_reach}: {spans}"
        assert versions[-1] <= one.newest, f"{one.request.request_id} was answered at {one.newest}: {spans}"


def assert_memory_is_flat(samples: Sequence[int], num_model_bytes: int) -> None:
    """Memory after the refits from the tenth on: the last ten against the first eleven of these.

    It may grow by 5 %, and by less than half a model per refit in between: of a small model every refit
    could leave a copy behind within those 5 %.
    """
    early, late = max(samples[: _NUM_COMPARED + 1]), max(samples[-_NUM_COMPARED:])
    num_refits = len(samples) - 1 - _NUM_COMPARED
    limit = min(0.05 * early, 0.5 * num_refits * num_model_bytes)
    assert late - early <= limit, (
        f"memory grew from {early / 1e6:.1f} to {late / 1e6:.1f} MB in {num_refits} refits "
        f"of {num_model_bytes / 1e6:.1f} MB, allowed {limit / 1e6:.1f} MB more"
    )


class RefitSoak(GeneratorChecks):
    """Refits under load. A subclass for which this is too slow sets the law to None."""

    num_soak_refits: int = 50
    num_soak_requests: int = 16
    """In flight at any time."""

    def test_fifty_refits_under_load_lose_no_request_mix_no_versions_and_keep_no_memory(
        self, harness: GeneratorHarness
    ) -> None:
        pool, memory, scores = harness.run(self._soak(harness))
        assert_none_lost(pool.requests)
        assert_tagged_with_held_versions(pool.requests)
        self._assert_all_exact(harness, pool.requests)
        for version, got in scores.items():
            assert_close(got, harness.witness(_SCORED, version), self.tolerance)
        num_in_flight = num_landed_in_flight(pool.requests)
        megabytes = [round(memory[at] / 1e6, 1) for at in (0, _NUM_COMPARED, -1)]
        _log.info("%d requests, %d refits in flight, MB: %s", len(pool.requests), num_in_flight, megabytes)
        assert num_in_flight >= 0.8 * self.num_soak_refits, f"only {num_in_flight} refits landed in flight"
        assert_memory_is_flat(memory, sum(spec.num_bytes for spec in harness.manifest()))

    async def _soak(self, harness: GeneratorHarness) -> tuple[RequestPool, list[int], dict[int, tuple[float, ...]]]:
        pool, memory, scores = RequestPool(harness, self.num_soak_requests), [], {}
        async with asyncio.TaskGroup() as group:
            pool.start(group)
            for number in range(1, self.num_soak_refits + 1):
                await pool.some_ended(_ENDED_BETWEEN_REFITS)
                assert len(pool.under_way()) == self.num_soak_requests
                version = harness.make_version()
                await self._refit(harness, self._update(harness, version, bucket_bytes=_BUCKET_BYTES))
                # An answer that was whole before the commit has come in by the time of this one.
                scores[version] = await harness.generator.score(_SCORED)
                for one in pool.under_way():
                    one.must_reach = version
                if number >= _NUM_WARM:
                    memory.append(harness.memory_bytes())
            await pool.close()
        return pool, memory, scores

    def _assert_all_exact(self, harness: GeneratorHarness, requests: Sequence[SoakRequest]) -> None:
        """Every token's logprob is the witness's, and a greedy token is its most likely one (or ties with it)."""
        pieces = [(span, one) for one in requests for span in one.answer.version_spans]
        worst = 0.0
        for span, one in sorted(pieces, key=lambda piece: piece[0].policy_version):
            prompt, part = one.request.prompt_token_ids, slice(span.start, span.end)
            tokens = (*prompt, *one.answer.token_ids[: span.end])
            wanted = harness.witness(tokens, span.policy_version)[len(prompt) - 1 :][part]
            got = one.answer.logprobs[part]
            assert_close(got, wanted, self.tolerance)
            worst = max(worst, *(abs(a - b) for a, b in zip(got, wanted, strict=True)))
            if one.request.sampling.temperature == 0:
                best = harness.best(tokens, span.policy_version)[len(prompt) - 1 :][part]
                assert_close(wanted, best, self.tolerance)
        _log.info("logprobs differ by at most %.2g nats", worst)
