# ruff: noqa: PTH110, PTH123
# Between fork and exec pathlib costs more than it clarifies.
"""The control groups of one run: made by its supervisor, joined by its init, removed at its end."""

from __future__ import annotations

import os
import time
from typing import Any, NamedTuple

Job = dict[str, Any]

_PERIOD_US = 100_000
_SHM_MB = 64  # of /dev/shm, which no other limit counts
_OWN_PROCESSES = 2  # the init, and the test process itself
_REMOVAL_S = 2.0  # the kernel answers EBUSY for a moment after the last process has gone
_RETRY_S = 0.0005


class Group(NamedTuple):
    """One directory; its parent stays open, since the init's pivot_root takes the supervisor's paths away."""

    parent: int
    name: str
    path: str


def create(job: Job) -> list[Group]:
    """Make the run's group below each of the server's and set its limits. Raises OSError."""
    name = f"run-{os.getpid()}-{time.monotonic_ns()}"
    made: list[Group] = []
    try:
        for parent, controllers in job["cgroups"]:
            group = Group(os.open(parent, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC), name, f"{parent}/{name}")
            os.mkdir(name, dir_fd=group.parent)
            made.append(group)
            for file, value in _limits(job, controllers):
                _set(f"{group.path}/{file}", value, is_optional="swap" in file or "memsw" in file)
    except OSError:
        remove(made)
        raise
    return made


def _limits(job: Job, controllers: list[str]) -> list[tuple[str, str]]:
    # the pages of the run's tmpfs count as its memory here, and as disk_mb for the user
    memory = str((job["memory_mb"] + job["disk_mb"] + _SHM_MB) * 1024 * 1024)
    pids = str(job["pids"] + _OWN_PROCESSES)
    quota = None if job["cpus"] is None else str(int(job["cpus"] * _PERIOD_US))
    values = {
        "memory.v1": [("memory.limit_in_bytes", memory), ("memory.memsw.limit_in_bytes", memory)],
        "memory.v2": [("memory.max", memory), ("memory.swap.max", "0")],
        "pids.v1": [("pids.max", pids)],
        "pids.v2": [("pids.max", pids)],
        "cpu.v1": [] if quota is None else [("cpu.cfs_period_us", str(_PERIOD_US)), ("cpu.cfs_quota_us", quota)],
        "cpu.v2": [] if quota is None else [("cpu.max", f"{quota} {_PERIOD_US}")],
    }
    return [pair for controller in controllers for pair in values[controller]]


def join(groups: list[Group]) -> None:
    """Move this process, which has one thread, into the groups; its children are born there. Raises OSError."""
    for group in groups:
        # version 1 moves the calling thread at once; a process waits some 10 ms for every CPU of the machine
        file = "tasks" if os.path.exists(f"{group.path}/tasks") else "cgroup.procs"
        _set(f"{group.path}/{file}", "0", is_optional=False)


def num_oom_kills(groups: list[Group]) -> int:
    """How many processes of the groups the kernel killed for memory."""
    found = 0
    for group in groups:
        for file in ("memory.oom_control", "memory.events"):
            try:
                with open(os.open(f"{group.name}/{file}", os.O_RDONLY, dir_fd=group.parent)) as stream:
                    fields = [line.split() for line in stream]
            except OSError:
                continue
            found += sum(int(words[1]) for words in fields if words[0] == "oom_kill")
    return found


def remove(groups: list[Group]) -> None:
    """Remove the groups; what cannot be removed now is left to the next server's sweep."""
    end = time.monotonic() + _REMOVAL_S
    for group in groups:
        while True:
            try:
                os.rmdir(group.name, dir_fd=group.parent)
            except FileNotFoundError:
                pass
            except OSError:
                if time.monotonic() < end:
                    time.sleep(_RETRY_S)
                    continue
            break
        os.close(group.parent)


def _set(path: str, value: str, *, is_optional: bool) -> None:
    try:
        with open(path, "w") as file:
            file.write(value)
    except OSError:
        if not is_optional:
            raise
