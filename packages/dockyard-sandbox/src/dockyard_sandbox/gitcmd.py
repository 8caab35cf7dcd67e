"""Calls of git plumbing with an environment of our own.

git reads no configuration, hook, attribute or credential of the machine: only the file written by
`write_git_config`, and the repository's own objects.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import resource
import signal
import subprocess
import threading
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from dockyard_sandbox.cancellation import Cancellation

_CONFIG = """\
[safe]
	directory = *
[core]
	hooksPath = /dev/null
	fsmonitor = false
	autocrlf = false
	attributesFile = /dev/null
	logAllRefUpdates = false
	packedGitWindowSize = 32m
	packedGitLimit = 256m
[gc]
	auto = 0
[maintenance]
	auto = false
[protocol "ext"]
	allow = never
[http]
	lowSpeedLimit = 1000
	lowSpeedTime = 60
[init]
	defaultBranch = main
[advice]
	detachedHead = false
"""


class GitFailed(Exception):
    """A git command exited with an error; the message is the last line that it wrote."""

    def __init__(self, command: str, returncode: int, stderr: str) -> None:
        lines = [line for line in stderr.strip().splitlines() if line.strip()]
        super().__init__(f"git {command}: {lines[-1] if lines else f'exit code {returncode}'}")
        self.returncode = returncode
        self.stderr = stderr


@dataclass(frozen=True, kw_only=True)
class Bounds:
    """What one call on untrusted input may use. Passing one ends it with an error or a signal."""

    memory_mb: int
    cpu_s: int
    file_mb: int


class Git:
    """Runs git with one configuration file, and can end every call in flight."""

    def __init__(self, config_path: Path) -> None:
        self._config_path = config_path
        self._lock = threading.Lock()
        self._active: set[subprocess.Popen[bytes]] = set()
        self._closed = False

    @property
    def is_closed(self) -> bool:
        """Whether calls end because the executor does."""
        return self._closed

    def run(
        self,
        *arguments: str,
        git_dir: Path | None = None,
        stdin: bytes = b"",
        extra_env: Mapping[str, str] | None = None,
        timeout_s: float = 60.0,
        bounds: Bounds | None = None,
        cancellation: Cancellation | None = None,
        may_be_long: bool = False,
    ) -> bytes:
        """Return what git wrote on standard output.

        Args:
            arguments: of git.
            git_dir: the repository.
            stdin: given to git.
            extra_env: further environment.
            timeout_s: after which it is killed.
            bounds: what it may use; for calls on untrusted input.
            cancellation: ends it.
            may_be_long: the kernel ends it when the executor is killed. Costs a fork of the whole
                executor instead of a vfork, so short calls go without.

        Raises:
            GitFailed: it exited with an error, or a signal ended it: ``bounds``, a cancellation, `close`.
            subprocess.TimeoutExpired: it did not end within ``timeout_s``; it was killed.
        """
        environment = {
            "PATH": "/usr/local/bin:/usr/bin:/bin",
            "HOME": "/nonexistent",
            "LC_ALL": "C",
            "GIT_CONFIG_NOSYSTEM": "1",
            "GIT_CONFIG_GLOBAL": str(self._config_path),
            "GIT_ATTR_NOSYSTEM": "1",
            "GIT_TERMINAL_PROMPT": "0",
            "GIT_NO_REPLACE_OBJECTS": "1",
            "GIT_OPTIONAL_LOCKS": "0",
            **(extra_env or {}),
        }
        if git_dir is not None:
            environment["GIT_DIR"] = str(git_dir)
        process = self._start(arguments, environment, may_be_long)
        try:
            if cancellation is not None:
                cancellation.stop_with(lambda: _kill(process))
            if bounds is not None:
                _bound(process, bounds)  # before it has read a byte of its input
            output, errors = process.communicate(stdin, timeout=timeout_s)
        finally:
            if cancellation is not None:
                cancellation.stop_with(None)
            self._end(process)
        if process.returncode != 0:
            raise GitFailed(arguments[0], process.returncode, errors.decode(errors="replace"))
        return output

    def close(self) -> None:
        """Kill the calls in flight and refuse new ones."""
        with self._lock:
            self._closed = True
            for process in self._active:
                _kill(process)

    def _start(
        self, arguments: tuple[str, ...], environment: dict[str, str], may_be_long: bool
    ) -> subprocess.Popen[bytes]:
        process = subprocess.Popen(
            ["git", *arguments],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            env=environment,
            cwd="/",
            start_new_session=True,  # a fetch has children: they end as one group
            preexec_fn=_die_with_parent if may_be_long else None,
        )
        with self._lock:
            self._active.add(process)
            is_closed = self._closed
        if is_closed:
            self._end(process)
            raise GitFailed(arguments[0], -1, "the executor is closing")
        return process

    def _end(self, process: subprocess.Popen[bytes]) -> None:
        with self._lock:
            self._active.discard(process)
        if process.poll() is None:
            _kill(process)
            process.communicate()


def _bound(process: subprocess.Popen[bytes], bounds: Bounds) -> None:
    mib = 1024 * 1024
    for kind, value in (
        (resource.RLIMIT_AS, bounds.memory_mb * mib),
        (resource.RLIMIT_CPU, bounds.cpu_s),
        (resource.RLIMIT_FSIZE, bounds.file_mb * mib),
        (resource.RLIMIT_CORE, 0),
    ):
        with contextlib.suppress(ProcessLookupError):  # it has ended already
            resource.prlimit(process.pid, kind, (value, value))


_prctl = ctypes.CDLL(None).prctl  # looked up here: nothing may be loaded between fork and exec


def _die_with_parent() -> None:
    _prctl(1, ctypes.c_ulong(signal.SIGKILL), 0, 0, 0)  # PR_SET_PDEATHSIG


def _kill(process: subprocess.Popen[bytes]) -> None:
    if process.returncode is not None:
        return  # reaped: the id may be another's by now
    try:
        os.killpg(process.pid, signal.SIGKILL)
    except ProcessLookupError:
        pass


def write_git_config(path: Path) -> Git:
    """Write the configuration that every call uses and return the runner."""
    path.write_text(_CONFIG)
    return Git(path)
