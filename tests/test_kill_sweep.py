"""SIGKILL at every kind of event of the real app: the run goes on, and what it trains is what it would have trained."""

from __future__ import annotations

import hashlib
import json
import random
import signal
import sys
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
from running_app import RunningApp, rows

from dockyard_core.loop import recount, surviving

pytestmark = [pytest.mark.ci, pytest.mark.timeout(2400)]

GRPO = "dockyard_grpo"
TINY = [
    "grpo.num_prompts_per_step=2",
    "grpo.num_generations_per_prompt=2",
    "evaluation.num_tasks=2",
    "evaluation.every_steps=1",
    "checkpoint.every_steps=1",
    "generation.backend=transformers",
    "logging.console=plain",
    "run.resume=auto",
]
DETERMINISTIC = ["grpo.max_staleness=0", "generation.per_request_seeds=true", "generation.max_num_seqs=1"]
"""One sequence at a time: sums do not depend on which sequences share a batch."""

EVENTS = (
    "admitted", "finished", "step_begun", "trained", "refit_begun", "attested", "refit_committed",
    "evaluation_begun", "evaluated", "checkpoint_begun", "checkpoint",
)  # fmt: skip
CALLS = (
    f"{GRPO}.run_directory:RunDirectory.write_config",
    f"{GRPO}.run_directory:RunDirectory.commit_checkpoint",
    f"{GRPO}.pipeline:Pipeline._snapshot",
    f"{GRPO}.steps:StepRunner._train",
    f"{GRPO}.steps:record_groups",
    f"{GRPO}.refit:RefitCoordinator._transfer",
    f"{GRPO}.refit:RefitCoordinator.probe",
    f"{GRPO}.groups:GroupRunner.run",
    f"{GRPO}.checkpoint_files:write_manifest",
    f"{GRPO}.checkpoint_files:sync_tree",
    f"{GRPO}.checkpoint_files:publish",
    f"{GRPO}.checkpoint_files:prune",
)
RESUME_CALLS = (
    f"{GRPO}.resume:find_restore_point",
    f"{GRPO}.resume:roll_back",
    f"{GRPO}.fleets:Fleets.restore",
    f"{GRPO}.fleets:Fleets.load_groups",
)


def kill_points() -> list[dict[str, Any]]:
    """Every kind of event, before and after it is on disk, and every stage of a step, a save and a resume."""
    rng = random.Random(0)
    append = f"{GRPO}.run_directory:RunDirectory.append"
    sync = f"{GRPO}.run_directory:RunDirectory.sync"
    points = [
        {"where": append, "when": when, "event": event, "number": rng.randint(1, 3)}
        for event in EVENTS
        for when in ("before", "after")
    ]
    points += [{"where": where, "when": "after", "event": "metrics"} for where in (append, sync)]
    points += [{"where": sync, "when": "before", "event": "events"}]
    points += [{"where": where, "when": "before", "number": rng.randint(1, 2)} for where in CALLS]
    points += [{"where": where, "when": rng.choice(("before", "after"))} for where in RESUME_CALLS]
    points += [{"where": append, "when": when, "event": "restored"} for when in ("before", "after")]
    rng.shuffle(points)
    # The first life leaves a run to take up, the second one a checkpoint to take it up from.
    first = [{"where": append, "when": "after", "event": event, "number": 1} for event in ("finished", "checkpoint")]
    return [*first, *(point for point in points if point not in first)]


def share(part: int, parts: int) -> list[dict[str, Any]]:
    points = kill_points()
    return points[:2] + points[2 + part :: parts]


def run_to_the_end(run_dir: Path, *overrides: str) -> None:
    app = RunningApp(run_dir, *TINY, *overrides)
    assert app.wait(1200) == 0, app.output[-4000:]
    assert app.survivors() == []


def run_through_kills(run_dir: Path, points: list[dict[str, Any]], *overrides: str) -> None:
    for point in points:
        launcher = (sys.executable, "tests/killed_app.py", json.dumps(point))
        app = RunningApp(run_dir, *TINY, *overrides, launcher=launcher)
        assert app.wait(600) == -signal.SIGKILL, f"{point} was not reached:\n{app.output[-3000:]}"
        assert app.survivors() == [], point
    run_to_the_end(run_dir, *overrides)


def trained(run_dir: Path) -> list[str]:
    return [event["group"] for event in surviving(rows(run_dir / "events.jsonl")) if event["event"] == "trained"]


def check_books(run_dir: Path, steps: int) -> None:
    counts = recount(rows(run_dir / "events.jsonl"))
    assert counts["admitted"] == counts["trained"] == 2 * steps
    assert counts["alive"] == counts["dropped"] == 0
    assert [row["step"] for row in rows(run_dir / "metrics.jsonl")] == list(range(1, steps + 1))
    recorded = Counter((row["task"], row["repetition"]) for row in rows(run_dir / "rollouts.jsonl"))
    assert recorded == Counter({tuple_of(group): 2 for group in trained(run_dir)})
    evaluated = [e["step"] for e in surviving(rows(run_dir / "events.jsonl")) if e["event"] == "evaluated"]
    assert sorted(evaluated) == list(range(steps + 1))


def tuple_of(group: str) -> tuple[str, int]:
    task, _, repetition = group.rpartition("#")
    return task, int(repetition)


def weights_hash(run_dir: Path) -> str:
    return hashlib.sha256((run_dir / "checkpoints/latest/policy/model.safetensors").read_bytes()).hexdigest()


def test_there_are_at_least_forty_points_and_no_two_are_the_same() -> None:
    points = [json.dumps(point, sort_keys=True) for point in kill_points()]
    assert len(set(points)) == len(points) >= 40


@pytest.mark.parametrize(
    ("mode", "part"),
    [
        ("pinned", 0),
        pytest.param("pinned", 1, marks=pytest.mark.nightly),
        pytest.param("live", 2, marks=pytest.mark.nightly),
        pytest.param("live", 3, marks=pytest.mark.nightly),
    ],
)
def test_killed_at_every_point_an_asynchronous_run_trains_what_it_would_have_trained(
    tmp_path: Path, mode: str, part: int
) -> None:
    """The points are shared out between the two modes of evaluation, and a quarter of them is for every commit."""
    points, steps = share(part, 4), 40
    always = [f"run.max_steps={steps}", f"evaluation.mode={mode}"]
    run_through_kills(tmp_path / "killed", points, *always)
    run_to_the_end(tmp_path / "whole", *always)
    for run_dir in (tmp_path / "killed", tmp_path / "whole"):
        check_books(run_dir, steps)
    assert Counter(trained(tmp_path / "killed")) == Counter(trained(tmp_path / "whole"))


def test_killed_at_every_point_a_synchronous_run_with_fixed_seeds_ends_with_the_same_weights(tmp_path: Path) -> None:
    points, steps = share(0, 5), 16
    always = [f"run.max_steps={steps}", *DETERMINISTIC]
    run_to_the_end(tmp_path / "whole", *always)
    run_through_kills(tmp_path / "killed", points, *always)
    for run_dir in (tmp_path / "killed", tmp_path / "whole"):
        check_books(run_dir, steps)
    assert trained(tmp_path / "killed") == trained(tmp_path / "whole")
    assert weights_hash(tmp_path / "killed") == weights_hash(tmp_path / "whole")
    assert any(row["grad_norm"] > 0 for row in rows(tmp_path / "whole" / "metrics.jsonl"))
