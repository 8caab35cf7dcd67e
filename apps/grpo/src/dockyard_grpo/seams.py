"""What the app asks of parts of the wheels that core has no seam for."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Protocol

from dockyard_core import Generator, Policy, WeightSink
from dockyard_core.refit import RefitEndpoint, RefitUpdate


class RankPolicy(Policy, Protocol):
    """A policy that knows its place among the ranks of the fleet."""

    @property
    def data_rank(self) -> int:
        """Which of ``num_data_ranks`` shards of a batch this rank takes."""
        ...

    @property
    def num_data_ranks(self) -> int:
        """Into how many shards a batch is split."""
        ...


class Sender(Protocol):
    """The trainer's side of a refit transport."""

    def endpoint(self, rank_offset: int = 1) -> RefitEndpoint:
        """Where engines join; ``rank_offset`` is the rank of the engine's first worker."""
        ...

    def connect(self) -> None:
        """Wait until every engine worker has joined."""
        ...

    def send(self, stream_weights: Callable[[WeightSink], None], update: RefitUpdate) -> Any:
        """Send one version."""
        ...

    def close(self) -> None:
        """Leave the group."""
        ...


class Engine(Generator, Protocol):
    """A generator whose processes this run owns."""

    async def start(self) -> None:
        """Start its processes and load the model."""
        ...

    async def shutdown(self) -> None:
        """End the engine and its processes."""
        ...


class SandboxServer(Protocol):
    """A sandbox server process that this run owns."""

    @property
    def url(self) -> str:
        """Base URL."""
        ...

    @property
    def pid(self) -> int:
        """Its process id."""
        ...

    def stop(self) -> int:
        """End it and everything it started; returns its exit code."""
        ...
