"""Writes checkpoints beside the run: policy, optimizer, RNG, the loop's state, finished groups, an export.

begin      waits for: the checkpoint before it, the snapshot of every trainer rank
write      in the background: trainers write the snapshot, the recorder the groups
commit     waits for: all of them, rows on disk; hashes, fsync, rename, ``latest``
prune      follows a commit, never precedes one

A checkpoint that the disk does not take is counted and named, leaves nothing behind, and the run goes on;
the next one that is due is tried like any other.
"""

from __future__ import annotations

import asyncio
import json
import shutil
import time
from collections.abc import Awaitable, Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from dockyard_grpo import checkpoint_files
from dockyard_grpo.config import Config
from dockyard_grpo.fleets import Fleets
from dockyard_grpo.retention import Retention
from dockyard_grpo.run_directory import RunDirectory
from dockyard_grpo.storage_errors import reason_of


class CheckpointFailure(NamedTuple):
    """A checkpoint that is not there, or a clean-up after one that is."""

    step: int
    reason: str
    """Begins with the errno's name, ``lost:`` or ``prune:``."""


class _NotWritten(Exception):
    """A part of the checkpoint was not written; the message says why."""


class Checkpointer:
    """Knows when a checkpoint is due and writes it, one at a time, while training goes on."""

    def __init__(
        self,
        config: Config,
        fleets: Fleets,
        run: RunDirectory,
        *,
        on_saved: Callable[[int, Path], None] | None = None,
        on_failed: Callable[[int, str], None] | None = None,
    ) -> None:
        self._config = config
        self._fleets = fleets
        self._run = run
        self._on_saved = on_saved
        self._on_failed = on_failed
        self._retention = Retention.of(config.checkpoint)
        self._under_way: asyncio.Task[None] | None = None
        self.last_step: int | None = None
        """Step of the newest checkpoint that this life has completed."""
        self.failures: list[CheckpointFailure] = []
        self.longest_save_s = 0.0
        """Seconds from `begin` to the end, of the slowest checkpoint that was completed."""

    def is_due(self, step: int) -> bool:
        """Whether to write after this step; always after the last one."""
        every = self._config.checkpoint.every_steps
        return step == self._config.run.max_steps or (every is not None and step % every == 0)

    async def begin(
        self,
        step: int,
        loop_state: Mapping[str, Any],
        *,
        metrics: Mapping[str, Any],
        groups: Sequence[Any] = (),
    ) -> None:
        """Take the state of this moment and write ``checkpoints/step-NNNNNN`` in the background.

        Returns when every trainer rank has copied its state: the trainers may step then. The one before
        is waited for first, and is enough if it was of this step. What the disk refuses is in `failures`,
        and not raised; a trainer that died before it had copied its state is.

        Args:
            step: optimizer steps done.
            loop_state: loop.json; turned into text before the first await, so that it is of one moment.
            metrics: row of the step, for `Retention`.
            groups: Ray references of finished groups that no step has trained; groups.jsonl, in this order.
        """
        text = json.dumps(loop_state)
        row, references = dict(metrics), tuple(groups)
        await self.wait()
        if self.last_step == step:  # the one that was under way
            return
        started = time.monotonic()
        try:
            partial = await asyncio.to_thread(checkpoint_files.open_partial, self._run.checkpoints, step)
        except OSError as error:
            self._failed(step, reason_of(error))
            return
        try:
            trainers = tuple(self._fleets.trainers)  # those of this moment hold the snapshot, not their successors
            await asyncio.gather(*(trainer.snapshot.remote() for trainer in trainers))
            parts = [trainer.write.remote(partial) for trainer in trainers]
            if references:
                parts.append(self._fleets.recorder.write_groups.remote(partial / "groups.jsonl", *references))
            writing = self._write(step, partial, parts, text, row, started)
            self._under_way = asyncio.create_task(writing, name=f"checkpoint {step}")
        finally:
            if self._under_way is None:
                await asyncio.to_thread(shutil.rmtree, partial, ignore_errors=True)

    async def wait(self) -> None:
        """Return when none is under way; whether it was written, `last_step` and `failures` tell."""
        task = self._under_way
        if task is None:
            return
        await asyncio.wait({task})  # not `await task`: a waiter that is cancelled must not cancel the writer
        if self._under_way is task:
            self._under_way = None
        task.result()

    async def _write(
        self, step: int, partial: Path, parts: Sequence[Any], text: str, row: Mapping[str, Any], started: float
    ) -> None:
        try:
            await self._written(parts)
            path = await asyncio.to_thread(self._run.commit_checkpoint, partial, text, row)
        except (OSError, _NotWritten) as error:
            await asyncio.to_thread(shutil.rmtree, partial, ignore_errors=True)
            self._failed(step, reason_of(error) if isinstance(error, OSError) else str(error))
            return
        self.last_step = step
        try:
            await asyncio.to_thread(checkpoint_files.prune, self._run.checkpoints, self._retention, newest=step)
        except OSError as error:  # the next one prunes again
            self.failures.append(CheckpointFailure(step, f"prune: {reason_of(error)}"))
        self.longest_save_s = max(self.longest_save_s, time.monotonic() - started)
        if self._on_saved is not None:
            self._on_saved(step, path)

    async def _written(self, parts: Sequence[Any]) -> None:
        """Return when every actor has written its part; raise _NotWritten only when none writes any more."""
        reasons = await asyncio.gather(*map(_reason, parts), _reason(self._fleets.flush()))
        failed = [reason for reason in reasons if reason is not None]
        if failed:
            raise _NotWritten(failed[0])

    def _failed(self, step: int, reason: str) -> None:
        self.failures.append(CheckpointFailure(step, reason))
        if self._on_failed is not None:
            self._on_failed(step, reason)


async def _reason(part: Awaitable[str | None]) -> str | None:
    """What an actor says of its part, or that it, or a group that it should write, is gone."""
    from ray.exceptions import ObjectLostError, RayActorError

    try:
        return await part
    except (RayActorError, ObjectLostError) as error:
        cause = getattr(error, "cause", None) or error  # Ray wraps what an actor met in a traceback of many lines
        return f"lost: {type(cause).__name__}: {str(cause).splitlines()[0]}"
