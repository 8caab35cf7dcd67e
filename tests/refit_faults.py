"""Faults of a refit that any engine must bear, and what must hold after each.

    class TestMyEngine(RefitFaults):
        @pytest.fixture(scope="class")
        def harness(self, ...): ...

The harness is that of the inference wheel's tests: an engine, a model with its versions, and a sender.
After every fault the engine holds the version that it had, serves nothing or exactly that version, and a
new sender heals it.
"""

from __future__ import annotations

import asyncio
import json
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict
from pathlib import Path
from typing import Any

import pytest

from dockyard_core.errors import GeneratorError, RefitError, RefitTimeout, WeightMismatch
from dockyard_core.policy import WeightChunk, WeightSink
from dockyard_core.refit import RefitEndpoint, RefitUpdate
from dockyard_core.testing.generator_checks import assert_close, outcomes, request, until_running
from dockyard_inference import RefitSender

TRANSPORTS = ("collective", "shared_memory", "filesystem")
PROMPT = tuple(range(3, 20))
BUCKET_BYTES = 10_000
"""Of the models in these tests: some thirty buckets."""
MIDDLE = 8
"""Tensors that have been streamed in the middle of an update."""
TOLERANCE = 1e-4

_SENDER = """
import json, sys, time, torch
from pathlib import Path
from dockyard_core.policy import WeightChunk
from dockyard_core.refit import RefitUpdate, TensorSpec
from dockyard_inference import RefitSender

transport, directory, middle, fields = sys.argv[1], Path(sys.argv[2]), int(sys.argv[3]), json.loads(sys.argv[4])
manifest = tuple(TensorSpec(name, dtype, tuple(shape)) for name, dtype, shape in fields.pop("manifest"))
update = RefitUpdate(manifest=manifest, **fields)
sender = RefitSender("127.0.0.1", 0, 2, transport=transport, directory=directory)
print(sender.port, flush=True)
sender.connect()

def stream(sink):
    for number, spec in enumerate(manifest):
        if number == middle:
            while sender._board.peek("1/bucket/1") is None:  # files do not wait for their reader
                time.sleep(0.01)
            print("in the middle", flush=True)
            time.sleep(600)
        sink(WeightChunk(spec.name, spec.shape, (0,) * len(spec.shape), torch.full(spec.shape, 0.25)))

sender.send(stream, update)
"""


class SenderProcess:
    """A trainer that stops in the middle of sending an update, to be killed there."""

    def __init__(self, transport: str, directory: Path, update: RefitUpdate) -> None:
        words = [sys.executable, "-c", _SENDER, transport, str(directory), str(MIDDLE), json.dumps(asdict(update))]
        self.process = subprocess.Popen(words, stdout=subprocess.PIPE, text=True)
        self.endpoint = RefitEndpoint(host="127.0.0.1", port=int(self.said()), world_size=2, rank_offset=1)

    def said(self) -> str:
        """The next line; waits for it."""
        assert self.process.stdout is not None
        return self.process.stdout.readline().strip()

    def kill(self) -> None:
        """SIGKILL, and wait until it has ended. Harmless twice."""
        self.process.kill()
        self.process.wait()
        assert self.process.stdout is not None
        self.process.stdout.close()


@contextmanager
def bit_flipped(sender: RefitSender, bucket: int = 1) -> Iterator[None]:
    """One bit of a bucket changes after the sender has hashed it, before any rank reads it."""
    wire: Any = sender._wire
    state: Any = sender
    put, seal = wire.put, state._seal

    def seal_flip_and_put(*arguments: Any) -> None:
        seal(*arguments)
        number, buffer = arguments[-2:]
        if number == bucket:
            buffer[17] ^= 1
        put(number)

    wire.put, state._seal = lambda number: None, seal_flip_and_put
    try:
        yield
    finally:
        wire.put, state._seal = put, seal


def interrupted(stream: Callable[[WeightSink], None], meanwhile: Callable[[], object]) -> Callable[[WeightSink], None]:
    """The same stream; something happens in the middle of it."""

    def stream_weights(sink: WeightSink) -> None:
        count = iter(range(1 << 30))

        def take(chunk: WeightChunk) -> None:
            if next(count) == MIDDLE:
                meanwhile()
            sink(chunk)

        stream(take)

    return stream_weights


async def join(harness: Any, transport: str, directory: Path, *others: Any) -> RefitSender:
    """A new sender for the harness's engine (rank 1) and others."""
    if harness.sender is not None:
        harness.sender.close()
    engines = (harness.generator, *others)
    sender = RefitSender("127.0.0.1", 0, 1 + len(engines), transport=transport, directory=directory)  # type: ignore[arg-type]
    harness.sender = sender
    joins = (engine.connect_refit(sender.endpoint(rank)) for rank, engine in enumerate(engines, start=1))
    await asyncio.gather(asyncio.to_thread(sender.connect), *joins)
    return sender


def update_of(harness: Any, timeout_s: float = 60.0) -> RefitUpdate:
    """To a new version."""
    return RefitUpdate(
        policy_version=harness.make_version(),
        manifest=harness.manifest(),
        bucket_bytes=BUCKET_BYTES,
        timeout_s=timeout_s,
    )


