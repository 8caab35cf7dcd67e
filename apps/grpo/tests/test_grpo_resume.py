from __future__ import annotations

import json
import os
from pathlib import Path

import pytest

from dockyard_core import ConfigError
from dockyard_grpo import checkpoint_files
from dockyard_grpo.config import dump_config, load_config
from dockyard_grpo.resume import (
    RestorePoint,
    check_same_run,
    find_restore_point,
    loop_sizes,
    read_rows,
    roll_back,
    sampler_state,
)
from dockyard_grpo.retention import Retention
from dockyard_grpo.run_directory import RunDirectory


def write_rows(path: Path, rows: list[dict]) -> None:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))


def checkpoint(run: RunDirectory, step: int, *, keep_last: int = 2, frontier: int = 0) -> Path:
    loop = {
        "step": step, "machine": {"ledger": {"frontier": frontier}}, "dataset": "abc", "incarnation": 0,
        "events_bytes": run.size("events"), "sampler": {"num_tasks": 3, "seed": 0, "epoch": 1, "position": 2},
        "sizes": loop_sizes(load_config(None, [])),
    }  # fmt: skip

    partial = checkpoint_files.open_partial(run.checkpoints, step)
    (partial / "policy").mkdir()
    (partial / "policy" / "weights").write_bytes(os.urandom(64))
    final = run.commit_checkpoint(partial, json.dumps(loop), {})
    checkpoint_files.prune(run.checkpoints, Retention(keep_last=keep_last), newest=step)
    return final


@pytest.fixture
def run(tmp_path: Path) -> RunDirectory:
    (tmp_path / "checkpoints").mkdir()
    return RunDirectory(tmp_path)


def test_a_damaged_checkpoint_is_passed_over_for_the_one_before(run: RunDirectory) -> None:
    checkpoint(run, 2)
    newest = checkpoint(run, 4)
    assert find_restore_point(run.path).step == 4
    (newest / "policy" / "weights").write_bytes(b"other bytes")
    assert find_restore_point(run.path).step == 2


def test_a_checkpoint_cut_short_is_none_at_all(run: RunDirectory) -> None:
    checkpoint(run, 2)
    partial = checkpoint_files.open_partial(run.checkpoints, 4)
    (partial / "weights").write_bytes(b"half")
    assert find_restore_point(run.path).step == 2
    assert (run.path / "checkpoints" / "latest").resolve().name == "step-000002"


def test_pruning_never_removes_the_checkpoint_just_written(run: RunDirectory) -> None:
    damaged = checkpoint(run, 8)
    (damaged / "policy" / "weights").write_bytes(b"other bytes")
    checkpoint(run, 4, keep_last=1)
    assert find_restore_point(run.path).step == 4
    roll_back(run.path, find_restore_point(run.path))
    checkpoint(run, 6, keep_last=1)
    assert find_restore_point(run.path).step == 6
    kept = sorted(path.name for path in (run.path / "checkpoints").iterdir() if path.is_dir() and not path.is_symlink())
    assert kept == ["damaged-step-000008-1", "step-000006"]


def test_rows_after_the_restore_point_move_aside_and_the_rest_stays(run: RunDirectory) -> None:
    events = [
        {"seq": 0, "event": "admitted", "group": "a#0", "num_rollouts": 2},
        {"seq": 1, "event": "dropped", "group": "a#0", "num_rollouts": 2},
        {"seq": 2, "event": "admitted", "group": "b#0", "num_rollouts": 2},
        {"seq": 3, "event": "trained", "group": "b#0", "num_rollouts": 2},
        {"seq": 4, "event": "admitted", "group": "c#0", "num_rollouts": 2},
        {"seq": 5, "event": "dropped", "group": "c#0", "num_rollouts": 2},
    ]
    write_rows(run.path / "events.jsonl", events[:4])
    checkpoint(run, 1, frontier=4)
    write_rows(run.path / "events.jsonl", events)
    with (run.path / "events.jsonl").open("a") as file:
        file.write('{"seq": 6, "eve')  # the kill came in the middle of a line
    write_rows(run.path / "metrics.jsonl", [{"step": 1}, {"step": 2}])
    rollouts = [
        {"task": "a", "repetition": 0, "step": None, "seq": 1}, {"task": "b", "repetition": 0, "step": 1},
        {"task": "c", "repetition": 0, "step": None, "seq": 5}, {"task": "d", "repetition": 0, "step": 2},
    ]  # fmt: skip
    write_rows(run.path / "rollouts.jsonl", rollouts)
    point = find_restore_point(run.path)
    assert (point.incarnation, point.next_seq) == (1, 6)
    assert roll_back(run.path, point) == 3
    assert read_rows(run.path / "metrics.jsonl") == [{"step": 1}]
    assert [row["task"] for row in read_rows(run.path / "rollouts.jsonl")] == ["a", "b"]
    assert [row["task"] for row in read_rows(run.path / "rollouts.rolled_back.jsonl")] == ["c", "d"]
    assert (run.path / "events.jsonl").read_text().endswith("}\n")


