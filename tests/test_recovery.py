"""Parts of a run die while it goes on: each comes back by policy, each death is in the ledger, nothing is lost."""

from __future__ import annotations

import json
import os
import signal
import sys
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
from running_app import SMALL, RunningApp, rows
from sglang_environment import sglang_python

from dockyard_core.data import TaskSampler
from dockyard_core.loop import recount, surviving

pytestmark = [pytest.mark.ci, pytest.mark.timeout(1200)]

STEPS = 8
LIVELY = [*SMALL, f"run.max_steps={STEPS}", "data.validation=null", "checkpoint.every_steps=1", "refit.timeout_s=20"]


def check_nothing_was_lost(run_dir: Path, app: RunningApp, num_groups: int = 4 * STEPS) -> list[dict[str, Any]]:
    """The run ended, and trained the sampler's prefix: what a run without deaths would have trained."""
    assert app.wait(900) == 0, app.output[-4000:]
    assert app.survivors() == []
    events = rows(run_dir / "events.jsonl")
    counts = recount(events)
    assert counts["admitted"] == counts["trained"] == num_groups
    assert counts["alive"] == counts["dropped"] == 0
    trained = Counter(event["group"] for event in surviving(events) if event["event"] == "trained")
    assert max(trained.values()) == 1
    sampler = TaskSampler(96, 0)
    visits = Counter(sampler.next()[1] for _ in range(num_groups))
    assert Counter(int(group.rpartition("#")[2]) for group in trained) == visits
    metrics = rows(run_dir / "metrics.jsonl")
    assert [row["step"] for row in metrics] == list(range(1, STEPS + 1))
    assert all(row["staleness_max"] <= 1 for row in metrics)
    return events


def kinds(events: list[dict[str, Any]]) -> Counter[str]:
    return Counter(event["event"] for event in events)


def test_a_dead_engine_comes_back_and_its_groups_run_anew(tmp_path: Path) -> None:
    run_dir = tmp_path / "run"
    app = RunningApp(run_dir, *LIVELY, "generation.num_engines=2")
    app.wait_for_step(2)
    os.kill(app.pids_of("ray::InferenceWorker")[0], signal.SIGKILL)
    seen = kinds(check_nothing_was_lost(run_dir, app))
    assert seen["engine_lost"] == seen["engine_restarted"] == 1
    assert seen["restored"] == 0
    assert "a new one is started" in app.output


@pytest.mark.nightly
def test_the_only_engine_dies_twice_and_the_run_goes_on(tmp_path: Path) -> None:
    run_dir = tmp_path / "run"
    app = RunningApp(run_dir, *LIVELY)
    for step in (1, 4):
        app.wait_for_step(step)
        os.kill(app.pids_of("ray::InferenceWorker")[0], signal.SIGKILL)
        lost = 1 if step == 1 else 2
        app.wait_until(lambda lost=lost: kinds(rows(run_dir / "events.jsonl"))["engine_restarted"] == lost)
    seen = kinds(check_nothing_was_lost(run_dir, app))
    assert seen["engine_lost"] == 2


def test_the_process_of_a_vllm_engine_dies_and_is_replaced(tmp_path: Path) -> None:
    run_dir = tmp_path / "run"
    overrides = [word for word in LIVELY if not word.startswith("generation.backend")]
    app = RunningApp(run_dir, *overrides)
    app.wait_for_step(2)
    os.kill(app.pid_of("EngineCore"), signal.SIGKILL)
    seen = kinds(check_nothing_was_lost(run_dir, app))
    assert seen["engine_lost"] == seen["engine_restarted"] == 1


@pytest.mark.nightly
@pytest.mark.parametrize("victim", ["sglang::scheduler", "-m sglang.launch_server"])
def test_the_server_of_an_sglang_engine_dies_and_is_replaced(tmp_path: Path, victim: str) -> None:
    run_dir = tmp_path / "run"
    engine = ["generation.backend=sglang", f"generation.sglang.python={sglang_python()}"]
    app = RunningApp(run_dir, *LIVELY, *engine)
    app.wait_for_step(2)
    os.kill(app.pids_of(victim)[0], signal.SIGKILL)
    seen = kinds(check_nothing_was_lost(run_dir, app))
    assert seen["engine_lost"] == seen["engine_restarted"] == 1


def kill_during(run_dir: Path, where: str, victim: str, *overrides: str) -> RunningApp:
    """The app, with a death planted before the fourth call of one of the driver's functions."""
    point = json.dumps({"where": f"dockyard_grpo.{where}", "when": "before", "number": 4, "victim": victim})
    launcher = (sys.executable, "tests/killed_app.py", point)
    return RunningApp(run_dir, *LIVELY, *overrides, launcher=launcher)


