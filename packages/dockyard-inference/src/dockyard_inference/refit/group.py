"""The refit's process group and its key-value board: NCCL on GPUs, GLOO on CPUs, one code path.

Rank 0 is the trainer's sender and owns the TCP store. Bytes cross by broadcast; every agreement
(who joined, who accepts the manifest, who verified and loaded) is a key in the store, so a deadline
can name the rank that is late and a refusal reaches the sender before a byte moves.

Keys, with ``s`` the number of the update since the group was opened and ``r`` a rank:
``hello/r``; ``s/ready/r`` (``ok <plan>`` or ``no <why>``); ``s/go`` (``ok`` or ``no <why>``);
``s/bucket/r`` (buckets received); ``s/done/r`` (``ok`` or ``no <why>``).
"""

from __future__ import annotations

import hashlib
import time
from collections.abc import Callable, Iterable
from datetime import timedelta
from typing import TYPE_CHECKING, Any

from dockyard_core.errors import RefitError
from dockyard_core.refit import RefitUpdate

if TYPE_CHECKING:
    import torch

OK = "ok"
NO = "no"
_FIRST_POLL_S, _LAST_POLL_S = 0.0005, 0.02
_LOOPBACK = ("127.0.0.1", "localhost", "::1")


class Deadline:
    """A point in time that several waits share."""

    def __init__(self, seconds: float) -> None:
        self._end = time.monotonic() + seconds

    @property
    def left_s(self) -> float:
        """Seconds left; never below 1 ms, because the store reads 0 as "no limit"."""
        return max(0.001, self._end - time.monotonic())

    @property
    def is_over(self) -> bool:
        """Whether the point has passed."""
        return time.monotonic() >= self._end


class Board:
    """Keys that ranks set for each other, under one prefix of a TCP store."""

    def __init__(self, host: str, port: int, *, is_owner: bool, timeout_s: float) -> None:
        from torch import distributed as dist

        wait = timedelta(seconds=timeout_s)
        self._tcp = dist.TCPStore(host, port, None, is_owner, timeout=wait, wait_for_workers=False)
        self.store: Any = dist.PrefixStore("dockyard-refit", self._tcp)

    @property
    def port(self) -> int:
        """The TCP port; the one the system chose if 0 was asked for."""
        return int(self._tcp.port)

    def put(self, key: str, value: str) -> None:
        """Set a key."""
        self.store.set(key, value)

    def peek(self, key: str) -> str | None:
        """The value of a key, or None if nobody has set it."""
        return self.store.get(key).decode() if self.store.check([key]) else None

    def await_key(self, key: str, deadline: Deadline) -> str | None:
        """The value of a key, or None if the deadline passes first or the store is gone."""
        return self._await([key], deadline)[key]

    def await_ranks(self, key: Callable[[int], str], ranks: Iterable[int], deadline: Deadline) -> dict[int, str | None]:
        """One value per rank; None for every rank that is late."""
        keys = {rank: key(rank) for rank in ranks}
        values = self._await(list(keys.values()), deadline)
        return {rank: values[name] for rank, name in keys.items()}

    def _await(self, keys: list[str], deadline: Deadline) -> dict[str, str | None]:
        """Polls: the store's own wait takes keys one by one and writes to stderr when it times out."""
        from torch import distributed as dist

        found: dict[str, str | None] = dict.fromkeys(keys)
        pause_s = _FIRST_POLL_S
        while True:
            is_last = deadline.is_over
            try:
                for key in [key for key, value in found.items() if value is None]:
                    found[key] = self.peek(key)
            except dist.DistNetworkError:
                return found
            if is_last or None not in found.values():
                return found
            time.sleep(min(pause_s, deadline.left_s))
            pause_s = min(1.3 * pause_s, _LAST_POLL_S)


def plain_message(error: RefitError) -> str:
    """The message without the versions, which whoever raises it again adds anew."""
    text = str(error)
    return text.removesuffix(f" (wanted policy version {error.wanted_version}, holds {error.held_version})")


def plan_id(update: RefitUpdate) -> str:
    """What sender and receiver must agree on before a byte moves: version, manifest and cut."""
    text = repr((update.policy_version, update.incarnation, update.bucket_bytes, tuple(map(tuple, update.manifest))))
    return hashlib.sha256(text.encode()).hexdigest()[:16]


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


def broadcast(group: Any, buffer: torch.Tensor, timeout_s: float) -> None:
    """Send from, or receive at, rank 0. Blocks this thread until the bytes are there.

    Raises:
        RuntimeError: the timeout passed, or a peer is gone (torch's own message).
    """
    from torch import distributed as dist

    wait = timedelta(seconds=timeout_s)
    options = dist.BroadcastOptions()
    options.rootRank = 0
    options.timeout = wait
    group.broadcast([buffer], options).wait(wait)


def digest_of(buffer: torch.Tensor, num_bytes: int) -> bytes:
    """SHA-256 of the first ``num_bytes`` of a uint8 buffer on any device."""
    from dockyard_core.refit import bucket_digest

    return bucket_digest(memoryview(buffer[:num_bytes].cpu().numpy()))
