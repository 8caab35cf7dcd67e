"""A real SGLang server that is killed, does not start or does not answer, and an owner that is killed."""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
import sys
import textwrap
import time
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
from sglang_environment import sglang_python

from dockyard_core.errors import EngineDead, GeneratorError, RefitError, RefitTimeout
from dockyard_core.policy import WeightChunk, WeightSink
from dockyard_core.refit import RefitUpdate, TensorSpec
from dockyard_core.testing.generator_checks import outcomes, request, until_running
from dockyard_inference import RefitSender, SglangConfig, SglangGenerator

pytestmark = [pytest.mark.nightly, pytest.mark.timeout(900)]


def descendants(pid: int) -> set[int]:
    found: set[int] = set()
    for task in Path(f"/proc/{pid}/task").glob("*/children"):
        for child in map(int, task.read_text().split()):
            found |= {child} | descendants(child)
    return found


def is_alive(pid: int) -> bool:
    try:
        state = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except (FileNotFoundError, ProcessLookupError):
        return False
    return state not in "ZX"


def until_gone(pids: set[int], timeout_s: float = 60.0) -> set[int]:
    deadline = time.monotonic() + timeout_s
    while (alive := {pid for pid in pids if is_alive(pid)}) and time.monotonic() < deadline:
        time.sleep(0.1)
    return alive


def until_staged(folder: Path) -> None:
    """The weights lie there, and the server has been told, or will be in a moment."""
    deadline = time.monotonic() + 60
    while not list(folder.glob("version-*/*.safetensors")):
        assert time.monotonic() < deadline
        time.sleep(0.01)
    time.sleep(0.5)


def title(pid: int) -> str:
    return Path(f"/proc/{pid}/cmdline").read_bytes().replace(b"\0", b" ").decode(errors="replace")


def config_of(model: Path, **changes: Any) -> SglangConfig:
    values = {"model": str(model), "python": sglang_python(), "max_model_len": 128, "max_num_seqs": 8}
    return SglangConfig.model_validate(values | changes)


@asynccontextmanager
async def started(config: SglangConfig) -> AsyncIterator[tuple[SglangGenerator, set[int]]]:
    """An engine and the processes of its server, guard included; none is left in the end."""
    generator = SglangGenerator(config)
    await generator.start()
    assert generator._session is not None
    guard = generator._session.server.pid
    pids = {guard} | descendants(guard)
    try:
        yield generator, pids
    finally:
        await generator.shutdown()
        assert until_gone(pids) == set()


def scheduler_of(pids: set[int]) -> int:
    [pid] = [pid for pid in pids if "sglang::scheduler" in title(pid)]
    return pid


@pytest.mark.parametrize("victim", ["scheduler", "main"])
def test_a_server_that_is_killed_while_it_samples_is_reported(make_model: Callable[..., Path], victim: str) -> None:
    async def work() -> None:
        async with started(config_of(make_model("qwen2", is_tied=True))) as (generator, pids):
            live = [asyncio.create_task(generator.generate(request(f"{i}", (3, 4), 120))) for i in range(24)]
            await until_running(generator, 24)
            wanted = "sglang::scheduler" if victim == "scheduler" else "-m sglang.launch_server"
            [pid] = [pid for pid in pids if wanted in title(pid) and "guard.py" not in title(pid)]
            os.kill(pid, signal.SIGKILL)
            answers = await asyncio.wait_for(outcomes(*live), 120)
            dead = [answer for answer in answers if isinstance(answer, Exception)]
            assert dead
            assert all(isinstance(answer, EngineDead) for answer in dead), dead
            assert "restart the engine" in str(dead[0])
            assert await asyncio.to_thread(until_gone, pids) == set()
            for answer in await outcomes(generator.generate(request("later", (3,))), generator.score((3, 4))):
                assert isinstance(answer, EngineDead), answer
            assert not (await generator.health()).is_alive

    asyncio.run(work())


async def _refit(generator: SglangGenerator, timeout_s: float, meanwhile: Callable[[], object]) -> list[Any]:
    """Refit to the next version, and call ``meanwhile`` when the sender packs its first tensor."""
    assert generator._session is not None
    held = generator._session.facts.held
    manifest = tuple(TensorSpec(name, "float32", shape) for name, shape in held.items())
    update = RefitUpdate(policy_version=generator.version + 1, manifest=manifest, timeout_s=timeout_s)

    def stream(sink: WeightSink) -> None:
        meanwhile()
        for name, shape in held.items():
            sink(WeightChunk(name, shape, (0,) * len(shape), 0.05 * torch.ones(shape)))

    sender = RefitSender("127.0.0.1", 0, 2, transport="collective")
    try:
        await asyncio.gather(asyncio.to_thread(sender.connect), generator.connect_refit(sender.endpoint()))
        return await outcomes(generator.refit(update), asyncio.to_thread(sender.send, stream, update))
    finally:
        sender.close()


