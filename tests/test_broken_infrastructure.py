"""What cannot be recovered from yet ends the run with its name, not with a reward and not in a loop."""

from __future__ import annotations

import os
import signal
from pathlib import Path

import pytest
from running_app import SMALL, RunningApp, rows

from dockyard_core.loop import recount

pytestmark = [pytest.mark.ci, pytest.mark.timeout(900)]


def check_nothing_was_scored_by_a_failure(run_dir: Path) -> None:
    counts = recount(rows(run_dir / "events.jsonl"))
    assert counts["admitted"] == counts["trained"] + counts["dropped"] + counts["alive"]
    lost = [row for row in rows(run_dir / "rollouts.jsonl") if row["verdict"] == "infra_error"]
    assert all(row["invalid_cause"] == "infra_error" and row["advantage"] == 0.0 for row in lost)


def test_a_dead_sandbox_stalls_the_run_by_name(tmp_path: Path) -> None:
    app = RunningApp(tmp_path / "run", *SMALL, "run.max_steps=500", "data.validation=null", "sandbox.timeout_s=5")
    app.wait_for_step(1)
    os.kill(app.pid_of("dockyard_sandbox.cli serve"), signal.SIGKILL)
    assert app.wait(600) == 1
    assert "failed: RunStalled: " in app.output
    assert "infra_error" in app.output
    assert "Traceback" not in app.output
    assert app.survivors() == []
    check_nothing_was_scored_by_a_failure(tmp_path / "run")


def test_a_dead_vllm_core_ends_the_run_by_name(tmp_path: Path) -> None:
    overrides = [word for word in SMALL if not word.startswith("generation.backend")]
    app = RunningApp(tmp_path / "run", *overrides, "run.max_steps=500", "data.validation=null")
    app.wait_for_step(1)
    os.kill(app.pid_of("EngineCore"), signal.SIGKILL)
    assert app.wait(300) == 1
    assert "failed: EngineDead: " in app.output
    assert "Traceback" not in app.output
    assert app.survivors() == []
    check_nothing_was_scored_by_a_failure(tmp_path / "run")
