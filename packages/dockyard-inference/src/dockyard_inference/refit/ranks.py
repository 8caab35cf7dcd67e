"""The receiving ranks of a refit group, as their sender sees them."""

from __future__ import annotations

import os
import select
from collections.abc import Mapping, Sequence

from dockyard_core.errors import RefitError, RefitTimeout, WeightMismatch
from dockyard_core.refit import RefitUpdate
from dockyard_inference.refit.group import NO, OK, Board, Deadline, plan_id, refused

_ENDING_MS = 200
"""The connections of a process that ends break a moment before it has ended."""
_STAGES = ("staged", "done")


class Ranks:
    """Ranks 1 to n: what they say on the board, and whether those on this host live.

    It keeps no reference to the board: ranks learn from a store that goes that their sender has gone.
    """

    def __init__(self, num_ranks: int) -> None:
        self.numbers = range(1, num_ranks + 1)
        self._processes: dict[int, int] = {}
        """Rank -> pidfd of those that run on this host."""

    def watch(self, pids: Mapping[int, int]) -> None:
        """From now on notice when these processes end. Raises OSError if one has ended already."""
        self._processes = {rank: os.pidfd_open(pid) for rank, pid in pids.items()}

    def close(self) -> None:
        """Watch nobody any more."""
        processes, self._processes = self._processes, {}
        for process in processes.values():
            os.close(process)

    def lost(self, wait_ms: int = 0) -> list[int]:
        """Ranks on this host whose process has ended."""
        ranks, poll = {process: rank for rank, process in self._processes.items()}, select.poll()
        for process in ranks:
            poll.register(process, select.POLLIN)
        return sorted(ranks[process] for process, _ in poll.poll(wait_ms))

    def answers(self, board: Board, key: str, deadline: Deadline) -> dict[int, str | None]:
        """By rank what it says under ``key``; None of those that are late or lost."""
        return board.await_ranks(lambda rank: f"{key}/{rank}", self.numbers, deadline)

    def failure(self, answers: Mapping[int, str | None], what: str, update: RefitUpdate) -> RefitError | None:
        """The most telling reason why not every rank said yes; ``what``: that a late one did not do."""
        version = update.policy_version
        for rank, said in answers.items():
            if said is not None and said.startswith(NO):
                return refused(rank, said, version)
            if said not in (None, OK, f"{OK} {plan_id(update)}"):
                return WeightMismatch(
                    f"rank {rank} was told another manifest, bucket size or version than the sender",
                    wanted_version=version,
                )
        late = [rank for rank, said in answers.items() if said is None]
        if lost := [rank for rank in self.lost() if rank in late]:
            return _gone(lost, version)
        if not late:
            return None
        return RefitTimeout(f"rank {_join(late)} {what} within {update.timeout_s} s", wanted_version=version)

    def why_stuck(self, board: Board, number: int, bucket: int, error: Exception, update: RefitUpdate) -> RefitError:
        """Why ``bucket`` of the group's update ``number`` did not get across."""
        version, lost = update.policy_version, self.lost(_ENDING_MS)
        for rank in self.numbers:  # one that could not go on takes no more buckets, and has said why
            for said in (board.peek(f"{number}/{stage}/{rank}") for stage in _STAGES):
                if said is not None and said.startswith(NO):
                    return refused(rank, said, version)
        if lost:
            return _gone(lost, version)
        taken = {rank: int(board.peek(f"{number}/bucket/{rank}") or 0) for rank in self.numbers}
        late = [rank for rank, count in taken.items() if count <= min(taken.values())]
        return RefitTimeout(
            f"bucket {bucket} was not taken within {update.timeout_s} s; late: rank {_join(late)} ({error})",
            wanted_version=version,
        )


def _gone(ranks: Sequence[int], version: int) -> RefitError:
    return RefitError(f"rank {_join(ranks)} is gone: its process has ended", wanted_version=version)


def _join(ranks: Sequence[int]) -> str:
    return ", ".join(map(str, ranks))
