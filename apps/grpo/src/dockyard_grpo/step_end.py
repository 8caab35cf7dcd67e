"""What follows a step and goes on beside the next ones: evaluation, the row, the checkpoint."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from dockyard_core import DockyardError
from dockyard_core.loop import LoopMachine
from dockyard_grpo.checkpoints import Checkpointer
from dockyard_grpo.config import Config
from dockyard_grpo.deadline import SaveBy
from dockyard_grpo.evaluation import Evaluator
from dockyard_grpo.fleets import Fleets
from dockyard_grpo.progress import Reporter
from dockyard_grpo.run_directory import RunDirectory
from dockyard_grpo.tracker import Tracker, scalars

Snapshot = Callable[[int], tuple[dict[str, Any], list[Any]]]
"""Step -> the loop's state at this moment, and references to its finished groups."""


class CheckpointFailed(DockyardError):
    """The run ends, and its last step is not on disk."""


class StepEnd:
    """Writes rows and checkpoints in an order that a crash cannot confuse.

    The row of a step waits for the evaluation that pins it; a checkpoint waits for its row, and the last
    one for every evaluation: a run that has it is done.
    """

    def __init__(
        self,
        config: Config,
        fleets: Fleets,
        run: RunDirectory,
        reporter: Reporter,
        tracker: Tracker,
        machine: LoopMachine,
        evaluator: Evaluator,
        *,
        snapshot: Snapshot,
    ) -> None:
        self._config = config
        self._run = run
        self._reporter = reporter
        self._tracker = tracker
        self._machine = machine
        self._evaluator = evaluator
        self._snapshot = snapshot
        self._checkpointer = Checkpointer(config, fleets, run, on_saved=self._saved, on_failed=self._failed)
        self._held: tuple[int, dict[str, Any]] | None = None
        self._row: dict[str, Any] = {}
        limit = config.checkpoint.must_save_by
        self._save_by = SaveBy.parse(limit) if limit is not None else None
        self._longest_step_s = 0.0

    async def finish(self, step: int, row: dict[str, Any], tasks: asyncio.TaskGroup) -> None:
        """End a step: evaluate and save if it is time; what can go on beside training does."""
        await self._write_row()
        self._held = step, row
        if self._evaluator.is_due(step):
            self._evaluator.begin(step, tasks)
        is_last = step == self._config.run.max_steps
        if self._checkpointer.is_due(step):
            await self.save(step, is_final=is_last)
        elif not self._machine.is_pinned:
            await self._write_row()

    async def save(self, step: int, *, is_final: bool = False) -> None:
        """Write a checkpoint of this moment; a final one is waited for.

        Raises CheckpointFailed when the final one could not be written, twice.
        """
        await self._write_row(also_live=step == self._config.run.max_steps)
        if self._checkpointer.last_step != step:
            await self._begin_checkpoint(step)
        if not is_final:
            return
        await self._checkpointer.wait()
        if self._checkpointer.last_step != step:
            await self._begin_checkpoint(step)
            await self._checkpointer.wait()
        if self._checkpointer.last_step != step:
            reason = self._checkpointer.failures[-1].reason
            raise CheckpointFailed(
                f"the checkpoint after step {step}, the last of this run, could not be written: {reason}; make room, "
                f"and go on from the one before with run.resume={self._run.path}"
            )

    async def close(self) -> None:
        """Let a checkpoint under way be completed, however the run ends, unless it was told to stop at once."""
        task = asyncio.current_task()
        if task is None or not task.cancelling():
            await self._checkpointer.wait()

    def must_stop(self, step_s: float) -> bool:
        """Whether checkpoint.must_save_by leaves no time for another step; ``step_s``: the one that just ended."""
        if self._save_by is None:
            return False
        self._longest_step_s = max(self._longest_step_s, step_s)
        elapsed_s = time.monotonic() - self._run.opened_at
        save_s = self._checkpointer.longest_save_s
        is_near = self._save_by.is_near(elapsed_s, self._longest_step_s, save_s or self._longest_step_s)
        if is_near:
            self._reporter.say(f"checkpoint.must_save_by={self._config.checkpoint.must_save_by} is near: saving")
            self._run.is_out_of_time = True
        return is_near

    async def _begin_checkpoint(self, step: int) -> None:
        state, groups = self._snapshot(step)
        self._machine.ledger.note("checkpoint_begun", step=step, num_groups=len(groups))
        await self._checkpointer.begin(step, state, metrics=self._row, groups=groups)

    async def _write_row(self, *, also_live: bool = False) -> None:
        await self._evaluator.settle(also_live=also_live)
        if self._held is None:
            return
        (step, row), self._held = self._held, None
        row |= self._evaluator.take_fields()
        self._run.append("metrics", row)
        self._tracker.log(step, scalars(row))
        self._reporter.step(row)
        self._row = row

    def _saved(self, step: int, path: Path) -> None:
        self._machine.ledger.note("checkpoint", step=step, path=str(path.relative_to(self._run.path)))
        self._run.sync("events")

    def _failed(self, step: int, reason: str) -> None:
        self._machine.ledger.note("checkpoint_failed", step=step, reason=reason)
        self._reporter.say(f"the checkpoint after step {step} could not be written ({reason}); training goes on")
