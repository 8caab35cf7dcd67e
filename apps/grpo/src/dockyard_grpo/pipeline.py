"""The asynchronous pipeline: one event loop that moves the state machine of `dockyard_core.loop`.

tasks -> groups under way -> finished groups -> batch -> trainer
            ^                                              |
            +------ free slots <------ refit <-------------+

admit     consumes: the sampler's next task
          waits for: a slot, and engines that hold the trainer's version   unblocked by: refit, drop
group     consumes: a slot; runs in the inference fleet, judged by the sandbox fleet; anew if its engine dies
step      waits for: num_prompts_per_step finished groups, oldest version first
refit     follows every step, and the restart of an engine; waits for: evaluations that pin the engines
          frees the step's slots
evaluate, save   begin at the end of a step and go on beside the next ones (`step_end`)
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from typing import Any

from dockyard_core import GroupId, RunStalled, Task
from dockyard_core.data import TaskSampler, dataset_fingerprint
from dockyard_core.loop import EMPTY_LOOP, ZERO_SIGNAL, Ledger, LoopConfig, LoopMachine
from dockyard_core.refit import ProbeDiff
from dockyard_grpo.config import Config
from dockyard_grpo.evaluation import Evaluator
from dockyard_grpo.fleets import Fleets
from dockyard_grpo.groups import GroupRunner
from dockyard_grpo.metrics import StepTimes, rollout_staleness
from dockyard_grpo.progress import Reporter
from dockyard_grpo.recovery import Budget, Recovery, TrainerLost
from dockyard_grpo.refit import RefitCoordinator
from dockyard_grpo.resume import RestorePoint, loop_sizes, read_rows, roll_back, sampler_state
from dockyard_grpo.run_directory import RunDirectory
from dockyard_grpo.step_end import StepEnd
from dockyard_grpo.steps import Batch, StepRunner, record_groups
from dockyard_grpo.summary import GroupRun, GroupSummary
from dockyard_grpo.timeline import Timeline
from dockyard_grpo.tracker import Tracker
from dockyard_grpo.usage import Usage, UsageMeter

_MIN_DROPS_TO_STALL = 16


class StopRequested(Exception):
    """Raised inside the run when it was asked to stop and has done so in order."""


class Pipeline:
    """Drives one life of a run: to its last step, to a stop, or to the death of its trainer."""

    def __init__(
        self,
        config: Config,
        fleets: Fleets,
        run: RunDirectory,
        reporter: Reporter,
        tracker: Tracker,
        train: Sequence[Task],
        validation: Sequence[Task],
        *,
        budget: Budget,
        point: RestorePoint | None = None,
    ) -> None:
        """``point``: where an earlier life of this run is taken up again; ``budget``: of deaths, over all lives."""
        self._config = config
        self._fleets = fleets
        self._run = run
        self._reporter = reporter
        self._tasks = train
        self._point = point
        self._index_of = {task.instance_id: index for index, task in enumerate(train)}
        self._dataset = dataset_fingerprint(train)
        self._sampler = TaskSampler(len(train), config.run.seed)
        self._timeline = Timeline()
        ledger = Ledger(self._book, next_seq=point.next_seq if point is not None else 0)
        self._machine = LoopMachine(loop_config(config), ledger, list(fleets.engines))
        self._recovery = Recovery(config, fleets, self._machine, budget, reporter.say)
        self._runner = GroupRunner(config, fleets, self._recovery)
        self._refits = RefitCoordinator(config, fleets, self._recovery)
        self._steps = StepRunner(config, fleets, run, self._timeline)
        self._usage = UsageMeter(fleets.num_sandbox_workers)
        self._evaluator = Evaluator(config, self._runner, self._machine, self._timeline, validation, reporter.say)
        self._step_end = StepEnd(
            config, fleets, run, reporter, tracker, self._machine, self._evaluator, snapshot=self._snapshot
        )
        self._finished: dict[GroupId, GroupRun] = {}
        self._done = 0
        self._is_stopping = False

    def request_stop(self) -> None:
        """Finish the step, save, stop."""
        self._is_stopping = True
        self._reporter.say(f"stopping: step {self._done + 1} is finished and saved first; once more stops now")

    async def run(self) -> int:
        """Train to ``run.max_steps``.

        Returns the number of steps done: fewer than ``run.max_steps`` after `request_stop` and shortly before
        ``checkpoint.must_save_by``. Raises TrainerLost when the run must go on from its last checkpoint; any
        other failure that cannot be recovered from is raised as it is.
        """
        from ray.exceptions import ObjectLostError, RayActorError

        try:
            async with asyncio.TaskGroup() as tasks:
                self._recovery.start(tasks)
                await self._begin(tasks)
                await self._train(tasks)
                self._recovery.stop()
        except* StopRequested:
            self._reporter.say(f"stopped after step {self._done}; go on with run.resume={self._run.path}")
        except* (RayActorError, ObjectLostError) as lost:  # a rank, or rollouts that were on a node that is gone
            reason = str(lost.exceptions[0]).splitlines()[0]
            self._machine.ledger.note("trainer_lost", reason=reason)
            raise TrainerLost(reason) from lost
        finally:
            self._recovery.stop()
            await self._step_end.close()
            self._run.write_timeline(self._timeline.trace())
        return self._done

    async def _begin(self, tasks: asyncio.TaskGroup) -> None:
        anew = await self._restore(self._point) if self._point is not None else ()
        probe = await self._refits.prepare(self._machine.policy_version)
        if probe is not None:
            self._reporter.say(
                f"engines and trainer agree at version {self._machine.policy_version}: "
                f"mean |logprob difference| {probe.abs_diff_mean:.1e}"
            )
        for step, is_pinned in self._machine.interrupted_evaluations:
            self._evaluator.begin(step, tasks, is_pinned=is_pinned)
        if self._done == 0 and self._evaluator.is_due(0):
            self._evaluator.begin(0, tasks)
        for group_id in anew:
            self._start_group(self._index_of[group_id.task_id], group_id, tasks)

    async def _train(self, tasks: asyncio.TaskGroup) -> None:
        since_s = self._timeline.wall_s
        while self._done < self._config.run.max_steps:
            started = self._timeline.wall_s
            batch, head_of_line_s = await self._next_batch(tasks)
            wait_s = self._timeline.wall_s - started
            step = self._done + 1
            trained = await self._steps.train(step, batch, self._machine)
            started = self._timeline.wall_s
            probe, usage = await self._freshen(step, tasks)
            await trained.synced
            now = self._timeline.wall_s
            times = StepTimes(
                wait_s=wait_s,
                head_of_line_s=head_of_line_s,
                train_s=trained.train_s,
                refit_s=now - started,
                step_s=now - since_s,
                wall_s=now,
            )
            row = self._steps.row(trained, self._machine, probe=probe, times=times, usage=usage)
            self._done, since_s = step, now
            await self._step_end.finish(step, row, tasks)
            is_last = step == self._config.run.max_steps
            if not is_last and (self._is_stopping or self._step_end.must_stop(times.step_s)):
                await self._step_end.save(step, is_final=True)
                raise StopRequested

    async def _freshen(self, step: int, tasks: asyncio.TaskGroup) -> tuple[ProbeDiff | None, Usage]:
        """Bring the engines to the trainer's version once no evaluation pins them, admit, and compare both sides."""
        if not self._machine.refit.is_fresh:
            await self._evaluator.settle()
            with self._timeline.span("trainer", "refit", step=step):
                await self._refits.refit(self._machine)
        self._admit(tasks)  # now: the slots are free, and what the probe takes would be a bubble in the engines
        with self._timeline.span("trainer", "probe", step=step):
            probe, counts = await asyncio.gather(
                self._refits.probe(self._machine.policy_version), self._fleets.usage(self._recovery.serving)
            )
        return probe, self._usage.read(counts)

    async def _restore(self, point: RestorePoint) -> tuple[GroupId, ...]:
        """Bring trainer, engines, sampler and state machine to a restore point; returns the groups to run anew."""
        num_rolled_back = roll_back(self._run.path, point)
        kept = read_rows(self._run.path / "metrics.jsonl")
        self._timeline.earlier_s = kept[-1]["wall_s"] if kept else 0.0
        state = point.loop["machine"] if point.loop is not None else EMPTY_LOOP
        if point.checkpoint is not None and point.loop is not None:
            await self._fleets.restore(point.checkpoint)
            self._sampler = TaskSampler.from_state(sampler_state(point.loop, self._dataset, len(self._tasks)))
            self._finished = await self._fleets.load_groups(point.checkpoint, state["finished"])
        self._done = point.step
        self._refits.incarnation = point.incarnation
        anew = self._machine.restore(state, incarnation=point.incarnation)
        self._run.sync("events")
        for name in self._fleets.engines:
            self._recovery.fence(name)
        await self._refits.refit(self._machine)
        gone = [group_id for group_id in anew if group_id.task_id not in self._index_of]
        for group_id in gone:
            self._machine.drop(group_id, "data_changed")
        anew = tuple(group_id for group_id in anew if group_id not in gone)
        self._reporter.say(
            f"going on after step {point.step} (incarnation {point.incarnation}): {len(self._finished)} finished "
            f"groups are kept, {len(anew)} are run anew, {num_rolled_back} rows were rolled back"
        )
        return anew

    def _snapshot(self, step: int) -> tuple[dict[str, Any], list[Any]]:
        """The loop's state at this moment, and references to the groups that are finished in it, in its order."""
        machine = self._machine.snapshot()
        state = {
            "step": step,
            "machine": machine,
            "sampler": self._sampler.state(),
            "dataset": self._dataset,
            "sizes": loop_sizes(self._config),
            "incarnation": self._refits.incarnation,
            "events_bytes": self._run.size("events"),
        }
        return state, [self._finished[GroupId(entry[0], entry[1])].payload for entry in machine["finished"]]

    def _book(self, event: Any) -> None:
        self._run.append("events", {**event, "wall_s": round(self._timeline.wall_s, 6)})

    def _admit(self, tasks: asyncio.TaskGroup) -> None:
        while self._machine.num_admissible > 0:
            index, repetition = self._sampler.next()
            group_id = GroupId(self._tasks[index].instance_id, repetition)
            self._machine.admit(group_id)
            self._start_group(index, group_id, tasks)

    def _start_group(self, index: int, group_id: GroupId, tasks: asyncio.TaskGroup) -> None:
        tasks.create_task(self._run_group(index, group_id, tasks), name=str(group_id))

    async def _run_group(self, index: int, group_id: GroupId, tasks: asyncio.TaskGroup) -> None:
        started = self._timeline.wall_s
        run = await self._runner.run("train", index, group_id, self._config.grpo.num_generations_per_prompt)
        self._timeline.add_group(group_id, index, run.engine, started, run.summary)
        cause = self._machine.finish(group_id, [rollout.member for rollout in run.summary.rollouts])
        if cause is None:
            self._finished[group_id] = run
        else:
            self._dropped(run.summary, run.payload, cause)
            self._admit(tasks)
        self._recovery.changed.set()

    def _dropped(self, summary: GroupSummary, payload: Any, cause: str) -> None:
        """Record a dropped group; raise RunStalled when there is nothing but dropped ones."""
        batch = Batch((summary.group_id,), (summary,), (payload,))
        lags = rollout_staleness(summary, self._machine.policy_version)
        seq = self._machine.ledger.next_seq - 1  # that of the drop
        record_groups(self._fleets, batch, [lags], [[0.0] * len(lags)], step=None, dropped=cause, seq=seq)
        ledger, in_a_row = self._machine.ledger, self._machine.num_drops_in_a_row
        detail = next((rollout.detail for rollout in summary.rollouts if rollout.detail), "no detail")
        if in_a_row >= max(_MIN_DROPS_TO_STALL, 2 * self._machine.config.num_slots):
            raise RunStalled(f"{in_a_row} groups in a row were dropped, the last by {cause}: {detail}")
        total = ledger.dropped_groups.total() - ledger.dropped_groups[ZERO_SIGNAL]
        is_news = total == 1 or (total % 10 == 0 and total > 0.01 * ledger.admitted_groups)
        if cause != ZERO_SIGNAL and is_news:
            self._reporter.say(
                f"dropped {total} of {ledger.admitted_groups} groups so far; {summary.group_id} by {cause}: {detail}"
            )

    async def _next_batch(self, tasks: asyncio.TaskGroup) -> tuple[Batch, float]:
        """The next batch, and for how many seconds it was an older group that a finished batch waited for."""
        blocked_s = 0.0
        while True:
            if set(self._machine.refit.late_engines) & self._recovery.available and not self._machine.is_pinned:
                await self._refits.refit(self._machine)  # an engine is back
            self._admit(tasks)
            self._recovery.changed.clear()
            group_ids = self._machine.next_batch()
            if group_ids is not None:
                runs = [self._finished.pop(group_id) for group_id in group_ids]
                return Batch(group_ids, tuple(r.summary for r in runs), tuple(r.payload for r in runs)), blocked_s
            started, is_blocked = self._timeline.wall_s, self._machine.is_blocked_by_head
            await self._recovery.changed.wait()
            blocked_s += self._timeline.wall_s - started if is_blocked else 0.0


def loop_config(config: Config) -> LoopConfig:
    """The numbers that bound the loop of a run."""
    grpo = config.grpo
    bound = grpo.max_replaced_per_step or 2 * grpo.num_prompts_per_step
    return LoopConfig(
        num_prompts_per_step=grpo.num_prompts_per_step,
        num_generations_per_prompt=grpo.num_generations_per_prompt,
        max_staleness=grpo.max_staleness,
        max_steps=config.run.max_steps,
        max_replaced_per_step=bound if grpo.dynamic_sampling else 0,
    )
