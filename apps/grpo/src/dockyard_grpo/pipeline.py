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

from dockyard_core import GroupId, RunStalled, Task
from dockyard_core.data import TaskSampler, dataset_fingerprint
from dockyard_core.loop import EMPTY_LEDGER, Ledger, LoopConfig, LoopMachine
from dockyard_grpo.checkpoints import Checkpointer
from dockyard_grpo.config import Config
from dockyard_grpo.evaluation import Evaluator
from dockyard_grpo.fleets import Fleets
from dockyard_grpo.metrics import Evaluation, rollout_staleness
from dockyard_grpo.progress import Reporter
from dockyard_grpo.resume import RestorePoint, loop_sizes, read_rows, roll_back
from dockyard_grpo.run_directory import RunDirectory
from dockyard_grpo.steps import Batch, StepRunner, record_groups
from dockyard_grpo.summary import GroupSummary
from dockyard_grpo.timeline import Timeline
from dockyard_grpo.tracker import Tracker, scalars

_MIN_DROPS_TO_STALL = 16


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
        self._timeline = Timeline()
        self._steps = StepRunner(config, fleets, run, self._timeline)
        self._evaluator = Evaluator(config, fleets, validation)
        self._checkpointer = Checkpointer(config, fleets, run)
        grpo = config.grpo
        self._machine = LoopMachine(
            LoopConfig(
                num_prompts_per_step=grpo.num_prompts_per_step,
                num_generations_per_prompt=grpo.num_generations_per_prompt,
                max_staleness=grpo.max_staleness,
                max_steps=config.run.max_steps,
            ),
            Ledger(self._book, next_seq=len(read_rows(run.path / "events.jsonl"))),
            list(fleets.engines),
        )
        self._changed = asyncio.Event()
        self._finished: dict[GroupId, tuple[GroupSummary, Any]] = {}
        self._load = dict.fromkeys(fleets.engines, 0)
        self._pending_evaluation: Evaluation | None = None
        self._done = 0
        self._is_stopping = False

    def request_stop(self) -> None:
        """Finish the step, save, stop."""
        self._is_stopping = True
        self._reporter.say(f"stopping: step {self._done + 1} is finished and saved first; once more stops now")

    async def run(self, point: RestorePoint | None = None) -> int:
        """Train to ``run.max_steps``; the first failure of any part ends the run and is raised.

        Args:
            point: where an earlier life of this run is taken up again.

        Returns the number of steps done: fewer than ``run.max_steps`` after `request_stop`.
        """
        readmitted = await self._restore(point) if point is not None else ()
        probe = await self._steps.refits.prepare(self._machine.policy_version)
        self._reporter.say(
            f"engines and trainer agree at version {self._machine.policy_version}: "
            f"mean |logprob difference| {probe.abs_diff_mean:.1e}"
        )
        if self._evaluator.has_tasks and self._done == 0:
            self._pending_evaluation = await self._evaluate()
        try:
            async with asyncio.TaskGroup() as groups:
                for group_id in readmitted:
                    self._start_group(self._index_of[group_id.task_id], group_id, groups)
                await self._train(groups)
        except* StopRequested:
            self._reporter.say(f"stopped after step {self._done}; go on with run.resume={self._run.path}")
        finally:
            self._run.write_timeline(self._timeline.trace())
        return self._done

    async def _train(self, groups: asyncio.TaskGroup) -> None:
        since_s = self._timeline.wall_s
        while self._done < self._config.run.max_steps:
            started = self._timeline.wall_s
            batch = await self._next_batch(groups)
            wait_s = self._timeline.wall_s - started
            step = self._done + 1
            row = await self._steps.run(step, batch, self._machine, wait_s=wait_s, since_s=since_s)
            self._admit(groups)
            await self._finish_row(step, row)
            self._done, since_s = step, self._timeline.wall_s
            if self._is_stopping and step < self._config.run.max_steps:
                await self._checkpoint(step)
                raise StopRequested

    async def _restore(self, point: RestorePoint) -> tuple[GroupId, ...]:
        """Bring trainer, engines, sampler and state machine to a restore point."""
        num_rolled_back = roll_back(self._run.path, point)
        kept = read_rows(self._run.path / "metrics.jsonl")
        self._timeline.earlier_s = kept[-1]["wall_s"] if kept else 0.0
        state = point.loop or {"machine": self._machine.snapshot() | {"ledger": EMPTY_LEDGER}}
        if point.checkpoint is not None:
            await self._fleets.restore(point.checkpoint)
            self._sampler = TaskSampler.from_state(state["sampler"])
        self._done = point.step
        self._steps.refits.incarnation = point.incarnation
        readmitted = self._machine.restore(state["machine"], incarnation=point.incarnation)
        self._run.sync("events")
        await self._steps.refits.refit(self._machine)
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
            "sizes": loop_sizes(self._config),
        }

    def _book(self, event: Any) -> None:
        self._run.append("events", {**event, "wall_s": round(self._timeline.wall_s, 6)})

    async def _evaluate(self) -> Evaluation:
        version = self._machine.policy_version
        with self._timeline.span("inference", "evaluate", policy_version=version):
            evaluation = await self._evaluator.run(version, step=self._done)
        self._machine.ledger.note("evaluated", policy_version=version, **evaluation.fields)
        self._reporter.say(f"held-out at version {version}: {evaluation}")
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
        self._timeline.add_group(group_id, index, engine, started, summary)
        cause = self._machine.finish(group_id, [rollout.member for rollout in summary.rollouts])
        if cause is None:
            self._finished[group_id] = (summary, payload)
        else:
            self._dropped(summary, payload, cause)
            self._admit(groups)
        self._changed.set()

    def _dropped(self, summary: GroupSummary, payload: Any, cause: str) -> None:
        """Record a dropped group; raise RunStalled when there is nothing but dropped ones."""
        batch = Batch((summary.group_id,), (summary,), (payload,))
        lags = rollout_staleness(summary, self._machine.policy_version)
        record_groups(self._fleets, batch, [lags], [[0.0] * len(lags)], step=None, dropped=cause)
        ledger, in_a_row = self._machine.ledger, self._machine.num_drops_in_a_row
        detail = next((rollout.detail for rollout in summary.rollouts if rollout.detail), "no detail")
        if in_a_row >= max(_MIN_DROPS_TO_STALL, 2 * self._machine.config.num_slots):
            raise RunStalled(f"{in_a_row} groups in a row were dropped, the last by {cause}: {detail}")
        total = ledger.dropped_groups.total()
        if total == 1 or (total % 10 == 0 and total > 0.01 * ledger.admitted_groups):
            self._reporter.say(
                f"dropped {total} of {ledger.admitted_groups} groups so far; {summary.group_id} by {cause}: {detail}"
            )

    async def _next_batch(self, groups: asyncio.TaskGroup) -> Batch:
        while True:
            self._admit(groups)
            self._changed.clear()
            group_ids = self._machine.next_batch()
            if group_ids is not None:
                summaries, payloads = zip(*(self._finished.pop(group_id) for group_id in group_ids), strict=True)
                return Batch(group_ids, summaries, payloads)
            await self._changed.wait()

    async def _finish_row(self, step: int, row: dict[str, Any]) -> None:
        # The evaluation before the first step has no row of its own: it goes with step 1.
        pending, self._pending_evaluation = self._pending_evaluation, None
        if self._evaluator.is_due(step):
            evaluation = await self._evaluate()
            before = {f"{name}_before": value for name, value in pending.fields.items()} if pending else {}
            row |= evaluation.fields | before
        elif pending is not None:
            row |= pending.fields
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
