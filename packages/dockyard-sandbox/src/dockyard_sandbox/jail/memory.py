# ruff: noqa: PTH123, PTH208
# Between fork and exec pathlib costs more than it clarifies.
"""What all processes of a run hold together: a resource limit bounds each of them only.

A watch, not a wall: between two looks a run can take more. Where it matters, run the server in a
memory control group of its own.
"""

from __future__ import annotations

import os

INTERVAL_S = 0.2
_PAGE = os.sysconf("SC_PAGE_SIZE")


def exceeds(proc: int, init: int, limit_mb: int) -> bool:
    """Whether ``init`` and its descendants hold more than ``limit_mb`` MiB.

    ``proc`` is a descriptor of /proc, opened before the run's own /proc took its place.
    """
    limit = limit_mb * 1024 * 1024
    pids = _family(proc, init)
    # resident pages count what forks share in each of them: cheap to read, and never too small
    if sum(int(_read(proc, f"{pid}/statm", "0 0").split()[1]) * _PAGE for pid in pids) <= limit:
        return False
    return sum(_proportional(proc, pid, is_ours=pid == init) for pid in pids) > limit


def _family(proc: int, init: int) -> list[int]:
    family = [init]
    for pid in family:  # grows while it is read
        try:
            tasks = os.open(f"{pid}/task", os.O_RDONLY | os.O_DIRECTORY, dir_fd=proc)
        except OSError:
            continue  # it has ended
        try:
            threads = os.listdir(tasks)
        except OSError:
            threads = []
        finally:
            os.close(tasks)
        for thread in threads:
            family += map(int, _read(proc, f"{pid}/task/{thread}/children", "").split())
    return family


def _proportional(proc: int, pid: int, *, is_ours: bool) -> int:
    """What a process holds, its part only of what it shares; all that is no file's where it may not be looked into."""
    lines = _read(proc, f"{pid}/smaps_rollup", "").splitlines()
    if not lines and not is_ours:  # a root without CAP_SYS_PTRACE
        _, resident, shared = map(int, _read(proc, f"{pid}/statm", "0 0 0").split()[:3])
        return (resident - shared) * _PAGE
    return sum(int(line.split()[1]) * 1024 for line in lines if line.startswith("Pss:"))


def _read(proc: int, path: str, otherwise: str) -> str:
    try:
        with open(os.open(path, os.O_RDONLY, dir_fd=proc)) as file:
            return file.read() or otherwise
    except OSError:
        return otherwise
