"""Faults of a refit with real vLLM engines: a killed trainer, a flipped bit, a core that stalls or dies in the load."""

from __future__ import annotations

import asyncio
import os
import signal
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from process_tree import descendants, until_gone
from refit_faults import RefitFaults, join, send, serves_nothing, serves_only, stalled, update_of

from dockyard_core.errors import EngineDead, GeneratorError, RefitError
from dockyard_core.testing.generator_checks import outcomes, request
from dockyard_inference import TransformersConfig, TransformersGenerator, VllmConfig, VllmGenerator
from dockyard_inference.vllm_engine.launch import engine_pids

pytest.importorskip("vllm")
pytestmark = pytest.mark.ci
Serve = Callable[[Any, Path], Iterator[Any]]


def vllm(model: Path) -> VllmGenerator:
    config = VllmConfig(model=str(model), max_model_len=128, max_num_seqs=8, kv_cache_gib=0.1, answer_timeout_s=2.0)
    return VllmGenerator(config)


class TestVllm(RefitFaults):
    @pytest.fixture(scope="class")
    @classmethod
    def harness(cls, serve: Serve, make_model: Callable[..., Path]) -> Iterator[Any]:
        model = make_model("qwen2", is_tied=True)
        yield from serve(vllm(model), model)

    def test_a_core_that_stalls_while_it_loads_is_named_by_both_sides(self, harness: Any, tmp_path: Path) -> None:
        held, [core] = harness.generator.version, engine_pids(harness.generator._running())

        async def work() -> Any:
            try:
                said = await stalled(harness, lambda: os.kill(core, signal.SIGSTOP), tmp_path)
                await serves_nothing(harness.generator, held)
                return said
            finally:
                os.kill(core, signal.SIGCONT)

        _, engine_side, seconds = harness.run(work())
        assert f"the engine process {core}" in str(engine_side)
        assert "no answer to update_weights" in str(engine_side)
        assert seconds < 30
        update = update_of(harness)
        harness.run(self._heal(harness, update, "collective", tmp_path))


@pytest.fixture
def pair(serve: Serve, make_model: Callable[..., Path]) -> Iterator[tuple[Any, TransformersGenerator]]:
    """A vLLM engine in a harness and a second engine with the same model; none leaves a process."""
    model, before = make_model("qwen2", is_tied=True), descendants(os.getpid())
    other = TransformersGenerator(TransformersConfig(model=str(model), max_model_len=128))
    for harness in serve(vllm(model), model):
        engine = {pid for core in engine_pids(harness.generator._running()) for pid in (core, *descendants(core))}
        harness.run(other.start())
        yield harness, other
        harness.run(other.shutdown())
    assert engine
    assert engine.isdisjoint(before)
    assert until_gone(engine) == set()


@pytest.mark.parametrize("transport", ["collective", "shared_memory"])
def test_a_core_that_is_killed_while_it_loads_and_its_neighbour_is_healed(
    pair: tuple[Any, TransformersGenerator], transport: str, tmp_path: Path
) -> None:
    harness, neighbour = pair
    dead, update = harness.generator, update_of(harness)
    [core] = engine_pids(dead._running())

    async def work() -> list[Any]:
        await join(harness, transport, tmp_path, neighbour)
        failed = await asyncio.wait_for(
            outcomes(
                send(harness, update, lambda: os.kill(core, signal.SIGKILL)),
                dead.refit(update),
                neighbour.refit(update),
            ),
            60,
        )
        assert dead.version == 0
        later = await outcomes(dead.generate(request("later", (3, 4))), dead.score((3, 4)))
        assert all(isinstance(answer, GeneratorError) for answer in later), later
        [again] = await outcomes(dead.refit(update))
        assert isinstance(again, EngineDead), again
        assert not (await dead.health()).is_alive
        await serves_nothing(neighbour, 0)
        harness.generator = neighbour
        await join(harness, transport, tmp_path)
        await asyncio.gather(send(harness, update), neighbour.refit(update))
        await serves_only(harness, 1)
        harness.generator = dead
        return failed

    sender_side, dead_side, neighbour_side = harness.run(work())
    assert type(sender_side) is RefitError
    assert "rank 1 is gone: its process has ended" in str(sender_side)
    assert isinstance(dead_side, EngineDead), dead_side
    assert type(neighbour_side) is RefitError