def test_an_engine_that_dies_during_a_refit_is_left_behind_and_catches_up(tmp_path: Path) -> None:
    run_dir = tmp_path / "run"
    where = "refit:RefitCoordinator._transfer"
    app = kill_during(run_dir, where, "ray::InferenceWorker", "generation.num_engines=2", "refit.timeout_s=10")
    events = check_nothing_was_lost(run_dir, app)
    seen = kinds(events)
    assert seen["engine_lost"] == seen["engine_restarted"] == 1
    assert seen["refit_failed"] >= 1
    assert seen["restored"] == 0
    lost = next(index for index, event in enumerate(events) if event["event"] == "engine_lost")
    survivor = {"engine-0", "engine-1"} - {events[lost]["engine"]}
    versions = [e["policy_version"] for e in events if e["event"] == "attested" and {e["engine"]} == survivor]
    assert versions == sorted(set(versions))  # whoever attested a version is not sent it again


@pytest.mark.nightly
def test_the_process_of_a_vllm_engine_dies_during_a_refit_and_is_replaced(tmp_path: Path) -> None:
    run_dir = tmp_path / "run"
    where = "refit:RefitCoordinator._transfer"
    app = kill_during(run_dir, where, "VLLM::EngineCore", "generation.backend=vllm", "refit.timeout_s=10")
    seen = kinds(check_nothing_was_lost(run_dir, app))
    assert seen["engine_lost"] == seen["engine_restarted"] == 1
    assert seen["refit_failed"] >= 1
    assert seen["restored"] == 0


def test_a_trainer_that_dies_during_a_refit_takes_the_run_back(tmp_path: Path) -> None:
    run_dir = tmp_path / "run"
    app = kill_during(run_dir, "refit:RefitCoordinator._transfer", "ray::TrainerWorker")
    seen = kinds(check_nothing_was_lost(run_dir, app))
    assert seen["trainer_lost"] == seen["restored"] == 1


@pytest.mark.nightly
def test_a_trainer_that_dies_during_a_save_leaves_the_checkpoint_before_it(tmp_path: Path) -> None:
    run_dir = tmp_path / "run"
    app = kill_during(run_dir, "run_directory:RunDirectory.commit_checkpoint", "ray::TrainerWorker")
    seen = kinds(check_nothing_was_lost(run_dir, app))
    assert seen["trainer_lost"] == seen["restored"] == 1


@pytest.mark.nightly
def test_an_engine_that_only_stalls_is_given_up_and_replaced(tmp_path: Path) -> None:
    run_dir = tmp_path / "run"
    app = RunningApp(run_dir, *LIVELY, "generation.num_engines=2", "grpo.rollout_timeout_s=20", "refit.timeout_s=10")
    app.wait_for_step(2)
    os.kill(app.pids_of("ray::InferenceWorker")[0], signal.SIGSTOP)
    seen = kinds(check_nothing_was_lost(run_dir, app))
    assert seen["engine_lost"] == seen["engine_restarted"] == 1


def test_a_dead_sandbox_server_is_started_again_and_no_verdict_is_lost(tmp_path: Path) -> None:
    run_dir = tmp_path / "run"
    app = RunningApp(run_dir, *LIVELY)
    for step in (2, 5):
        app.wait_for_step(step)
        before = kinds(rows(run_dir / "events.jsonl"))["sandbox_restarted"]
        os.kill(app.pids_of("dockyard_sandbox.cli serve")[0], signal.SIGKILL)
        app.wait_until(lambda before=before: kinds(rows(run_dir / "events.jsonl"))["sandbox_restarted"] > before)
    events = check_nothing_was_lost(run_dir, app)
    assert kinds(events)["sandbox_lost"] == kinds(events)["sandbox_restarted"] == 2
    assert all(row["invalid_cause"] is None for row in rows(run_dir / "rollouts.jsonl"))


def test_the_sandbox_worker_itself_dies_and_another_one_takes_its_place(tmp_path: Path) -> None:
    run_dir = tmp_path / "run"
    app = RunningApp(run_dir, *LIVELY)
    app.wait_for_step(2)
    os.kill(app.pids_of("ray::SandboxWorker")[0], signal.SIGKILL)
    events = check_nothing_was_lost(run_dir, app)
    assert kinds(events)["sandbox_restarted"] == 1


