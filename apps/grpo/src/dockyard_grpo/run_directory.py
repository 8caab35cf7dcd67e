"""The run directory: the contract that tools and users rely on.

config.yaml, metrics.jsonl, rollouts.jsonl, events.jsonl, timeline.json, checkpoints/step-000010/.
"""

from __future__ import annotations

import json
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
        """Make the directory, or open the one to go on with, and write config.yaml.

        Raises ConfigError if it holds a run already and ``run.resume`` does not ask for it.
        """
        path = config.run.dir or Path("runs") / f"{config.run.name}-{time.strftime('%Y%m%d-%H%M%S')}"
        holds_run = (path / "config.yaml").exists()
        if holds_run and config.run.resume is None:
            raise ConfigError(
                f"run.dir must not hold a run already, got {str(path)!r}; choose another run.dir, or go on with "
                "run.resume=auto"
            )
        try:
            (path / "checkpoints").mkdir(parents=True, exist_ok=True)
            (path / "config.yaml").write_text(dump_config(config))
        except OSError as error:
            raise ConfigError(f"run.dir must be writable, got {str(path)!r}: {error.strerror}") from error
        run = cls(path.resolve())
        run.holds_run = holds_run
        return run

    @property
    def rollouts_path(self) -> Path:
        """Where the recorder appends."""
        return self.path / "rollouts.jsonl"

    def append(self, name: str, row: Mapping[str, Any]) -> None:
        """Append one object to ``<name>.jsonl`` and hand it to the kernel."""
        if name not in self._files:
            self._files[name] = (self.path / f"{name}.jsonl").open("a", encoding="utf-8")
        self._files[name].write(json.dumps(row) + "\n")
        self._files[name].flush()

    def sync(self, name: str) -> None:
        """Commit point: what was appended to ``<name>.jsonl`` is on disk when this returns."""
        if name in self._files:
            os.fsync(self._files[name].fileno())

    def write_json(self, name: str, content: Any) -> None:
        """Write a whole JSON file."""
        (self.path / name).write_text(json.dumps(content))

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
        for old in sorted(final.parent.glob("step-*"))[:-keep_last]:
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
