"""The default job learns, measured as anybody would: from the run directory of the real app."""

from __future__ import annotations

from pathlib import Path

import pytest
from running_app import RunningApp, rows

from benchmarks.quickstart import CASES, RESULTS, summarize, table
from dockyard_core.loop import recount

ROOT = Path(__file__).resolve().parent.parent


def check_learning(run_dir: Path, max_staleness: int) -> None:
    metrics = rows(run_dir / "metrics.jsonl")
    figures = summarize(metrics)
    assert figures["reward_first_5"] <= 0.4
    assert figures["reward_last_10"] >= 0.75
    assert figures["held_out_after"] - figures["held_out_before"] >= 0.3
    assert figures["refit_probe_abs_diff_mean_max"] <= 1e-4
    assert figures["staleness_max"] == max_staleness
    if max_staleness == 0:
        assert figures["offpolicy_abs_diff_mean_max"] <= 1e-3
    counts = recount(rows(run_dir / "events.jsonl"))
    assert counts["admitted"] == counts["trained"] + counts["dropped"] + counts["alive"]
    assert counts["trained"] == 16 * len(metrics)
    assert all(row["isolation"] != "unsafe" for row in rows(run_dir / "rollouts.jsonl"))


IN_CI = ("seed-0",)


@pytest.mark.timeout(2400)
@pytest.mark.parametrize(
    "case", [pytest.param(case, marks=pytest.mark.ci if case in IN_CI else pytest.mark.nightly) for case in CASES]
)
def test_the_quickstart_reaches_its_bar(case: str, tmp_path: Path) -> None:
    app = RunningApp(tmp_path / "run", "logging.console=plain", *CASES[case])
    assert app.wait(2300) == 0, app.output[-4000:]
    assert app.survivors() == []
    check_learning(tmp_path / "run", max_staleness=0 if case == "synchronous" else 1)


def test_the_table_of_the_readme_is_that_of_the_result_file() -> None:
    import json

    assert table(json.loads(RESULTS.read_text())) in (ROOT / "README.md").read_text()
