"""Blocks of tensors: where they begin, what two have in common, and which file holds which."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import NamedTuple

Slices = tuple[slice, ...]


class Region(NamedTuple):
    """A block of a whole tensor."""

    offset: tuple[int, ...]
    shape: tuple[int, ...]

    @classmethod
    def whole(cls, shape: tuple[int, ...]) -> Region:
        """All of a tensor of this shape."""
        return cls((0,) * len(shape), shape)

    @property
    def num_elements(self) -> int:
        """0 for a rank that has no part of the tensor."""
        return math.prod(self.shape)

    @property
    def stop(self) -> tuple[int, ...]:
        """One past the last index, in each dimension."""
        return tuple(start + size for start, size in zip(self.offset, self.shape, strict=True))

    def overlap(self, other: Region) -> Region | None:
        """What both hold; None when that is nothing."""
        starts = tuple(map(max, self.offset, other.offset))
        sizes = tuple(stop - start for start, stop in zip(starts, map(min, self.stop, other.stop), strict=True))
        return Region(starts, sizes) if all(size > 0 for size in sizes) else None

    def slices_in(self, outer: Region) -> Slices:
        """Index of this region in a tensor that holds ``outer``."""
        starts = [mine - theirs for mine, theirs in zip(self.offset, outer.offset, strict=True)]
        return tuple(slice(start, start + size) for start, size in zip(starts, self.shape, strict=True))


class BlockIndex:
    """Which file holds which blocks of which tensors."""

    def __init__(self) -> None:
        self._held: dict[str, list[tuple[Path, Region]]] = {}

    def add(self, path: Path, name: str, region: Region) -> None:
        """A block that a file holds."""
        self._held.setdefault(name, []).append((path, region))

    @property
    def shapes(self) -> dict[str, tuple[int, ...]]:
        """Shape of each whole tensor, as far as its blocks reach."""
        return {
            name: tuple(max(stops) for stops in zip(*(region.stop for _, region in held), strict=True))
            for name, held in self._held.items()
        }

    @property
    def incomplete(self) -> list[str]:
        """Names of tensors whose blocks are fewer or more than the whole."""
        shapes: Mapping[str, tuple[int, ...]] = self.shapes
        return [
            name
            for name, held in self._held.items()
            if sum(region.num_elements for _, region in held) != math.prod(shapes[name])
        ]

    def files_of(self, name: str) -> list[Path]:
        """Files that hold a block of the tensor; none for one that nobody wrote."""
        return [path for path, _ in self._held.get(name, ())]

    def pieces(self, name: str, region: Region) -> Iterator[tuple[Path, Slices, Slices]]:
        """What a block is put together from: a file, the piece in its block, and where it goes in ``region``."""
        for path, held in self._held[name]:
            common = region.overlap(held)
            if common is not None:
                yield path, common.slices_in(held), common.slices_in(region)
