"""Temporary folders that say whose they are, so that the next start can sweep those of the dead.

A folder is named after its owner's process id and start time: a process id alone comes back.
"""

from __future__ import annotations

import getpass
import os
import shutil
import tempfile
from pathlib import Path

MARK = "DOCKYARD_SCRATCH"
"""Environment variable with the run's folder; every process of a run inherits it."""


def make(kind: str) -> Path:
    """Make an empty folder for this process; short, because Ray puts sockets below it.

    Inside a run's own folder where there is one on this machine, so that it goes with the run.
    """
    run = Path(os.environ.get(MARK, ""))
    parent = run if run.is_absolute() and run.is_dir() else base()
    folder = parent / f"{kind}-{_identity('self')}"
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    return folder


def sweep() -> int:
    """Remove the folders of processes that are gone; returns how many."""
    if not base().is_dir():
        return 0
    count = 0
    for folder in base().iterdir():
        pid = folder.name.rpartition("-")[2].partition(".")[0]
        if pid.isdigit() and folder.name.rpartition("-")[2] != _identity(pid):
            shutil.rmtree(folder, ignore_errors=True)
            count += 1
    return count


def base() -> Path:
    """Folder of this user's scratch folders on this machine."""
    return Path(tempfile.gettempdir()) / f"dockyard-{getpass.getuser()}"


def _identity(pid: str) -> str:
    """``pid.starttime`` of a living process, "" of a dead one (proc(5), field 22 of stat)."""
    try:
        stat = Path(f"/proc/{pid}/stat").read_text()
    except (FileNotFoundError, ProcessLookupError):
        return ""
    number, _, rest = stat.partition(" ")
    return f"{number}.{rest.rpartition(')')[2].split()[19]}"
