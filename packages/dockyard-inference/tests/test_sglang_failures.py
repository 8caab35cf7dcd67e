"""A real SGLang server that is killed while it samples or does not start, and an owner that is killed."""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
import sys
import textwrap
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest
from process_tree import descendants, title, until_gone
from sglang_environment import sglang_python

from dockyard_core.errors import EngineDead, GeneratorError
from dockyard_core.testing.generator_checks import outcomes, request, until_running
from dockyard_inference import SglangConfig, SglangGenerator

pytestmark = pytest.mark.timeout(900)


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


@pytest.mark.ci
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


@pytest.mark.nightly
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


@pytest.mark.nightly
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
