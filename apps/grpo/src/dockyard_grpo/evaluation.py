"""Held-out evaluation: its own ids, no slots, the versions that answered are recorded."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from typing import Any

from dockyard_core import GroupId, Task
from dockyard_grpo.config import Config
from dockyard_grpo.fleets import Fleets
from dockyard_grpo.metrics import Evaluation
from dockyard_grpo.summary import GroupSummary


class Evaluator:
    """Runs the first ``evaluation.num_tasks`` held-out tasks."""

    def __init__(self, config: Config, fleets: Fleets, validation: Sequence[Task]) -> None:
        self._config = config
        self._fleets = fleets
        self._tasks = validation[: config.evaluation.num_tasks]

    def is_due(self, step: int) -> bool:
        """Whether to evaluate after this step; always after the last one."""
        every = self._config.evaluation.every_steps
        is_last = step == self._config.run.max_steps
        return bool(self._tasks) and (is_last or (every is not None and step % every == 0))

    @property
    def has_tasks(self) -> bool:
        """Whether there is anything to evaluate on."""
        return bool(self._tasks)

    async def run(self, policy_version: int, *, step: int) -> Evaluation:
        """Evaluate now.

        Args:
            policy_version: the one the engines hold and keep meanwhile.
            step: optimizer steps done; a skipped step leaves the version, but not the ids, as they were.
        """
        engines = list(self._fleets.engines.values())
        pending = [self._run_task(engines[index % len(engines)], index, step) for index in range(len(self._tasks))]
        answers = await asyncio.gather(*pending)
        versions = [v for summary in answers for r in summary.rollouts if (v := r.oldest_version) is not None]
        return Evaluation(
            summaries=tuple(answers),
            version_min=min(versions, default=policy_version),
            version_max=max(versions, default=policy_version),
        )

    async def _run_task(self, engine: Any, index: int, step: int) -> GroupSummary:
        group_id = GroupId(f"eval-{step}/{self._tasks[index].instance_id}", 0)
        summary, _ = engine.run_group.options(num_returns=2).remote(
            "validation", index, group_id, self._config.evaluation.num_generations
        )
        answer: GroupSummary = await summary
        return answer
