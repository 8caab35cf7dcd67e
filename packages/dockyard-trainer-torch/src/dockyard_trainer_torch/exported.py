"""The weights that other programs load: whole tensors under Hugging Face names, dealt over the ranks by bytes.

No rank holds the model. Each gathers every tensor in turn, as for a refit, and keeps those dealt to it:
written, they are the files of one sharded Hugging Face checkpoint.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

import torch
from torch import Tensor

from dockyard_core.directories import write_aside_together
from dockyard_core.model_files import DealtFiles, deal_files
from dockyard_trainer_torch.disk import save_tensors
from dockyard_trainer_torch.weights import ModelSource, hf_tensors, weight_manifest, write_hf

if TYPE_CHECKING:
    from dockyard_trainer_torch.policy import TorchPolicy


class ExportedWeights(NamedTuple):
    """A rank's part of a Hugging Face checkpoint, in host memory."""

    tensors: Mapping[str, Tensor]
    dealt: DealtFiles
    file: str | None
    """File of this rank's tensors; None when none were dealt to it."""


@torch.no_grad()
def copy_exported(policy: TorchPolicy) -> ExportedWeights:
    """Copy this rank's whole tensors into host memory, in the policy's dtype (collective)."""
    dealt = deal_files(weight_manifest(policy), policy.ranks.world_size)
    rank, dtype = policy.ranks.rank, getattr(torch, policy.config.dtype)
    tensors = {}
    for name, tensor in hf_tensors(policy.causal_lm):
        if dealt.owners[name] == rank:
            # Of a tensor of the CPU, the copy is what the next step does not change.
            tensors[name] = tensor.to("cpu", dtype, copy=True).contiguous()
    return ExportedWeights(tensors, dealt, dealt.file_of(rank))


def export_hf(policy: TorchPolicy, directory: Path) -> None:
    """Write config, safetensors and the source's tokenizer files: what AutoModelForCausalLM and engines load.

    Weights are in ``config.dtype``, adapters merged. Collective; each rank writes a file of its own. An existing
    directory is replaced whole: files of another number of ranks would be loaded instead of these. Raises OSError on
    every rank when the disk of any does not take its part; ``directory`` is then as it was.
    """
    exported, dtype = copy_exported(policy), getattr(torch, policy.config.dtype)

    def write(aside: Path) -> None:
        if exported.file is not None:
            save_tensors(exported.tensors, aside / exported.file)
        if policy.ranks.rank == 0:
            write_hf(ModelSource.of(policy), aside, lambda path: exported.dealt.write_index(path.parent), dtype)

    write_aside_together(directory, write, policy.ranks)
