"""The asynchronous pipeline: one event loop that moves the state machine of `dockyard_core.loop`.

tasks -> groups under way -> finished groups -> batch -> trainer
            ^                                              |
            +------ free slots <------ refit <-------------+

admit     consumes: the sampler's next task
          waits for: a slot, and engines that hold the trainer's version   unblocked by: refit, drop
group     consumes: a slot; runs in the inference fleet, judged by the sandbox fleet
step      waits for: num_prompts_per_step finished groups, oldest version first
refit     follows every step; frees the step's slots
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from typing import Any

from dockyard_core import GroupId, StepMetrics, Task
from dockyard_core.advantage import group_advantages
from dockyard_core.data import TaskSampler, dataset_fingerprint
from dockyard_core.loop import EMPTY_LEDGER, Ledger, LoopConfig, LoopMachine
from dockyard_core.refit import ProbeDiff
from dockyard_grpo.checkpoints import Checkpointer
from dockyard_grpo.config import Config
from dockyard_grpo.evaluation import Evaluator
from dockyard_grpo.fleets import Fleets
from dockyard_grpo.metrics import Evaluation, StepTimes, step_row
from dockyard_grpo.progress import Reporter
from dockyard_grpo.refit import RefitCoordinator
from dockyard_grpo.resume import RestorePoint, check_dataset, read_rows, roll_back
from dockyard_grpo.run_directory import RunDirectory
from dockyard_grpo.summary import GroupSummary
from dockyard_grpo.timeline import Timeline
from dockyard_grpo.tracker import Tracker, scalars


class StopRequested(Exception):
    """Raised inside the run when it was asked to stop and has done so in order."""


class Pipeline:
    """Drives one run to its last step."""

    def __init__(
        self,
        config: Config,
        fleets: Fleets,
        run: RunDirectory,
        reporter: Reporter,
        tracker: Tracker,
        train: Sequence[Task],
        validation: Sequence[Task],
    ) -> None:
        self._config = config
        self._fleets = fleets
        self._run = run
        self._reporter = reporter
        self._tracker = tracker
        self._tasks = train
        self._index_of = {task.instance_id: index for index, task in enumerate(train)}
        self._dataset = dataset_fingerprint(train)
        self._sampler = TaskSampler(len(train), config.run.seed)
        self._refits = RefitCoordinator(config, fleets)
        self._evaluator = Evaluator(config, fleets, validation)
        self._checkpointer = Checkpointer(config, fleets, run)
        self._timeline = Timeline()
        self._machine = LoopMachine(
            LoopConfig(
                num_prompts_per_step=config.grpo.num_prompts_per_step,
                num_generations_per_prompt=config.grpo.num_generations_per_prompt,
                max_staleness=config.grpo.max_staleness,
                max_steps=config.run.max_steps,
            ),
            Ledger(self._book, next_seq=len(read_rows(run.path / "events.jsonl"))),
            list(fleets.engines),
        )
        self._changed = asyncio.Event()
        self._summaries: dict[GroupId, GroupSummary] = {}
        self._payloads: dict[GroupId, Any] = {}
        self._load = dict.fromkeys(fleets.engines, 0)
        self._pending_evaluation: Evaluation | None = None
        self._last_step_end = 0.0
        self._is_stopping = False

    def request_stop(self) -> None:
        """Finish the step, save, stop."""
        self._is_stopping = True

    async def run(self, point: RestorePoint | None = None) -> int:
        """Train to ``run.max_steps``; the first failure of any part ends the run and is raised.

        Args:
            point: where an earlier life of this run is taken up again.

        Returns the number of steps done: fewer than ``run.max_steps`` after `request_stop`.
        """
        readmitted = await self._restore(point) if point is not None else ()
        probe = await self._refits.prepare(self._machine.policy_version)
        self._reporter.say(
            f"engines and trainer agree at version {self._machine.policy_version}: "
            f"mean |logprob difference| {probe.abs_diff_mean:.1e}"
        )
        done = point.step if point is not None else 0
        if self._evaluator.has_tasks and done == 0:
            self._pending_evaluation = await self._evaluate()
        self._last_step_end = self._timeline.wall_s
        try:
            async with asyncio.TaskGroup() as groups:
                for group_id in readmitted:
                    self._start_group(self._index_of[group_id.task_id], group_id, groups)
                while done < self._config.run.max_steps:
                    started = self._timeline.wall_s
                    batch = await self._next_batch(groups)
                    await self._step(done + 1, batch, groups, wait_s=self._timeline.wall_s - started)
                    done += 1
                    if self._is_stopping and done < self._config.run.max_steps:
                        await self._checkpoint(done)
                        raise StopRequested
        except* StopRequested:
            self._reporter.say(f"stopped after step {done}; go on with run.resume={self._run.path}")
        self._run.write_json("timeline.json", self._timeline.trace())
        return done

    async def _restore(self, point: RestorePoint) -> tuple[GroupId, ...]:
        """Bring trainer, engines, sampler and state machine to a restore point."""
        check_dataset(point, self._dataset)
        num_rolled_back = roll_back(self._run.path, point)
        kept = read_rows(self._run.path / "metrics.jsonl")
        self._timeline.earlier_s = kept[-1]["wall_s"] if kept else 0.0
        state = point.loop or {"machine": self._machine.snapshot() | {"ledger": EMPTY_LEDGER}}
        if point.checkpoint is not None:
            await self._fleets.restore(point.checkpoint)
            self._sampler = TaskSampler.from_state(state["sampler"])
        self._refits.incarnation = point.incarnation
        readmitted = self._machine.restore(state["machine"], incarnation=point.incarnation)
        self._run.sync("events")
        await self._refits.refit(self._machine)
        self._reporter.say(
            f"going on after step {point.step} (incarnation {point.incarnation}): {len(readmitted)} groups are "
            f"run anew, {num_rolled_back} rows were rolled back"
        )
        return readmitted

    def _loop_state(self, step: int) -> dict[str, Any]:
        return {
            "step": step,
            "machine": self._machine.snapshot(),
            "sampler": self._sampler.state(),
            "dataset": self._dataset,
        }

    def _book(self, event: Any) -> None:
        self._run.append("events", {**event, "wall_s": round(self._timeline.wall_s, 6)})

    async def _evaluate(self) -> Evaluation:
        with self._timeline.span("inference", "evaluate", policy_version=self._machine.policy_version):
            evaluation = await self._evaluator.run(self._machine.policy_version)
        self._machine.ledger.note("evaluated", policy_version=self._machine.policy_version, **evaluation.fields)
        self._reporter.say(
            f"held-out at version {self._machine.policy_version}: resolved "
            f"{evaluation.fields['val_resolved_rate']:.3f} of {evaluation.fields['val_num_rollouts']} rollouts"
        )
        return evaluation

    def _admit(self, groups: asyncio.TaskGroup) -> None:
        while self._machine.num_admissible > 0:
            index, repetition = self._sampler.next()
            group_id = GroupId(self._tasks[index].instance_id, repetition)
            self._machine.admit(group_id)
            self._start_group(index, group_id, groups)

    def _start_group(self, index: int, group_id: GroupId, groups: asyncio.TaskGroup) -> None:
        groups.create_task(self._run_group(index, group_id, groups), name=str(group_id))

    async def _run_group(self, index: int, group_id: GroupId, groups: asyncio.TaskGroup) -> None:
        engine = min(self._load, key=lambda name: self._load[name])
        self._load[engine] += 1
        started = self._timeline.wall_s
        size = self._config.grpo.num_generations_per_prompt
        reference, payload = (
            self._fleets.engines[engine].run_group.options(num_returns=2).remote("train", index, group_id, size)
        )
        summary: GroupSummary = await reference
        self._load[engine] -= 1
        self._timeline.add("inference", str(group_id), started, self._timeline.wall_s, lane=index, engine=engine)
        cause = self._machine.finish(group_id, [rollout.member for rollout in summary.rollouts])
        if cause is None:
            self._summaries[group_id] = summary
            self._payloads[group_id] = payload
        else:
            self._record([group_id], [payload], [summary], [0], [(0.0,) * size], step=None, dropped=cause)
            self._admit(groups)
        self._changed.set()

    async def _next_batch(self, groups: asyncio.TaskGroup) -> tuple[GroupId, ...]:
        while True:
            self._admit(groups)
            self._changed.clear()
            batch = self._machine.next_batch()
            if batch is not None:
                return batch
            await self._changed.wait()

    async def _step(self, step: int, batch: tuple[GroupId, ...], groups: asyncio.TaskGroup, *, wait_s: float) -> None:
        summaries = [self._summaries.pop(group_id) for group_id in batch]
        payloads = [self._payloads.pop(group_id) for group_id in batch]
        staleness = [self._machine.staleness(group_id) for group_id in batch]
        advantages = [self._advantages(summary) for summary in summaries]
        started = self._timeline.wall_s
        with self._timeline.span("trainer", "train", step=step):
            trained = await self._train(advantages, payloads)
        train_s = self._timeline.wall_s - started
        if trained.is_skipped:
            self._machine.skipped(batch)
        else:
            self._machine.trained(batch)
        self._run.sync("events")
        self._record(batch, payloads, summaries, staleness, advantages, step=step)
        started = self._timeline.wall_s
        probe = await self._refit(step)
        refit_s = self._timeline.wall_s - started
        self._admit(groups)
        now = self._timeline.wall_s
        times = StepTimes(wait_s=wait_s, train_s=train_s, refit_s=refit_s, step_s=now - self._last_step_end, wall_s=now)
        self._last_step_end = now
        row = step_row(
            step=step,
            trained=trained,
            groups=summaries,
            staleness=staleness,
            dropped=dict(self._machine.ledger.dropped_rollouts),
            probe=probe,
            times=times,
        )
        await self._finish_row(step, row)

    async def _train(self, advantages: list[tuple[float, ...]], payloads: list[Any]) -> StepMetrics:
        answers = await asyncio.gather(*(t.train.remote(advantages, *payloads) for t in self._fleets.trainers))
        metrics: StepMetrics = answers[0]
        return metrics

    async def _refit(self, step: int) -> ProbeDiff:
        with self._timeline.span("trainer", "refit", step=step):
            if not self._machine.refit.is_fresh:
                await self._refits.refit(self._machine)
        with self._timeline.span("trainer", "probe", step=step):
            return await self._refits.probe(self._machine.policy_version)

    async def _finish_row(self, step: int, row: dict[str, Any]) -> None:
        # The evaluation before the first step has no row of its own: it goes with step 1.
        evaluation, self._pending_evaluation = self._pending_evaluation, None
        if self._evaluator.is_due(step):
            evaluation = await self._evaluate()
        if evaluation is not None:
            row |= evaluation.fields
        self._run.append("metrics", row)
        self._tracker.log(step, scalars(row))
        self._reporter.step(row)
        if self._checkpointer.is_due(step):
            await self._checkpoint(step)

    async def _checkpoint(self, step: int) -> None:
        if self._checkpointer.last_step == step:
            return
        path = await self._checkpointer.write(step, self._loop_state(step))
        self._machine.ledger.note("checkpoint", step=step, path=str(path.relative_to(self._run.path)))
        self._run.sync("events")

    def _advantages(self, summary: GroupSummary) -> tuple[float, ...]:
        rewards = [rollout.reward for rollout in summary.rollouts]
        valid = [rollout.invalid_cause is None for rollout in summary.rollouts]
        values = group_advantages(rewards, valid, baseline=self._config.grpo.baseline, scale=self._config.grpo.scale)
        return tuple(float(value) for value in values)

    def _record(
        self,
        batch: Sequence[GroupId],
        payloads: Sequence[Any],
        summaries: Sequence[GroupSummary],
        staleness: Sequence[int],
        advantages: Sequence[Sequence[float]],
        *,
        step: int | None,
        dropped: str | None = None,
    ) -> None:
        fields = [
            {"step": step, "staleness": lag, "dropped": dropped, "advantages": values}
            for lag, values in zip(staleness, advantages, strict=True)
        ]
        self._fleets.recorder.record.remote(fields, *payloads)
