# ruff: noqa: PTH123
# Between fork and exec pathlib costs more than it clarifies.
"""The launcher: receive jobs with their pipes, fork a supervisor for each, never block on one.

Its interpreter is bare, or, for the warm path, one that has imported pytest: see ``jail/zygote.py``.

consumes: one message per run on a unix socket: a memory file with the job, and four pipe ends
waits for: nothing but the next message; closing the socket ends it and every run
"""

from __future__ import annotations

import gc
import io
import marshal
import os
import resource
import select
import signal
import socket
import sys
import time
from typing import Any

from . import cgroup, memory, namespaces, plain, seccomp
from . import syscalls as sc
from .process import Job, Program, receive, report

FD_NAMES = ("job", "output", "records", "result", "control")


def main(fd: int, program: Program | None = None) -> None:
    """Serve jobs from the socket ``fd`` until it closes; test processes run ``program``, or what their job names."""
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, signal.SIG_IGN)  # the server ends us by closing the socket
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)
    seccomp.prepare()
    gc.freeze()
    with socket.socket(fileno=fd) as channel:
        while True:
            fds = receive(channel, FD_NAMES)
            if not fds:
                return
            if os.fork() == 0:
                channel.close()
                _supervise(fds, program)
                os._exit(0)
            for fd_received in fds.values():
                os.close(fd_received)


def _supervise(fds: dict[str, int], program: Program | None) -> None:
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGCHLD):
        signal.signal(number, signal.SIG_DFL)
    with open(fds["job"], "rb") as file:
        job: Job = {**marshal.load(file), "program": program}
    try:
        report(fds["result"], _run(job, fds))
    except BrokenPipeError:
        pass  # the server has let go: nobody wants to know any more


def _run(job: Job, fds: dict[str, int]) -> dict[str, Any]:
    began = time.monotonic()
    status_read, fds["status"] = os.pipe()
    proc = os.open("/proc", os.O_RDONLY | os.O_DIRECTORY)  # the init's pivot_root takes this process along
    namespaced = job["level"] == "namespaces"
    groups: list[cgroup.Group] = []
    try:
        groups = cgroup.create(job)
        if namespaced:
            namespaces.enter(job)
        sc.prctl(sc.PR_SET_PDEATHSIG, signal.SIGKILL)
        init = os.fork()
    except OSError as error:
        cgroup.remove(groups)
        return {"end": "setup_failed", "error": f"{job['level']}: {error}"}
    if init == 0:
        os.close(proc)
        _init(job, fds, namespaced, groups)
    for name in ("output", "records", "status"):
        os.close(fds[name])
    end = _wait(init, fds["control"], proc, job, signal.SIGKILL if namespaced else signal.SIGTERM)
    if end == "exited" and cgroup.num_oom_kills(groups):
        end = "memory"
    cgroup.remove(groups)
    usage = resource.getrusage(resource.RUSAGE_CHILDREN)
    result: dict[str, Any] = {"end": end, "cpu_s": usage.ru_utime + usage.ru_stime, "max_rss_kb": usage.ru_maxrss}
    for message in _messages(status_read):
        result.update(message)
    if "error" in result or (end == "exited" and "wait_status" not in result):
        result["end"] = "setup_failed"
        result.setdefault("error", "the init process died before the test process did")
    finished = time.monotonic()
    started = result.pop("started", finished)
    return {**result, "start_s": started - began, "test_s": finished - started}


def _init(job: Job, fds: dict[str, int], namespaced: bool, groups: list[cgroup.Group]) -> None:
    try:
        os.close(fds["result"])
        os.close(fds["control"])
        cgroup.join(groups)
        (namespaces if namespaced else plain).run_init(job, fds)
    except OSError as error:
        report(fds["status"], {"error": str(error)})
    finally:
        os._exit(0)


def _wait(init: int, control: int, proc: int, job: Job, kill_signal: int) -> str:
    """Wait for the init; kill it at a limit, or when the server closes its control pipe."""
    pidfd = os.pidfd_open(init)
    poller = select.poll()
    poller.register(pidfd, select.POLLIN)
    poller.register(control, select.POLLIN | select.POLLHUP)
    deadline = time.monotonic() + job["deadline_s"]
    look_every_s = memory.INTERVAL_S * (5 if job["is_session"] else 1)  # sessions are mostly idle
    while True:
        left_s = max(0.0, deadline - time.monotonic())
        ready = dict(poller.poll(min(left_s, look_every_s) * 1000))
        end = "exited" if pidfd in ready else "cancelled" if control in ready else "deadline"
        if not ready and left_s > 0:
            if not memory.exceeds(proc, init, job["memory_mb"]):
                continue
            end = "memory"
        break
    if end != "exited":
        os.kill(init, kill_signal)
    os.waitpid(init, 0)
    return end


def _messages(fd: int) -> list[dict[str, Any]]:
    with open(fd, "rb") as pipe:
        stream = io.BytesIO(pipe.read())
    messages: list[dict[str, Any]] = []
    while stream.tell() < len(stream.getbuffer()):
        messages.append(marshal.load(stream))
    return messages


if __name__ == "__main__":
    main(int(sys.argv[1]))
