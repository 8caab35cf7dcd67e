"""Whole versions in host memory: the one that an engine serves, and the one that it is to load."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING

from dockyard_core.errors import RefitError
from dockyard_core.refit import RefitUpdate
from dockyard_inference.refit.group import plain_message
from dockyard_inference.refit.receiver import BucketReceiver

if TYPE_CHECKING:
    import torch


@dataclass(frozen=True)
class StagedVersion:
    """Verified buckets on the host, and the update that brought them."""

    update: RefitUpdate
    buckets: tuple[list[tuple[str, torch.Tensor]], ...]

    def __iter__(self) -> Iterator[list[tuple[str, torch.Tensor]]]:
        return iter(self.buckets)


class HostStage:
    """What ``staging="host"`` keeps: one copy of the model between updates, two during one."""

    def __init__(self) -> None:
        self.held: StagedVersion | None = None
        """What the engine serves; None before the first commit, and in a group that does not stage."""
        self.incoming: StagedVersion | None = None
        """What every rank has verified and is to load."""

    def fill(self, receiver: BucketReceiver, update: RefitUpdate) -> None:
        """Take and verify the whole update, and wait until every rank has.

        Raises:
            RefitError: see ``BucketReceiver.receive`` and ``BucketReceiver.await_load``. Nothing is
                loaded then, here and on every other rank, and nothing but ``held`` is kept.
        """
        self.incoming = None
        with receiver.attesting(update, "staged"):
            buckets = tuple(receiver.receive(update))
        receiver.await_load(update)
        self.incoming = StagedVersion(update, buckets)

    def joined(self, receiver: BucketReceiver) -> None:
        """The rank joined a group: what another one staged and did not load never will be.

        One that does not stage makes the engine hold what is not kept here.
        """
        self.incoming = None
        if not receiver.is_staging:
            self.held = None

    def commit(self) -> None:
        """The engine serves what came in."""
        self.held, self.incoming = self.incoming, None

    def drop(self) -> None:
        """What came in will not be loaded."""
        self.incoming = None


def rolled_back(error: RefitError, held_version: int) -> RefitError:
    """The same failure of a load, saying that it left nothing behind."""
    what = f"{plain_message(error)}; the engine went back to version {held_version} and serves it"
    return type(error)(what, wanted_version=error.wanted_version, held_version=held_version)
