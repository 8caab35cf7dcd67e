"""The shared-memory transport, for ranks on the sender's host: no byte passes through a socket.

The sender packs into one slot of a ring while the ranks read the other one. A rank verifies and loads
a bucket where it lies. If its engine keeps views, it copies the bucket first: the slot is free at
once, also when a layer spans more buckets than there are slots.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from dockyard_core.refit import Bucket
from dockyard_inference.refit.group import Board, Deadline
from dockyard_inference.refit.ring import DeviceRing, HostRing
from dockyard_inference.refit.wire import NUM_BUFFERS, BufferPool, Counts, NoRoom, WireError, largest

if TYPE_CHECKING:
    import torch


class SharedMemorySendWire:
    """Owns the ring."""

    def __init__(self, board: Board, ranks: Sequence[int], device: torch.device) -> None:
        self._board, self._device = board, device
        self._counts = Counts(board, ranks)
        self._ring: HostRing | DeviceRing | None = None
        self._buckets: Sequence[Bucket] = ()

    def begin(self, number: int, buckets: Sequence[Bucket], deadline: Deadline) -> None:
        """See ``SendWire``; the ring is kept from update to update."""
        self._buckets = buckets
        self._counts.begin(number, deadline)
        size = largest(buckets)
        try:
            if self._ring is None or self._ring.slot_bytes < size:
                self._drop_ring()
                is_host = self._device.type == "cpu"
                self._ring = HostRing.create(size) if is_host else DeviceRing.create(size, self._device)
            self._board.put(f"{number}/place", self._ring.address)
        except (OSError, RuntimeError) as error:
            raise NoRoom(f"no shared memory for two buckets of {size} bytes: {error}") from error

    def buffer(self, number: int) -> torch.Tensor:
        """See ``SendWire``."""
        assert self._ring is not None, "begin() comes first"
        self._counts.await_taken(number - NUM_BUFFERS + 1)
        return self._ring.slot(number, self._buckets[number].num_bytes)

    def put(self, number: int) -> None:
        """See ``SendWire``."""
        assert self._ring is not None, "begin() comes first"
        self._ring.settle()
        self._counts.put(number + 1)

    def finish(self) -> None:
        """See ``SendWire``: the ring stays as it is until the next update."""

    def attested(self) -> None:
        """See ``SendWire``."""

    def close(self) -> None:
        """See ``SendWire``."""
        self._counts.call_off()
        self._drop_ring()

    def _drop_ring(self) -> None:
        ring, self._ring = self._ring, None
        if ring is not None:
            ring.close()


class SharedMemoryReceiveWire:
    """Maps the ring."""

    def __init__(self, board: Board, device: torch.device) -> None:
        self._board, self._device = board, device
        self._counts = Counts(board, ())
        self._ring: HostRing | DeviceRing | None = None
        self._address = ""
        self._buckets: Sequence[Bucket] = ()
        self._pool = BufferPool(0, device)

    def begin(self, number: int, buckets: Sequence[Bucket], deadline: Deadline) -> None:
        """See ``ReceiveWire``."""
        self._buckets = buckets
        self._counts.begin(number, deadline)
        self._pool = BufferPool(largest(buckets), self._device)
        address = self._board.await_key(f"{number}/place", deadline)
        if address is None:
            raise WireError("the sender shared no memory")
        if address != self._address:
            self._ring = None  # frees a smaller one
            try:
                is_on_device = DeviceRing.is_one(address)  # the sender's may be on a CPU, whatever this rank's is
                self._ring = DeviceRing.open(address, self._device) if is_on_device else HostRing.open(address)
            except (OSError, RuntimeError, ValueError) as error:
                raise WireError(f"the sender's memory cannot be mapped: {error}") from error
            self._address = address

    def take(self, number: int, *, is_kept: bool) -> torch.Tensor:
        """See ``ReceiveWire``."""
        assert self._ring is not None, "begin() comes first"
        self._counts.await_put(number + 1)
        size = self._buckets[number].num_bytes
        slot = self._ring.slot(number, size)
        if not is_kept:
            return slot
        buffer = self._pool.take(size).copy_(slot)
        self.release()
        if number == len(self._buckets) - 1:
            self._pool = BufferPool(0, self._device)
        return buffer

    def release(self) -> None:
        """See ``ReceiveWire``."""
        if self._ring is not None:
            self._ring.settle()

    def close(self) -> None:
        """See ``ReceiveWire``."""
        self._ring, self._address = None, ""
        self._pool = BufferPool(0, self._device)
