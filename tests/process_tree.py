"""Processes below another one: which they are, and whether they are gone."""

from __future__ import annotations

import time
from pathlib import Path


def descendants(pid: int) -> set[int]:
    """Children, and theirs."""
    found: set[int] = set()
    for task in Path(f"/proc/{pid}/task").glob("*/children"):
        for child in map(int, task.read_text().split()):
            found |= {child} | descendants(child)
    return found


def is_alive(pid: int) -> bool:
    """Whether it still runs; one that nobody has waited for does not."""
    try:
        state = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except (FileNotFoundError, ProcessLookupError):
        return False
    return state not in "ZX"


def until_gone(pids: set[int], timeout_s: float = 60.0) -> set[int]:
    """Those that are alive after ``timeout_s``; returns as soon as there are none."""
    deadline = time.monotonic() + timeout_s
    while (alive := {pid for pid in pids if is_alive(pid)}) and time.monotonic() < deadline:
        time.sleep(0.05)
    return alive


def title(pid: int) -> str:
    """The command line."""
    return Path(f"/proc/{pid}/cmdline").read_bytes().replace(b"\0", b" ").decode(errors="replace")
