"""Outlives a driver that was killed, ends what it left behind, and goes.

Ray's own processes follow a dead driver only in part, and some of them late. Every process of a run
inherits `MARK` with the run's scratch folder; this one waits for the driver's end and then kills
exactly those. It is started by path, without site-packages: it must cost nothing.
"""

from __future__ import annotations

import os
import select
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

MARK = "DOCKYARD_SCRATCH"  # as in `scratch`, which this file, run by path, cannot import
_GRACE_S = 3.0
_PATIENCE_S = 20.0


def start(folder: Path) -> subprocess.Popen[bytes]:
    """Mark this process and its future children, and start their reaper."""
    reaper = subprocess.Popen(
        [sys.executable, "-I", "-S", __file__, str(os.getpid()), str(folder)],
        stdin=subprocess.DEVNULL,
        start_new_session=True,
    )
    os.environ[MARK] = str(folder)
    return reaper


def marked(folder: str) -> list[int]:
    """Process ids whose environment carries the mark of ``folder``."""
    wanted = f"{MARK}={folder}".encode()
    found = []
    for entry in Path("/proc").iterdir():
        if not entry.name.isdigit():
            continue
        try:
            environment = (entry / "environ").read_bytes()
        except OSError:  # gone meanwhile, or another user's
            continue
        if wanted in environment.split(b"\0"):
            found.append(int(entry.name))
    return found


def reap(folder: str, *, spare: int | None = None) -> None:
    """Give marked processes a moment to end in order, then kill them and remove the folder.

    Args:
        folder: of the run.
        spare: a process id that carries the mark itself and must live on.
    """
    deadline = time.monotonic() + _PATIENCE_S
    grace = time.monotonic() + _GRACE_S
    while (alive := [pid for pid in marked(folder) if pid != spare]) and time.monotonic() < deadline:
        if time.monotonic() > grace:
            for pid in alive:
                try:
                    os.kill(pid, signal.SIGKILL)
                except ProcessLookupError:
                    continue
        time.sleep(0.2)
    shutil.rmtree(folder, ignore_errors=True)


def main() -> None:
    """Wait for the driver's end, then reap."""
    driver, folder = int(sys.argv[1]), sys.argv[2]
    try:
        watch = os.pidfd_open(driver)
    except ProcessLookupError:
        reap(folder)
        return
    poll = select.poll()
    poll.register(watch, select.POLLIN)
    poll.poll()
    reap(folder)


if __name__ == "__main__":
    main()
