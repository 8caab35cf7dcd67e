"""One optimizer step as the driver sees it: train, book, refit, probe, row, checkpoint."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from dockyard_core import GroupId, StepMetrics
from dockyard_core.advantage import group_advantages
from dockyard_core.loop import LoopMachine
from dockyard_core.refit import ProbeDiff
from dockyard_grpo.config import Config
from dockyard_grpo.fleets import Fleets
from dockyard_grpo.metrics import StepTimes, rollout_staleness, step_row
from dockyard_grpo.refit import RefitCoordinator
from dockyard_grpo.run_directory import RunDirectory
from dockyard_grpo.summary import GroupSummary
from dockyard_grpo.timeline import Timeline


@dataclass(frozen=True)
class Batch:
    """The groups of one step: metadata here, tokens in the object store."""

    group_ids: tuple[GroupId, ...]
    summaries: tuple[GroupSummary, ...]
    payloads: tuple[Any, ...]
    """References to `RolloutGroup`s."""


class StepRunner:
    """Takes a batch to a new policy version that every engine has attested."""

    def __init__(self, config: Config, fleets: Fleets, run: RunDirectory, timeline: Timeline) -> None:
        self._config = config
        self._fleets = fleets
        self._run = run
        self._timeline = timeline
        self.refits = RefitCoordinator(config, fleets)

    async def run(
        self, step: int, batch: Batch, machine: LoopMachine, *, wait_s: float, since_s: float
    ) -> dict[str, Any]:
        """Train on ``batch`` and refit; returns the row of metrics.jsonl.

        Args:
            step: optimizer step, from 1.
            batch: exactly ``grpo.num_prompts_per_step`` groups.
            machine: books the step.
            wait_s: seconds the trainer waited for the batch.
            since_s: when the step before was over, in seconds since the start of the run.
        """
        staleness = [rollout_staleness(summary, machine.policy_version) for summary in batch.summaries]
        advantages = [self._advantages(summary) for summary in batch.summaries]
        started = self._timeline.wall_s
        with self._timeline.span("trainer", "train", step=step):
            trained = await self._train(advantages, batch.payloads)
        train_s = self._timeline.wall_s - started
        if trained.is_skipped:
            machine.skipped(batch.group_ids)
        else:
            machine.trained(batch.group_ids)
        self._run.sync("events")
        dropped = "nonfinite" if trained.is_skipped else None
        record_groups(self._fleets, batch, staleness, advantages, step=step, dropped=dropped)
        started = self._timeline.wall_s
        probe = await self._refit(step, machine)
        now = self._timeline.wall_s
        return step_row(
            step=step,
            trained=trained,
            groups=batch.summaries,
            staleness=staleness,
            dropped=dict(machine.ledger.dropped_rollouts),
            probe=probe,
            times=StepTimes(wait_s=wait_s, train_s=train_s, refit_s=now - started, step_s=now - since_s, wall_s=now),
        )

    async def _train(self, advantages: list[tuple[float, ...]], payloads: Sequence[Any]) -> StepMetrics:
        answers = await asyncio.gather(*(t.train.remote(advantages, *payloads) for t in self._fleets.trainers))
        metrics: StepMetrics = answers[0]
        return metrics

    async def _refit(self, step: int, machine: LoopMachine) -> ProbeDiff:
        with self._timeline.span("trainer", "refit", step=step):
            if not machine.refit.is_fresh:
                await self.refits.refit(machine)
        with self._timeline.span("trainer", "probe", step=step):
            return await self.refits.probe(machine.policy_version)

    def _advantages(self, summary: GroupSummary) -> tuple[float, ...]:
        rewards = [rollout.reward for rollout in summary.rollouts]
        valid = [rollout.invalid_cause is None for rollout in summary.rollouts]
        values = group_advantages(rewards, valid, baseline=self._config.grpo.baseline, scale=self._config.grpo.scale)
        return tuple(float(value) for value in values)


def record_groups(
    fleets: Fleets,
    batch: Batch,
    staleness: Sequence[Sequence[int | None]],
    advantages: Sequence[Sequence[float]],
    *,
    step: int | None,
    dropped: str | None,
) -> None:
    """Hand groups that left the loop to the recorder; it answers to `Fleets.flush`.

    Args:
        fleets: whose recorder.
        batch: the groups.
        staleness: per group, per rollout; None = nothing was sampled.
        advantages: per group, per rollout.
        step: that trained them; None = they were dropped before one.
        dropped: cause for which the whole group was dropped.
    """
    fields = [
        {"step": step, "dropped": dropped, "staleness": lags, "advantage": values}
        for lags, values in zip(staleness, advantages, strict=True)
    ]
    fleets.recorder.record.remote(fields, *batch.payloads)
