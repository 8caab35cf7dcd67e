"""Which Hugging Face tensors each parameter of a model holds.

A parameter's name is its path joined by dots, which is the Hugging Face name but for indices: the layers of a model
are one parameter, [layers, ...], and so are the experts of its layers, [layers, experts, ...]. The name of each
tensor has those indices after ``layers`` and ``experts``.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from typing import TYPE_CHECKING, NamedTuple

from flax import nnx

if TYPE_CHECKING:
    from jax import Array

_INDEXED = ("layers", "experts")
"""Words of a name that are followed by an index, in the order of a parameter's leading axes."""


class Part(NamedTuple):
    """A Hugging Face tensor and where it lies in its parameter."""

    name: str
    indices: tuple[int, ...]
    """Indices in the leading dimensions of the parameter; () = the tensor is the whole parameter."""


def num_stacked(name: str) -> int:
    """How many leading dimensions of a parameter are indices of its tensors' names."""
    return sum(word in _INDEXED for word in name.split("."))


def parts_of(name: str, shape: tuple[int, ...]) -> Iterator[Part]:
    """The tensors of a parameter, in the order of their indices."""
    words = name.split(".")
    for indices in itertools.product(*map(range, shape[: num_stacked(name)])):
        numbers = iter(indices)
        named = [f"{word}.{next(numbers)}" if word in _INDEXED else word for word in words]
        yield Part(".".join(named), indices)


def shape_of(part: Part, shape: tuple[int, ...]) -> tuple[int, ...]:
    """Shape of a part of a parameter of this shape."""
    return shape[len(part.indices) :]


def named_parameters(tree: nnx.Module | nnx.State) -> dict[str, nnx.Param[Array]]:
    """Every parameter of a model, or of a state of its, by name."""
    state = nnx.state(tree, nnx.Param) if isinstance(tree, nnx.Module) else tree
    return {".".join(map(str, path)): variable for path, variable in nnx.to_flat_state(state)}
