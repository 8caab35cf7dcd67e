"""One optimizer step as the driver sees it: train, book, row."""

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
from dockyard_grpo.run_directory import RunDirectory
from dockyard_grpo.summary import GroupSummary
from dockyard_grpo.timeline import Timeline
from dockyard_grpo.usage import Usage


@dataclass(frozen=True)
class Batch:
    """The groups of one step: metadata here, tokens in the object store."""

    group_ids: tuple[GroupId, ...]
    summaries: tuple[GroupSummary, ...]
    payloads: tuple[Any, ...]
    """References to `RolloutGroup`s."""


@dataclass(frozen=True)
class Trained:
    """A step that was taken and booked."""

    step: int
    batch: Batch
    metrics: StepMetrics
    staleness: tuple[list[int | None], ...]
    """Per group, per rollout, at consumption."""
    train_s: float
    synced: asyncio.Task[None]
    """Ends when the step's events are on disk; the refit need not wait for it, the row must."""


class StepRunner:
    """Takes a batch to a new policy version."""

    def __init__(self, config: Config, fleets: Fleets, run: RunDirectory, timeline: Timeline) -> None:
        self._config = config
        self._fleets = fleets
        self._run = run
        self._timeline = timeline

    async def train(self, step: int, batch: Batch, machine: LoopMachine) -> Trained:
        """Train on ``batch`` and book it; the engines are stale afterwards unless the step was skipped.

        Args:
            step: optimizer step, from 1.
            batch: exactly ``grpo.num_prompts_per_step`` groups.
            machine: books the step.
        """
        staleness = tuple(rollout_staleness(summary, machine.policy_version) for summary in batch.summaries)
        advantages = [self._advantages(summary) for summary in batch.summaries]
        machine.begin_step(batch.group_ids)
        started = self._timeline.wall_s
        with self._timeline.span("trainer", "train", step=step):
            metrics = await self._train(advantages, batch.payloads)
        train_s = self._timeline.wall_s - started
        if metrics.is_skipped:
            machine.skipped(batch.group_ids)
        else:
            machine.trained(batch.group_ids)
        synced = asyncio.create_task(asyncio.to_thread(self._run.sync, "events"), name=f"sync {step}")
        dropped = "nonfinite" if metrics.is_skipped else None
        record_groups(self._fleets, batch, staleness, advantages, step=step, dropped=dropped)
        return Trained(step, batch, metrics, staleness, train_s, synced)

    def row(
        self, trained: Trained, machine: LoopMachine, *, probe: ProbeDiff | None, times: StepTimes, usage: Usage
    ) -> dict[str, Any]:
        """The row of metrics.jsonl of a step whose refit is over."""
        return step_row(
            step=trained.step,
            trained=trained.metrics,
            groups=trained.batch.summaries,
            staleness=trained.staleness,
            dropped=dict(machine.ledger.dropped_rollouts),
            probe=probe,
            times=times,
            usage=usage,
        )

    async def _train(self, advantages: list[tuple[float, ...]], payloads: Sequence[Any]) -> StepMetrics:
        from ray.exceptions import RayTaskError

        try:
            answers = await asyncio.gather(*(t.train.remote(advantages, *payloads) for t in self._fleets.trainers))
        except RayTaskError:
            await self._fleets.check_trainers()  # the death of one rank makes collectives of the others fail
            raise
        metrics: StepMetrics = answers[0]
        return metrics

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
    seq: int | None = None,
) -> None:
    """Hand groups that left the loop to the recorder; it answers to `Fleets.flush`.

    Args:
        fleets: whose recorder.
        batch: the groups.
        staleness: per group, per rollout; None = nothing was sampled.
        advantages: per group, per rollout.
        step: that trained them; None = they were dropped before one.
        dropped: cause for which the whole group was dropped.
        seq: the ledger's event that dropped it before a step: a resume keeps the row if it keeps the event.
    """
    fields = [
        {"step": step, "dropped": dropped, "seq": seq, "staleness": lags, "advantage": values}
        for lags, values in zip(staleness, advantages, strict=True)
    ]
    fleets.recorder.record.remote(fields, *batch.payloads)
