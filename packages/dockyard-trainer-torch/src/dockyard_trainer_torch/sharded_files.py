"""Tensors of which each rank holds a part, in safetensors files that are written and read without a gather.

Rank r of W (from 1) writes ``<kind>-0000r-of-0000W.safetensors``: its own parts, under the names of the whole
tensors. The header says where each part begins, as ``torch.distributed.checkpoint`` does in its safetensors
storage, whose ``HuggingFaceStorageReader`` reads these files too.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor

from dockyard_core.errors import UserError
from dockyard_trainer_torch.disk import save_tensors

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh

OFFSETS_KEY = "DCP_SHARDING_INFO"
"""Header entry of torch.distributed.checkpoint: ``{name: {"saved_offsets": [...]}}``."""


class Region(NamedTuple):
    """A block of a whole tensor."""

    offset: tuple[int, ...]
    shape: tuple[int, ...]

    @property
    def num_elements(self) -> int:
        """0 for a rank that has no part of the tensor."""
        return math.prod(self.shape)

    def overlap(self, other: Region) -> Region | None:
        """What both hold; None when that is nothing."""
        starts = tuple(map(max, self.offset, other.offset))
        sizes = tuple(stop - start for start, stop in zip(starts, map(min, self.stop, other.stop), strict=True))
        return Region(starts, sizes) if all(size > 0 for size in sizes) else None

    def slices_in(self, outer: Region) -> tuple[slice, ...]:
        """Index of this region in a tensor that holds ``outer``."""
        starts = [mine - theirs for mine, theirs in zip(self.offset, outer.offset, strict=True)]
        return tuple(slice(start, start + size) for start, size in zip(starts, self.shape, strict=True))

    @property
    def stop(self) -> tuple[int, ...]:
        """One past the last index, in each dimension."""
        return tuple(start + size for start, size in zip(self.offset, self.shape, strict=True))


class TensorShard(NamedTuple):
    """A block of a whole tensor with what is in it."""

    region: Region
    tensor: Tensor


def region_of(tensor: Tensor) -> Region:
    """The block that this rank holds; a tensor that is not sharded is its own block."""
    from torch.distributed.tensor import DTensor

    if not isinstance(tensor, DTensor):
        return Region((0,) * tensor.ndim, tuple(tensor.shape))
    from torch.distributed.tensor._utils import compute_local_shape_and_global_offset

    shape, offset = compute_local_shape_and_global_offset(tensor.shape, tensor.device_mesh, tensor.placements)
    return Region(tuple(offset), tuple(shape))


def is_first_copy(tensor: Tensor, mesh: DeviceMesh | None) -> bool:
    """Whether this rank is the first of those that hold the same block: the one that writes it.

    Args:
        tensor: whole on every rank, or a DTensor on ``mesh`` or on some of its dimensions.
        mesh: of all ranks of the policy; None for one rank.
    """
    from torch.distributed import get_rank
    from torch.distributed.tensor import DTensor

    if mesh is None:
        return True
    first_rank = int(mesh.mesh.flatten()[0])
    if not isinstance(tensor, DTensor):
        return int(get_rank()) == first_rank
    # A mesh of fewer dimensions repeats the tensor along the others; the one through the origin is the first.
    coordinate = tensor.device_mesh.get_coordinate()
    assert coordinate is not None, "a parameter lies on the ranks that hold it"
    is_first_along = (
        not placement.is_replicate() or index == 0
        for placement, index in zip(tensor.placements, coordinate, strict=True)
    )
    return all(is_first_along) and bool((tensor.device_mesh.mesh == first_rank).any())


def file_name(kind: str, rank: int, world_size: int) -> str:
    """Name of a rank's file, counted from 1; plain ``<kind>.safetensors`` for one rank."""
    return f"{kind}.safetensors" if world_size == 1 else f"{kind}-{rank + 1:05d}-of-{world_size:05d}.safetensors"


def save_shards(shards: Mapping[str, TensorShard], path: Path, metadata: Mapping[str, str]) -> None:
    """Write a rank's blocks and where they begin. Raises OSError."""
    offsets = {name: {"saved_offsets": list(shard.region.offset)} for name, shard in shards.items()}
    header = {**metadata, OFFSETS_KEY: json.dumps(offsets)}
    save_tensors({name: shard.tensor for name, shard in shards.items()}, path, header)


class ShardFiles:
    """Reads any block of any tensor from the files of all ranks, and of them the bytes it needs only.

    A context manager: files stay open inside. Opening reads the headers.

    Raises UserError for a file that is missing, cut short, or no file of shards.
    """

    def __init__(self, paths: Sequence[Path]) -> None:
        self.metadata: dict[Path, Mapping[str, str]] = {}
        self._held: dict[str, list[tuple[Path, Region]]] = {}
        self._files: dict[Path, Any] = {}
        self._open = ExitStack()
        with ExitStack() as opening:
            opening.callback(self._open.close)
            for path in paths:
                self._index(path)
            opening.pop_all()

    def __enter__(self) -> ShardFiles:
        return self

    def __exit__(self, *_: object) -> None:
        self._open.close()
        self._files.clear()

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
        shapes = self.shapes
        return [
            name
            for name, held in self._held.items()
            if sum(region.num_elements for _, region in held) != math.prod(shapes[name])
        ]

    def read(self, name: str, region: Region) -> Tensor:
        """The block of a tensor, in float32; the tensor must be complete."""
        block = torch.empty(region.shape, dtype=torch.float32)
        for path, held in self._held[name]:
            common = region.overlap(held)
            if common is not None:
                block[common.slices_in(region)] = self._files[path].get_slice(name)[common.slices_in(held)]
        return block

    def read_as_written(self, name: str) -> Tensor | None:
        """A tensor that one rank wrote, in its own type; None when there is none."""
        if name not in self._held:
            return None
        ((path, _),) = self._held[name]
        tensor: Tensor = self._files[path].get_tensor(name)
        return tensor

    def _index(self, path: Path) -> None:
        from safetensors import SafetensorError, safe_open

        try:
            file = self._open.enter_context(safe_open(path, "pt"))
        except FileNotFoundError as error:
            raise UserError(
                f"a checkpoint is restored from the files of every rank that wrote it, got no {path.name!r} in "
                f"{str(path.parent)!r}; copy the whole directory, or restore another save"
            ) from error
        except SafetensorError as error:
            raise UserError(
                f"a checkpoint's files must be whole safetensors, got {str(path)!r} ({error}); copy it again, or "
                "restore another save"
            ) from error
        metadata = file.metadata() or {}
        offsets = json.loads(metadata.get(OFFSETS_KEY, "{}"))
        for name in file.keys():  # noqa: SIM118 - not a dictionary
            shape = tuple(file.get_slice(name).get_shape())
            offset = tuple(offsets[name]["saved_offsets"]) if name in offsets else (0,) * len(shape)
            self._held.setdefault(name, []).append((path, Region(offset, shape)))
        self.metadata[path] = metadata
        self._files[path] = file
