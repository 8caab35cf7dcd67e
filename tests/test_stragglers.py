"""Slow rollouts in the real app: trained when they end in time, counted by their cause when not, never left out."""

from __future__ import annotations

from collections import Counter
from pathlib import Path
from statistics import fmean
from typing import Any

import pytest
from running_app import ROOT, RunningApp, rows

from benchmarks.latency_engine import length_of
from dockyard_core.loop import recount

pytestmark = [pytest.mark.ci, pytest.mark.timeout(900)]

LATENCY = [
    "generation.backend=benchmarks.latency_engine:LatencyGenerator",
    "reward.kind=benchmarks.latency_engine:index_reward",
    "data.validation=null",
    "data.limit=4",
    "logging.console=plain",
    "grpo.num_prompts_per_step=2",
]


def run_latency_app(
    run_dir: Path, monkeypatch: pytest.MonkeyPatch, environment: dict[str, str], *overrides: str
) -> list[dict[str, Any]]:
    """Rows of metrics.jsonl of a run that ended well, whose ledger adds up."""
    monkeypatch.setenv("PYTHONPATH", str(ROOT), prepend=":")
    for name, value in environment.items():
        monkeypatch.setenv(f"DOCKYARD_LATENCY_{name}", value)
    app = RunningApp(run_dir, *LATENCY, *overrides)
    assert app.wait(800) == 0, app.output[-4000:]
    assert app.survivors() == []
    counts = recount(rows(run_dir / "events.jsonl"))
    assert counts["admitted_rollouts"] == counts["trained_rollouts"] + counts["dropped_rollouts"]
    assert counts["alive"] == 0
    return rows(run_dir / "metrics.jsonl")


def test_a_straggler_within_its_deadline_is_trained(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    environment = {"S": "0.2", "STRAGGLER_EVERY": "20", "STRAGGLER_FACTOR": "50"}  # one of 36 requests, 10 s
    metrics = run_latency_app(
        tmp_path / "run",
        monkeypatch,
        environment,
        "run.max_steps=6",
        "grpo.num_generations_per_prompt=3",
        "grpo.rollout_timeout_s=120",
    )
    assert [row["step"] for row in metrics] == [1, 2, 3, 4, 5, 6]
    assert metrics[-1]["dropped"] == {}
    rollouts = rows(tmp_path / "run" / "rollouts.jsonl")
    assert len(rollouts) == 6 * 2 * 3
    assert all(row["step"] is not None and row["invalid_cause"] is None for row in rollouts)
    slow = [row for row in rollouts if row["timings_s"]["generate"] >= 10]
    assert len(slow) == 1
    assert slow[0]["staleness"] <= 1
    assert slow[0]["num_sampled_tokens"] > 0


def test_a_straggler_past_its_deadline_is_invalid_and_counted(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    environment = {"S": "0.2", "STRAGGLER_EVERY": "20", "STRAGGLER_FACTOR": "1000"}  # one of 36 requests, 200 s
    metrics = run_latency_app(
        tmp_path / "run",
        monkeypatch,
        environment,
        "run.max_steps=6",
        "grpo.num_generations_per_prompt=3",
        "grpo.rollout_timeout_s=15",  # a real verdict has to fit in, on a busy machine
    )
    assert [row["step"] for row in metrics] == [1, 2, 3, 4, 5, 6]
    assert metrics[-1]["dropped"] == {"deadline": 1}
    assert max(row["step_s"] for row in metrics) < 200, "no step waits longer than the deadline and what it has to do"
    rollouts = rows(tmp_path / "run" / "rollouts.jsonl")
    (late,) = [row for row in rollouts if row["invalid_cause"] is not None]
    assert (late["invalid_cause"], late["reward"], late["advantage"]) == ("deadline", 0.0, 0.0)
    assert late["num_sampled_tokens"] == 0
    assert 15 <= late["timings_s"]["generate"] < 200
    assert late["step"] is not None, "its group has two valid rollouts left and is trained"
    group = [row for row in rollouts if (row["task"], row["repetition"]) == (late["task"], late["repetition"])]
    assert sum(row["advantage"] for row in group) == pytest.approx(0), "the baseline is that of the valid ones"
    assert sum(row["num_rollouts"] for row in metrics) == 6 * 2 * 3 - 1


def test_nothing_is_left_out_for_being_slow(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    lengths = (6,) * 9 + (40,)
    metrics = run_latency_app(
        tmp_path / "run",
        monkeypatch,
        {"S": "0", "PER_TOKEN_S": "0.05", "TOKENS": ",".join(map(str, lengths))},
        "run.max_steps=16",
        "grpo.num_generations_per_prompt=2",
        "grpo.rollout_timeout_s=120",
    )
    assert metrics[-1]["dropped"] == {}
    rollouts = rows(tmp_path / "run" / "rollouts.jsonl")
    admitted = [row["group"] for row in rows(tmp_path / "run" / "events.jsonl") if row["event"] == "admitted"]
    asked = Counter(length_of(group, index, lengths) for group in admitted for index in range(2))
    trained = Counter(row["num_sampled_tokens"] for row in rollouts if row["step"] is not None)
    assert trained == asked
    assert trained[40] >= 3, "there were slow ones"
    # Had the loop trained the first 2 of every 4 groups under way and discarded the others, the same rollouts, with the
    # durations they had, would have taught the policy to be short.
    groups = {group: [row for row in rollouts if f"{row['task']}#{row['repetition']}" == group] for group in admitted}
    kept: list[int] = []
    for under_way in batched_groups(admitted, 4):
        first = sorted(under_way, key=lambda group: max(row["timings_s"]["generate"] for row in groups[group]))[:2]
        kept += [row["num_sampled_tokens"] for group in first for row in groups[group]]
    assert fmean(kept) < 0.8 * fmean(trained.elements())


def batched_groups(groups: list[str], size: int) -> list[list[str]]:
    return [groups[at : at + size] for at in range(0, len(groups), size)]
