# ruff: noqa: PTH102, PTH114, PTH115, PTH112, PTH123
# Between fork and exec pathlib costs more than it clarifies.
"""The two weaker levels: bubblewrap where it is installed, and no isolation at all."""

from __future__ import annotations

import os
import shutil
import signal

from . import syscalls as sc
from .namespaces import TESTBED, copy_tree, write_delta
from .process import Job, reap_until, start_test_process


def run_init(job: Job, fds: dict[str, int]) -> None:
    """Copy the tree, run the test process on the copy, kill what it leaves, remove the copy."""
    sc.prctl(sc.PR_SET_PDEATHSIG, signal.SIGTERM)
    sc.prctl(sc.PR_SET_CHILD_SUBREAPER, 1)
    tree = f"{job['mount_point']}/tree-{os.getpid()}"
    os.mkdir(tree, 0o755)

    def stop(number: int, frame: object) -> None:
        raise SystemExit(128 + number)

    signal.signal(signal.SIGTERM, stop)
    try:
        copy_tree(job["lower"], tree, 0)
        write_delta(tree, job)
        if job["level"] == "bwrap":
            job["argv"] = _bwrap_command(job, tree)
            job["env"] = {}
        child = start_test_process(job, fds, tree)
        reap_until(child, fds["status"])
    except SystemExit:
        pass  # the supervisor's deadline; it knows
    finally:
        _kill_descendants()
        shutil.rmtree(tree, ignore_errors=True)


def _bwrap_command(job: Job, tree: str) -> list[str]:
    command = [job["bwrap"], "--unshare-all", "--die-with-parent", "--new-session", "--cap-drop", "ALL"]
    command += ["--unshare-user", "--uid", "1000", "--gid", "1000"]
    command += ["--tmpfs", "/tmp"]  # before the binds: an interpreter may lie there
    for name in ("bin", "sbin", "lib", "lib32", "lib64"):
        if os.path.islink(f"/{name}"):
            command += ["--symlink", os.readlink(f"/{name}"), f"/{name}"]
        elif os.path.isdir(f"/{name}"):
            command += ["--ro-bind", f"/{name}", f"/{name}"]
    for source, target in (("/usr", "/usr"), *job["binds"]):
        command += ["--ro-bind", source, target]
    command += ["--proc", "/proc", "--dev", "/dev", "--bind", tree, TESTBED, "--chdir", TESTBED]
    for path in job["readonly"]:
        command += ["--ro-bind-try", f"{tree}/{path}", f"{TESTBED}/{path}"]
    for name, value in job["env"].items():
        command += ["--setenv", name, value]
    return [*command, "--", *job["argv"]]


def _kill_descendants() -> None:
    """Kill whatever was re-parented to this subreaper, until nothing is left."""
    while True:
        children = _children()
        for pid in children:
            try:
                os.kill(pid, signal.SIGKILL)
            except ProcessLookupError:
                pass
        try:
            while os.waitpid(-1, 0 if children else os.WNOHANG) != (0, 0):
                pass
        except ChildProcessError:
            return


def _children() -> list[int]:
    with open(f"/proc/self/task/{os.getpid()}/children") as file:
        return [int(pid) for pid in file.read().split()]