@pytest.mark.parametrize(
    ("override", "hint"),
    [
        ("grpo.num_prompts_per_step=8", "grpo.num_prompts_per_step was 16, now 8"),
        ("grpo.num_generations_per_prompt=4", "grpo.num_generations_per_prompt was 16, now 4"),
        ("grpo.max_staleness=0", "grpo.max_staleness was 1, now 0"),
    ],
)
def test_a_resumed_run_keeps_the_sizes_of_its_loop(run: RunDirectory, override: str, hint: str) -> None:
    checkpoint(run, 2)
    point = find_restore_point(run.path)
    check_same_run(point, load_config(None, []), "abc")
    with pytest.raises(ConfigError, match=hint):
        check_same_run(point, load_config(None, [override]), "abc")


def test_a_checkpoint_stands_for_the_events_before_it_even_if_they_are_gone(run: RunDirectory) -> None:
    lines = [{"seq": number, "event": "admitted", "group": f"{number}#0", "num_rollouts": 2} for number in range(5)]
    write_rows(run.path / "events.jsonl", lines[:3])
    checkpoint(run, 1, frontier=3)
    write_rows(run.path / "events.jsonl", [*lines, {"seq": 5, "event": "restored", "incarnation": 1, "frontier": 3}])
    content = (run.path / "events.jsonl").read_bytes()
    start = json.loads((run.path / "checkpoints/latest/loop.json").read_text())["events_bytes"]
    (run.path / "events.jsonl").write_bytes(b"?" * (start - 1) + b"\n" + content[start:])
    point = find_restore_point(run.path)
    assert (point.step, point.incarnation, point.next_seq) == (1, 2, 6)


def test_another_dataset_is_refused_unless_asked_for(run: RunDirectory) -> None:
    checkpoint(run, 2)
    with pytest.raises(ConfigError, match=r"another training set.*data\.accept_change=true"):
        check_same_run(find_restore_point(run.path), load_config(None, []), "other")
    point = find_restore_point(run.path)
    check_same_run(point, load_config(None, ["data.accept_change=true"]), "other")
    assert point.loop is not None
    assert sampler_state(point.loop, "abc", 3) == {"num_tasks": 3, "seed": 0, "epoch": 1, "position": 2}
    # Its repetitions are of no epoch before: no identity is given twice.
    assert sampler_state(point.loop, "other", 7) == {"num_tasks": 7, "seed": 0, "epoch": 2, "position": 0}
    check_same_run(RestorePoint(1, None, None), load_config(None, []), "other")


def test_a_resumed_directory_is_the_run_directory_wherever_it_is_named(tmp_path: Path) -> None:
    first = load_config(None, ["run.seed=5", f"run.dir={tmp_path}"])
    (tmp_path / "config.yaml").write_text(dump_config(first))
    resumed = load_config(None, [f"run.resume={tmp_path}", "run.max_steps=7"])
    assert (resumed.run.dir, resumed.run.seed, resumed.run.max_steps) == (tmp_path, 5, 7)
    in_file = tmp_path / "other.yaml"
    in_file.write_text(f"run: {{resume: {tmp_path}}}\npolicy: {{model: quickstart:policy}}\n"
                       "data: {train: 'quickstart:train.jsonl'}\n")  # fmt: skip
    assert load_config(in_file, []).run.dir == tmp_path
    with pytest.raises(ConfigError, match="goes on in its own directory"):
        load_config(None, [f"run.resume={tmp_path}", f"run.dir={tmp_path / 'elsewhere'}"])
    with pytest.raises(ConfigError, match=r"run\.resume=auto goes on with run\.dir"):
        load_config(None, ["run.resume=auto"])


def test_the_configuration_of_an_earlier_life_is_kept(tmp_path: Path) -> None:
    first = load_config(None, [f"run.dir={tmp_path / 'run'}"])
    run = RunDirectory.create(first)
    run.write_config(first, incarnation=0)
    run.append("events", {"event": "admitted"})
    with pytest.raises(ConfigError, match="must not hold a run already"):
        RunDirectory.create(first)
    second = load_config(None, [f"run.resume={tmp_path / 'run'}", "run.max_steps=200"])
    again = RunDirectory.create(second)
    assert again.holds_run
    again.write_config(second, incarnation=1)
    assert load_config(run.path / "config.0.yaml", []).run.max_steps == 120
    assert load_config(run.path / "config.yaml", []).run.max_steps == 200
    assert load_config(run.path / "config.yaml", []).run.resume is None


def test_numbers_that_json_does_not_have_become_null(run: RunDirectory) -> None:
    run.append("metrics", {"loss": float("nan"), "dropped": {"x": float("inf")}, "step": 1})
    assert read_rows(run.path / "metrics.jsonl") == [{"loss": None, "dropped": {"x": None}, "step": 1}]
