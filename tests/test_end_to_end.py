"""The real app, as a user starts it: real Ray, engine, trainer, sandbox server, refits."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from running_app import SMALL, RunningApp, rows

from dockyard_core.loop import recount

FIELDS = {
    "step", "policy_version", "reward_mean", "resolved_rate", "num_rollouts", "num_groups", "num_valid_tokens",
    "loss", "grad_norm", "entropy", "clip_fraction", "kl_ref", "staleness_mean", "staleness_max",
    "refit_probe_abs_diff_mean", "refit_probe_abs_diff_max", "offpolicy_abs_diff_mean", "truncated_rate", "dropped",
    "time_generate_s", "time_judge_s", "time_train_s", "time_refit_s", "time_wait_s", "step_s", "wall_s",
    "tokens_per_s",
}  # fmt: skip
COMPILED = {"num_compiled", "num_compiled_shapes", "compile_s"}


def run_app(run_dir: Path, *overrides: str) -> str:
    # As a user starts it: Ray treats a driver under `uv run` in a way of its own.
    app = RunningApp(run_dir, *SMALL, *overrides, launcher=("uv", "run", "--no-sync"))
    assert app.wait(900) == 0, app.output[-4000:]
    assert app.survivors() == []
    return app.output


def check_laws(run_dir: Path, *, steps: int, max_staleness: int) -> list[dict[str, Any]]:
    metrics = rows(run_dir / "metrics.jsonl")
    assert [row["step"] for row in metrics] == list(range(1, steps + 1))
    for row in metrics:
        assert row.keys() >= FIELDS
        assert row["staleness_max"] <= max_staleness
        assert row["refit_probe_abs_diff_mean"] <= 1e-4
    counts = recount(rows(run_dir / "events.jsonl"))
    assert counts["admitted"] == counts["trained"] + counts["dropped"] + counts["alive"]
    assert counts["admitted_rollouts"] == (
        counts["trained_rollouts"] + counts["dropped_rollouts"] + counts["alive_rollouts"]
    )
    assert counts["alive"] == 0
    return metrics


@pytest.mark.timeout(900)
def test_a_short_run_keeps_every_promise_of_its_directory(tmp_path: Path) -> None:
    run_dir = tmp_path / "run"
    printed = run_app(run_dir, "run.max_steps=3")
    metrics = check_laws(run_dir, steps=3, max_staleness=1)
    assert max(row["staleness_max"] for row in metrics) == 1
    assert metrics[-1]["val_policy_version_min"] == metrics[-1]["val_policy_version_max"] == 3
    rollouts = rows(run_dir / "rollouts.jsonl")
    assert len(rollouts) >= 3 * 4 * 4
    assert all(row["isolation"] not in ("unknown", "unsafe") for row in rollouts if row["invalid_cause"] is None)
    assert all(row["evidence"].startswith("sha256:") for row in rollouts if row["verdict"] == "resolved")
    assert json.loads((run_dir / "timeline.json").read_text())["traceEvents"]
    latest = run_dir / "checkpoints" / "latest"
    assert latest.resolve().name == "step-000003"
    assert (latest / "hf" / "model.safetensors").is_file()
    assert "step    3/3" in printed


@pytest.mark.ci
@pytest.mark.timeout(900)
def test_synchronous_mode_is_on_policy_up_to_the_engine(tmp_path: Path) -> None:
    run_dir = tmp_path / "run"
    run_app(
        run_dir, "run.max_steps=3", "grpo.max_staleness=0", "data.validation=null"
    )  # fmt: skip
    metrics = check_laws(run_dir, steps=3, max_staleness=0)
    assert all(row["offpolicy_abs_diff_mean"] <= 1e-3 for row in metrics)


@pytest.mark.ci
@pytest.mark.timeout(900)
def test_dynamic_sampling_replaces_groups_without_signal_and_keeps_the_best_checkpoint(tmp_path: Path) -> None:
    run_dir = tmp_path / "run"
    best_of = ["checkpoint.keep_last=1", "checkpoint.keep_best=1", "checkpoint.best_metric=reward_mean"]
    replacing = ["grpo.dynamic_sampling=true", "grpo.max_replaced_per_step=6", "data.limit=32"]
    run_app(run_dir, "run.max_steps=6", "checkpoint.every_steps=1", *best_of, *replacing)
    check_laws(run_dir, steps=6, max_staleness=1)
    metrics = rows(run_dir / "metrics.jsonl")
    events = rows(run_dir / "events.jsonl")
    replaced = [event["group"] for event in events if event["event"] == "dropped"]
    assert {event["cause"] for event in events if event["event"] == "dropped"} == {"zero_signal"}
    assert 1 <= len(replaced) <= 6 * 6
    rollouts = rows(run_dir / "rollouts.jsonl")
    for group in replaced:
        rewards = {row["reward"] for row in rollouts if f"{row['task']}#{row['repetition']}" == group}
        assert len(rewards) == 1
    best = max(metrics, key=lambda row: (row["reward_mean"], row["step"]))["step"]
    kept = sorted(path.name for path in (run_dir / "checkpoints").glob("step-*"))
    assert kept == sorted({f"step-{best:06d}", "step-000006"})
    assert (run_dir / "checkpoints" / "best").resolve().name == f"step-{best:06d}"


@pytest.mark.ci
@pytest.mark.timeout(900)
@pytest.mark.parametrize(
    "overrides",
    [
        ["policy.num_ranks=2", "policy.tensor_parallel_size=2", "policy.activation_checkpointing=true"],
        [
            "policy.lora_rank=8",
            "loss.kl_coef=0.05",
            "loss.proximal=given",
            "grpo.updates_per_batch=2",
            "policy.optimizer_offload=true",
        ],
    ],
    ids=["tensor-parallel", "adapters"],
)
def test_the_trainers_ways_of_saving_memory_run_in_the_loop(tmp_path: Path, overrides: list[str]) -> None:
    """Every refit is attested: engines score what the trainer does, with sharded and with merged weights."""
    run_dir = tmp_path / "run"
    run_app(run_dir, "run.max_steps=2", "data.validation=null", "policy.learning_rate=1e-3", *overrides)
    metrics = check_laws(run_dir, steps=2, max_staleness=1)
    assert all(row["policy_version"] == row["step"] for row in metrics)
    assert all(row["grad_norm"] > 0 for row in metrics)


@pytest.mark.ci
@pytest.mark.timeout(900)
def test_a_run_that_torch_began_goes_on_with_jax(tmp_path: Path) -> None:
    """The one takes up weights, moments and schedule of the other; engines score what either of them does."""
    run_dir = tmp_path / "run"
    run_app(run_dir, "run.max_steps=1", "data.validation=null")
    run_app(run_dir, "run.resume=auto", "run.max_steps=3", "data.validation=null", "policy.backend=jax")
    metrics = check_laws(run_dir, steps=3, max_staleness=1)
    assert [row["policy_version"] for row in metrics] == [1, 2, 3]
    assert [row.keys() >= COMPILED for row in metrics] == [False, True, True]
    assert metrics[-1]["num_compiled"] >= 4, "a forward pass for the probe, a backward pass, zeros and an update"
    assert metrics[-1]["compile_s"] > 0
    latest = json.loads((run_dir / "checkpoints" / "latest" / "policy" / "trainer.json").read_text())
    assert latest["num_updates"] == 3


@pytest.mark.nightly
@pytest.mark.timeout(900)
@pytest.mark.parametrize(
    "overrides",
    [
        ["policy.num_ranks=2", "policy.activation_checkpointing=true"],
        ["policy.lora_rank=8", "loss.kl_coef=0.05", "loss.proximal=given", "grpo.updates_per_batch=2"],
    ],
    ids=["two-ranks", "adapters"],
)
def test_jax_trains_on_several_ranks_and_adapters_in_the_loop(tmp_path: Path, overrides: list[str]) -> None:
    run_dir = tmp_path / "run"
    run_app(run_dir, "run.max_steps=2", "data.validation=null", "policy.backend=jax", *overrides)
    metrics = check_laws(run_dir, steps=2, max_staleness=1)
    assert all(row["policy_version"] == row["step"] for row in metrics)
    assert all(row["grad_norm"] > 0 for row in metrics)
