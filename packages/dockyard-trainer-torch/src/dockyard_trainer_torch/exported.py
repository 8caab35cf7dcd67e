"""The weights that other programs load: whole tensors under Hugging Face names, dealt over the ranks by bytes.

No rank holds the model. Each gathers every tensor in turn, as for a refit, and keeps those dealt to it:
written, they are the files of one sharded Hugging Face checkpoint.
"""

from __future__ import annotations

import errno
import json
import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

import torch
from torch import Tensor

from dockyard_core.refit import TensorSpec
from dockyard_trainer_torch.disk import save_tensors, write_file
from dockyard_trainer_torch.sharded_files import file_name
from dockyard_trainer_torch.weights import ModelSource, hf_tensors, weight_manifest, write_hf

if TYPE_CHECKING:
    from dockyard_trainer_torch.policy import TorchPolicy


class ExportedWeights(NamedTuple):
    """A rank's part of a Hugging Face checkpoint, in host memory."""

    tensors: Mapping[str, Tensor]
    weight_map: Mapping[str, str]
    """File of every tensor, of all ranks."""
    file: str | None
    """File of this rank's tensors; None when none were dealt to it."""
    total_bytes: int
    """Of all ranks."""

    def write_index(self, directory: Path) -> None:
        """Write which file holds what; nothing for a checkpoint of one file, which needs no index."""
        if set(self.weight_map.values()) != {"model.safetensors"}:
            index = {"metadata": {"total_size": self.total_bytes}, "weight_map": dict(self.weight_map)}
            text = json.dumps(index, indent=2) + "\n"
            write_file(directory / "model.safetensors.index.json", lambda path: _write_text(path, text))


@torch.no_grad()
def copy_exported(policy: TorchPolicy) -> ExportedWeights:
    """Copy this rank's whole tensors into host memory, in the policy's dtype (collective)."""
    manifest = weight_manifest(policy)
    owners = deal(manifest, policy.ranks.world_size)
    num_files = len(set(owners.values()))
    files = [file_name("model", rank, num_files) for rank in range(num_files)]
    rank, dtype = policy.ranks.rank, getattr(torch, policy.config.dtype)
    tensors = {}
    for name, tensor in hf_tensors(policy.causal_lm):
        if owners[name] == rank:
            # Of a tensor of the CPU, the copy is what the next step does not change.
            tensors[name] = tensor.to("cpu", dtype, copy=True).contiguous()
    return ExportedWeights(
        tensors=tensors,
        weight_map={name: files[owner] for name, owner in owners.items()},
        file=files[rank] if rank < num_files else None,
        total_bytes=sum(map(_num_bytes, manifest)),
    )


def export_hf(policy: TorchPolicy, directory: Path) -> None:
    """Write config, safetensors and the source's tokenizer files: what AutoModelForCausalLM and engines load.

    Weights are in ``config.dtype``, adapters merged. Collective; each rank writes a file of its own. Raises
    OSError on every rank when the disk of any does not take its part.
    """
    exported, dtype = copy_exported(policy), getattr(torch, policy.config.dtype)
    elsewhere = OSError(errno.EIO, "another rank could not write its part; see that rank's error", str(directory))
    with policy.ranks.together(elsewhere):
        directory.mkdir(parents=True, exist_ok=True)
        if exported.file is not None:
            save_tensors(exported.tensors, directory / exported.file)
        if policy.ranks.rank == 0:
            write_hf(ModelSource.of(policy), directory, lambda path: exported.write_index(path.parent), dtype)


def deal(manifest: Sequence[TensorSpec], num_ranks: int) -> dict[str, int]:
    """Rank of each tensor, equal on every rank: the largest first, each to the rank with the fewest bytes.

    The ranks that get any are the first ones.
    """
    loads = [0] * num_ranks
    owners = {}
    for spec in sorted(manifest, key=_num_bytes, reverse=True):
        rank = min(range(num_ranks), key=loads.__getitem__)
        loads[rank] += _num_bytes(spec)
        owners[spec.name] = rank
    return owners


def _num_bytes(spec: TensorSpec) -> int:
    dtype: torch.dtype = getattr(torch, spec.dtype)
    return math.prod(spec.shape) * int(dtype.itemsize)


def _write_text(path: Path, text: str) -> None:
    path.write_text(text)
