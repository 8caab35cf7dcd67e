"""Tensors of which each device holds a part, in safetensors files that are written and read without a gather.

Their layout is that of ``dockyard_core.checkpoint_format``.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from jax import Array
from safetensors import SafetensorError, safe_open

from dockyard_core.checkpoint_format import saved_regions, with_offsets
from dockyard_core.errors import UserError
from dockyard_core.regions import BlockIndex, Region
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


class ShardFiles:
    """Reads any block of any tensor from the files of all ranks, and of them the bytes it needs only.

    A context manager: files stay open inside. Opening reads the headers.

    Raises UserError for a file that is missing, cannot be read, is cut short, or is no file of shards.
    """

    def __init__(self, paths: Sequence[Path]) -> None:
        self.metadata: dict[Path, Mapping[str, str]] = {}
        self.blocks = BlockIndex()
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

    def read(self, name: str, region: Region) -> np.ndarray:
        """The block of a tensor, in float32; the tensor must be complete."""
        block = np.empty(region.shape, np.float32)
        for path, piece, target in self.blocks.pieces(name, region):
            block[target] = self._files[path].get_slice(name)[piece]
        return block

    def _index(self, path: Path) -> None:
        try:
            file = self._open.enter_context(safe_open(path, "np"))
        except FileNotFoundError as error:
            raise UserError(
                f"a checkpoint is restored from the files of every rank that wrote it, got no {path.name!r} in "
                f"{str(path.parent)!r}; copy the whole directory, or restore another save"
            ) from error
        except (OSError, SafetensorError) as error:
            raise UserError(
                f"a checkpoint's files must be whole safetensors, got {str(path)!r} ({error}); copy it again, or "
                "restore another save"
            ) from error
        metadata = file.metadata() or {}
        shapes = {name: tuple(file.get_slice(name).get_shape()) for name in file.keys()}  # noqa: SIM118 - no dictionary
        for name, region in saved_regions(shapes, metadata).items():
            self.blocks.add(path, name, region)
        self.metadata[path] = metadata
        self._files[path] = file
