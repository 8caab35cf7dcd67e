"""The Transformers engine against the generator contract, and what is its own."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from dockyard_core.errors import EngineBusy
from dockyard_core.generator import GenerateRequest, SamplingParams
from dockyard_core.testing.generator_contract import GeneratorContract, GeneratorHarness
from dockyard_core.testing.refit_soak import RefitSoak
from dockyard_inference import TransformersConfig, TransformersGenerator

Serve = Callable[[Any, Path], Iterator[GeneratorHarness]]


def _generator(model: Path) -> TransformersGenerator:
    return TransformersGenerator(TransformersConfig(model=str(model), max_model_len=128))


class TestTiedQwen2(GeneratorContract):
    @pytest.fixture(scope="class")
    @classmethod
    def harness(cls, serve: Serve, make_model: Callable[..., Path]) -> Iterator[GeneratorHarness]:
        model = make_model("qwen2", is_tied=True, intermediate_size=1024)
        yield from serve(_generator(model), model)

    @pytest.mark.ci
    def test_fifty_refits_under_load_lose_no_request_mix_no_versions_and_keep_no_memory(
        self, harness: GeneratorHarness
    ) -> None:
        super().test_fifty_refits_under_load_lose_no_request_mix_no_versions_and_keep_no_memory(harness)


@pytest.mark.ci
class TestUntiedQwen3(GeneratorContract):
    @pytest.fixture(scope="class")
    @classmethod
    def harness(cls, serve: Serve, make_model: Callable[..., Path]) -> Iterator[GeneratorHarness]:
        model = make_model("qwen3", is_tied=False, intermediate_size=1024)
        yield from serve(_generator(model), model)


@pytest.mark.ci
class TestTiedLlama(RefitSoak):
    @pytest.fixture(scope="class")
    @classmethod
    def harness(cls, serve: Serve, make_model: Callable[..., Path]) -> Iterator[GeneratorHarness]:
        model = make_model("llama", is_tied=True, intermediate_size=1024)
        yield from serve(_generator(model), model)


@pytest.mark.ci
class TestUntiedLlama(RefitSoak):
    @pytest.fixture(scope="class")
    @classmethod
    def harness(cls, serve: Serve, make_model: Callable[..., Path]) -> Iterator[GeneratorHarness]:
        model = make_model("llama", is_tied=False, intermediate_size=1024)
        yield from serve(_generator(model), model)


def test_a_request_that_is_cancelled_during_its_first_prefill_leaves_the_engine_alive(
    make_model: Callable[..., Path],
) -> None:
    """The row of the cancelled request is in the batch that is being computed."""
    is_computing, may_compute = threading.Event(), threading.Event()

    async def work() -> list[Any]:
        config = TransformersConfig(model=str(make_model("qwen3", is_tied=True)), max_model_len=128)
        generator = TransformersGenerator(config)
        await generator.start()
        forward = generator._model.forward

        def held_back(*args: Any, **kwargs: Any) -> Any:
            is_computing.set()
            may_compute.wait(60)
            return forward(*args, **kwargs)

        generator._model.forward = held_back
        sampling = SamplingParams(max_new_tokens=8)
        requests = [GenerateRequest(request_id=f"{i}", prompt_token_ids=(3, 4), sampling=sampling) for i in range(5)]
        tasks = [asyncio.create_task(generator.generate(request)) for request in requests]
        await asyncio.to_thread(is_computing.wait, 60)
        tasks[0].cancel()
        await asyncio.sleep(0)
        again = asyncio.create_task(generator.generate(requests[0]))  # its id is free again
        await asyncio.sleep(0)
        may_compute.set()
        answers = await asyncio.gather(*tasks, again, return_exceptions=True)
        await generator.shutdown()
        return answers

    cancelled, *answers = asyncio.run(work())
    assert isinstance(cancelled, asyncio.CancelledError)
    assert [(answer.finish_reason, len(answer.token_ids)) for answer in answers] == [("length", 8)] * 5


def test_beyond_its_queue_an_engine_says_that_it_is_busy_and_begins_nothing(make_model: Callable[..., Path]) -> None:
    async def work() -> None:
        config = TransformersConfig(
            model=str(make_model("qwen2", is_tied=True)), max_model_len=64, max_num_seqs=2, max_queued=3
        )
        generator = TransformersGenerator(config)
        await generator.start()
        await generator.pause()
        sampling = SamplingParams(max_new_tokens=2)
        requests = [GenerateRequest(request_id=f"{i}", prompt_token_ids=(3, 4), sampling=sampling) for i in range(6)]
        waiting = [asyncio.create_task(generator.generate(request)) for request in requests[:5]]
        await asyncio.sleep(0)
        with pytest.raises(EngineBusy, match="max_queued is 3"):
            await generator.generate(requests[5])
        await generator.resume()
        completions = await asyncio.gather(*waiting)
        assert [len(completion.token_ids) for completion in completions] == [2] * 5
        assert len((await generator.generate(requests[5])).token_ids) == 2
        await generator.shutdown()

    asyncio.run(work())
