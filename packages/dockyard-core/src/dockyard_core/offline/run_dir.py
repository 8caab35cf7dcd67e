"""The output directory of an offline run.

<out>/
  config.json                     everything resolved; what a resumed run is compared with
  metrics.jsonl                   one line per step
  checkpoints/step-000010/policy  what ``Policy.restore`` reads
  checkpoints/step-000010/position.json
  hf/                             the result, there only when the run is complete
"""

from __future__ import annotations

import json
import os
import re
import shutil
from collections.abc import Callable, Iterator, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Literal

from dockyard_core.errors import ConfigError, UserError

FORMAT = 1
_PARTIAL = ".partial"
"""What a killed process may leave behind."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Position:
    """Where a run is after a step."""

    step: int = 0
    """Steps taken, skipped ones included."""
    epoch: int = 0
    batch: int = 0
    """The next one, in its epoch."""
    metrics_bytes: int = 0
    """Length of metrics.jsonl."""


class RunDir:
    """Reads on every rank; writes on the lead only.

    Args:
        path: may not exist yet.
        is_lead: whether this process writes.
    """

    def __init__(self, path: Path, *, is_lead: bool) -> None:
        self.path = path
        self.is_lead = is_lead
        self.metrics_path = path / "metrics.jsonl"
        self.export_path = path / "hf"
        self._checkpoints = path / "checkpoints"

    def examine(self, record: Mapping[str, Any], resume: Literal["auto", "must", "never"]) -> Position:
        """Where to go on; a fresh `Position` when nothing was saved.

        Raises:
            ConfigError: the directory holds something else, or contradicts ``resume``.
        """
        held = self._held_record()
        newest = self._newest()
        if resume == "never" and held is not None:
            raise ConfigError(f"--resume never needs an empty --out, got a run in {str(self.path)!r}; give another")
        if resume == "must" and newest is None:
            raise ConfigError(f"--resume must needs a checkpoint in --out, got none in {str(self.path)!r}; use auto")
        if held is not None:
            self._check_same(held, record)
        if newest is None:
            return Position()
        position = Position(**json.loads((newest / "position.json").read_text()))
        length = self.metrics_path.stat().st_size if self.metrics_path.exists() else 0
        if length < position.metrics_bytes:
            raise UserError(
                f"metrics.jsonl must hold the {position.metrics_bytes} bytes of {position.step} steps, got {length}; "
                "put it back, or give another --out"
            )
        return position

    def check_writable(self) -> None:
        """Raise UserError if it is not, before the model is loaded, which may take minutes. Every rank writes."""
        there = next(path for path in (self.path, *self.path.absolute().parents) if path.exists())
        if not there.is_dir() or not os.access(there, os.W_OK | os.X_OK):
            raise UserError(
                f"--out must be a directory that can be written, got {str(self.path)!r}, but {str(there)!r} "
                f"{'cannot' if there.is_dir() else 'is a file'}; give another directory"
            )

    def _held_record(self) -> dict[str, Any] | None:
        path = self.path / "config.json"
        if not path.is_file():
            is_dir = self.path.is_dir()
            others = [inner for inner in self.path.iterdir() if inner.suffix != _PARTIAL] if is_dir else []
            if others or (self.path.exists() and not is_dir):
                raise ConfigError(
                    f"--out must be new, empty or a run of this command, got {str(self.path)!r} with other files; "
                    "give another directory"
                )
            return None
        try:
            held = json.loads(path.read_text())
        except ValueError:
            held = None
        if not isinstance(held, dict) or held.get("format") != FORMAT or not isinstance(held.get("run"), dict):
            raise ConfigError(
                f"--out must be new, empty or a run of this command, got another program's {str(path)!r}; "
                "give another directory"
            )
        return held

    def _check_same(self, held: Mapping[str, Any], record: Mapping[str, Any]) -> None:
        # Compared as JSON, and only what both know: a later release may have more fields.
        before, now = (dict(_leaves(json.loads(json.dumps(part["run"])))) for part in (held, record))
        for name in sorted(before.keys() & now.keys()):
            if before[name] != now[name]:
                raise ConfigError(
                    f"--out {str(self.path)!r} holds a run with other options: {name} must be "
                    f"{before[name]!r}, got {now[name]!r}; give the same, or another --out"
                )

    def begin(self, record: Mapping[str, Any], position: Position, *, has_more: bool) -> None:
        """Make the directory what it was at ``position``; later metrics and half-written files go."""
        if not self.is_lead:
            return
        self.path.mkdir(parents=True, exist_ok=True)
        write_whole(self.path / "config.json", json.dumps(record, indent=1) + "\n")  # first: it says whose this is
        self._checkpoints.mkdir(exist_ok=True)
        for leftover in [*self._checkpoints.glob(".*"), *self.path.glob(f".hf*{_PARTIAL}")]:
            shutil.rmtree(leftover)
        if has_more:
            shutil.rmtree(self.export_path, ignore_errors=True)
        with self.metrics_path.open("ab") as file:
            file.truncate(position.metrics_bytes)

    def policy_path(self, position: Position) -> Path:
        """What ``Policy.restore`` reads."""
        return self._checkpoint(position.step) / "policy"

    def save(
        self, position: Position, save_policy: Callable[[Path], None], *, barrier: Callable[[], object], keep: int
    ) -> None:
        """Write a checkpoint (collective): seen whole or not at all, and older ones go only afterwards."""
        final = self._checkpoint(position.step)
        aside = final.with_name(f".{final.name}.partial")
        if self.is_lead:
            shutil.rmtree(aside, ignore_errors=True)
            aside.mkdir(parents=True)
        barrier()
        save_policy(aside / "policy")
        if self.is_lead:
            write_whole(aside / "position.json", json.dumps(asdict(position)) + "\n")
            fsync(aside)
            aside.rename(final)
            fsync(final.parent)
            self._prune(keep)
        barrier()

    def export(self, write: Callable[[Path], None], *, barrier: Callable[[], object]) -> None:
        """Write the result (collective); the directory appears when it is complete."""
        aside = self.path / ".hf.partial"
        if self.is_lead:
            shutil.rmtree(aside, ignore_errors=True)
        barrier()
        write(aside)
        barrier()
        if self.is_lead:
            shutil.rmtree(self.export_path, ignore_errors=True)
            for path in (*aside.iterdir(), aside):
                fsync(path)
            aside.rename(self.export_path)
            fsync(self.path)
        barrier()

    def _checkpoint(self, step: int) -> Path:
        return self._checkpoints / f"step-{step:06d}"

    def _saved(self) -> list[Path]:
        """Complete checkpoints, oldest first."""
        if not self._checkpoints.is_dir():
            return []
        found = [path for path in self._checkpoints.iterdir() if re.fullmatch(r"step-\d+", path.name)]
        return sorted(found, key=lambda path: int(path.name.removeprefix("step-")))

    def _newest(self) -> Path | None:
        return next(reversed(self._saved()), None)

    def _prune(self, keep: int) -> None:
        for path in self._saved()[:-keep]:
            # Renamed first: a checkpoint that is half gone must not look like a whole one.
            doomed = path.with_name(f".{path.name}.removed")
            path.rename(doomed)
            shutil.rmtree(doomed, ignore_errors=True)


class MetricsLog:
    """Appends lines to metrics.jsonl; does nothing on ranks that do not lead."""

    def __init__(self, run_dir: RunDir) -> None:
        self._file = run_dir.metrics_path.open("ab") if run_dir.is_lead else None

    def __enter__(self) -> MetricsLog:
        return self

    def __exit__(self, *_: object) -> None:
        if self._file is not None:
            self._file.close()

    def append(self, line: Mapping[str, Any]) -> None:
        """Write one step's line, at once visible to readers."""
        if self._file is not None:
            self._file.write(json.dumps(line, allow_nan=False).encode() + b"\n")
            self._file.flush()

    def sync(self) -> int:
        """Bring the lines to the disk; returns the file's length."""
        if self._file is None:
            return 0
        os.fsync(self._file.fileno())
        return self._file.tell()


def write_whole(path: Path, text: str) -> None:
    """Write a small file; readers see the old or the new content."""
    aside = path.with_name(f".{path.name}.partial")
    aside.write_text(text)
    fsync(aside)
    aside.replace(path)


def fsync(path: Path) -> None:
    """Bring a file or a directory to the disk."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _leaves(value: Any, name: str = "") -> Iterator[tuple[str, Any]]:
    if isinstance(value, dict) and value:
        for key, inner in value.items():
            yield from _leaves(inner, f"{name}.{key}" if name else key)
    else:
        yield name, value
