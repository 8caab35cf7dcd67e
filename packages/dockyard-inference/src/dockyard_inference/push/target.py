"""What the command asks of a server, whichever it is."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal, Protocol

from dockyard_inference.push.checkpoint_dir import Checkpoint

Transport = Literal["auto", "disk", "collective"]
Progress = Callable[[str], None]
"""Takes a short line that says what is going on."""


@dataclass(frozen=True, kw_only=True)
class Pushed:
    """How the weights went."""

    transport: str
    transfer_s: float
    """Seconds from the first byte until every worker had loaded the last."""
    paused_s: float
    """Seconds during which requests waited."""


class Target(Protocol):
    """A running server."""

    @property
    def kind(self) -> str:
        """Name and version of the program."""
        ...

    @property
    def held_version(self) -> str:
        """The label of the weights that it serves; ``default`` if nobody gave one."""
        ...

    def check(self, checkpoint: Checkpoint) -> str:
        """Compare the checkpoint with what is served; returns what could be compared. Raises NamesDiffer."""
        ...

    def push(self, checkpoint: Checkpoint, version: int, transport: Transport, progress: Progress) -> Pushed:
        """Load the checkpoint under the label ``version``. Raises PushError."""
        ...
