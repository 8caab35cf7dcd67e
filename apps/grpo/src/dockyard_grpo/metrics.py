"""One row of metrics.jsonl per optimizer step."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from statistics import fmean
from typing import Any

from dockyard_core import StepMetrics
from dockyard_core.refit import ProbeDiff
from dockyard_grpo.summary import GroupSummary, RolloutSummary
from dockyard_grpo.usage import Usage

_OF_A_COMPILER = ("num_compiled", "num_compiled_shapes", "compile_s")
"""JAX's: programs and seconds since the trainer's process started, and shapes of micro-batches that the run has met."""


@dataclass(frozen=True, kw_only=True)
class StepTimes:
    """Seconds of one step, seen from the driver."""

    wait_s: float
    """The trainer waited for finished groups."""
    head_of_line_s: float
    """Of that, while enough groups were finished, but an older one was still under way."""
    train_s: float
    refit_s: float
    step_s: float
    """Since the end of the step before."""
    wall_s: float
    """Since the start of the run."""


@dataclass(frozen=True, kw_only=True)
class Evaluation:
    """What held-out tasks say, and the versions that answered."""

    step: int
    """Steps that were done when it began."""
    summaries: tuple[GroupSummary, ...]
    version_min: int
    version_max: int

    def __str__(self) -> str:
        rate = self.fields["val_resolved_rate"]
        return f"resolved {'-' if rate is None else format(rate, '.3f')} of {self.fields['val_num_rollouts']} rollouts"

    @property
    def versions(self) -> str:
        """The versions that answered, in words."""
        first, last = self.version_min, self.version_max
        return f"version {first}" if first == last else f"versions {first} to {last}"

    @property
    def fields(self) -> dict[str, float | None]:
        """The val_* fields; invalid rollouts do not vote, and without a valid one the rates are None."""
        rollouts = [r for summary in self.summaries for r in summary.rollouts if r.invalid_cause is None]
        return {
            "val_reward_mean": _mean([r.reward for r in rollouts]),
            "val_resolved_rate": _mean([float(r.status == "resolved") for r in rollouts]),
            "val_num_rollouts": len(rollouts),
            "val_step": self.step,
            "val_policy_version_min": self.version_min,
            "val_policy_version_max": self.version_max,
        }


def step_row(
    *,
    step: int,
    trained: StepMetrics,
    groups: Sequence[GroupSummary],
    staleness: Sequence[Sequence[int | None]],
    dropped: dict[str, int],
    probe: ProbeDiff | None,
    times: StepTimes,
    usage: Usage,
) -> dict[str, Any]:
    """Assemble a row.

    Args:
        step: optimizer step, from 1.
        trained: what the trainer says.
        groups: the step's groups.
        staleness: per group, per rollout, at consumption.
        dropped: cause -> rollouts dropped since the start of the run.
        probe: |engine − trainer| logprobs at the same version, after the step's refit; None = no engine served.
        times: seconds.
        usage: of the fleets, during the step.
    """
    lags = [lag for group in staleness for lag in group if lag is not None]
    num_signal_groups = sum(_has_signal(summary) for summary in groups)
    rollouts = [rollout for summary in groups for rollout in summary.rollouts]
    return {
        "step": step,
        "policy_version": trained.policy_version,
        **_rollout_fields(rollouts),
        "num_groups": len(groups),
        "num_signal_groups": num_signal_groups,
        "num_valid_tokens": trained.num_valid_tokens,
        "loss": trained.loss,
        "grad_norm": trained.grad_norm,
        "learning_rate": trained.learning_rate,
        "is_skipped": trained.is_skipped,
        "entropy": trained.entropy,
        "clip_fraction": trained.clip_fraction,
        "kl_ref": trained.kl_ref,
        "staleness_mean": _mean([float(lag) for lag in lags]),
        "staleness_max": max(lags, default=0),
        "refit_probe_abs_diff_mean": None if probe is None else probe.abs_diff_mean,
        "refit_probe_abs_diff_max": None if probe is None else probe.abs_diff_max,
        "offpolicy_abs_diff_mean": trained.offpolicy_abs_diff_mean,
        "offpolicy_abs_diff_max": trained.offpolicy_abs_diff_max,
        "dropped": dropped,
        "time_train_s": times.train_s,
        "time_refit_s": times.refit_s,
        "time_wait_s": times.wait_s,
        "time_head_of_line_s": times.head_of_line_s,
        "utilization_trainer": min(1.0, times.train_s / max(times.step_s, 1e-9)),
        "utilization_inference": usage.inference,
        "utilization_sandbox": usage.sandbox,
        "step_s": times.step_s,
        "wall_s": times.wall_s,
        "tokens_per_s": sum(r.num_sampled_tokens for r in rollouts) / max(times.step_s, 1e-9),
        **{name: trained.extra[name] for name in _OF_A_COMPILER if name in trained.extra},
    }


def _rollout_fields(rollouts: Sequence[RolloutSummary]) -> dict[str, Any]:
    valid = [rollout for rollout in rollouts if _is_valid(rollout)]
    return {
        "reward_mean": _mean([r.reward for r in valid]),
        "resolved_rate": _mean([float(r.status == "resolved") for r in valid]),
        "apply_failed_rate": _mean([float(r.status == "apply_failed") for r in valid]),
        "num_rollouts": len(valid),
        "completion_tokens_mean": _mean([float(r.num_sampled_tokens) for r in valid]),
        "truncated_rate": _mean([float(r.finish_reason == "length") for r in rollouts]),
        "verdict_cache_rate": _mean([float(r.is_cached) for r in rollouts]),
        "time_generate_s": _mean([r.generate_s for r in rollouts]),
        "time_judge_s": _mean([r.judge_s for r in rollouts]),
    }


def rollout_staleness(summary: GroupSummary, policy_version: int) -> list[int | None]:
    """Trainer version minus the version of each rollout's oldest token; None = nothing was sampled."""
    return [None if r.oldest_version is None else policy_version - r.oldest_version for r in summary.rollouts]


def _has_signal(summary: GroupSummary) -> bool:
    rewards = [r.reward for r in summary.rollouts if _is_valid(r)]
    return len(rewards) >= 2 and max(rewards) - min(rewards) > 1e-6


def _is_valid(rollout: RolloutSummary) -> bool:
    return rollout.invalid_cause is None


def _mean(values: Sequence[float]) -> float | None:
    return fmean(values) if values else None
