"""Runs on a node of the cluster and says what the node sees; imports nothing but the standard library."""

from __future__ import annotations

import hashlib
import os
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True)
class Need:
    """A path that a node must see."""

    key: str
    """What names it to the user: a key of the configuration, or a task's field."""
    path: Path
    sealed: str | None = None
    """SHA-256 of ``config.yaml`` in it: tells a shared directory from one that only has its name."""
    must_write: bool = False


@dataclass(frozen=True)
class Answer:
    """What a node says of itself."""

    declared: str | None
    """DOCKYARD_FLEET_ROLE of its Ray's environment."""
    unmet: tuple[tuple[Need, str], ...]
    """What it does not see, and how that shows."""


def look(needs: Sequence[Need]) -> Answer:
    """Look at every path from here."""
    found = ((need, _obstacle(need)) for need in needs)
    return Answer(os.environ.get("DOCKYARD_FLEET_ROLE"), tuple((need, why) for need, why in found if why is not None))


def seal_of(directory: Path) -> str:
    """SHA-256 of its ``config.yaml``. Raises OSError."""
    return hashlib.sha256((directory / "config.yaml").read_bytes()).hexdigest()


def _obstacle(need: Need) -> str | None:
    if not need.path.exists():
        return "is not there"
    if not os.access(need.path, os.R_OK | (os.W_OK if need.must_write else 0)):
        return "may not be written" if os.access(need.path, os.R_OK) else "may not be read"
    if need.sealed is not None:
        try:
            is_same = seal_of(need.path) == need.sealed
        except OSError:
            is_same = False
        return None if is_same else "is another directory of the same name"
    return None
