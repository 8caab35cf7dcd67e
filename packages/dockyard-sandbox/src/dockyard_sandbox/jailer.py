"""The server's side of the jail: one launcher process, one call per run.

`Jailer.run` blocks its thread; the server calls it from its worker threads. The launcher ends when
the socket closes, its runs end when their control pipes do, so a killed server leaves nothing.
"""

from __future__ import annotations

import json
import marshal
import os
import py_compile
import selectors
import signal
import socket
import subprocess
import sys
import tempfile
import threading
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from dockyard_sandbox.cancellation import Cancellation
from dockyard_sandbox.isolation import Environment, Isolation
from dockyard_sandbox.judge import RunResult
from dockyard_sandbox.wire import Limits

MAX_RECORD_BYTES = 32 * 1024 * 1024
_RUNNER_DIRECTORY = "/opt/dockyard"
_PACKAGE = Path(__file__).parent
_BOOT = "import sys; sys.path.insert(0, sys.argv[2]); from jail.main import main; main(int(sys.argv[1]))"


@dataclass(frozen=True, kw_only=True)
class Workload:
    """What one run executes, on which tree."""

    lower: Path
    files: dict[str, tuple[bool, bytes]]
    """Path to (executable, content) written over the base tree."""
    deleted: list[str]
    readonly: list[str]
    pytest_arguments: list[str]
    timeout_s: float
    limits: Limits


class Jailer:
    """Owns the launcher process and the compiled runner."""

    def __init__(self, scratch: Path, environment: Environment, isolation: Isolation) -> None:
        self.isolation = isolation
        self.environment = environment
        self._mount_point = scratch / "mnt"
        self._mount_point.mkdir(mode=0o755, exist_ok=True)
        self._runner = scratch / "runner" / "runner.pyc"
        self._runner.parent.mkdir(mode=0o755, exist_ok=True)
        py_compile.compile(str(_PACKAGE / "runner.py"), cfile=str(self._runner), dfile="runner.py", doraise=True)
        self._runner.chmod(0o644)
        self._lock = threading.Lock()
        self._launcher: subprocess.Popen[bytes] | None = None
        self._channel: socket.socket | None = None

    def run(self, work: Workload, cancellation: Cancellation) -> RunResult:
        """Run one workload to its end. Raises OSError when the launcher cannot be started."""
        output_read, output_write = os.pipe()
        record_read, record_write = os.pipe()
        result_read, result_write = os.pipe()
        control_read, control_write = os.pipe()
        job = self._job_file()
        theirs = [job, output_write, record_write, result_write, control_read]
        ours = [output_read, record_read, result_read]
        cancellation.attach(control_write)
        try:
            try:
                self._write_job(job, work)
                self._send(theirs)
            finally:
                for fd in theirs:
                    os.close(fd)
            return _pump(ours, cancellation, work.limits.output_kb * 1024)
        finally:
            cancellation.release()
            for fd in ours:
                os.close(fd)

    def close(self) -> None:
        """End the launcher and wait for it."""
        with self._lock:
            self._stop_launcher()

    def _job_file(self) -> int:
        try:
            return os.memfd_create("job")
        except PermissionError:  # a server inside a sandbox like ours
            with tempfile.TemporaryFile(dir=self._mount_point.parent) as file:
                return os.dup(file.fileno())

    def _write_job(self, fd: int, work: Workload) -> None:
        runner = str(self._runner) if self.isolation.level == "unsafe" else f"{_RUNNER_DIRECTORY}/{self._runner.name}"
        runner_configuration = {"arguments": work.pytest_arguments, "import_paths": self.environment.import_paths}
        message = {
            "level": self.isolation.level,
            "tree": self.isolation.tree,
            "seccomp": self.isolation.seccomp,
            "uid": self.isolation.uid,
            "bwrap": self.isolation.bwrap,
            "mount_point": str(self._mount_point),
            "binds": [
                *((path, path) for path in self.environment.binds),
                (str(self._runner.parent), _RUNNER_DIRECTORY),
            ],
            "lower": str(work.lower),
            "files": work.files,
            "deleted": work.deleted,
            "readonly": work.readonly,
            "argv": [
                *(self.environment.python, "-P", "-s", "-B", runner),
                json.dumps(runner_configuration),
            ],
            "env": run_environment(),
            "deadline_s": work.timeout_s,
            "memory_mb": work.limits.memory_mb,
            "pids": work.limits.pids,
            "disk_mb": work.limits.disk_mb,
        }
        with open(fd, "wb", closefd=False) as file:
            marshal.dump(message, file)
        os.lseek(fd, 0, os.SEEK_SET)

    def _send(self, fds: list[int]) -> None:
        with self._lock:
            for attempt in range(2):
                if self._channel is None:
                    self._start_launcher()
                assert self._channel is not None
                try:
                    socket.send_fds(self._channel, [b"run"], fds)
                    return
                except (BrokenPipeError, ConnectionResetError):
                    self._stop_launcher()  # it died; one fresh start, then it is our fault
                    if attempt:
                        raise

    def _start_launcher(self) -> None:
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        with theirs:
            fd = theirs.fileno()
            self._launcher = subprocess.Popen(
                [sys.executable, "-I", "-S", "-c", _BOOT, str(fd), str(_PACKAGE)],
                env={},
                cwd="/",
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,
                pass_fds=[fd],
                start_new_session=True,
            )
        self._channel = ours

    def _stop_launcher(self) -> None:
        if self._channel is not None:
            self._channel.close()
            self._channel = None
        if self._launcher is not None:
            try:
                self._launcher.wait(timeout=5)
            except subprocess.TimeoutExpired:
                self._launcher.send_signal(signal.SIGKILL)
                self._launcher.wait()
            self._launcher = None


def run_environment() -> dict[str, str]:
    """The whole environment of a test process."""
    return {
        "PATH": "/usr/local/bin:/usr/bin:/bin",
        "HOME": "/tmp",
        "TMPDIR": "/tmp",
        "LANG": "C.UTF-8",
        "PYTHONHASHSEED": "0",
        "PYTHONDONTWRITEBYTECODE": "1",
        "PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1",
    }


def _pump(fds: list[int], cancellation: Cancellation, max_output_bytes: int) -> RunResult:
    """Read a run's pipes to their ends; stop the run when it writes too much."""
    buffers = {fd: bytearray() for fd in fds}
    output, records, result = fds
    caps = {output: max_output_bytes, records: MAX_RECORD_BYTES, result: 1 << 20}
    over_limit = False
    with selectors.DefaultSelector() as selector:
        for fd in fds:
            selector.register(fd, selectors.EVENT_READ)
        while selector.get_map():
            for key, _ in selector.select():
                chunk = os.read(key.fd, 65536)
                if not chunk:
                    selector.unregister(key.fd)
                elif len(buffers[key.fd]) + len(chunk) <= caps[key.fd]:
                    buffers[key.fd] += chunk
                elif not over_limit:
                    over_limit = True
                    cancellation.release()  # closes the control pipe: the supervisor kills the run
    message: dict[str, Any] = marshal.loads(bytes(buffers[result])) if buffers[result] else {}
    status = message.get("wait_status")
    return RunResult(
        end="output_limit" if over_limit else message.get("end", "launcher_died"),
        exit_code=None if status is None else os.waitstatus_to_exitcode(status),
        output=bytes(buffers[output]),
        records=bytes(buffers[records]),
        start_s=message.get("start_s", 0.0),
        test_s=message.get("test_s", 0.0),
        cpu_s=message.get("cpu_s", 0.0),
        max_rss_kb=message.get("max_rss_kb", 0),
        error=message.get("error", ""),
    )
