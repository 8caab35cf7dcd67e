"""The actor of the sandbox fleet around a real server, without Ray: its life, its death, its second life."""

from __future__ import annotations

import asyncio
import os
import signal
import stat
import time
from pathlib import Path

import pytest

import dockyard_grpo
from dockyard_core import SandboxError, VerdictStatus
from dockyard_core.data import read_tasks
from dockyard_grpo import compose, scratch
from dockyard_grpo.actors.sandbox import SandboxWorker
from dockyard_grpo.config import Config, load_config
from dockyard_grpo.seams import SandboxServer

QUICKSTART = Path(dockyard_grpo.__file__).parent / "quickstart"
TOKEN = "a-token-of-at-least-16-characters"


@pytest.fixture
def config(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Config:
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    monkeypatch.delenv(scratch.MARK, raising=False)
    return load_config(None, ["sandbox.num_workers=1"])


def server_of(worker: SandboxWorker) -> SandboxServer:
    assert worker._server is not None
    return worker._server


def working_files(root: Path) -> set[Path]:
    return set((root / "scratch").glob("*/*"))


def wait_until_at_work(root: Path, at_rest: set[Path], timeout_s: float = 60) -> None:
    """A verdict leaves files in the scratch directory only while it is under way."""
    deadline = time.monotonic() + timeout_s
    while not working_files(root) - at_rest:
        assert time.monotonic() < deadline
        time.sleep(0.002)


def is_gone(pid: int) -> bool:
    return not Path(f"/proc/{pid}").exists()


def test_a_killed_server_is_noticed_and_its_second_life_answers_what_was_asked_of_the_first(config: Config) -> None:
    task = read_tasks(QUICKSTART / "train.jsonl", limit=1)[0]
    assert task.gold_patch is not None

    async def scenario() -> None:
        worker = SandboxWorker(config, TOKEN)
        url = await worker.start()
        pid, root = server_of(worker).pid, worker._folder
        assert stat.S_IMODE((root / "token").stat().st_mode) == 0o600
        client = compose.build_sandbox_client(config, url, TOKEN)
        at_rest = working_files(root)
        death = asyncio.create_task(worker.wait_dead())
        verdict = asyncio.create_task(client.judge(task, task.gold_patch or "", attempt_id="first"))
        await asyncio.to_thread(wait_until_at_work, root, at_rest)
        assert not verdict.done()
        assert not death.done()
        os.kill(pid, signal.SIGKILL)
        assert await death == -signal.SIGKILL
        assert await worker.restart() == url
        assert server_of(worker).pid != pid
        assert (await verdict).status == VerdictStatus.RESOLVED
        assert len(list((root / "scratch").iterdir())) == 1, "what the dead one left is swept"

        second = server_of(worker).pid
        death = asyncio.create_task(worker.wait_dead())
        await worker.stop()
        assert await death == 0
        assert is_gone(second)
        assert not root.exists()
        await worker.stop()  # a second time is harmless

    asyncio.run(scenario())


def test_a_server_of_a_run_refuses_whoever_has_no_token(config: Config) -> None:
    task = read_tasks(QUICKSTART / "train.jsonl", limit=1)[0]

    async def scenario() -> None:
        worker = SandboxWorker(config, TOKEN)
        url = await worker.start()
        try:
            for wrong in (None, TOKEN[::-1]):
                with pytest.raises(SandboxError, match=r"401|Authorization"):
                    await compose.build_sandbox_client(config, url, wrong).judge(task, "", attempt_id="x")
        finally:
            await worker.stop()

    asyncio.run(scenario())


def test_a_restart_ends_a_server_that_still_lives(config: Config) -> None:
    async def scenario() -> None:
        worker = SandboxWorker(config, TOKEN)
        url = await worker.start()
        first = server_of(worker).pid
        assert await worker.restart() == url
        assert is_gone(first)
        await worker.stop()

    asyncio.run(scenario())
