"""The state of a policy at one moment, held in host memory, and the directories it is written to.

Their layout is that of ``dockyard_core.checkpoint_format``. With frozen parameters (a base under adapters) the files of
one rank hold what is trained, and are no Hugging Face model; `export` writes one.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from dockyard_core.checkpoint_format import file_name
from dockyard_core.directories import WrittenFile, link_or_copy, write_aside, write_new_files
from dockyard_trainer_torch.disk import save_tensors
from dockyard_trainer_torch.exported import ExportedWeights, copy_exported
from dockyard_trainer_torch.sharded_files import save_shards
from dockyard_trainer_torch.state import State, copy_state
from dockyard_trainer_torch.weights import ModelSource, weight_manifest, write_hf

if TYPE_CHECKING:
    from dockyard_trainer_torch.policy import TorchPolicy


def take(policy: TorchPolicy, *, for_export: bool = True) -> TorchSnapshot | ShardedSnapshot:
    """Copy this rank's state into host memory (collective).

    Args:
        for_export: also gather the whole tensors that `export` writes. Without, nothing is gathered, and
            several ranks have nothing to export.
    """
    state = copy_state(policy)
    source = ModelSource.of(policy)
    dtype = getattr(torch, policy.config.dtype)
    if policy.ranks.world_size > 1:
        exported = copy_exported(policy) if for_export else None
        return ShardedSnapshot(state, exported, source=source, export_dtype=dtype, rank=policy.ranks.rank)
    is_whole = [spec.name for spec in weight_manifest(policy)] == list(state.weights)
    exported = None if is_whole or not for_export else copy_exported(policy)
    return TorchSnapshot(state, exported, source=source, export_dtype=dtype, is_model=is_whole)


class _Snapshot:
    """What both kinds hold. It shares no memory with the policy; its methods are for one thread at a time."""

    def __init__(
        self, state: State, exported: ExportedWeights | None, *, source: ModelSource, export_dtype: torch.dtype
    ) -> None:
        self._state = state
        self._exported = exported
        self._source = source
        self._export_dtype = export_dtype

    def _write_meta(self, path: Path) -> None:
        path.write_text(json.dumps(self._state.meta, indent=2) + "\n")


class TorchSnapshot(_Snapshot):
    """Implements ``dockyard_core.policy.PolicySnapshot`` for one rank."""

    def __init__(self, *held: Any, is_model: bool, **options: Any) -> None:
        super().__init__(*held, **options)
        self._is_model = is_model
        """Whether the state is all weights under their own names; then there is nothing else to export."""
        self._written: WrittenFile | None = None
        """Where the float32 weights are on disk."""

    def write(self, directory: Path) -> None:
        """Write aside, fsync, rename; an existing directory is replaced.

        Raises OSError when the disk does not take it; ``directory`` is then as it was.
        """
        write_aside(directory, self._write_files)
        self._written = WrittenFile.of(directory / "model.safetensors")

    def export(self, directory: Path) -> None:
        """Write a Hugging Face model in the policy's dtype, aside like `write`. Raises OSError.

        When that is float32, its weights are the very bytes that `write` has written: they become a hard
        link to them, or a copy on a file system without links.
        """
        write_aside(directory, lambda aside: write_hf(self._source, aside, self._export_weights, self._export_dtype))

    def _write_files(self, aside: Path) -> None:
        if self._is_model:
            write_hf(self._source, aside, self._write_weights, torch.float32)
        else:
            self._write_weights(aside / "model.safetensors")
        save_shards(self._state.optimizer, aside / "optimizer.safetensors", {"save": self._state.meta["save"]})
        self._write_meta(aside / "trainer.json")

    def _write_weights(self, path: Path) -> None:
        # Without the name of the save: equal weights are equal files, wherever they were exported.
        save_tensors({name: shard.tensor for name, shard in self._state.weights.items()}, path)

    def _export_weights(self, path: Path) -> None:
        twin = self._twin()
        if twin is not None:
            link_or_copy(twin, path)
        elif self._exported is not None:
            save_tensors(self._exported.tensors, path)
        else:
            weights = self._state.weights.items()
            save_tensors({name: shard.tensor.to(self._export_dtype) for name, shard in weights}, path)

    def _twin(self) -> Path | None:
        """The file that holds the bytes to export; None when there is none, or it is another one by now."""
        if self._export_dtype is not torch.float32 or self._exported is not None or self._written is None:
            return None
        return self._written.path if self._written.is_there else None


class ShardedSnapshot(_Snapshot):
    """Implements ``dockyard_core.policy.PolicySnapshot`` for one of several ranks.

    Each rank writes its own files and waits for no other, so that the ranks may write into one directory
    at the same time. The directory is complete when every rank has returned.
    """

    def __init__(self, *held: Any, rank: int, **options: Any) -> None:
        super().__init__(*held, **options)
        self._rank = rank

    def write(self, directory: Path) -> None:
        """Write this rank's files, each aside, with fsync and rename, into a directory without a checkpoint.

        Raises OSError when the disk does not take them, or when files of a checkpoint are there already;
        this rank's files are then gone again.
        """
        world_size, metadata = self._state.meta["world_size"], {"save": self._state.meta["save"]}
        weights, optimizer = (file_name(kind, self._rank, world_size) for kind in ("model", "optimizer"))
        files: dict[str, Callable[[Path], None]] = {
            weights: lambda path: save_shards(self._state.weights, path, metadata),
            optimizer: lambda path: save_shards(self._state.optimizer, path, metadata),
        }
        if self._rank == 0:
            files["trainer.json"] = self._write_meta
        write_new_files(directory, files, unless="model.safetensors")

    def export(self, directory: Path) -> None:
        """Write this rank's file of a sharded Hugging Face model in the policy's dtype; rank 0 the rest.

        Raises OSError like `write`.
        """
        exported = self._exported
        assert exported is not None, "taken for a save only"
        files: dict[str, Callable[[Path], None]] = {}
        if exported.file is not None:
            files[exported.file] = lambda path: save_tensors(exported.tensors, path)
        write_new_files(directory, files, unless="model.safetensors")
        if self._rank == 0:
            write_hf(self._source, directory, lambda path: exported.dealt.write_index(path.parent), self._export_dtype)
