"""How buckets get from the sender to the ranks: one interface, one pair of classes per transport.

A transport moves buffers and knows nothing else. Who takes part, what is sent, whether the bytes are
right and who is late is settled on the board, the same way whatever moves them. The sender holds two
buckets: the next one is packed while this one is on its way.

The digest of a bucket goes over the board, so the sender hashes a bucket that is on its way already,
and a rank hashes it at the same time.
"""

from __future__ import annotations

import weakref
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, Protocol

from dockyard_core.refit import Bucket
from dockyard_inference.refit.group import NO, Board, Deadline

if TYPE_CHECKING:
    import torch

NUM_BUFFERS = 2


class WireError(Exception):
    """A bucket did not get across: the deadline passed, or the other side is gone."""


class NoRoom(WireError):
    """The sender has no memory or no disk for a bucket; no rank is to blame."""


class SendWire(Protocol):
    """The sender's end. Every method but ``close`` may raise WireError."""

    def begin(self, number: int, buckets: Sequence[Bucket], deadline: Deadline) -> None:
        """Make room for the buckets of update ``number``; before the ranks are told to start."""
        ...

    def buffer(self, number: int) -> torch.Tensor:
        """Where to pack bucket ``number``; waits until nobody needs what lay there."""
        ...

    def put(self, number: int) -> None:
        """Bucket ``number`` is packed: let every rank take it. Does not wait until they have."""
        ...

    def finish(self) -> None:
        """The last bucket was put; returns when no buffer is read any more, or when that does not matter."""
        ...

    def attested(self) -> None:
        """Every rank holds this update."""
        ...

    def close(self) -> None:
        """Give everything back; ranks that wait learn that nothing will come. Never raises."""
        ...


class ReceiveWire(Protocol):
    """A rank's end."""

    def begin(self, number: int, buckets: Sequence[Bucket], deadline: Deadline) -> None:
        """The sender has begun update ``number``. Raises WireError."""
        ...

    def take(self, number: int, *, is_kept: bool) -> torch.Tensor:
        """The bytes of bucket ``number``. Raises WireError.

        Valid until ``release``, which comes before the next one; or as long as any view of them, if
        ``is_kept``: that may cost a copy.
        """
        ...

    def release(self) -> None:
        """The bytes of the last bucket were read, on a GPU too."""
        ...

    def close(self) -> None:
        """Give everything back. Never raises."""
        ...


class BufferPool:
    """Buffers of one size that are used again once no view of them is alive.

    Engines may keep views of a bucket until a layer is whole, so a buffer must not be written again
    before; but a fresh one for each bucket costs more than the copy into it, in page faults.
    """

    def __init__(self, num_bytes: int, device: torch.device) -> None:
        self._num_bytes, self._device = num_bytes, device
        self._arrays: list[tuple[Any, weakref.ref[Any]]] = []

    def take(self, num_bytes: int) -> torch.Tensor:
        """A uint8 buffer that nothing else refers to, with undefined bytes."""
        import numpy as np
        import torch

        if self._device.type != "cpu":  # torch's own allocator keeps what was freed
            return torch.empty(num_bytes, dtype=torch.uint8, device=self._device)
        free = next((index for index, (_, lent) in enumerate(self._arrays) if lent() is None), len(self._arrays))
        # NumPy asks for huge pages, which torch.empty does not: fewer faults by far.
        array = np.empty(self._num_bytes, np.uint8) if free == len(self._arrays) else self._arrays[free][0]
        # A view of its own: torch lets go of it when the last tensor of this buffer dies.
        lent = array[:num_bytes]
        self._arrays[free : free + 1] = [(array, weakref.ref(lent))]
        return torch.from_numpy(lent)


class Counts:
    """Buckets that lie in a shared place (``s/put``), and those that each rank took (``s/bucket/r``)."""

    def __init__(self, board: Board, ranks: Sequence[int]) -> None:
        self._board, self._ranks = board, ranks
        self._number, self._deadline = 0, Deadline(0.0)

    def begin(self, number: int, deadline: Deadline) -> None:
        """From now on of update ``number``."""
        self._number, self._deadline = number, deadline

    def put(self, count: int) -> None:
        """Sender: so many buckets lie there."""
        try:
            self._board.put(f"{self._number}/put", str(count))
        except RuntimeError as error:
            raise WireError(str(error)) from error

    def await_taken(self, count: int) -> None:
        """Sender: wait until every rank has taken so many. Raises WireError."""
        keys = {f"{self._number}/bucket/{rank}": rank for rank in self._ranks}
        if count > 0 and not self._board.await_counts(keys, count, self._deadline):
            raise WireError(f"bucket {count - 1} was not taken by all")

    def await_put(self, count: int) -> None:
        """Rank: wait until so many lie there. Raises WireError."""
        if not self._board.await_counts({f"{self._number}/put": 0}, count, self._deadline):
            raise WireError("the deadline passed" if self._deadline.is_over else "the sender stopped")

    def call_off(self) -> None:
        """Sender: nothing more will come."""
        try:
            self._board.put(f"{self._number}/put", NO)
        except RuntimeError:
            pass  # the store is gone, and with it every rank's hope


def largest(buckets: Sequence[Bucket]) -> int:
    """Bytes of the largest bucket."""
    return max((bucket.num_bytes for bucket in buckets), default=0)
