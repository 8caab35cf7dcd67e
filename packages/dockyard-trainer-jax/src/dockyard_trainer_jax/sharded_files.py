"""Tensors of which each device holds a part, in safetensors files that are written and read without a gather.

Their layout is that of ``dockyard_core.checkpoint_format``.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import NamedTuple

import numpy as np
from jax import Array

from dockyard_core import tensor_files
from dockyard_core.checkpoint_format import with_offsets
from dockyard_core.regions import Region
from dockyard_trainer_jax.disk import save_tensors
from dockyard_trainer_jax.names import Part


class TensorShard(NamedTuple):
    """A block of a whole tensor with what is in it."""

    region: Region
    array: np.ndarray


class DeviceBlock(NamedTuple):
    """The block of a parameter that one device writes: the first of those that hold it."""

    device_id: int
    shard: TensorShard

    def of_part(self, part: Part) -> TensorShard | None:
        """What the block holds of one of the parameter's tensors, sharing its memory; None when that is nothing."""
        region, num_leading = self.shard.region, len(part.indices)
        leading = Region(region.offset[:num_leading], region.shape[:num_leading])
        if leading.overlap(Region(part.indices, (1,) * num_leading)) is None:
            return None
        at = tuple(index - start for index, start in zip(part.indices, leading.offset, strict=True))
        return TensorShard(Region(region.offset[num_leading:], region.shape[num_leading:]), self.shard.array[at])


def device_blocks(param: Array) -> Iterator[DeviceBlock]:
    """Copies in host memory of the blocks that the devices of this process write."""
    for shard in param.addressable_shards:
        if shard.replica_id == 0:
            ranges = [index.indices(size) for index, size in zip(shard.index, param.shape, strict=True)]
            region = Region(tuple(start for start, _, _ in ranges), tuple(stop - start for start, stop, _ in ranges))
            # On a CPU, an array of JAX and one of numpy may share memory, which the next step takes.
            yield DeviceBlock(shard.device.id, TensorShard(region, np.array(shard.data)))


def save_shards(shards: Mapping[str, TensorShard], path: Path, metadata: Mapping[str, str]) -> None:
    """Write blocks and where they begin. Raises OSError."""
    header = with_offsets(metadata, {name: shard.region for name, shard in shards.items()})
    save_tensors({name: shard.array for name, shard in shards.items()}, path, header)


class ShardFiles(tensor_files.ShardFiles):
    """Files of all ranks as arrays of numpy."""

    framework = "np"

    def read(self, name: str, region: Region) -> np.ndarray:
        """The block of a tensor, in float32; the tensor must be complete."""
        block = np.empty(region.shape, np.float32)
        self.fill(block, name, region)
        return block
