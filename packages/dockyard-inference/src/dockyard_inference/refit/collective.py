"""The collective transport: broadcasts from rank 0, NCCL between GPUs, GLOO between CPUs, one code path.

Both ends keep one broadcast under way while they work on the bucket before or after it: the sender
gathers, packs and hashes the next bucket, a rank verifies and loads the previous one.
"""

from __future__ import annotations

from collections.abc import Sequence
from datetime import timedelta
from typing import TYPE_CHECKING, Any

from dockyard_core.refit import Bucket
from dockyard_inference.refit.group import Board, Deadline
from dockyard_inference.refit.wire import NUM_BUFFERS, BufferPool, WireError, largest

if TYPE_CHECKING:
    import torch

_LOOPBACK = ("127.0.0.1", "localhost", "::1")


class _Broadcasts:
    """Broadcasts under way, by bucket."""

    def __init__(self, group: Any) -> None:
        self._group = group
        self._works: dict[int, Any] = {}

    def start(self, number: int, buffer: torch.Tensor, deadline: Deadline) -> None:
        from torch import distributed as dist

        options = dist.BroadcastOptions()
        options.rootRank = 0
        options.timeout = timedelta(seconds=deadline.left_s)
        try:
            self._works[number] = self._group.broadcast([buffer], options)
        except RuntimeError as error:
            raise WireError(str(error)) from error

    def wait(self, number: int, deadline: Deadline) -> None:
        """On a GPU the stream waits, not this thread."""
        work = self._works.pop(number, None)
        try:
            if work is not None:
                work.wait(timedelta(seconds=deadline.left_s))
        except RuntimeError as error:
            # The traceback keeps this frame, and the work would keep the connections to ranks that still wait.
            del work
            raise WireError(str(error)) from error

    @property
    def pending(self) -> list[int]:
        return list(self._works)

    def close(self) -> None:
        self._works.clear()
        self._group = None


class CollectiveSendWire:
    """Rank 0 of a process group."""

    def __init__(self, board: Board, host: str, world_size: int, device: torch.device, deadline: Deadline) -> None:
        self._device, self._deadline = device, deadline
        self._broadcasts = _Broadcasts(open_group(board, host, 0, world_size, device, deadline.left_s))
        self._buckets: Sequence[Bucket] = ()
        self._buffers: list[torch.Tensor] = []

    def begin(self, number: int, buckets: Sequence[Bucket], deadline: Deadline) -> None:
        """See ``SendWire``."""
        size, pool = largest(buckets), BufferPool(largest(buckets), self._device)
        self._buckets, self._deadline = buckets, deadline
        self._buffers = [pool.take(size) for _ in range(NUM_BUFFERS)]

    def buffer(self, number: int) -> torch.Tensor:
        """See ``SendWire``."""
        self._broadcasts.wait(number - NUM_BUFFERS, self._deadline)
        return self._buffers[number % NUM_BUFFERS][: self._buckets[number].num_bytes]

    def put(self, number: int) -> None:
        """See ``SendWire``."""
        buffer = self._buffers[number % NUM_BUFFERS][: self._buckets[number].num_bytes]
        self._broadcasts.start(number, buffer, self._deadline)

    def finish(self) -> None:
        """See ``SendWire``."""
        for number in self._broadcasts.pending:
            self._broadcasts.wait(number, self._deadline)
        self._buffers = []

    def attested(self) -> None:
        """See ``SendWire``."""

    def close(self) -> None:
        """See ``SendWire``."""
        self._broadcasts.close()
        self._buffers = []


class CollectiveReceiveWire:
    """Any other rank of the process group."""

    def __init__(
        self, board: Board, host: str, rank: int, world_size: int, device: torch.device, deadline: Deadline
    ) -> None:
        self._device, self._deadline = device, deadline
        self._broadcasts = _Broadcasts(open_group(board, host, rank, world_size, device, deadline.left_s))
        self._buckets: Sequence[Bucket] = ()
        self._buffers: dict[int, torch.Tensor] = {}
        self._pool = BufferPool(0, device)

    def begin(self, number: int, buckets: Sequence[Bucket], deadline: Deadline) -> None:
        """See ``ReceiveWire``."""
        self._buckets, self._deadline = buckets, deadline
        self._pool = BufferPool(largest(buckets), self._device)
        self._buffers.clear()

    def take(self, number: int, *, is_kept: bool) -> torch.Tensor:
        """See ``ReceiveWire``; the bucket after it is on its way when this returns."""
        for wanted in range(number, min(number + NUM_BUFFERS, len(self._buckets))):
            if wanted not in self._buffers:
                self._buffers[wanted] = self._pool.take(self._buckets[wanted].num_bytes)
                self._broadcasts.start(wanted, self._buffers[wanted], self._deadline)
        self._broadcasts.wait(number, self._deadline)
        if number == len(self._buckets) - 1:
            self._pool = BufferPool(0, self._device)  # between updates the memory is the engine's
        return self._buffers.pop(number)

    def release(self) -> None:
        """See ``ReceiveWire``."""

    def close(self) -> None:
        """See ``ReceiveWire``."""
        self._broadcasts.close()
        self._buffers.clear()
        self._pool = BufferPool(0, self._device)


def open_group(board: Board, host: str, rank: int, world_size: int, device: torch.device, timeout_s: float) -> Any:
    """A group of its own: it touches no default group, so FSDP's or an engine's never clash.

    Raises:
        RuntimeError: not every rank came before ``timeout_s`` (torch's own message).
    """
    from torch import distributed as dist

    wait = timedelta(seconds=timeout_s)
    if device.type == "cuda":
        nccl = dist.ProcessGroupNCCL.Options()
        nccl._timeout = wait
        return dist.ProcessGroupNCCL(board.store, rank, world_size, nccl)
    gloo = dist.ProcessGroupGloo._Options()
    gloo._timeout = wait
    make = dist.ProcessGroupGloo.create_device
    gloo._devices = [make(hostname=host)] if host in _LOOPBACK else [dist.ProcessGroupGloo.create_default_device()]
    return dist.ProcessGroupGloo(board.store, rank, world_size, gloo)
