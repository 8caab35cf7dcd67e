"""The run directory: the contract that tools and users rely on.

config.yaml, metrics.jsonl, rollouts.jsonl, events.jsonl, timeline.json, checkpoints/step-000010/.
"""

from __future__ import annotations

import json
import math
import os
import shutil
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from types import TracebackType
from typing import IO, Any

from dockyard_core import ConfigError
from dockyard_grpo.config import Config, dump_config
from dockyard_grpo.resume import sha256


class RunDirectory:
    """Owns the files of one run."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.holds_run = False
        """Whether an earlier life of this run left its files here."""
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
        """Write config.yaml; that of the life before stays as ``config.<incarnation>.yaml``."""
        current = self.path / "config.yaml"
        try:
            (self.path / "checkpoints").mkdir(parents=True, exist_ok=True)
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

    def checkpoint(self, step: int, write: Callable[[Path], None], *, keep_last: int) -> Path:
        """Write ``checkpoints/step-NNNNNN`` aside, add a manifest of hashes, fsync, rename.

        A reader sees a complete checkpoint or none; ``latest`` names the newest complete one.
        """
        final = self.path / "checkpoints" / f"step-{step:06d}"
        aside = final.with_name(f".{final.name}.partial")
        shutil.rmtree(aside, ignore_errors=True)
        aside.mkdir(parents=True)
        write(aside)
        files = sorted(path for path in aside.rglob("*") if path.is_file())
        hashes = {str(path.relative_to(aside)): sha256(path) for path in files}
        (aside / "manifest.json").write_text(json.dumps({"step": step, "sha256": hashes}, indent=1))
        for path in [*files, aside / "manifest.json"]:
            _fsync(path)
        shutil.rmtree(final, ignore_errors=True)  # of an earlier life, damaged: else it would be resumed from
        aside.rename(final)
        link = final.parent / ".latest.partial"
        link.unlink(missing_ok=True)
        link.symlink_to(final.name)
        link.rename(final.parent / "latest")
        _fsync(final.parent)
        for old in sorted(path for path in final.parent.glob("step-*") if path.name <= final.name)[:-keep_last]:
            shutil.rmtree(old)
        return final

    def __enter__(self) -> RunDirectory:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        for file in self._files.values():
            file.close()


def _fsync(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _finite(value: Any) -> Any:
    """JSON has no NaN and no infinity: they become null."""
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if isinstance(value, Mapping):
        return {key: _finite(inner) for key, inner in value.items()}
    return value
