"""Scratch directories that name their owner, and the sweep of those whose owner is dead."""

from __future__ import annotations

import os
import re
import shutil
from pathlib import Path

_NAME = re.compile(r"^(?P<boot>[0-9a-f]{8})-(?P<pid>\d+)-(?P<started>\d+)$")


def create_scratch(root: Path) -> Path:
    """Create this process's scratch directory under ``root/scratch``."""
    scratch = root / "scratch" / f"{_boot_id()}-{os.getpid()}-{_start_time(os.getpid())}"
    scratch.mkdir(parents=True, mode=0o755)
    return scratch


def sweep(root: Path) -> list[str]:
    """Remove what dead executors left; return the names removed.

    Processes and mounts need no sweep: they live in namespaces that end with their executor.
    """
    removed = []
    for directory in sorted((root / "scratch").glob("*")):
        match = _NAME.match(directory.name)
        if match is None or not _is_alive(match):
            shutil.rmtree(directory, ignore_errors=True)
            removed.append(directory.name)
    for partial in (root / "trees").glob(".new-*"):
        if not any((root / "scratch").glob("*")):  # another live executor may be writing it
            shutil.rmtree(partial, ignore_errors=True)
            removed.append(partial.name)
    return removed


def _is_alive(match: re.Match[str]) -> bool:
    return match["boot"] == _boot_id() and _start_time(int(match["pid"])) == match["started"]


def _boot_id() -> str:
    return Path("/proc/sys/kernel/random/boot_id").read_text()[:8]


def _start_time(pid: int) -> str | None:
    """Clock ticks since boot at which ``pid`` started; tells a reused pid from the old one."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[19]
    except OSError:
        return None