@pytest.mark.parametrize("ranks", [1, 2])
def test_a_dead_trainer_rank_takes_the_run_back_to_its_last_checkpoint(tmp_path: Path, ranks: int) -> None:
    run_dir = tmp_path / "run"
    app = RunningApp(run_dir, *LIVELY, f"policy.num_ranks={ranks}")
    app.wait_until(lambda: kinds(rows(run_dir / "events.jsonl"))["checkpoint"] >= 2)
    os.kill(app.pids_of("ray::TrainerWorker")[-1], signal.SIGKILL)
    seen = kinds(check_nothing_was_lost(run_dir, app))
    assert seen["trainer_lost"] == seen["restored"] == 1
    assert "going on from the last checkpoint" in app.output


@pytest.mark.parametrize(
    ("part", "process", "failure"),
    [
        ("engine", "ray::InferenceWorker", "EngineDead: engine-0 died"),
        pytest.param(
            "sandbox",
            "dockyard_sandbox.cli serve",
            "SandboxUnavailable: sandbox server 0 died",
            marks=pytest.mark.nightly,
        ),
        pytest.param("trainer", "ray::TrainerWorker", "TrainerLost: ", marks=pytest.mark.nightly),
    ],
)
def test_with_stop_a_death_ends_the_run_by_name(tmp_path: Path, part: str, process: str, failure: str) -> None:
    run_dir = tmp_path / "run"
    app = RunningApp(run_dir, *LIVELY, f"recovery.{part}=stop")
    app.wait_until(lambda: kinds(rows(run_dir / "events.jsonl"))["checkpoint"] >= 1)
    os.kill(app.pids_of(process)[0], signal.SIGKILL)
    assert app.wait(300) == 1, app.output[-3000:]
    assert f"failed: {failure}" in app.output
    assert "Traceback" not in app.output
    assert app.survivors() == []
    assert kinds(rows(run_dir / "events.jsonl"))[f"{part}_lost"] == 1


def test_deaths_beyond_the_budget_stop_the_run(tmp_path: Path) -> None:
    run_dir = tmp_path / "run"
    app = RunningApp(run_dir, *LIVELY, "run.max_steps=500", "recovery.max_per_hour=1")
    app.wait_for_step(1)
    for number in (1, 2):
        app.wait_until(lambda: bool(app.pids_of("dockyard_sandbox.cli serve")))
        os.kill(app.pids_of("dockyard_sandbox.cli serve")[0], signal.SIGKILL)
        if number == 1:
            app.wait_until(lambda: kinds(rows(run_dir / "events.jsonl"))["sandbox_restarted"] == 1)
    assert app.wait(300) == 1, app.output[-3000:]
    assert "recovery.max_per_hour=1" in app.output
    assert app.survivors() == []


def test_a_run_with_a_time_limit_saves_and_stops_before_it_and_goes_on_later(tmp_path: Path) -> None:
    run_dir = tmp_path / "run"
    base = [word for word in LIVELY if not word.startswith(("run.max_steps", "checkpoint.every_steps"))]
    app = RunningApp(run_dir, *base, "run.max_steps=100000", "checkpoint.must_save_by=01:00")
    assert app.wait(600) == 75, app.output[-3000:]
    steps = len(rows(run_dir / "metrics.jsonl"))
    assert (run_dir / "checkpoints" / "latest").resolve().name == f"step-{steps:06d}"
    again = RunningApp(run_dir, *base, f"run.max_steps={steps + 2}", "run.resume=auto")
    assert again.wait(600) == 0, again.output[-3000:]
    assert len(rows(run_dir / "metrics.jsonl")) == steps + 2
    assert app.survivors() == again.survivors() == []


def test_another_dataset_is_refused_on_resume_unless_asked_for(tmp_path: Path) -> None:
    run_dir = tmp_path / "run"
    base = [word for word in LIVELY if not word.startswith("run.max_steps")]
    first = RunningApp(run_dir, *base, "run.max_steps=2", "data.limit=8")
    assert first.wait(600) == 0, first.output[-3000:]
    other = [*base, "run.max_steps=4", "data.limit=20", f"run.resume={run_dir}"]
    refused = RunningApp(run_dir, *other)
    assert refused.wait(300) == 2
    assert "data.accept_change=true" in refused.output
    accepted = RunningApp(run_dir, *other, "data.accept_change=true")
    assert accepted.wait(600) == 0, accepted.output[-3000:]
    events = rows(run_dir / "events.jsonl")
    counts = recount(events)
    assert counts["admitted"] == counts["trained"] + counts["dropped"] == 16
    trained = [event["group"] for event in surviving(events) if event["event"] == "trained"]
    assert len(set(trained)) == len(trained) == 16
    assert first.survivors() == refused.survivors() == accepted.survivors() == []
