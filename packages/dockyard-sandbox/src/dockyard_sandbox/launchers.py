"""The processes that fork runs: a bare interpreter for cold ones, one that has imported pytest for warm ones."""

from __future__ import annotations

import json
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Callable, Sequence
from pathlib import Path

from dockyard_sandbox.environments import Environment

_PACKAGE = Path(__file__).parent
_IMPORT = "import sys; sys.path.insert(0, sys.argv[2]); "
_COLD = _IMPORT + "from jail.main import main; main(int(sys.argv[1]))"
_WARM = _IMPORT + "from jail.zygote import start; start(sys.argv[1])"
_END_S = 5.0


class Launcher:
    """One process that takes jobs over a socket, started when the first one is sent. It ends when the socket closes.

    Args:
        command: what starts it, given the descriptor of its end of the socket.
    """

    def __init__(self, command: Callable[[int], Sequence[str]]) -> None:
        self._command = command
        self._lock = threading.Lock()
        self._process: subprocess.Popen[bytes] | None = None
        self._channel: socket.socket | None = None

    def send(self, fds: list[int]) -> None:
        """Give it one job, named by its descriptors. Raises OSError."""
        with self._lock:
            for attempt in range(2):
                if self._channel is None:
                    self._start()
                assert self._channel is not None
                try:
                    socket.send_fds(self._channel, [b"run"], fds)
                    return
                except (BrokenPipeError, ConnectionResetError):
                    self._stop()  # it died; one fresh start, then it is our fault
                    if attempt:
                        raise

    def close(self) -> None:
        """End it and wait for it."""
        with self._lock:
            self._stop()

    def _start(self) -> None:
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        with theirs:
            self._process = subprocess.Popen(
                self._command(theirs.fileno()),
                env={},
                cwd="/",
                stdin=subprocess.DEVNULL,
                # a pipe, as its runs have one: an interpreter asks its outputs what they are when it starts
                stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT,
                pass_fds=[theirs.fileno()],
                start_new_session=True,
            )
        self._channel = ours

    def _stop(self) -> None:
        if self._channel is not None:
            self._channel.close()
            self._channel = None
        if self._process is not None:
            try:
                self._process.wait(timeout=_END_S)
            except subprocess.TimeoutExpired:
                self._process.send_signal(signal.SIGKILL)
                self._process.wait()
            assert self._process.stdout is not None
            self._process.stdout.close()
            self._process = None


def cold_launcher() -> Launcher:
    """A launcher whose runs execute an interpreter of their own."""
    return Launcher(lambda fd: [sys.executable, "-I", "-S", "-c", _COLD, str(fd), str(_PACKAGE)])


def warm_launcher(environment: Environment, runner: Path, variables: dict[str, str], *, namespaced: bool) -> Launcher:
    """A launcher whose runs go on from its own interpreter, which has imported pytest.

    Args:
        environment: the interpreter; one without a root of its own.
        runner: the compiled runner, on the host.
        variables: the whole environment of its test processes.
        namespaced: whether runs have mount namespaces. Then it keeps its interpreter read-only.
    """

    def command(fd: int) -> list[str]:
        configuration = {"channel": fd, "package": str(_PACKAGE), "import_paths": environment.import_paths}
        message = {
            "command": [*environment.command(str(runner)), json.dumps(configuration)],
            "env": variables,
            "readonly": list(environment.binds) if namespaced else None,
        }
        return [sys.executable, "-I", "-S", "-c", _WARM, json.dumps(message), str(_PACKAGE)]

    return Launcher(command)
