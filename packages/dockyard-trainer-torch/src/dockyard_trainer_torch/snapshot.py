"""The state of a policy at one moment, held in host memory, and the directories it is written to.

<directory>/                                         of `TorchSnapshot.write`
  config.json, model.safetensors, tokenizer files    a Hugging Face model, weights in float32
  optimizer.safetensors                              moments, by weight name; the RNG state
  trainer.json                                       format, version, optimizer steps, counters
"""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from dockyard_trainer_torch.disk import link_or_copy, save_tensors, write_aside
from dockyard_trainer_torch.weights import ModelSource, gather, named_weights, write_hf

if TYPE_CHECKING:
    from dockyard_trainer_torch.policy import TorchPolicy

FORMAT = 1
MOMENTS = ("exp_avg", "exp_avg_sq")


def take(policy: TorchPolicy) -> TorchSnapshot:
    """Copy weights, moments and RNG of the policy into the memory of rank 0 (collective)."""
    is_writer = policy.ranks.rank == 0
    weights = gather(dict(named_weights(policy.causal_lm)), torch.float32, is_kept=is_writer)
    moments = {
        f"{moment}.{name}": policy.optimizer.state[param][moment]
        for moment in MOMENTS
        for name, param in named_weights(policy.causal_lm)
    }
    optimizer_state = gather(moments, torch.float32, is_kept=is_writer) | {"rng": torch.get_rng_state()}
    meta = {
        "format": FORMAT,
        "version": policy.version,
        "optimizer_steps": policy.version,
        "num_skipped_steps": policy.num_skipped_steps,
        "config": policy.config.model_dump(mode="json"),
    }
    return TorchSnapshot(
        weights,
        optimizer_state,
        meta,
        source=ModelSource.of(policy),
        export_dtype=getattr(torch, policy.config.dtype),
        is_writer=is_writer,
    )


class TorchSnapshot:
    """Implements ``dockyard_core.policy.PolicySnapshot``: rank 0 writes, the others have nothing to write.

    It shares no memory with the policy. Its methods are for one thread at a time.
    """

    def __init__(
        self,
        weights: Mapping[str, Tensor],
        optimizer_state: Mapping[str, Tensor],
        meta: Mapping[str, Any],
        *,
        source: ModelSource,
        export_dtype: torch.dtype,
        is_writer: bool,
    ) -> None:
        self._weights = weights
        self._optimizer_state = optimizer_state
        self._meta = meta
        self._source = source
        self._export_dtype = export_dtype
        self._is_writer = is_writer
        self._written: tuple[Path, os.stat_result] | None = None
        """Where the float32 weights are on disk, and what that file was when it was written."""

    def write(self, directory: Path) -> None:
        """Write aside, fsync, rename; an existing directory is replaced.

        Raises OSError when the disk does not take it; ``directory`` is then as it was.
        """
        if not self._is_writer:
            return
        write_aside(directory, self._write_files)
        weights = directory / "model.safetensors"
        self._written = weights, weights.stat()

    def export(self, directory: Path) -> None:
        """Write a Hugging Face model in the policy's dtype, aside like `write`. Raises OSError.

        When that is float32, its weights are the very bytes that `write` has written: they become a hard
        link to them, or a copy on a file system without links.
        """
        if not self._is_writer:
            return

        def write_files(aside: Path) -> None:
            twin = self._twin()
            if twin is not None:
                write_hf(self._source, aside, lambda path: link_or_copy(twin, path), self._export_dtype)
                return
            weights = {name: tensor.to(self._export_dtype) for name, tensor in self._weights.items()}
            write_hf(self._source, aside, lambda path: save_tensors(weights, path), self._export_dtype)

        write_aside(directory, write_files)

    def _write_files(self, aside: Path) -> None:
        write_hf(self._source, aside, lambda path: save_tensors(self._weights, path), torch.float32)
        save_tensors(self._optimizer_state, aside / "optimizer.safetensors")
        (aside / "trainer.json").write_text(json.dumps(self._meta, indent=2) + "\n")

    def _twin(self) -> Path | None:
        """The file that holds the bytes to export; None when there is none, or it is another one by now."""
        if self._export_dtype is not torch.float32 or self._written is None:
            return None
        path, written = self._written
        try:
            is_same = _identity(path.stat()) == _identity(written)
        except FileNotFoundError:
            return None
        return path if is_same else None


def _identity(stat: os.stat_result) -> tuple[int, ...]:
    return stat.st_dev, stat.st_ino, stat.st_size, stat.st_mtime_ns
