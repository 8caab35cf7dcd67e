# ruff: noqa: PTH123
# Between fork and exec pathlib costs more than it clarifies.
"""A run that stays: its init takes one call after the other and forks a confined process for each.

consumes: one message per call on a unix socket: a memory file with the call, and three pipe ends
waits for: the next message; the end of the call's process, its deadline, or the server letting go
"""

from __future__ import annotations

import errno
import marshal
import os
import select
import signal
import socket
import time
from typing import Any

from . import files
from .process import Job, confine, receive, report

FD_NAMES = ("job", "output", "result", "control")
_REAP_EVERY_MS = 200


def serve(job: Job, fds: dict[str, int], directory: str, *, is_pid_1: bool) -> None:
    """Serve calls from the socket in ``fds["records"]`` until it closes."""
    report(fds["status"], {"started": time.monotonic()})
    os.close(fds["output"])
    with socket.socket(fileno=fds["records"]) as channel:
        channel.send(b"ready")
        while True:
            if not select.select([channel], [], [], 1.0)[0]:
                _reap()
                continue
            received = receive(channel, FD_NAMES)
            if not received:
                break
            _serve_call(job, received, directory, is_pid_1)
    report(fds["status"], {"wait_status": 0})


def _serve_call(job: Job, fds: dict[str, int], directory: str, is_pid_1: bool) -> None:
    with open(fds["job"], "rb") as file:
        call: dict[str, Any] = marshal.load(file)
    if call["op"] == "list":
        kill_others(is_pid_1, job["drop_to"])  # what is scored must not change while it is read
    began = time.monotonic()
    child = os.fork()
    if child == 0:
        os.close(fds["control"])
        _run_call({**job, "deadline_s": call["timeout_s"]}, call, fds, directory)
    os.close(fds["output"])
    end, status = _wait(child, fds["control"], call["timeout_s"])
    os.close(fds["control"])
    report(fds["result"], {"end": end, "wait_status": status, "duration_s": time.monotonic() - began})
    os.close(fds["result"])


def _run_call(job: Job, call: dict[str, Any], fds: dict[str, int], directory: str) -> None:
    """In the forked process: a shell command, or one of our own functions on the files. Never returns."""
    try:
        confine(job, directory, output=fds["output"])
        if call["op"] == "exec":
            shell = ["/bin/sh", "-c", call["command"]]
            if job["wrap"]:
                shell = [*job["wrap"], *shell]
            os.execve(shell[0], shell, job["env"])
        files.OPERATIONS[call["op"]]({**call, "tmp": job["tmp"]})
        os._exit(0)
    except OSError as error:
        name = errno.errorcode.get(error.errno or 0, "error")
        os.write(1, f"{name}: {error.strerror or error}\n".encode(errors="replace"))
    finally:
        os._exit(127)  # whatever happens, this process must not go on as a second init


def _wait(child: int, control: int, timeout_s: float) -> tuple[str, int]:
    """Wait for ``child``; kill its process group at the deadline, or when the server closes its control pipe."""
    poller = select.poll()
    poller.register(control, select.POLLIN | select.POLLHUP)
    pidfd = os.pidfd_open(child)
    poller.register(pidfd, select.POLLIN)
    deadline = time.monotonic() + timeout_s
    end = "exited"
    status: int | None = None
    while status is None:
        left_ms = max(0.0, deadline - time.monotonic()) * 1000
        ready = dict(poller.poll(min(left_ms, _REAP_EVERY_MS) if end == "exited" else _REAP_EVERY_MS))
        if end == "exited" and (control in ready or left_ms <= 0):
            end = "cancelled" if control in ready else "deadline"
            poller.unregister(control)
            _kill_group(child)
        status = _reap(child)
    os.close(pidfd)
    return end, status


def _kill_group(child: int) -> None:
    for kill, pid in ((os.killpg, child), (os.kill, child)):  # it may not lead its group yet
        try:
            kill(pid, signal.SIGKILL)
        except ProcessLookupError:
            pass


def _reap(child: int | None = None) -> int | None:
    """Reap what has ended; returns the wait status of ``child`` if it is among that."""
    found = None
    while True:
        try:
            pid, status = os.waitpid(-1, os.WNOHANG)
        except ChildProcessError:
            return found
        if pid == 0:
            return found
        if pid == child:
            found = status


def kill_others(is_pid_1: bool, uid: int) -> None:
    """Kill every other process of the run."""
    if is_pid_1:
        try:
            os.kill(-1, signal.SIGKILL)  # all of this namespace but its init
        except ProcessLookupError:
            pass
        while True:
            try:
                os.waitpid(-1, 0)
            except ChildProcessError:
                return
    from .plain import kill_descendants

    kill_descendants(uid)
