"""The weights that other programs load: whole tensors under Hugging Face names, dealt over the processes by bytes.

No process holds the model. Each gathers every tensor in turn, as for a refit, and keeps those dealt to it: written,
they are the files of one sharded Hugging Face checkpoint.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from dockyard_core.directories import write_aside_together
from dockyard_core.model_files import DealtFiles, deal_files
from dockyard_trainer_jax.disk import save_tensors
from dockyard_trainer_jax.weights import hf_tensors, weight_manifest, write_hf

if TYPE_CHECKING:
    from dockyard_trainer_jax.policy import JaxPolicy


class ExportedWeights(NamedTuple):
    """A process's part of a Hugging Face checkpoint, in host memory."""

    tensors: Mapping[str, np.ndarray]
    dealt: DealtFiles
    file: str | None
    """File of this process's tensors; None when none were dealt to it."""


def copy_exported(policy: JaxPolicy) -> ExportedWeights:
    """Copy this process's whole tensors into host memory, in the policy's dtype (collective)."""
    dealt, rank = deal_files(weight_manifest(policy), policy.ranks.world_size), policy.ranks.rank
    tensors = {
        # Of an array of the CPU, the copy is what the next step does not take.
        name: np.array(tensor)
        for name, tensor in hf_tensors(policy.params | policy.frozen, policy.config.dtype, policy.config.lora)
        if dealt.owners[name] == rank
    }
    return ExportedWeights(tensors, dealt, dealt.file_of(rank))


def export_hf(policy: JaxPolicy, directory: Path) -> None:
    """Write config, safetensors and the source's tokenizer files: what AutoModelForCausalLM and engines load.

    Weights are in ``config.dtype``, adapters merged. Collective; each process writes a file of its own. An existing
    directory is replaced whole: files of another number of processes would be loaded instead of these. Raises OSError
    on every process when the disk of any does not take its part; ``directory`` is then as it was.
    """
    exported, dtype, ranks = copy_exported(policy), policy.config.dtype, policy.ranks

    def write(aside: Path) -> None:
        if exported.file is not None:
            save_tensors(exported.tensors, aside / exported.file)
        if ranks.rank == 0:
            write_hf(policy.source, aside, lambda path: exported.dealt.write_index(path.parent), dtype)

    write_aside_together(directory, write, ranks)
