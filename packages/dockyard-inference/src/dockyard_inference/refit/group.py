"""What the ranks of a refit share: a board of keys, deadlines, and what a version is told apart by.

Rank 0 is the trainer's sender and owns the TCP store. Bytes cross by a transport (see ``wire``);
every agreement (who joined and by which transport, who accepts the manifest, who took which bucket,
who verified and loaded) is a key in the store, so a deadline can name the rank that is late and a
refusal reaches the sender before a byte moves.

Keys, with ``s`` the number of the update since the group was opened and ``r`` a rank:
``memory`` (see ``neighbours``); ``hello/r`` (``ok <pid or -> <cpu or cuda>``); ``transport`` (``<name> <cpu or
cuda>``, where the buffers lie, or ``no <why>``); a rank's ``no`` begins with the class of its error;
``s/ready/r`` (``ok <plan>`` or ``no <why>``); ``s/place`` (where the buckets lie, of transports that
have such a place); ``s/go`` (``ok`` or ``no <why>``); ``s/put`` (buckets that lie there, or ``no <why>``);
``s/digest/n`` (SHA-256 of bucket ``n``); ``s/bucket/r`` (buckets taken); with staging ``s/staged/r`` and then
``s/load`` (``ok`` or ``no <why>``); ``s/done/r`` (``ok`` or ``no <why>``).
"""

from __future__ import annotations

import hashlib
import time
from collections.abc import Callable, Collection, Iterable, Mapping
from datetime import timedelta
from typing import Any

from dockyard_core.errors import RefitError, RefitTimeout, WeightMismatch
from dockyard_core.refit import RefitUpdate

OK = "ok"
NO = "no"
_FIRST_POLL_S, _LAST_POLL_S = 0.0005, 0.02
_LAST_POLL_OF_COUNTS_S = 0.002
"""Buckets follow each other within tens of milliseconds."""


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
        self.lost: Callable[[], Collection[int]] = tuple
        """Ranks that are known to be gone; nobody waits for them."""

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
        return self._await({key: -1}, _is_set, deadline, _LAST_POLL_S)[key]

    def await_ranks(self, key: Callable[[int], str], ranks: Iterable[int], deadline: Deadline) -> dict[int, str | None]:
        """One value per rank; None for every rank that is late or lost."""
        keys = {key(rank): rank for rank in ranks}
        values = self._await(keys, _is_set, deadline, _LAST_POLL_S)
        return {rank: values[name] for name, rank in keys.items()}

    def await_counts(self, keys: Mapping[str, int], at_least: int, deadline: Deadline) -> bool:
        """Whether every key has counted so far before the deadline; False also for one that says no.

        Args:
            keys: key -> the rank that counts.
            at_least: the count to wait for.
            deadline: of the wait.
        """

        def is_settled(value: str | None) -> bool:
            return value is not None and (value.startswith(NO) or int(value) >= at_least)

        values = self._await(keys, is_settled, deadline, _LAST_POLL_OF_COUNTS_S).values()
        return all(is_settled(value) and not str(value).startswith(NO) for value in values)

    def _await(
        self, keys: Mapping[str, int], is_settled: Callable[[str | None], bool], deadline: Deadline, last_poll_s: float
    ) -> dict[str, str | None]:
        """Polls: the store's own wait takes keys one by one and writes to stderr when it times out."""
        from torch import distributed as dist

        found: dict[str, str | None] = dict.fromkeys(keys)
        pause_s = _FIRST_POLL_S
        while True:
            # Asked before the keys are read: what a rank said before it ended counts.
            is_last, lost = deadline.is_over, self.lost()
            pending = [key for key, value in found.items() if not is_settled(value)]
            try:
                for key in pending:
                    found[key] = self.peek(key)
            except dist.DistNetworkError:
                return found
            if is_last or all(is_settled(found[key]) or keys[key] in lost for key in pending):
                return found
            time.sleep(min(pause_s, deadline.left_s))
            pause_s = min(1.3 * pause_s, last_poll_s)


def _is_set(value: str | None) -> bool:
    return value is not None


def plain_message(error: RefitError) -> str:
    """The message without the versions, which whoever raises it again adds anew."""
    text = str(error)
    return text.removesuffix(f" (wanted policy version {error.wanted_version}, holds {error.held_version})")


def refusal(error: RefitError) -> str:
    """What a rank says that could not do its part; see ``refused``."""
    return f"{NO} {type(error).__name__} {plain_message(error)}"


def refused(rank: int, said: str, wanted_version: int) -> RefitError:
    """The error of another rank, from what it said."""
    name, _, message = said.removeprefix(f"{NO} ").partition(" ")
    kind = next((kind for kind in (WeightMismatch, RefitTimeout) if kind.__name__ == name), RefitError)
    return kind(f"rank {rank} refused: {message}", wanted_version=wanted_version)


def plan_id(update: RefitUpdate) -> str:
    """What sender and receiver must agree on before a byte moves: version, manifest and cut."""
    manifest = tuple(map(tuple, update.manifest))
    text = repr((update.policy_version, update.incarnation, update.bucket_bytes, update.hashes, manifest))
    return hashlib.sha256(text.encode()).hexdigest()[:16]
