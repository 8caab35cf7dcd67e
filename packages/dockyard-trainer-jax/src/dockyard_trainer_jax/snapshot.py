"""The state of a policy at one moment, held in host memory, and the directories it is written to.

Their layout is that of ``dockyard_core.checkpoint_format``. With frozen parameters (a base under adapters) the files of
one process hold what is trained, and are no Hugging Face model; `export` writes one.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING

import jax.numpy as jnp

from dockyard_core.checkpoint_format import file_name
from dockyard_core.directories import WrittenFile, link_or_copy, write_aside, write_new_files
from dockyard_trainer_jax.disk import save_tensors
from dockyard_trainer_jax.exported import ExportedWeights, copy_exported
from dockyard_trainer_jax.sharded_files import TensorShard, save_shards
from dockyard_trainer_jax.state import copy_state
from dockyard_trainer_jax.weights import ModelSource, write_hf

if TYPE_CHECKING:
    from dockyard_trainer_jax.policy import JaxPolicy


def take(policy: JaxPolicy, *, for_export: bool = True) -> JaxSnapshot | ShardedSnapshot:
    """Copy this process's state into host memory (collective).

    Args:
        for_export: also gather the whole tensors that `export` writes. Without, nothing is gathered, and several
            processes have nothing to export.
    """
    if policy.ranks.world_size > 1:
        return ShardedSnapshot(policy, copy_exported(policy) if for_export else None)
    return JaxSnapshot(policy, copy_exported(policy) if for_export and policy.frozen else None)


class _Snapshot:
    """What both kinds hold. It shares no memory with the policy; its methods are for one thread at a time."""

    def __init__(self, policy: JaxPolicy, exported: ExportedWeights | None) -> None:
        self._state = copy_state(policy)
        self._exported = exported
        self._source: ModelSource = policy.source
        self._export_dtype: str = policy.config.dtype

    def _write_meta(self, path: Path) -> None:
        path.write_text(json.dumps(self._state.meta, indent=2) + "\n")


class JaxSnapshot(_Snapshot):
    """Implements ``dockyard_core.policy.PolicySnapshot`` for one process, whatever devices it has."""

    def __init__(self, policy: JaxPolicy, exported: ExportedWeights | None) -> None:
        super().__init__(policy, exported)
        self._is_model = not policy.frozen
        """Whether the state is all weights; then there is nothing else to export."""
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

    @property
    def _weights(self) -> dict[str, TensorShard]:
        return self._state.files[0].weights

    def _write_files(self, aside: Path) -> None:
        if self._is_model:
            write_hf(self._source, aside, self._write_weights, "float32")
        else:
            self._write_weights(aside / "model.safetensors")
        save_shards(self._state.files[0].moments, aside / "optimizer.safetensors", {"save": self._state.meta["save"]})
        self._write_meta(aside / "trainer.json")

    def _write_weights(self, path: Path) -> None:
        # Without the name of the save: equal weights are equal files, wherever they were exported.
        save_tensors({name: shard.array for name, shard in self._weights.items()}, path)

    def _export_weights(self, path: Path) -> None:
        written = self._written
        if self._exported is not None:
            save_tensors(self._exported.tensors, path)
        elif self._export_dtype == "float32" and written is not None and written.is_there:
            link_or_copy(written.path, path)
        else:
            dtype = jnp.dtype(self._export_dtype)
            save_tensors({name: shard.array.astype(dtype) for name, shard in self._weights.items()}, path)


class ShardedSnapshot(_Snapshot):
    """Implements ``dockyard_core.policy.PolicySnapshot`` for one of several processes.

    Each process writes files of its own, a pair for each of its devices, and waits for no other, so that the
    processes may write into one directory at the same time. It is complete when every process has returned.
    """

    def __init__(self, policy: JaxPolicy, exported: ExportedWeights | None) -> None:
        super().__init__(policy, exported)
        self._rank = policy.ranks.rank

    def write(self, directory: Path) -> None:
        """Write this process's files, each aside, with fsync and rename, into a directory without a checkpoint.

        Raises OSError when the disk does not take them, or when files of a checkpoint are there already; this
        process's files are then gone again.
        """
        files: dict[str, Callable[[Path], None]] = {}
        for rank, pair in self._state.files.items():
            files[self._name("model", rank)] = self._writer(pair.weights)
            files[self._name("optimizer", rank)] = self._writer(pair.moments)
        if self._rank == 0:
            files["trainer.json"] = self._write_meta
        write_new_files(directory, files, unless="model.safetensors")

    def export(self, directory: Path) -> None:
        """Write this process's file of a sharded Hugging Face model in the policy's dtype; process 0 the rest.

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

    def _name(self, kind: str, rank: int) -> str:
        return file_name(kind, rank, self._state.meta["world_size"])

    def _writer(self, shards: dict[str, TensorShard]) -> Callable[[Path], None]:
        return lambda path: save_shards(shards, path, {"save": self._state.meta["save"]})
