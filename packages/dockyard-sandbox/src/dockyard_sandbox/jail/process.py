"""Start the test process with nothing but its limits, and reap what it leaves."""

from __future__ import annotations

import marshal
import os
import resource
import signal
import socket
import time
from collections.abc import Callable, Sequence
from typing import Any, NoReturn

from . import landlock, seccomp
from . import syscalls as sc

Job = dict[str, Any]  # one message of our own server: see dockyard_sandbox.jailer
Program = Callable[[Job], NoReturn]  # what a forked test process goes on with, where it executes nothing new

MIB = 1024 * 1024


def receive(channel: socket.socket, names: Sequence[str]) -> dict[str, int]:
    """One message's descriptors by name; {} = the other side has closed. None of them outlives an exec."""
    message, fds, _, _ = socket.recv_fds(channel, 16, len(names))
    for fd in fds:
        os.set_inheritable(fd, False)
    return dict(zip(names, fds, strict=True)) if message else {}


def start_test_process(job: Job, fds: dict[str, int], directory: str) -> int:
    """Fork the test process and return its pid."""
    report(fds["status"], {"started": time.monotonic()})
    child = os.fork()
    if child:
        for name in ("output", "records"):
            os.close(fds[name])
        return child
    try:
        confine(job, directory, output=fds["output"], records=fds["records"])
        if job["program"] is not None:
            job["program"](job)
        os.execve(job["argv"][0], job["argv"], job["env"])
    except OSError as error:
        report(fds["status"], {"error": f"test process: {error}"})
    finally:
        os._exit(127)  # whatever happens, this process must not go on as a second init


def confine(job: Job, directory: str, *, output: int, records: int | None = None) -> None:
    """Turn this forked process into one that may run the repository's code. Raises OSError."""
    os.setsid()
    os.chdir(directory)
    os.umask(0o022)
    null = os.open("/dev/null", os.O_RDONLY)
    for source, target in ((null, 0), (output, 1), (output, 2), (null if records is None else records, 3)):
        os.dup2(source, target)
    _set_limits(job)
    if job["drop_to"]:
        _drop_to(job["drop_to"])
    if job["landlock"] is not None:
        landlock.restrict(job["landlock"]["read"], job["landlock"]["write"])
    if job["seccomp_fd"] >= 0:  # another program installs the filter, and reads it from its beginning
        os.lseek(job["seccomp_fd"], 0, os.SEEK_SET)
    elif job["seccomp"]:
        seccomp.install(sockets=job["landlock"] is None)
    for number in (signal.SIGPIPE, signal.SIGINT, signal.SIGCHLD, signal.SIGTERM):
        signal.signal(number, signal.SIG_DFL)


def _drop_to(uid: int) -> None:
    """Become a user that owns nothing but the run's own files: for levels without namespaces."""
    os.setgroups([])
    os.setresgid(uid, uid, uid)
    os.setresuid(uid, uid, uid)
    sc.drop_capabilities()


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
