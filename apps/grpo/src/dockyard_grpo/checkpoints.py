"""Writes checkpoints: policy, optimizer, RNG, the loop's state and an export, in one atomic folder."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from dockyard_grpo.config import Config
from dockyard_grpo.fleets import Fleets
from dockyard_grpo.run_directory import RunDirectory


class Checkpointer:
    """Knows when a checkpoint is due and writes it beside the event loop."""

    def __init__(self, config: Config, fleets: Fleets, run: RunDirectory) -> None:
        self._config = config
        self._fleets = fleets
        self._run = run
        self.last_step: int | None = None

    def is_due(self, step: int) -> bool:
        """Whether to write after this step; always after the last one."""
        every = self._config.checkpoint.every_steps
        return step == self._config.run.max_steps or (every is not None and step % every == 0)

    async def write(self, step: int, loop_state: Mapping[str, Any]) -> Path:
        """Write ``checkpoints/step-NNNNNN``; the trainer must not step meanwhile.

        Args:
            step: optimizer steps done.
            loop_state: loop.json, taken before the first await, so that it is of one moment.
        """
        # Rows of steps up to this one must be on disk before the checkpoint that vouches for them.
        await self._fleets.flush()
        for name in ("metrics", "events"):
            self._run.sync(name)
        event_loop = asyncio.get_running_loop()

        def write(directory: Path) -> None:
            asyncio.run_coroutine_threadsafe(self._save(directory), event_loop).result()
            (directory / "loop.json").write_text(json.dumps(loop_state))

        keep_last = self._config.checkpoint.keep_last
        path = await asyncio.to_thread(self._run.checkpoint, step, write, keep_last=keep_last)
        self.last_step = step
        return path

    async def _save(self, directory: Path) -> None:
        trainers = self._fleets.trainers
        await asyncio.gather(*(trainer.save.remote(directory) for trainer in trainers))
        await asyncio.gather(*(trainer.export.remote(directory / "hf") for trainer in trainers))
