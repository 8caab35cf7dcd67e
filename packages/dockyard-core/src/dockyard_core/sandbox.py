"""The seam to whatever runs tests. It does not say where or how."""

from __future__ import annotations

from contextlib import AbstractAsyncContextManager
from dataclasses import dataclass
from typing import Protocol

from dockyard_core.task import Task
from dockyard_core.verdict import Verdict


class Sandbox(Protocol):
    """Runs a patch against a task's held-out tests."""

    async def judge(self, task: Task, patch: str, *, attempt_id: str) -> Verdict:
        """Return the verdict on ``patch``.

        Args:
            task: the problem; its tests decide.
            patch: a unified diff, possibly empty or malformed (that is a verdict, not an error).
            attempt_id: names (rollout, attempt); the same id with the same content is executed at
                most once by a server.

        Raises:
            SandboxTimeout: no verdict before the client's deadline.
            SandboxUnavailable: the server cannot be reached after retries.
        """
        ...


@dataclass(frozen=True, kw_only=True)
class ExecResult:
    """What one command of a session did."""

    exit_code: int
    """Negative = the number of the signal that ended it."""
    output: str
    """Standard output and error, in order; the first and the last part when it wrote more than the session gives."""
    timed_out: bool = False
    num_dropped_bytes: int = 0
    """Bytes left out of the middle of ``output``."""
    duration_s: float = 0.0


@dataclass(frozen=True, kw_only=True)
class SessionResult:
    """How a session ended."""

    verdict: Verdict
    """On a fresh tree with ``patch``: nothing that the session's processes did to their own tree decides."""
    patch: str
    """What the session changed, as a unified diff."""


class SandboxSession(Protocol):
    """A tree at the task's base commit that an agent works on, without the held-out tests."""

    async def exec(self, command: str, *, timeout_s: float = 60.0) -> ExecResult:
        """Run a shell command in the tree's root; it is killed at ``timeout_s``.

        Raises:
            SandboxError: the session has ended.
            SandboxTimeout, SandboxUnavailable: as `Sandbox.judge`.
        """
        ...

    async def read(self, path: str) -> bytes:
        """Return a file. Raises SandboxError when it is none, or lies outside the tree."""
        ...

    async def write(self, path: str, content: bytes) -> None:
        """Write a file, whole; directories are made. Raises SandboxError."""
        ...

    async def finish(self) -> SessionResult:
        """Judge what was changed, on a fresh tree. The session takes no further calls. Raises as `exec`."""
        ...


class SessionSandbox(Sandbox, Protocol):
    """A sandbox that also serves multi-turn agents."""

    def session(self, task: Task) -> AbstractAsyncContextManager[SandboxSession]:
        """Open a session on ``task``; leaving it unfinished drops it without a verdict.

        Raises:
            SandboxError: the task is refused.
            SandboxUnavailable: no room, or no server, after retries.
        """
        ...
