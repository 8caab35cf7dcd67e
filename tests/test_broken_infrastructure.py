"""What cannot be recovered from ends the run with its name, not with a reward and not in a loop."""

from __future__ import annotations

from pathlib import Path

import pytest
from running_app import SMALL, RunningApp, rows

from dockyard_core.loop import recount
from dockyard_sandbox import start_server

pytestmark = [pytest.mark.ci, pytest.mark.timeout(900)]


def test_a_sandbox_of_the_users_that_goes_away_stalls_the_run_by_name(tmp_path: Path) -> None:
    run_dir = tmp_path / "run"
    server = start_server(tmp_path / "server")
    app = RunningApp(
        run_dir, *SMALL, "run.max_steps=500", "data.validation=null", "sandbox.timeout_s=5", f"sandbox.url={server.url}"
    )
    app.wait_for_step(1)
    server.stop()
    assert app.wait(600) == 1
    assert "failed: RunStalled: " in app.output
    assert "infra_error" in app.output
    assert "Traceback" not in app.output
    assert app.survivors() == []
    counts = recount(rows(run_dir / "events.jsonl"))
    assert counts["admitted"] == counts["trained"] + counts["dropped"] + counts["alive"]
    lost = [row for row in rows(run_dir / "rollouts.jsonl") if row["verdict"] == "infra_error"]
    assert lost
    assert all(row["invalid_cause"] == "infra_error" and row["advantage"] == 0.0 for row in lost)
