"""The checkpoints folder of a run: written aside, hashed, synced, renamed, pruned.

checkpoints/
  step-000010/            complete: every file has the hash that manifest.json gives
  latest -> step-000010   the newest complete one
  best -> step-000004     the best one, when some are kept for being best
  .step-000012.partial/   being written, or left by a life that died; no reader looks at it
  .step-000008.removed/   being deleted

A process that dies between any two stages leaves the old complete checkpoints, or these and the new one.
"""

from __future__ import annotations

import contextlib
import json
import os
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from dockyard_grpo.resume import is_complete, sha256, step_of
from dockyard_grpo.retention import Retention


def open_partial(folder: Path, step: int) -> Path:
    """An empty folder to write the checkpoint of ``step`` into. Raises OSError."""
    partial = folder / f".step-{step:06d}.partial"
    shutil.rmtree(partial, ignore_errors=True)
    partial.mkdir(parents=True)
    return partial


def commit(partial: Path, metrics: Mapping[str, Any]) -> Path:
    """Make a written checkpoint a complete one, and ``latest`` name it. Returns its final path.

    Raises OSError, and then every earlier checkpoint and ``latest`` are as they were, and ``partial`` is
    still there. Only when the last fsync of all fails is the new one there: nobody knows whether it would
    outlive a power cut.

    Args:
        partial: from `open_partial`, with every file closed.
        metrics: row of its step; only finite numbers.
    """
    final = final_path(partial)
    write_manifest(partial, metrics)
    sync_tree(partial)
    try:
        stage_link(final.parent, "latest", final.name)
        is_new = publish(partial, final)
        try:
            swing_link(final.parent, "latest")
        except OSError:
            if is_new:
                final.rename(partial)
            raise
    finally:
        unstage_link(final.parent, "latest")
    sync_folder(final.parent)
    return final


def final_path(partial: Path) -> Path:
    """Where a partial checkpoint goes."""
    return partial.with_name(partial.name.removeprefix(".").removesuffix(".partial"))


def write_manifest(partial: Path, metrics: Mapping[str, Any]) -> None:
    """Hash every file."""
    hashes: dict[str, str] = {}
    by_inode: dict[tuple[int, int], str] = {}
    for path in sorted(path for path in partial.rglob("*") if path.is_file()):
        stat = path.stat()
        inode = stat.st_dev, stat.st_ino
        if inode not in by_inode:  # weights that are linked twice are read once
            by_inode[inode] = sha256(path)
        hashes[str(path.relative_to(partial))] = by_inode[inode]
    manifest = {"step": step_of(final_path(partial)), "metrics": dict(metrics), "sha256": hashes}
    (partial / "manifest.json").write_text(json.dumps(manifest, indent=1, allow_nan=False))


def sync_tree(partial: Path) -> None:
    """Bring every file and every folder to the disk, the files first."""
    paths = sorted(partial.rglob("*"), key=lambda path: path.is_dir())
    for path in (*paths, partial):
        sync_folder(path)


def publish(partial: Path, final: Path) -> bool:
    """The commit point: a reader sees all of the checkpoint from here on. Returns whether it is the one given.

    A checkpoint of this step that is there already is of an earlier life. A damaged one would be resumed
    from if it stayed beside the link, so it goes; a complete one is of the same lineage and stays itself,
    for there must be no moment without it.
    """
    if final.exists():
        if is_complete(final):
            shutil.rmtree(partial)
            return False
        shutil.rmtree(final)
    partial.rename(final)
    return True


def stage_link(folder: Path, name: str, target: str) -> None:
    """Make the link aside, so that a disk without room says so before the commit point."""
    unstage_link(folder, name)
    (folder / f".{name}.partial").symlink_to(target)


def unstage_link(folder: Path, name: str) -> None:
    """Remove a staged link that was not swung, if there is one."""
    (folder / f".{name}.partial").unlink(missing_ok=True)


def swing_link(folder: Path, name: str) -> None:
    """Put the staged link in place of the one before, in one move."""
    (folder / f".{name}.partial").rename(folder / name)


def sync_folder(path: Path) -> None:
    """Fsync a folder, or a file."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def prune(folder: Path, retention: Retention, *, newest: int) -> None:
    """Delete what need not be kept, after ``newest`` is complete; ``best`` then names the best one.

    Later steps than ``newest`` are of another life, and not touched. Raises OSError.
    """
    metrics = {step: row for step, row in stored_metrics(folder).items() if step <= newest}
    best = retention.best(metrics)
    if best:
        stage_link(folder, "best", f"step-{best[0]:06d}")
        swing_link(folder, "best")
    else:
        (folder / "best").unlink(missing_ok=True)
    kept = {newest, *retention.kept(metrics)}
    for path in sorted(folder.glob("step-*")):
        step = step_of(path)
        if step is not None and step < newest and step not in kept:
            # Renamed first: a checkpoint that lost half of its files must not look like one.
            removed = folder / f".{path.name}.removed"
            path.rename(removed)
            shutil.rmtree(removed)
    sync_folder(folder)


def stored_metrics(folder: Path) -> dict[int, Mapping[str, Any]]:
    """Metrics row by step, of every checkpoint with a manifest that can be read."""
    found: dict[int, Mapping[str, Any]] = {}
    for path in folder.glob("step-*"):
        step = step_of(path)
        with contextlib.suppress(OSError, ValueError, AttributeError):
            if step is not None:
                found[step] = dict(json.loads((path / "manifest.json").read_text()).get("metrics") or {})
    return found


def sweep(folder: Path) -> None:
    """Remove what lives that died have left half-written or half-deleted in this run's folder."""
    for pattern in (".step-*.partial", ".step-*.removed"):
        for path in folder.glob(pattern):
            shutil.rmtree(path, ignore_errors=True)
    for name in ("latest", "best"):
        unstage_link(folder, name)
