"""The seam to whatever runs tests. It does not say where or how."""

from __future__ import annotations

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
