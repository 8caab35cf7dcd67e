"""Faults of a refit with a real SGLang server: a killed trainer, a flipped bit, a server that stalls or dies."""

from __future__ import annotations

import asyncio
import os
import signal
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from process_tree import descendants, title, until_gone
from refit_faults import RefitFaults, join, send, serves_only, stalled, update_of
from sglang_environment import sglang_python

from dockyard_core.errors import EngineDead, RefitError
from dockyard_core.testing.generator_checks import outcomes
from dockyard_inference import SglangConfig, SglangGenerator, TransformersConfig, TransformersGenerator

pytestmark = [pytest.mark.ci, pytest.mark.timeout(600)]


def scheduler_of(generator: SglangGenerator) -> int:
    [pid] = [pid for pid in descendants(generator._running().server.pid) if "sglang::scheduler" in title(pid)]
    return pid


def until_staged(folder: Path) -> None:
    """All the bytes lie there, and the server has been told, or will be in a moment."""
    deadline = time.monotonic() + 60
    while not list(folder.glob("version-*/*.safetensors")):
        assert time.monotonic() < deadline
        time.sleep(0.01)
    time.sleep(0.5)


class TestSglang(RefitFaults):
    """The test that kills the server comes last."""

    @pytest.fixture(scope="class")
    @classmethod
    def harness(cls, serve: Callable[..., Iterator[Any]], make_model: Callable[..., Path]) -> Iterator[Any]:
        model = make_model("qwen2", is_tied=True)
        config = SglangConfig(
            model=str(model), python=sglang_python(), max_model_len=128, max_num_seqs=8, answer_timeout_s=2.0
        )
        yield from serve(SglangGenerator(config), model)

    def test_a_server_that_stalls_while_it_loads_is_named_by_both_sides(self, harness: Any, tmp_path: Path) -> None:
        scheduler = scheduler_of(harness.generator)

        async def work() -> Any:
            try:
                return await stalled(harness, lambda: os.kill(scheduler, signal.SIGSTOP), tmp_path)
            finally:
                os.kill(scheduler, signal.SIGCONT)

        _, engine_side, seconds = harness.run(work())
        assert "did not answer /update_weights_from_disk" in str(engine_side)
        assert seconds < 60
        harness.run(self._heal(harness, update_of(harness), "collective", tmp_path))

    def test_a_server_that_is_killed_while_it_loads_and_its_neighbour_is_healed(
        self, harness: Any, tmp_path: Path
    ) -> None:
        dead: SglangGenerator = harness.generator
        held, update, folder = dead.version, update_of(harness), dead._running().server.weights
        guard, scheduler = dead._running().server.pid, scheduler_of(dead)
        server = {guard} | descendants(guard)
        model = dead.config.model
        neighbour = TransformersGenerator(TransformersConfig(model=model, max_model_len=128))

        async def work() -> list[Any]:
            await neighbour.start()
            try:
                await join(harness, "shared_memory", tmp_path, neighbour)
                refits = outcomes(
                    send(harness, update, lambda: os.kill(scheduler, signal.SIGSTOP)),
                    dead.refit(update),
                    neighbour.refit(update),
                )
                running = asyncio.create_task(refits)
                await asyncio.to_thread(until_staged, folder)
                os.kill(scheduler, signal.SIGKILL)
                failed = await asyncio.wait_for(running, 120)
                assert dead.version == held
                # It had every byte and loaded them: it rolls forward.
                harness.generator = neighbour
                await serves_only(harness, update.policy_version)
                await join(harness, "shared_memory", tmp_path)
                again = update_of(harness)
                await asyncio.gather(send(harness, again), neighbour.refit(again))
                await serves_only(harness, again.policy_version)
                return failed
            finally:
                harness.generator = dead
                await neighbour.shutdown()

        sender_side, dead_side, neighbour_side = harness.run(work())
        assert isinstance(sender_side, RefitError), sender_side
        assert isinstance(dead_side, EngineDead), dead_side
        assert getattr(neighbour_side, "policy_version", neighbour_side) == update.policy_version
        assert until_gone(server) == set()
        assert list(folder.glob("*")) == []
