"""No process of an engine outlives its owner, and a dead engine says so."""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
import sys
import textwrap
from collections.abc import Callable
from pathlib import Path

import pytest
from process_tree import descendants, until_gone

from dockyard_core.errors import EngineDead
from dockyard_core.generator import Completion, GenerateRequest, SamplingParams
from dockyard_inference import VllmConfig, VllmGenerator

pytest.importorskip("vllm")
pytestmark = pytest.mark.ci


def _engine_processes(before: set[int]) -> set[int]:
    """Children since ``before``, without Python's own tracker, which lives as long as this process."""
    new = descendants(os.getpid()) - before
    return {pid for pid in new if b"resource_tracker" not in Path(f"/proc/{pid}/cmdline").read_bytes()}


def _config(model: Path) -> VllmConfig:
    return VllmConfig(model=str(model), max_model_len=128, max_num_seqs=16, kv_cache_gib=0.1)


def _endless(request_id: str) -> GenerateRequest:
    return GenerateRequest(request_id=request_id, prompt_token_ids=(3, 4), sampling=SamplingParams(max_new_tokens=126))


async def _until_running(generator: VllmGenerator) -> None:
    for _ in range(2000):
        if (await generator.health()).num_running:
            return
        await asyncio.sleep(0.005)


def test_an_engine_dies_with_an_owner_that_is_killed(make_model: Callable[..., Path], tmp_path: Path) -> None:
    host = tmp_path / "host.py"
    host.write_text(
        textwrap.dedent(
            """
            import asyncio, sys, time
            from dockyard_inference import VllmConfig, VllmGenerator

            async def main():
                config = VllmConfig(model=sys.argv[1], max_model_len=128, max_num_seqs=16, kv_cache_gib=0.1)
                await VllmGenerator(config).start()
                sys.stdout.write("ready" + chr(10))
                sys.stdout.flush()
                await asyncio.sleep(600)

            if __name__ == "__main__":
                asyncio.run(main())
            """
        )
    )
    command = [sys.executable, str(host), str(make_model("qwen2", is_tied=True))]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True) as owner:
        try:
            assert owner.stdout is not None
            assert owner.stdout.readline().strip() == "ready"
            engine = descendants(owner.pid)
            assert engine
        finally:
            owner.kill()
    left = until_gone(engine)
    for pid in left:
        os.kill(pid, signal.SIGKILL)
    assert not left


def test_a_killed_engine_is_reported_and_shutdown_leaves_nothing(make_model: Callable[..., Path]) -> None:
    before = descendants(os.getpid())

    async def work() -> set[int]:
        generator = VllmGenerator(_config(make_model("qwen2", is_tied=True)))
        await generator.start()
        engine = _engine_processes(before)
        task = asyncio.create_task(generator.generate(_endless("live")))
        await _until_running(generator)
        for pid in engine:
            os.kill(pid, signal.SIGKILL)
        with pytest.raises(EngineDead):
            await task
        with pytest.raises(EngineDead):
            await generator.generate(_endless("later"))
        assert not (await generator.health()).is_alive
        await generator.shutdown()
        return engine

    assert not until_gone(asyncio.run(work()))


def test_a_shutdown_returns_live_requests_and_leaves_no_process(make_model: Callable[..., Path]) -> None:
    before = descendants(os.getpid())

    async def work() -> tuple[Completion, set[int]]:
        generator = VllmGenerator(_config(make_model("qwen2", is_tied=True)))
        await generator.start()
        engine = _engine_processes(before)
        await generator.pause("keep")
        task = asyncio.create_task(generator.generate(_endless("live")))
        await _until_running(generator)
        await generator.shutdown()
        return await task, engine

    completion, engine = asyncio.run(work())
    assert completion.finish_reason == "abort"
    assert engine
    assert not until_gone(engine)
