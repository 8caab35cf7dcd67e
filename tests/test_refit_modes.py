"""The real app with each way to treat live requests, and with staged and sampled refits."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from running_app import ROOT, SMALL, RunningApp, rows

from dockyard_core.loop import recount

pytestmark = [pytest.mark.ci, pytest.mark.timeout(900)]
STEPS = 5


def trained_rollouts(run_dir: Path, *overrides: str) -> list[dict[str, Any]]:
    """Rows of rollouts.jsonl of a run that ended well, whose ledger adds up and whose engines were never in doubt."""
    app = RunningApp(run_dir, *SMALL, f"run.max_steps={STEPS}", "data.validation=null", *overrides)
    assert app.wait(800) == 0, app.output[-4000:]
    assert app.survivors() == []
    events = rows(run_dir / "events.jsonl")
    counts = recount(events)
    assert counts["admitted"] == counts["trained"] == 4 * STEPS
    assert counts["alive"] == counts["dropped"] == 0
    assert not [event for event in events if event["event"] in ("refit_failed", "engine_lost")]
    metrics = rows(run_dir / "metrics.jsonl")
    assert [row["step"] for row in metrics] == list(range(1, STEPS + 1))
    assert max(row["refit_probe_abs_diff_mean"] for row in metrics) <= 1e-4
    found = rows(run_dir / "rollouts.jsonl")
    assert {row["invalid_cause"] for row in found} == {None}
    return found


@pytest.mark.parametrize("mode", ["keep", pytest.param("wait", marks=pytest.mark.nightly), "abort"])
def test_what_becomes_of_rollouts_that_a_refit_finds_under_way(
    mode: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PYTHONPATH", str(ROOT / "tests"), prepend=":")
    run_dir = tmp_path / "run"
    rollouts = trained_rollouts(
        run_dir, "generation.backend=slow_engine:SlowGenerator", f"refit.mode={mode}", "grpo.max_staleness=2"
    )
    num_mixed = sum(len(rollout["versions"]) > 1 for rollout in rollouts)
    num_again = sum(event["event"] == "group_run_anew" for event in rows(run_dir / "events.jsonl"))
    assert (num_mixed > 0) == (mode == "keep")
    assert (num_again > 0) == (mode == "abort")


def test_staged_and_sampled_refits_of_two_engines(tmp_path: Path) -> None:
    trained_rollouts(tmp_path / "run", "refit.staging=host", "refit.hashes=sampled", "generation.num_engines=2")
