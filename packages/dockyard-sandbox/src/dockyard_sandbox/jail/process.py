"""Start the test process with nothing but its limits, and reap what it leaves."""

from __future__ import annotations

import marshal
import os
import resource
import signal
import time
from typing import Any

from . import seccomp

Job = dict[str, Any]  # one message of our own server: see dockyard_sandbox.jailer.build_job

MIB = 1024 * 1024


def start_test_process(job: Job, fds: dict[str, int], directory: str) -> int:
    """Fork the test process and return its pid."""
    report(fds["status"], {"started": time.monotonic()})
    child = os.fork()
    if child:
        for name in ("output", "records"):
            os.close(fds[name])
        return child
    try:
        _exec_test(job, fds, directory)
    except OSError as error:
        report(fds["status"], {"error": f"test process: {error}"})
    os._exit(127)


def _exec_test(job: Job, fds: dict[str, int], directory: str) -> None:
    os.setsid()
    os.chdir(directory)
    os.umask(0o022)
    null = os.open("/dev/null", os.O_RDONLY)
    for source, target in ((null, 0), (fds["output"], 1), (fds["output"], 2), (fds["records"], 3)):
        os.dup2(source, target)
    _set_limits(job)
    if job["seccomp"]:
        seccomp.install()
    for number in (signal.SIGPIPE, signal.SIGINT, signal.SIGCHLD):
        signal.signal(number, signal.SIG_DFL)
    os.execve(job["argv"][0], job["argv"], job["env"])


def _set_limits(job: Job) -> None:
    memory = job["memory_mb"] * MIB
    for kind, value in (
        (resource.RLIMIT_AS, memory),
        (resource.RLIMIT_NPROC, job["pids"]),
        (resource.RLIMIT_FSIZE, job["disk_mb"] * MIB),
        (resource.RLIMIT_CORE, 0),
        (resource.RLIMIT_NOFILE, 1024),
        (resource.RLIMIT_MEMLOCK, 0),
        (resource.RLIMIT_MSGQUEUE, 0),
        (resource.RLIMIT_CPU, int(job["deadline_s"]) * 4 + 60),
    ):
        resource.setrlimit(kind, (value, value))


def reap_until(child: int, status_fd: int) -> None:
    """Reap every process that ends until ``child`` does, then report its wait status."""
    while True:
        pid, status = os.waitpid(-1, 0)
        if pid == child:
            report(status_fd, {"wait_status": status})
            return


def report(fd: int, message: dict[str, Any]) -> None:
    """Send one message to the supervisor; small enough to be atomic on a pipe."""
    os.write(fd, marshal.dumps(message))
