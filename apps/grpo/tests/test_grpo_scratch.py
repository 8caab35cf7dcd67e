from __future__ import annotations

import subprocess
import sys
import time
from pathlib import Path

import pytest

from dockyard_grpo import reaper, scratch


@pytest.fixture(autouse=True)
def own_base(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    monkeypatch.delenv(scratch.MARK, raising=False)
    return tmp_path


def test_the_next_start_sweeps_what_the_dead_left_and_nothing_else() -> None:
    mine = scratch.make("ray")
    made = "from dockyard_grpo import scratch; print(scratch.make('ray'))"
    program = f"import tempfile; tempfile.tempdir = {str(scratch.base().parent)!r}; {made}"
    theirs = Path(
        subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True).stdout[:-1]
    )
    reused = scratch.base() / f"ray-{mine.name.rpartition('-')[2].partition('.')[0]}.1"  # this id, another start time
    reused.mkdir()
    assert theirs.is_dir()
    assert scratch.sweep() == 2
    assert (mine.is_dir(), theirs.exists(), reused.exists()) == (True, False, False)


def test_a_folder_of_a_run_goes_with_the_run(monkeypatch: pytest.MonkeyPatch) -> None:
    run = scratch.make("ray")
    monkeypatch.setenv(scratch.MARK, str(run))
    assert scratch.make("sandbox").parent == run


def test_the_reaper_ends_marked_processes_of_a_dead_driver_and_its_folder(tmp_path: Path) -> None:
    folder = tmp_path / "run"
    folder.mkdir()
    driver = (
        "import subprocess, sys, time; from pathlib import Path; from dockyard_grpo import reaper\n"
        f"reaper.start(Path({str(folder)!r}))\n"
        "child = subprocess.Popen([sys.executable, '-c', 'import time; time.sleep(600)'], start_new_session=True)\n"
        "print(child.pid, flush=True); time.sleep(600)"
    )
    process = subprocess.Popen([sys.executable, "-c", driver], stdout=subprocess.PIPE, text=True)
    assert process.stdout is not None
    child = int(process.stdout.readline())
    assert reaper.marked(str(folder)) == [child]
    process.kill()
    process.wait()
    deadline = time.monotonic() + 60
    while folder.exists() and time.monotonic() < deadline:
        time.sleep(0.1)
    assert reaper.marked(str(folder)) == []
    assert not folder.exists()
