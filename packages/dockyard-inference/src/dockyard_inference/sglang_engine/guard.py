"""Runs a server and makes sure that neither a process nor a folder of it outlives its owner.

Started by path, with whatever interpreter, so it needs nothing but the standard library:

    python guard.py OWNER_PID NUM_FOLDERS FOLDER... COMMAND...

The first line of its standard input is the command's environment, a JSON object; the guard needs none, and
so is not found by those who look for processes by a mark in it. It ends when its input is closed, when
the owner is gone, or when the command ends. Then it kills every process that descends from the command,
and removes the folders, and what SGLang and multiprocessing would leave in shared memory. Without a
command it only watches over the folders.
"""

from __future__ import annotations

import ctypes
import json
import os
import select
import shutil
import signal
import subprocess
import sys
from pathlib import Path

_PR_SET_PDEATHSIG, _PR_SET_CHILD_SUBREAPER = 1, 36
_SHARED_MEMORY = Path("/dev/shm")
_LEFT_BEHIND = ("sglang_loads_", "sem.mp-")
"""Names of what a killed server does not unlink: the scheduler's load, multiprocessing's semaphores."""
_LOOK_MS = 2000


def _prctl(option: int, value: int) -> None:
    ctypes.CDLL(None, use_errno=True).prctl(option, value, 0, 0, 0)


def _die_with_guard() -> None:
    _prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)


def _wait_for_an_end(pids: list[int], server: subprocess.Popen[bytes] | None, mapped: set[int]) -> None:
    """Meanwhile add to ``mapped``: the dead map nothing."""
    try:
        watched = [os.pidfd_open(pid) for pid in pids]
    except ProcessLookupError:
        return
    poll = select.poll()
    if server is not None:
        watched.append(os.pidfd_open(server.pid))
    for descriptor in (0, *watched):
        poll.register(descriptor, select.POLLIN | select.POLLHUP)
    while not poll.poll(_LOOK_MS):
        mapped |= _shared_inodes(_descendants())
    mapped |= _shared_inodes(_descendants())


def _children(pid: int | str = "self") -> list[int]:
    found: list[int] = []
    for listing in Path(f"/proc/{pid}/task").glob("*/children"):
        try:
            found += map(int, listing.read_text().split())
        except OSError:  # it has ended
            continue
    return found


def _descendants() -> list[int]:
    found = _children()
    for pid in found:  # which grows
        found += _children(pid)
    return found


def _shared_inodes(pids: list[int]) -> set[int]:
    """Of what these processes map of the shared memory; a semaphore is mapped under a name that it had before."""
    inodes: set[int] = set()
    for pid in pids:
        try:
            lines = Path(f"/proc/{pid}/maps").read_text().splitlines()
        except OSError:
            continue
        inodes |= {int(line.split()[4]) for line in lines if f" {_SHARED_MEMORY}/" in line}
    return inodes


def _unlink_shared(inodes: set[int]) -> None:
    for prefix in _LEFT_BEHIND:
        for path in _SHARED_MEMORY.glob(f"{prefix}*"):
            try:
                if path.stat().st_ino in inodes:
                    path.unlink()
            except OSError:  # others remove theirs meanwhile
                continue


def _end_children() -> None:
    """As a subreaper this process inherits whatever a dying child leaves behind, so nothing is missed."""
    while True:
        for pid in _children():
            try:
                os.kill(pid, signal.SIGKILL)
            except ProcessLookupError:
                pass
        try:
            os.waitpid(-1, 0)
        except ChildProcessError:
            return


def _read_environment() -> dict[str, str] | None:
    """None when the input ended before."""
    line = b""
    while not line.endswith(b"\n"):
        part = os.read(0, 1 << 16)  # nothing follows the line
        if not part:
            return None
        line += part
    environment: dict[str, str] = json.loads(line)
    return environment


def main(words: list[str]) -> int:
    """Returns the command's exit code, or 0 when it was ended here."""
    owner_pid, count = int(words[0]), int(words[1])
    folders, command = words[2 : 2 + count], words[2 + count :]
    outer = os.getpid()
    # Ray and others kill the children of a process that ends, not what these started: the guard is a grandchild.
    if inner := os.fork():
        return os.waitstatus_to_exitcode(os.waitpid(inner, 0)[1])
    os.setsid()
    _prctl(_PR_SET_CHILD_SUBREAPER, 1)
    code = 0
    server = None
    mapped: set[int] = set()
    try:
        environment = _read_environment()
        if command and environment is not None:
            # This process has one thread, so the signal comes when it dies, not earlier.
            server = subprocess.Popen(command, stdin=subprocess.DEVNULL, env=environment, preexec_fn=_die_with_guard)
        _wait_for_an_end([owner_pid, outer], server, mapped)
        code = (server.poll() or 0) if server is not None else 0
    finally:
        _end_children()
        _unlink_shared(mapped)
        for folder in folders:
            shutil.rmtree(folder, ignore_errors=True)
    return code if code >= 0 else 128 - code


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
