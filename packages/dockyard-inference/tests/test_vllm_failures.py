"""A vLLM engine that does not answer, and what goes first when it is full."""

from __future__ import annotations

import asyncio
import os
import signal
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from dockyard_core.errors import GeneratorError, RefitTimeout
from dockyard_core.refit import RefitUpdate
from dockyard_core.testing.generator_checks import GeneratorHarness, outcomes, request, until_running
from dockyard_inference import VllmConfig, VllmGenerator
from dockyard_inference.vllm_engine.launch import engine_pids

pytest.importorskip("vllm")
pytestmark = pytest.mark.ci


@pytest.fixture(scope="module")
def harness(serve: Callable[[Any, Path], Iterator[Any]], make_model: Callable[..., Path]) -> Iterator[Any]:
    model = make_model("qwen2", is_tied=True)
    config = VllmConfig(model=str(model), max_model_len=128, max_num_seqs=2, kv_cache_gib=0.1, answer_timeout_s=2.0)
    yield from serve(VllmGenerator(config), model)


def test_score_goes_before_rollouts_that_wait(harness: Any) -> None:
    """Two sequences run at a time and 24 rollouts came first."""

    async def work() -> int:
        tasks = [
            asyncio.create_task(harness.generator.generate(request(f"queued-{i}", (3, 4), max_new_tokens=60)))
            for i in range(24)
        ]
        await until_running(harness.generator, 24)
        await harness.generator.score((3, 4, 5))
        num_done = sum(task.done() for task in tasks)
        await asyncio.gather(*tasks)
        return num_done

    assert harness.run(work()) <= 8


def test_an_engine_process_that_does_not_answer_is_named_and_can_be_refitted(harness: Any) -> None:
    generator: VllmGenerator = harness.generator
    update = RefitUpdate(policy_version=harness.make_version(), manifest=harness.manifest(), timeout_s=1.0)
    pids = engine_pids(generator._running())

    async def work() -> tuple[list[object], Any, float]:
        live = asyncio.create_task(generator.generate(request("live", (3, 4), max_new_tokens=120)))
        await until_running(generator, 1)
        await generator.pause("keep")
        for pid in pids:
            os.kill(pid, signal.SIGSTOP)
        started = time.monotonic()
        try:
            failed = await asyncio.wait_for(outcomes(generator.pause("keep"), generator.refit(update)), 60)
            answer = await asyncio.wait_for(live, 30)
            failed += await asyncio.wait_for(outcomes(generator.connect_refit(_nowhere(harness))), 60)
            return failed, answer, time.monotonic() - started
        finally:
            for pid in pids:
                os.kill(pid, signal.SIGCONT)

    (paused, refitted, connected), completion, seconds = harness.run(work())
    assert isinstance(paused, GeneratorError)
    assert f"process {pids[0]}" in str(paused)
    assert isinstance(refitted, RefitTimeout)
    assert f"process {pids[0]}" in str(refitted)
    assert "dockyard_prepare" in str(refitted)
    assert isinstance(connected, RefitTimeout)
    assert "dockyard_connect" in str(connected)
    assert completion.finish_reason == "abort"
    assert seconds < 20
    harness.run(_refit_again(harness))
    harness.run(generator.resume())
    tokens = tuple(range(3, 20))
    scores = harness.run(generator.score(tokens))
    assert max(abs(a - b) for a, b in zip(scores, harness.witness(tokens, 1), strict=True)) < 1e-4


def _nowhere(harness: Any) -> Any:
    return replace(harness.sender.endpoint(), timeout_s=1.0)


async def _refit_again(harness: GeneratorHarness) -> None:
    await harness.reconnect()
    update = RefitUpdate(policy_version=1, manifest=harness.manifest(), timeout_s=60.0)
    await asyncio.gather(harness.send(update), harness.generator.refit(update))
