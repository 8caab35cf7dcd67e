"""Held-out evaluation beside training: its own ids, no slots; the versions that answered are recorded."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from typing import Any

from dockyard_core import GroupId, Task
from dockyard_core.loop import LoopMachine
from dockyard_grpo.config import Config
from dockyard_grpo.groups import GroupRunner
from dockyard_grpo.metrics import Evaluation
from dockyard_grpo.timeline import Timeline


class Evaluator:
    """Runs the first ``evaluation.num_tasks`` held-out tasks, as often as it is due.

    A pinned evaluation holds refits back (`settle`), so that one version answers all of it. A live one
    lets them happen. The fields of an evaluation go into the first row that is written after it.
    """

    def __init__(
        self,
        config: Config,
        runner: GroupRunner,
        machine: LoopMachine,
        timeline: Timeline,
        validation: Sequence[Task],
        say: Callable[[str], None],
    ) -> None:
        self._config = config
        self._runner = runner
        self._machine = machine
        self._timeline = timeline
        self._tasks = validation[: config.evaluation.num_tasks]
        self._say = say
        self._under_way: dict[int, asyncio.Task[None]] = {}
        self._fields: dict[str, Any] = {}

    def is_due(self, step: int) -> bool:
        """Whether to evaluate after this step; always before the first and after the last one."""
        every = self._config.evaluation.every_steps
        is_end = step in (0, self._config.run.max_steps)
        return bool(self._tasks) and (is_end or (every is not None and step % every == 0))

    def begin(self, step: int, tasks: asyncio.TaskGroup, *, is_pinned: bool | None = None) -> None:
        """Start the evaluation after ``step``; a skipped step leaves the version, but not the ids, as they were."""
        pins = self._config.evaluation.mode == "pinned" if is_pinned is None else is_pinned
        self._machine.begin_evaluation(step, is_pinned=pins)
        self._under_way[step] = tasks.create_task(self._run(step), name=f"evaluation after step {step}")

    async def settle(self, *, also_live: bool = False) -> None:
        """Wait for what pins the engines, or for every evaluation."""
        wanted = [task for step, task in self._under_way.items() if also_live or self._machine.evaluations.get(step)]
        if wanted:
            await asyncio.wait(wanted)

    def take_fields(self) -> dict[str, Any]:
        """The val_* fields of evaluations that ended since they were last taken."""
        fields, self._fields = self._fields, {}
        return fields

    async def _run(self, step: int) -> None:
        version = self._machine.policy_version
        with self._timeline.span("inference", "evaluate", step=step, policy_version=version):
            runs = await asyncio.gather(*(self._run_task(index, step) for index in range(len(self._tasks))))
        summaries = tuple(run.summary for run in runs)
        rollouts = [rollout for summary in summaries for rollout in summary.rollouts]
        oldest = [rollout.oldest_version for rollout in rollouts if rollout.oldest_version is not None]
        newest = [rollout.newest_version for rollout in rollouts if rollout.newest_version is not None]
        evaluation = Evaluation(
            step=step,
            summaries=summaries,
            version_min=min(oldest, default=version),
            version_max=max(newest, default=version),
        )
        self._say(f"held-out after step {step}, {evaluation.versions}: {evaluation}")
        # That before the first step has no row of its own; step 1 may have one too.
        suffix = "_before" if step == 0 and self.is_due(1) else ""
        self._fields |= {f"{name}{suffix}": value for name, value in evaluation.fields.items()}
        del self._under_way[step]
        self._machine.end_evaluation(step, **evaluation.fields)

    async def _run_task(self, index: int, step: int) -> Any:
        group_id = GroupId(f"eval-{step}/{self._tasks[index].instance_id}", 0)
        return await self._runner.run("validation", index, group_id, self._config.evaluation.num_generations)
