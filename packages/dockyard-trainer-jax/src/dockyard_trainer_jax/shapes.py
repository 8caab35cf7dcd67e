"""Sizes that programs are compiled for: few, whatever the batches are.

A batch is padded to a shape that was met before if that costs little, and else to one that the next batches may fit
too: sizes are rounded up, and no smaller than those of the shape it is nearest to.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from operator import attrgetter
from typing import NamedTuple

_SHORTEST = 16
"""Rows are at least this long: shorter ones take the same time, and are one more shape."""
_MAX_WASTE = 1.3
"""Positions may be so many times those of the rounded sizes, for a shape that is known,"""
_SMALL = 2
"""or the largest known over this: where a step is short anyway, it need not be the shortest."""
_FEW = 256
"""So many positions cost less than a program of their own."""


class Shape(NamedTuple):
    """Sizes of a laid out micro-batch. Rows are those of packed sequences, or suffixes of shared prefixes."""

    num_rows: int
    row_length: int
    num_blocks: int
    num_slots: int
    """Of trained tokens, in each block."""
    num_prefixes: int = 0
    """0 = nothing is shared."""
    prefix_length: int = 0
    num_distinct: int = 0
    """Slots of distinct trained tokens, where prefixes are shared."""

    @property
    def num_positions(self) -> int:
        """Tokens that go through the model, padding included."""
        return self.num_rows * self.row_length + self.num_prefixes * self.prefix_length

    @property
    def num_scored(self) -> int:
        """Positions whose logits are computed, padding included."""
        return self.num_distinct or self.num_blocks * self.num_slots

    def is_alike(self, other: Shape) -> bool:
        """Whether both share prefixes, or neither does, over as many blocks."""
        return self.num_blocks == other.num_blocks and bool(self.num_prefixes) == bool(other.num_prefixes)

    def joined(self, other: Shape) -> Shape:
        """The smallest that covers both."""
        return Shape(*map(max, zip(self, other, strict=True)))


def rounded(size: int) -> int:
    """The next of 0, 1, ..., 8, 10, 12, 14, 16, 20, 24, 28, 32, 40, ...: less than a quarter is added."""
    step = 1 << max((size - 1).bit_length() - 3, 0) if size else 1
    return -(-size // step) * step


class Shapes:
    """The shapes that a policy has met."""

    def __init__(self, row_lengths: Sequence[int] | None = None) -> None:
        """``row_lengths``: those that the user wants packed rows to be padded to, as far as they go."""
        self._row_lengths = tuple(row_lengths or ())
        self.known: set[Shape] = set()

    def fit(self, needed: Shape) -> Shape:
        """A shape that covers what is needed, and is known from now on.

        Equal for equal known shapes and needs, whatever the order in which they were met: a run that goes on from a
        checkpoint, which holds them, computes what it would have computed.
        """
        tight = self._rounded(needed)
        met = [one for one in self.known if one.is_alike(tight)]
        covering = [one for one in met if one.joined(needed) == one]
        grown = [one.joined(tight) for one in met]
        best = self._cheapest(covering, tight) or self._cheapest(grown, tight) or tight
        self.known.add(best)
        return best

    def _cheapest(self, candidates: Sequence[Shape], tight: Shape) -> Shape | None:
        """Of those that take little longer to compute than the one that they cover; None if all do."""

        def is_cheap(size: Callable[[Shape], int], shape: Shape) -> bool:
            largest = max(map(size, self.known), default=0)
            return size(shape) <= max(_MAX_WASTE * size(tight), largest // _SMALL, _FEW)

        sizes = attrgetter("num_positions"), attrgetter("num_scored")
        cheap = [one for one in candidates if all(is_cheap(size, one) for size in sizes)]
        return min(cheap, key=lambda one: (one.num_positions, one), default=None)

    def _rounded(self, needed: Shape) -> Shape:
        per_block = rounded(-(-needed.num_rows // needed.num_blocks))
        return Shape(
            num_rows=per_block * needed.num_blocks,
            row_length=self._rounded_length(needed.row_length, is_packed=not needed.num_prefixes),
            num_blocks=needed.num_blocks,
            num_slots=rounded(needed.num_slots),
            num_prefixes=rounded(needed.num_prefixes),
            prefix_length=rounded(needed.prefix_length),
            num_distinct=rounded(needed.num_distinct),
        )

    def _rounded_length(self, length: int, *, is_packed: bool) -> int:
        # A suffix is a part of one sequence: padded to a row that holds many, it would cost as much as all of them.
        wanted = self._row_lengths if is_packed else ()
        return next((one for one in wanted if one >= length), rounded(max(length, _SHORTEST)))
