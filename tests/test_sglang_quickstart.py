"""The quickstart on a real SGLang server: the same job, another engine."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from running_app import SMALL, RunningApp, rows
from sglang_environment import ROOT, sglang_python

pytestmark = pytest.mark.timeout(1200)


def engine() -> list[str]:
    """Overrides; the last word counts where two name one key."""
    return ["generation.backend=sglang", f"generation.sglang.python={sglang_python()}"]


def wait_until_empty(folder: Path) -> None:
    """The guard of a server removes the folder of its weights last."""
    deadline = time.monotonic() + 60
    while list(folder.iterdir()):
        assert time.monotonic() < deadline, list(folder.rglob("*"))
        time.sleep(0.1)


@pytest.mark.ci
def test_five_steps_hold_the_trainers_weights(tmp_path: Path) -> None:
    weights = tmp_path / "weights"
    app = RunningApp(
        tmp_path / "run", *SMALL, *engine(), f"generation.sglang.weights_directory={weights}", "run.max_steps=5"
    )
    assert app.wait(1100) == 0, app.output[-4000:]
    metrics = rows(tmp_path / "run" / "metrics.jsonl")
    assert [row["step"] for row in metrics] == [1, 2, 3, 4, 5]
    assert [row["policy_version"] for row in metrics] == [1, 2, 3, 4, 5]
    assert max(row["refit_probe_abs_diff_mean"] for row in metrics) <= 1e-4
    assert max(row["offpolicy_abs_diff_mean"] for row in metrics if row["staleness_max"] == 0) <= 1e-3
    assert metrics[-1]["val_policy_version_min"] == metrics[-1]["val_policy_version_max"] == 5
    rollouts = rows(tmp_path / "run" / "rollouts.jsonl")
    assert {row["invalid_cause"] for row in rollouts} == {None}
    assert app.survivors() == []
    wait_until_empty(weights)


@pytest.mark.nightly
def test_a_driver_that_is_killed_leaves_no_server(tmp_path: Path) -> None:
    weights = tmp_path / "weights"
    app = RunningApp(
        tmp_path / "run", *SMALL, *engine(), f"generation.sglang.weights_directory={weights}", "run.max_steps=200"
    )
    app.wait_for_step(1)
    assert app.pids_of("sglang.launch_server")
    assert list(weights.iterdir())
    os.kill(app.process.pid, signal.SIGKILL)
    app.process.wait()
    assert app.survivors(60) == []
    wait_until_empty(weights)


@pytest.mark.nightly
def test_doctor_says_which_sglang_it_is(tmp_path: Path) -> None:
    command = [sys.executable, "apps/grpo", "doctor", "--json", *engine()]
    answer = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=120, check=False)
    found = {finding["name"]: finding for finding in json.loads(answer.stdout)["findings"]}
    assert found["engine"]["status"] == "ok"
    assert found["engine"]["found"].startswith("sglang 0.5.23 in ")