def test_a_server_that_is_killed_while_it_loads_is_reported(make_model: Callable[..., Path]) -> None:
    async def work() -> None:
        async with started(config_of(make_model("qwen2", is_tied=True))) as (generator, pids):
            scheduler = scheduler_of(pids)
            before = await generator.score((3, 4, 5))
            os.kill(scheduler, signal.SIGSTOP)  # so that it is in the middle of it
            work = asyncio.create_task(_refit(generator, 60.0, lambda: None))
            assert generator._session is not None
            await asyncio.to_thread(until_staged, generator._session.server.weights)
            os.kill(scheduler, signal.SIGKILL)
            engine_side, sender_side = await asyncio.wait_for(work, 120)
            assert isinstance(engine_side, EngineDead), engine_side
            assert isinstance(sender_side, RefitError), sender_side
            assert generator.version == 0
            assert len(before) == 2
            assert list(generator._session.server.weights.glob("*")) == []

    asyncio.run(work())


def test_a_server_that_does_not_answer_is_named_and_can_be_refitted(make_model: Callable[..., Path]) -> None:
    async def work() -> None:
        model = make_model("qwen3", is_tied=True)
        async with started(config_of(model, answer_timeout_s=2.0)) as (generator, pids):
            scheduler = scheduler_of(pids)
            live = asyncio.create_task(generator.generate(request("live", (3, 4), 120)))
            await until_running(generator, 1)
            try:
                begun = time.monotonic()
                failed, _ = await _refit(generator, 2.0, lambda: os.kill(scheduler, signal.SIGSTOP))
                assert isinstance(failed, RefitTimeout), failed
                assert "did not answer /update_weights_from_disk within" in str(failed)
                assert time.monotonic() - begun < 60
                [fenced] = await outcomes(generator.score((3, 4)))
                assert "the engine is fenced" in str(fenced)
            finally:
                os.kill(scheduler, signal.SIGCONT)
            answer = await asyncio.wait_for(live, 60)
            assert answer.finish_reason in ("abort", "length")
            report, _ = await _refit(generator, 60.0, lambda: None)
            assert (report.policy_version, generator.version) == (1, 1)
            completion = await generator.generate(request("healed", (3,)))
            assert {span.policy_version for span in completion.version_spans} == {1}

    asyncio.run(work())


def test_a_server_dies_with_an_owner_that_is_killed(make_model: Callable[..., Path], tmp_path: Path) -> None:
    host = tmp_path / "host.py"
    host.write_text(
        textwrap.dedent(
            """
            import asyncio, sys
            from pathlib import Path
            from dockyard_inference import SglangConfig, SglangGenerator

            async def main():
                model, python, weights = sys.argv[1:]
                config = SglangConfig(model=model, python=Path(python), weights_directory=Path(weights))
                await SglangGenerator(config).start()
                sys.stdout.write("ready" + chr(10))
                sys.stdout.flush()
                await asyncio.sleep(600)

            asyncio.run(main())
            """
        )
    )
    weights = tmp_path / "weights"
    command = [sys.executable, str(host), str(make_model("qwen2", is_tied=True)), str(sglang_python()), str(weights)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True) as owner:
        try:
            assert owner.stdout is not None
            assert owner.stdout.readline().strip() == "ready"
            server = descendants(owner.pid)
            assert [pid for pid in server if "sglang::scheduler" in title(pid)]
        finally:
            owner.kill()
    assert until_gone(server) == set()
    assert list(weights.iterdir()) == []


def test_a_server_that_does_not_start_says_why(make_model: Callable[..., Path]) -> None:
    model = make_model("qwen2", is_tied=True)

    async def start(**changes: Any) -> str:
        generator = SglangGenerator(config_of(model, **changes))
        with pytest.raises(GeneratorError) as caught:
            await generator.start()
        await generator.shutdown()
        return str(caught.value)

    before = descendants(os.getpid())
    refused = asyncio.run(start(server_args={"no_such_option": 3}))
    assert refused.startswith(f"SGLang did not start for {model}: exit code 2; its last lines: ")
    assert "--no-such-option" in refused
    assert "within 0.5 s" in asyncio.run(start(start_timeout_s=0.5))
    assert "No module named 'sglang'" in asyncio.run(start(python=Path(sys.executable)))
    assert until_gone(descendants(os.getpid()) - before) == set()
