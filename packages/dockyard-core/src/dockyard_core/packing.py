"""How one step's sequences are dealt over ranks and micro-batches, and laid into rows.

Only lengths are looked at; `dockyard_core.batch` turns the plan into arrays. A *unit* is what stays
in one micro-batch: a sequence, the rollouts of one prompt, or a row of fixed length. A *wave* is the
k-th micro-batches of all ranks, which run at the same time and wait for each other.
"""

from __future__ import annotations

import heapq
from bisect import bisect_left, insort
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

MAX_PADDING = 0.05
"""Largest part of a micro-batch's positions that may be padding when its rows are free to choose."""

ATTENTION_TOKENS = 16_384
"""Length at which attention costs as much as everything else of a transformer layer.

Causal attention takes about 2·T·D multiply-adds forward per 12·D² of the weights' (T = length, D =
width), so the two meet between 6·D and 12·D by kernel: near 10,000 for 0.5B parameters, 40,000 for 7B.
"""


def work(length: int) -> float:
    """Relative time of a sequence: tokens + tokens² / ATTENTION_TOKENS."""
    return length + length * length / ATTENTION_TOKENS


@dataclass(frozen=True, slots=True)
class Unit:
    """Sequences that stay in one micro-batch."""

    members: tuple[int, ...]  # indices of sequences
    size: int
    """Positions that count against the budget."""
    work: float


def unit_of(members: Sequence[int], lengths: Sequence[int], *, size: int | None = None) -> Unit:
    """A unit of these sequences; its size is their tokens unless given."""
    tokens = sum(lengths[index] for index in members)
    return Unit(tuple(members), tokens if size is None else size, sum(work(lengths[index]) for index in members))


def group_units(groups: Iterable[Sequence[int]], lengths: Sequence[int], budget: int) -> list[Unit]:
    """A unit per group; a group over the budget is cut, longest members first, into pieces that fit."""
    units = []
    for group in groups:
        piece: list[int] = []
        tokens = 0
        for index in sorted(group, key=lambda index: -lengths[index]):
            if piece and tokens + lengths[index] > budget:
                units.append(unit_of(piece, lengths))
                piece, tokens = [], 0
            piece.append(index)
            tokens += lengths[index]
        units.append(unit_of(piece, lengths))
    return units


@dataclass(slots=True)
class _Wave:
    """The k-th micro-batch of every rank while it is being filled."""

    num_ranks: int
    units: list[list[Unit]] = field(init=False)
    sizes: list[int] = field(init=False)
    works: list[float] = field(init=False)

    def __post_init__(self) -> None:
        self.units = [[] for _ in range(self.num_ranks)]
        self.sizes, self.works = [0] * self.num_ranks, [0.0] * self.num_ranks

    def take(self, dealt: Sequence[Unit], capacity: int) -> bool:
        """Give each rank at most one unit, the largest to the idlest; False if some rank has no room."""
        ranks = sorted(range(self.num_ranks), key=self.works.__getitem__)
        placed = list(zip(ranks, dealt, strict=False))
        if any(self.units[rank] and self.sizes[rank] + unit.size > capacity for rank, unit in placed):
            return False
        for rank, unit in placed:
            self.units[rank].append(unit)
            self.sizes[rank] += unit.size
            self.works[rank] += unit.work
        return True


def deal(units: Sequence[Unit], *, num_ranks: int, budget: int) -> list[list[list[Unit]]]:
    """Return units per wave and rank; no micro-batch is over the budget unless one unit alone is.

    Units are sorted by work and dealt in rounds of one per rank, each round's largest to the rank with
    the least work. Rounds follow each other in the sorted order, so what separates two ranks of a wave
    is at most its largest unit's work, and at most (largest - smallest) when every rank was served in
    every round. A wave holds sequences of similar length, which fill rows without padding.

    The number of waves is what the budget makes it. Then the smallest budget that needs no more of
    them is used: waves of like size instead of full ones and a rest.
    """
    ordered = sorted(units, key=lambda unit: -unit.work)
    waves = _waves(ordered, num_ranks, budget)
    low, high = sum(unit.size for unit in units) // (num_ranks * max(1, len(waves))), budget
    while low < high:
        middle = (low + high) // 2
        levelled = _waves(ordered, num_ranks, middle)
        if len(levelled) <= len(waves):
            waves, high = levelled, middle
        else:
            low = middle + 1
    return [wave.units for wave in waves or [_Wave(num_ranks)]]


def _waves(ordered: Sequence[Unit], num_ranks: int, capacity: int) -> list[_Wave]:
    waves: list[_Wave] = []
    for start in range(0, len(ordered), num_ranks):
        dealt = ordered[start : start + num_ranks]
        if not waves or not waves[-1].take(dealt, capacity):
            waves.append(_Wave(num_ranks))
            waves[-1].take(dealt, capacity)
    return waves


def level_rows(indices: Sequence[int], lengths: Sequence[int], budget: int) -> list[list[int]]:
    """Rows of whole sequences: as many, so as short, as MAX_PADDING and the budget allow.

    Short rows are wanted because attention costs rows x length²; one row has no padding at all, so
    there always is a way.
    """
    tokens = sum(lengths[index] for index in indices)
    longest = max((lengths[index] for index in indices), default=1)
    positions = min(budget, int(tokens / (1 - MAX_PADDING)))
    num_rows = min(len(indices), positions // longest)
    while num_rows > 1:
        rows = fill_rows(indices, lengths, positions // num_rows)
        if len(rows) <= num_rows:
            return rows
        num_rows -= max(1, num_rows // 10)
    return [list(indices)] if indices else []


def fill_rows(
    indices: Sequence[int], lengths: Sequence[int], row_length: int, *, num_ranks: int = 1
) -> list[list[int]]:
    """Rows of at most ``row_length`` tokens, best fit by decreasing length, then of like size if they can be.

    Rows of like size are made as many as serve every rank equally often.
    """
    ordered = sorted(indices, key=lambda index: -lengths[index])
    rows: list[list[int]] = []
    free: list[tuple[int, int]] = []  # (room, row), sorted
    for index in ordered:
        place = bisect_left(free, (lengths[index], 0))
        if place == len(free):
            free.append((row_length, len(rows)))
            rows.append([])
        room, row = free.pop(place)
        rows[row].append(index)
        insort(free, (room - lengths[index], row))
    num_rows = min(-(-len(rows) // num_ranks) * num_ranks, len(ordered))
    levelled = _spread(ordered, lengths, num_rows)
    return levelled if _longest(levelled, lengths) <= row_length else rows


def _spread(ordered: Sequence[int], lengths: Sequence[int], num_rows: int) -> list[list[int]]:
    """Longest first, each to the row with the fewest tokens."""
    rows: list[list[int]] = [[] for _ in range(num_rows)]
    filled = [(0, row) for row in range(num_rows)]
    for index in ordered:
        tokens, row = filled[0]
        rows[row].append(index)
        heapq.heapreplace(filled, (tokens + lengths[index], row))
    return rows


def _longest(rows: Sequence[Sequence[int]], lengths: Sequence[int]) -> int:
    return max((sum(lengths[index] for index in row) for row in rows), default=0)
