"""Start a server as a child process and wait until it is ready."""

from __future__ import annotations

import os
import re
import selectors
import signal
import subprocess
import sys
import time
from dataclasses import dataclass
from pathlib import Path

from dockyard_core import SandboxUnavailable

_READY = re.compile(r"^dockyard-sandbox ready (?P<url>http://\S+) isolation=(?P<isolation>\S+)$")


@dataclass(frozen=True)
class ServerHandle:
    """A running server that this process started and must stop."""

    url: str
    isolation: str
    process: subprocess.Popen[bytes]

    @property
    def pid(self) -> int:
        """Process id of the server."""
        return self.process.pid

    def stop(self, timeout_s: float = 20.0) -> int:
        """End the server in order and return its exit code; kill it after ``timeout_s``."""
        if self.process.poll() is None:
            self.process.send_signal(signal.SIGTERM)
        try:
            return self.process.wait(timeout=timeout_s)
        except subprocess.TimeoutExpired:
            self.process.kill()
            return self.process.wait()
        finally:
            if self.process.stdout is not None:
                self.process.stdout.close()


def start_server(
    root: Path | str,
    *,
    host: str = "127.0.0.1",
    port: int = 0,
    workers: int | None = None,
    max_queue: int | None = None,
    max_sessions: int | None = None,
    min_isolation: str | None = None,
    token_file: Path | str | None = None,
    warm: bool = True,
    timeout_s: float = 60.0,
) -> ServerHandle:
    """Start ``dockyard-sandbox serve`` under ``root``; it also ends when this process does.

    Args:
        root: directory of its repositories and trees; what it writes to stderr goes to ``serve.log`` there.
        workers: tests run at once; None = the number of CPUs.
        max_queue: tasks that may wait for a worker; None = the server's default.
        max_sessions: sessions that may be open at once; None = the server's default.
        min_isolation: None = the strongest level that the machine gives.
        token_file: bearer tokens; None = none is asked for.
        warm: False = a new interpreter for every run.
        timeout_s: how long it may take to be ready.

    Raises:
        SandboxUnavailable: it ended, or was not ready in time; the message has its last line.
    """
    root = Path(root)
    root.mkdir(parents=True, exist_ok=True)
    command = [sys.executable, "-P", "-m", "dockyard_sandbox.cli", "serve", "--die-with-parent"]
    command += ["--host", host, "--port", str(port), "--root", str(root)]
    for name, value in (
        ("workers", workers),
        ("max-queue", max_queue),
        ("max-sessions", max_sessions),
        ("min-isolation", min_isolation),
        ("token-file", token_file),
    ):
        if value is not None:
            command += [f"--{name}", str(value)]
    command += [] if warm else ["--no-warm"]
    log_path = root / "serve.log"
    with log_path.open("wb") as log:
        process = subprocess.Popen(
            command,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=log,
            start_new_session=True,  # a Ctrl-C in the terminal is for the caller, who stops the server when done
        )
    return _ready(process, log_path, timeout_s)


def _ready(process: subprocess.Popen[bytes], log_path: Path, timeout_s: float) -> ServerHandle:
    line = _read_line(process, timeout_s)
    ready = _READY.match(line)
    if ready is None:
        if process.poll() is None:
            process.kill()
        process.wait()
        lines = log_path.read_text(errors="replace").strip().splitlines()
        why = lines[-1] if lines else f"no ready line within {timeout_s} s"
        raise SandboxUnavailable(f"the sandbox server did not start: {why}")
    return ServerHandle(url=ready["url"], isolation=ready["isolation"], process=process)


def _read_line(process: subprocess.Popen[bytes], timeout_s: float) -> str:
    assert process.stdout is not None
    deadline = time.monotonic() + timeout_s
    line = b""
    with selectors.DefaultSelector() as selector:
        selector.register(process.stdout, selectors.EVENT_READ)
        while not line.endswith(b"\n") and selector.select(max(0.0, deadline - time.monotonic())):
            byte = os.read(process.stdout.fileno(), 1)
            if not byte:
                break
            line += byte
    return line.decode(errors="replace").strip()
