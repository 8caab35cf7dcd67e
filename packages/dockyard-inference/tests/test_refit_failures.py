"""What a failed refit leaves behind: who is told, who goes on serving, and what a retry finds."""

from __future__ import annotations

import asyncio
import gc
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch

from dockyard_core.errors import GeneratorError, RefitCalledOff, RefitError, RefitTimeout, WeightMismatch
from dockyard_core.policy import WeightChunk, WeightSink
from dockyard_core.refit import RefitUpdate, TensorSpec
from dockyard_core.testing.generator_checks import request, until_running
from dockyard_inference import RefitSender, TransformersConfig, TransformersGenerator
from dockyard_inference.refit.load_counter import LoadCounter

Join = Callable[..., Awaitable[RefitSender]]
PROMPT = tuple(range(3, 12))


@pytest.fixture(scope="module")
def model_dir(make_model: Callable[..., Path]) -> Path:
    return make_model("qwen2", is_tied=True)


@pytest.fixture(scope="module")
def weights(model_dir: Path) -> dict[str, torch.Tensor]:
    """Of policy version 1."""
    from transformers import AutoModelForCausalLM

    held = AutoModelForCausalLM.from_pretrained(model_dir)
    return {name: 1.5 * tensor.detach() for name, tensor in held.named_parameters()}


def _update(weights: dict[str, torch.Tensor], timeout_s: float = 20.0) -> RefitUpdate:
    manifest = tuple(TensorSpec(name, "float32", tuple(tensor.shape)) for name, tensor in weights.items())
    return RefitUpdate(policy_version=1, manifest=manifest, bucket_bytes=1 << 14, timeout_s=timeout_s)


def _stream(weights: dict[str, torch.Tensor]) -> Callable[[WeightSink], None]:
    def stream_weights(sink: WeightSink) -> None:
        for name, tensor in weights.items():
            sink(WeightChunk(name, tuple(tensor.shape), (0,) * tensor.dim(), tensor))

    return stream_weights


@asynccontextmanager
async def _engine(model_dir: Path) -> AsyncIterator[TransformersGenerator]:
    torch.set_num_threads(1)
    generator = TransformersGenerator(TransformersConfig(model=str(model_dir), max_model_len=128))
    await generator.start()
    try:
        yield generator
    finally:
        await generator.shutdown()


@pytest.fixture(params=["collective", "shared_memory", "filesystem"])
def join(request: pytest.FixtureRequest, tmp_path: Path) -> Join:
    """``await join(*engines)``: a sender that they are connected to."""
    return partial(_joined, request.param, tmp_path)


async def _joined(transport: Any, directory: Path, *engines: TransformersGenerator) -> RefitSender:
    sender = RefitSender("127.0.0.1", 0, 1 + len(engines), transport=transport, directory=directory)
    joins = (engine.connect_refit(sender.endpoint(rank)) for rank, engine in enumerate(engines, start=1))
    await asyncio.gather(asyncio.to_thread(sender.connect), *joins)
    return sender


async def _all(*work: Any) -> list[Any]:
    return await asyncio.wait_for(asyncio.gather(*work, return_exceptions=True), 60)


def test_a_load_that_fails_at_its_end_is_not_attested(
    model_dir: Path, weights: dict[str, torch.Tensor], join: Join, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Every byte has arrived and was verified; then the engine runs out of memory."""
    update = _update(weights)

    class OutOfMemory(LoadCounter):
        def add(self, tensors: list[tuple[str, torch.Tensor]]) -> None:
            super().add(tensors)
            if self.num_tensors == len(update.manifest):
                raise RuntimeError("out of memory")

    async def work() -> tuple[list[Any], list[Any]]:
        async with _engine(model_dir) as engine:
            sender = await join(engine)
            monkeypatch.setattr("dockyard_inference.transformers_engine.model.LoadCounter", OutOfMemory)
            answers = await _all(engine.refit(update), asyncio.to_thread(sender.send, _stream(weights), update))
            return answers, await _all(engine.score(PROMPT))

    (engine_side, sender_side), [score] = asyncio.run(work())
    assert type(engine_side) is RefitError
    assert "out of memory" in str(engine_side)
    assert type(sender_side) is RefitError
    assert "rank 1 refused: rank 1 could not load the weights: RuntimeError: out of memory" in str(sender_side)
    assert isinstance(score, GeneratorError)


def test_an_engine_that_refuses_fences_no_other_and_all_can_try_again(
    model_dir: Path, weights: dict[str, torch.Tensor], join: Join
) -> None:
    update = _update(weights)
    other = replace(update, manifest=update.manifest[:-1])

    async def work() -> tuple[list[Any], list[Any], list[Any]]:
        async with AsyncExitStack() as stack:
            bad, good = [await stack.enter_async_context(_engine(model_dir)) for _ in range(2)]
            sender = await join(bad, good)
            before = await good.score(PROMPT)
            failed = await _all(
                bad.refit(other), good.refit(update), asyncio.to_thread(sender.send, _stream(weights), update)
            )
            served = [before, await good.score(PROMPT)]
            again = await _all(
                bad.refit(update), good.refit(update), asyncio.to_thread(sender.send, _stream(weights), update)
            )
            return failed, served, again

    (bad, good, sender), (before, after), again = asyncio.run(work())
    assert isinstance(bad, WeightMismatch)
    assert isinstance(good, RefitCalledOff)
    assert "called the update off" in str(good)
    assert isinstance(sender, WeightMismatch)
    assert before == after
    assert [getattr(report, "policy_version", report) for report in again] == [1, 1, 1]


def test_a_sender_that_is_gone_before_the_update_changes_nothing(
    model_dir: Path, weights: dict[str, torch.Tensor], join: Join
) -> None:
    update = _update(weights)

    async def work() -> tuple[list[Any], list[Any]]:
        async with _engine(model_dir) as engine:
            sender = await join(engine)
            sender.close()
            gc.collect()
            before = await engine.score(PROMPT)
            failed = [*await _all(engine.refit(update)), *await _all(engine.refit(update))]
            assert await engine.score(PROMPT) == before
            sender = await join(engine)
            return failed, await _all(engine.refit(update), asyncio.to_thread(sender.send, _stream(weights), update))

    failed, again = asyncio.run(work())
    assert [type(error) for error in failed] == [RefitError, RefitError]
    assert "the sender (rank 0) is gone" in str(failed[0])
    assert "call connect_refit first" in str(failed[1])
    assert [report.policy_version for report in again] == [1, 1]


def test_live_requests_are_returned_partial_when_the_sender_does_not_come(
    model_dir: Path, weights: dict[str, torch.Tensor], join: Join
) -> None:
    async def work() -> list[Any]:
        async with _engine(model_dir) as engine:
            sender = await join(engine)
            task = asyncio.create_task(engine.generate(request("live", PROMPT, max_new_tokens=110)))
            await until_running(engine, 1)
            await engine.pause("keep")  # or it may end before the deadline does
            answers = await _all(engine.refit(_update(weights, timeout_s=0.5)), task)
            sender.close()
            return answers

    error, completion = asyncio.run(work())
    assert isinstance(error, RefitTimeout)
    assert completion.finish_reason == "abort"
    assert len(completion.token_ids) == len(completion.logprobs) < 110