async def send(harness: Any, update: RefitUpdate, meanwhile: Callable[[], object] | None = None) -> Any:
    """``RefitSender.send`` of a version of the harness."""
    stream = harness.stream(update.policy_version)
    stream = stream if meanwhile is None else interrupted(stream, meanwhile)
    return await asyncio.to_thread(harness.sender.send, stream, update)


async def serves_only(harness: Any, version: int, generator: Any = None) -> None:
    """Sampled and scored by exactly one version."""
    generator = generator or harness.generator
    assert generator.version == version
    assert_close(await generator.score(PROMPT), harness.witness(PROMPT, version), TOLERANCE)
    for other in harness.versions.keys() - {version}:
        pairs = zip(harness.witness(PROMPT, other), harness.witness(PROMPT, version), strict=True)
        assert max(abs(a - b) for a, b in pairs) > 100 * TOLERANCE
    completion = await generator.generate(request(f"only-{version}", PROMPT))
    assert {span.policy_version for span in completion.version_spans} == {version}
    wanted = harness.witness((*PROMPT, *completion.token_ids), version)[len(PROMPT) - 1 :]
    assert_close(completion.logprobs, wanted, TOLERANCE)


async def serves_nothing(generator: Any, version: int) -> None:
    """Fenced, with the version that it held."""
    assert generator.version == version
    for answer in await outcomes(generator.score(PROMPT), generator.generate(request("fenced", PROMPT))):
        assert isinstance(answer, GeneratorError), answer
        assert "the engine is fenced" in str(answer)


class RefitFaults:
    """Subclass with a ``harness`` fixture."""

    @pytest.mark.parametrize("transport", TRANSPORTS)
    def test_a_trainer_that_is_killed_in_mid_transfer(self, harness: Any, transport: str, tmp_path: Path) -> None:
        held, update = harness.generator.version, update_of(harness)
        process = SenderProcess(transport, tmp_path, update)
        generator = harness.generator

        async def work() -> tuple[Any, Any, float]:
            await generator.connect_refit(process.endpoint)
            live = asyncio.create_task(generator.generate(request("live", (3, 4), max_new_tokens=120)))
            await until_running(generator, 1)
            await generator.pause("keep")  # so that the request is still there when the trainer dies
            refit = asyncio.create_task(generator.refit(update))
            assert await asyncio.to_thread(process.said) == "in the middle"
            process.kill()
            killed = time.monotonic()
            [error] = await asyncio.wait_for(outcomes(refit), 60)
            seconds = time.monotonic() - killed
            await serves_nothing(generator, held)
            [answer] = await asyncio.wait_for(outcomes(live), 60)
            return error, answer, seconds

        try:
            error, answer, seconds = harness.run(work())
        finally:
            process.kill()
        assert type(error) is RefitError
        assert "the sender" in str(error)
        assert seconds < update.timeout_s / 2
        assert answer.finish_reason in ("abort", "length")  # as far as it had come
        assert {span.policy_version for span in answer.version_spans} <= {held}
        harness.run(self._heal(harness, update, transport, tmp_path))
        harness.sender.close()
        assert list(tmp_path.iterdir()) == []

    @pytest.mark.parametrize("transport", TRANSPORTS)
    def test_a_bit_that_changes_after_it_was_hashed(self, harness: Any, transport: str, tmp_path: Path) -> None:
        held, update = harness.generator.version, update_of(harness)

        async def work() -> list[Any]:
            sender = await join(harness, transport, tmp_path)
            with bit_flipped(sender):
                failed = await asyncio.wait_for(outcomes(send(harness, update), harness.generator.refit(update)), 60)
            await serves_nothing(harness.generator, held)
            await asyncio.gather(send(harness, update), harness.generator.refit(update))  # the same sender
            await serves_only(harness, update.policy_version)
            return failed

        for failed in harness.run(work()):
            assert isinstance(failed, WeightMismatch), failed
            assert "rank 1: SHA-256 of bucket 1 differs from the sender's" in str(failed)

    async def _heal(self, harness: Any, update: RefitUpdate, transport: str, directory: Path) -> None:
        await join(harness, transport, directory)
        await asyncio.gather(send(harness, update), harness.generator.refit(update))
        await harness.generator.resume()
        await serves_only(harness, update.policy_version)


async def stalled(harness: Any, stop: Callable[[], object], directory: Path, timeout_s: float = 3.0) -> list[Any]:
    """What sender and engine say when the engine stops in the middle of an update; seconds as well."""
    update = update_of(harness, timeout_s)
    await join(harness, "collective", directory)
    begun = time.monotonic()
    both = outcomes(send(harness, update, stop), harness.generator.refit(update))
    failed = await asyncio.wait_for(both, 120)
    seconds = time.monotonic() - begun
    sender_side, engine_side = failed
    assert isinstance(sender_side, RefitTimeout), sender_side
    assert "rank 1" in str(sender_side)
    assert isinstance(engine_side, RefitTimeout), engine_side
    return [sender_side, engine_side, seconds]
