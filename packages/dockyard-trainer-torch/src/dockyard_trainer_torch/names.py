"""Which Hugging Face tensors each parameter of a module holds.

Nearly all have one, of their own name. A mixture of experts keeps its experts in two fused parameters,
which a checkpoint and an engine know expert by expert.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

from dockyard_core.regions import Region

_GATE_UP = re.compile(r"(.*\.experts)\.gate_up_proj")
_DOWN = re.compile(r"(.*\.experts)\.down_proj")


class Part(NamedTuple):
    """A Hugging Face tensor and where it lies in its parameter."""

    name: str
    row: int | None
    """Index in dimension 0 of the parameter; None = the tensor is the whole parameter."""
    start: int
    stop: int
    """Range in dimension 1, where ``row`` is given."""


def parts_of(name: str, shape: tuple[int, ...]) -> Iterator[Part]:
    """The tensors of a parameter, in the order of the manifest."""
    if fused := _GATE_UP.fullmatch(name):
        half = shape[1] // 2
        for expert in range(shape[0]):
            yield Part(f"{fused[1]}.{expert}.gate_proj.weight", expert, 0, half)
            yield Part(f"{fused[1]}.{expert}.up_proj.weight", expert, half, shape[1])
    elif fused := _DOWN.fullmatch(name):
        for expert in range(shape[0]):
            yield Part(f"{fused[1]}.{expert}.down_proj.weight", expert, 0, shape[1])
    else:
        yield Part(name, None, 0, 0)


def shape_of(part: Part, shape: tuple[int, ...]) -> tuple[int, ...]:
    """Shape of a part of a parameter of this shape."""
    return shape if part.row is None else (part.stop - part.start, *shape[2:])


def own_name(name: str, shape: tuple[int, ...]) -> Iterator[Part]:
    """The parameter under its own name, fused or not, as checkpoints had it up to format 2."""
    yield Part(name, None, 0, 0)


Naming = Callable[[str, tuple[int, ...]], Iterator[Part]]
"""`parts_of`, or another division of a parameter of a name and a shape."""


class Piece(NamedTuple):
    """What a block of a parameter holds of one tensor."""

    name: str
    region: Region
    """In the tensor."""
    index: Any
    """In the block; gives the shape of ``region``."""


def pieces_of(name: str, shape: tuple[int, ...], block: Region, naming: Naming = parts_of) -> Iterator[Piece]:
    """The tensors that a block of a parameter of this whole shape has a part of."""
    for part in naming(name, shape):
        if part.row is None:
            yield Piece(part.name, block, ...)
            continue
        start = (part.row, part.start, *(0 for _ in shape[2:]))
        common = block.overlap(Region(start, (1, *shape_of(part, shape))))
        if common is not None:
            offset = (common.offset[1] - part.start, *common.offset[2:])
            row, *within = common.slices_in(block)
            yield Piece(part.name, Region(offset, common.shape[1:]), (row.start, *within))
