"""Every end of a run leaves no process, and nothing that it promised is lost."""

from __future__ import annotations

import signal
import time
from collections import Counter
from pathlib import Path

import pytest
from running_app import SMALL, RunningApp, rows

from dockyard_core.loop import recount, surviving

pytestmark = [pytest.mark.ci, pytest.mark.timeout(1500)]


def check_whole_run(run_dir: Path, steps: int) -> None:
    assert [row["step"] for row in rows(run_dir / "metrics.jsonl")] == list(range(1, steps + 1))
    assert Counter(row["step"] for row in rows(run_dir / "rollouts.jsonl")) == dict.fromkeys(range(1, steps + 1), 16)
    events = rows(run_dir / "events.jsonl")
    counts = recount(events)
    assert counts["admitted"] == counts["trained"] == 4 * steps
    assert counts["alive"] == counts["dropped"] == 0
    trained = [event["group"] for event in surviving(events) if event["event"] == "trained"]
    assert len(set(trained)) == len(trained) == 4 * steps


def test_ctrl_c_finishes_the_step_saves_and_the_run_goes_on_from_there(tmp_path: Path) -> None:
    run_dir = tmp_path / "run"
    app = RunningApp(run_dir, *SMALL, "run.max_steps=8", "data.validation=null")
    app.wait_for_step(2)
    app.interrupt()
    assert app.wait() == 128 + signal.SIGINT, app.output[-4000:]
    assert app.survivors() == []
    steps = len(rows(run_dir / "metrics.jsonl"))
    assert 2 <= steps < 8
    assert (run_dir / "checkpoints" / "latest").resolve().name == f"step-{steps:06d}"
    assert f"stopped after step {steps}" in app.output

    again = RunningApp(run_dir, f"run.resume={run_dir}")
    assert again.wait() == 0, again.output[-4000:]
    assert again.survivors() == []
    assert f"going on after step {steps}" in again.output
    check_whole_run(run_dir, steps=8)


def test_a_second_ctrl_c_stops_at_once(tmp_path: Path) -> None:
    app = RunningApp(tmp_path / "run", *SMALL, "run.max_steps=50", "data.validation=null")
    app.wait_for_step(1)
    app.interrupt()
    time.sleep(0.1)
    app.interrupt()
    assert app.wait(120) == 128 + signal.SIGINT, app.output[-4000:]
    assert app.survivors() == []


def test_sigterm_ends_like_the_first_ctrl_c(tmp_path: Path) -> None:
    app = RunningApp(tmp_path / "run", *SMALL, "run.max_steps=50", "data.validation=null")
    app.wait_for_step(1)
    app.process.send_signal(signal.SIGTERM)
    assert app.wait(120) == 128 + signal.SIGTERM, app.output[-4000:]
    assert "stopped after step" in app.output
    assert app.survivors() == []


def test_ctrl_c_while_the_fleets_start_leaves_nothing(tmp_path: Path) -> None:
    app = RunningApp(tmp_path / "run", *SMALL, "run.max_steps=5")
    app.wait_until(lambda: "fleets: " in app.output)
    app.interrupt()
    assert app.wait(120) == 128 + signal.SIGINT, app.output[-4000:]
    assert app.survivors() == []
