"""Tensors of which each rank holds a part, in safetensors files that are written and read without a gather.

Their layout is that of ``dockyard_core.checkpoint_format``.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

import torch
from torch import Tensor

from dockyard_core import tensor_files
from dockyard_core.checkpoint_format import with_offsets
from dockyard_core.regions import Region
from dockyard_trainer_torch.disk import save_tensors

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh


class TensorShard(NamedTuple):
    """A block of a whole tensor with what is in it."""

    region: Region
    tensor: Tensor


def region_of(tensor: Tensor) -> Region:
    """The block that this rank holds; a tensor that is not sharded is its own block."""
    from torch.distributed.tensor import DTensor

    if not isinstance(tensor, DTensor):
        return Region.whole(tuple(tensor.shape))
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


def save_shards(shards: Mapping[str, TensorShard], path: Path, metadata: Mapping[str, str]) -> None:
    """Write a rank's blocks and where they begin. Raises OSError."""
    header = with_offsets(metadata, {name: shard.region for name, shard in shards.items()})
    save_tensors({name: shard.tensor for name, shard in shards.items()}, path, header)


class ShardFiles(tensor_files.ShardFiles):
    """Files of all ranks as torch's tensors."""

    framework = "pt"

    def read(self, name: str, region: Region) -> Tensor:
        """The block of a tensor, in float32; the tensor must be complete."""
        block = torch.empty(region.shape, dtype=torch.float32)
        self.fill(block, name, region)
        return block

    def read_as_written(self, name: str) -> Tensor | None:
        """A tensor that one rank wrote, in its own type; None when there is none."""
        paths = self.blocks.files_of(name)
        if not paths:
            return None
        (path,) = paths
        tensor: Tensor = self._files[path].get_tensor(name)
        return tensor
