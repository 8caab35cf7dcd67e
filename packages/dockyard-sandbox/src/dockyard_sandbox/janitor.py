"""Directories and control groups that name their owner, and the sweep of those whose owner is dead."""

from __future__ import annotations

import os
import re
import shutil
from collections.abc import Iterable
from pathlib import Path

_NAME = re.compile(r"^(?P<boot>[0-9a-f]{8})-(?P<pid>\d+)-(?P<started>\d+)$")


def owner_name() -> str:
    """Name of this process: unlike a pid, no other process ever has it."""
    return f"{_boot_id()}-{os.getpid()}-{_start_time(os.getpid())}"


def is_owner_alive(name: str) -> bool:
    """Whether the process that `owner_name` named runs."""
    match = _NAME.match(name)
    return match is not None and match["boot"] == _boot_id() and _start_time(int(match["pid"])) == match["started"]


def create_scratch(root: Path) -> Path:
    """Create this process's scratch directory under ``root/scratch``."""
    scratch = root / "scratch" / owner_name()
    scratch.mkdir(parents=True, mode=0o755)
    return scratch


def sweep(root: Path, *, partials: Iterable[str] = ("trees", "environments")) -> list[str]:
    """Remove what dead executors left; return the names removed.

    Processes and mounts need no sweep: they live in namespaces that end with their executor. Control groups
    have a sweep of their own: `dockyard_sandbox.cgroups.sweep`.
    """
    removed = []
    for directory in sorted((root / "scratch").glob("*")):
        if not is_owner_alive(directory.name):
            shutil.rmtree(directory, ignore_errors=True)
            removed.append(directory.name)
    for parent in partials:
        for partial in (root / parent).glob(".new-*"):
            if not any((root / "scratch").glob("*")):  # another live executor may be writing it
                shutil.rmtree(partial, ignore_errors=True)
                removed.append(partial.name)
    return removed


def _boot_id() -> str:
    return Path("/proc/sys/kernel/random/boot_id").read_text()[:8]


def _start_time(pid: int) -> str | None:
    """Clock ticks since boot at which ``pid`` started; tells a reused pid from the old one."""
    try:
        fields = Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()
    except OSError:
        return None
    return None if fields[0] in "ZX" else fields[19]
