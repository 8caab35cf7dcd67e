"""Which transport a group uses: by where its ranks are, unless the sender was told."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Literal

from dockyard_core.errors import RefitError
from dockyard_core.refit import RefitEndpoint
from dockyard_inference.refit.collective import CollectiveReceiveWire, CollectiveSendWire
from dockyard_inference.refit.filesystem import FilesystemReceiveWire, FilesystemSendWire
from dockyard_inference.refit.group import Board, Deadline
from dockyard_inference.refit.shared_memory import SharedMemoryReceiveWire, SharedMemorySendWire
from dockyard_inference.refit.wire import ReceiveWire, SendWire

if TYPE_CHECKING:
    import torch

Transport = Literal["collective", "shared_memory", "filesystem"]


def choose(wanted: Transport | Literal["auto"], is_near: Mapping[int, bool], device: torch.device) -> Transport:
    """The transport of a group.

    Args:
        wanted: ``auto`` = shared memory if all ranks are near and the weights are on CPUs, else
            collective (GPUs of one host reach each other through NCCL as well).
        is_near: by rank, whether it can map the sender's memory.
        device: of the weights.

    Raises:
        RefitError: shared memory is wanted and some ranks are not near.
    """
    far = [str(rank) for rank, near in is_near.items() if not near]
    if wanted == "auto":
        return "collective" if far or device.type != "cpu" else "shared_memory"
    if wanted == "shared_memory" and far:
        raise RefitError(
            f"transport shared_memory needs every rank on the sender's host, in its PID namespace and of its user; "
            f"not so: rank {', '.join(far)}; use auto",
            wanted_version=-1,
        )
    return wanted


def open_send_wire(
    transport: Transport,
    board: Board,
    host: str,
    ranks: Sequence[int],
    device: torch.device,
    directory: Path | None,
    deadline: Deadline,
) -> SendWire:
    """The sender's end. Raises RuntimeError or OSError when it cannot be opened."""
    if transport == "shared_memory":
        return SharedMemorySendWire(board, ranks, device)
    if transport == "filesystem":
        assert directory is not None, "the sender checks it"
        return FilesystemSendWire(board, ranks, directory, device)
    return CollectiveSendWire(board, host, len(ranks) + 1, device, deadline)


def open_receive_wire(
    transport: str, board: Board, endpoint: RefitEndpoint, rank: int, device: torch.device, deadline: Deadline
) -> ReceiveWire:
    """A rank's end. Raises RuntimeError when it cannot be opened."""
    if transport == "shared_memory":
        return SharedMemoryReceiveWire(board, device)
    if transport == "filesystem":
        return FilesystemReceiveWire(board, device)
    return CollectiveReceiveWire(board, endpoint.host, rank, endpoint.world_size, device, deadline)
