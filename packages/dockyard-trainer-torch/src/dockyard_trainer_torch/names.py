"""Which Hugging Face tensors each parameter of a module holds.

Nearly all have one, of their own name. A mixture of experts keeps its experts in two fused parameters,
which a checkpoint and an engine know expert by expert.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import NamedTuple

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
