"""A machine of the cluster is lost while the real app trains; another one takes its place, and nothing is lost."""

from __future__ import annotations

from pathlib import Path

import pytest
from ray_cluster import RayCluster, Spec
from running_app import RunningApp, rows
from test_cluster import start
from test_recovery import STEPS, check_nothing_was_lost, kinds

pytestmark = [pytest.mark.ci, pytest.mark.timeout(900)]

NODES = (
    Spec("t", 1, ("trainer",)),
    Spec("i1", 1, ("inference",)),
    Spec("i2", 1, ("inference",)),
    Spec("s", 1, ("sandbox",)),
)


def start_on(cluster: RayCluster, run_dir: Path, *overrides: str) -> RunningApp:
    return start(
        cluster,
        run_dir,
        f"run.max_steps={STEPS}",
        "checkpoint.every_steps=1",
        "refit.timeout_s=20",
        "generation.num_engines=2",
        *overrides,
    )


@pytest.mark.parametrize(
    ("node", "role", "part", "back"),
    [
        ("i1", "inference", "engine_lost", "engine_restarted"),
        pytest.param("s", "sandbox", "sandbox_lost", "sandbox_restarted", marks=pytest.mark.nightly),
        ("t", "trainer", "trainer_lost", "restored"),
    ],
)
def test_a_lost_node_is_replaced_by_one_that_joins_later(
    tmp_path: Path, node: str, role: str, part: str, back: str
) -> None:
    run_dir = tmp_path / "run"
    with RayCluster(NODES) as cluster:
        app = start_on(cluster, run_dir)
        app.wait_until(lambda: kinds(rows(run_dir / "events.jsonl"))["checkpoint"] >= 2)
        cluster.lose(node)
        cluster.add(Spec("new", 1, (role,)))
        events = check_nothing_was_lost(run_dir, app)
    assert cluster.pids() == []
    seen = kinds(events)
    assert seen[part] >= 1
    assert seen[back] >= 1
    if part != "trainer_lost":
        assert seen["restored"] == 0


@pytest.mark.nightly
def test_a_node_that_nothing_replaces_ends_the_run_by_name_within_the_deadline(tmp_path: Path) -> None:
    run_dir = tmp_path / "run"
    with RayCluster(NODES) as cluster:
        app = start_on(cluster, run_dir, "recovery.timeout_s=15")
        app.wait_until(lambda: kinds(rows(run_dir / "events.jsonl"))["checkpoint"] >= 1)
        cluster.lose("i2")
        assert app.wait(600) == 1, app.output[-3000:]
        assert "did not come back within recovery.timeout_s=15" in app.output
        assert app.survivors() == []
        cluster.add(Spec("new", 1, ("inference",)))
        check_nothing_was_lost(run_dir, start_on(cluster, run_dir, f"run.resume={run_dir}"))
