"""The run directory: the contract that tools and users rely on.

config.yaml, metrics.jsonl, rollouts.jsonl, events.jsonl, timeline.json, checkpoints/step-000010/.
"""

from __future__ import annotations

import json
import math
import os
import time
from collections.abc import Mapping
from pathlib import Path
from types import TracebackType
from typing import IO, Any

from dockyard_core import ConfigError
from dockyard_grpo import checkpoint_files
from dockyard_grpo.config import Config, dump_config


class RunDirectory:
    """Owns the files of one run."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.holds_run = False
        """Whether an earlier life of this run left its files here."""
        self.opened_at = time.monotonic()
        """When this process took the directory, for `checkpoint.must_save_by`."""
        self.is_out_of_time = False
        """Whether the run stopped because of it."""
        self._files: dict[str, IO[str]] = {}

    @classmethod
    def create(cls, config: Config) -> RunDirectory:
        """Choose the directory of a new run, or open the one to go on with; writes nothing.

        Raises ConfigError if it holds a run already and ``run.resume`` does not ask for it.
        """
        path = config.run.dir or Path("runs") / f"{config.run.name}-{time.strftime('%Y%m%d-%H%M%S')}"
        # A start that failed before the first event has left a configuration and nothing else.
        holds_run = (path / "events.jsonl").exists()
        if holds_run and config.run.resume is None:
            raise ConfigError(
                f"run.dir must not hold a run already, got {str(path)!r}; choose another run.dir, or go on with "
                f"run.resume={path}"
            )
        run = cls(path.resolve())
        run.holds_run = holds_run
        return run

    def write_config(self, config: Config, *, incarnation: int) -> None:
        """Write config.yaml; that of the life before stays as ``config.<incarnation>.yaml``.

        A life begins here: what an earlier one left half-written among the checkpoints is removed.
        """
        current = self.path / "config.yaml"
        try:
            self.checkpoints.mkdir(parents=True, exist_ok=True)
            checkpoint_files.sweep(self.checkpoints)
            if self.holds_run and current.exists():
                current.rename(self.path / f"config.{incarnation - 1}.yaml")
            # Loading this file makes a run like this one; it does not go on with it.
            run = config.run.model_copy(update={"resume": None})
            current.write_text(dump_config(config.model_copy(update={"run": run})))
        except OSError as error:
            raise ConfigError(f"run.dir must be writable, got {str(self.path)!r}: {error.strerror}") from error

    @property
    def rollouts_path(self) -> Path:
        """Where the recorder appends."""
        return self.path / "rollouts.jsonl"

    def append(self, name: str, row: Mapping[str, Any]) -> None:
        """Append one object to ``<name>.jsonl`` and hand it to the kernel."""
        if name not in self._files:
            self._files[name] = (self.path / f"{name}.jsonl").open("a", encoding="utf-8")
        self._files[name].write(json.dumps(_finite(row), allow_nan=False) + "\n")
        self._files[name].flush()

    def size(self, name: str) -> int:
        """Bytes of ``<name>.jsonl``."""
        path = self.path / f"{name}.jsonl"
        return path.stat().st_size if path.exists() else 0

    def close_files(self) -> None:
        """Let go of the files, which a new life may replace; they open again when they are needed."""
        for file in self._files.values():
            file.close()
        self._files.clear()

    def sync(self, name: str) -> None:
        """Commit point: what was appended to ``<name>.jsonl`` is on disk when this returns."""
        if name in self._files:
            os.fsync(self._files[name].fileno())

    def write_timeline(self, trace: Mapping[str, Any]) -> None:
        """Write timeline.json; that of an earlier life of the run stays beside it."""
        path = self.path / "timeline.json"
        if path.exists():
            path.rename(path.with_name(f"timeline.{len(list(self.path.glob('timeline*.json')))}.json"))
        path.write_text(json.dumps(trace))

    @property
    def checkpoints(self) -> Path:
        """The folder of `checkpoint_files`."""
        return self.path / "checkpoints"

    def commit_checkpoint(self, partial: Path, loop_state: str, metrics: Mapping[str, Any]) -> Path:
        """Make a written checkpoint the newest complete one; returns its path.

        A reader sees a complete checkpoint or none; ``latest`` names the newest complete one. The rows it
        vouches for are on disk first. Raises OSError, and then no other checkpoint has changed.

        Args:
            partial: from `checkpoint_files.open_partial`.
            loop_state: text of loop.json.
            metrics: row of its step; what is no finite number becomes null.
        """
        for name in ("metrics", "events"):
            self.sync(name)
        (partial / "loop.json").write_text(loop_state, encoding="utf-8")
        return checkpoint_files.commit(partial, _finite(metrics))

    def __enter__(self) -> RunDirectory:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.close_files()


def _finite(value: Any) -> Any:
    """JSON has no NaN and no infinity: they become null."""
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if isinstance(value, Mapping):
        return {key: _finite(inner) for key, inner in value.items()}
    if isinstance(value, list | tuple):
        return [_finite(inner) for inner in value]
    return value
