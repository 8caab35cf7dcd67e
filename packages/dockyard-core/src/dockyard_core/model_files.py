"""A Hugging Face checkpoint that several ranks write: which file holds which tensor."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

from dockyard_core.checkpoint_format import file_name
from dockyard_core.directories import write_file
from dockyard_core.refit import TensorSpec


class DealtFiles(NamedTuple):
    """The files of a model, equal on every rank."""

    owners: Mapping[str, int]
    """Rank of each tensor."""
    weight_map: Mapping[str, str]
    """File of each tensor."""
    total_bytes: int

    def file_of(self, rank: int) -> str | None:
        """File of a rank's tensors; None when none were dealt to it."""
        return next((self.weight_map[name] for name, owner in self.owners.items() if owner == rank), None)

    def write_index(self, directory: Path) -> None:
        """Write which file holds what; nothing for a model of one file, which needs no index."""
        if set(self.weight_map.values()) != {"model.safetensors"}:
            index = {"metadata": {"total_size": self.total_bytes}, "weight_map": dict(self.weight_map)}
            text = json.dumps(index, indent=2) + "\n"
            write_file(directory / "model.safetensors.index.json", lambda path: _write_text(path, text))


def deal_files(manifest: Sequence[TensorSpec], num_ranks: int) -> DealtFiles:
    """Deal the tensors of a model to ranks, a file for each that gets any."""
    owners = deal(manifest, num_ranks)
    num_files = len(set(owners.values()))
    weight_map = {name: file_name("model", owner, num_files) for name, owner in owners.items()}
    return DealtFiles(owners, weight_map, sum(spec.num_bytes for spec in manifest))


def deal(manifest: Sequence[TensorSpec], num_ranks: int) -> dict[str, int]:
    """Rank of each tensor, equal on every rank: the largest first, each to the rank with the fewest bytes.

    The ranks that get any are the first ones.
    """
    loads = [0] * num_ranks
    owners = {}
    for spec in sorted(manifest, key=lambda spec: spec.num_bytes, reverse=True):
        rank = min(range(num_ranks), key=loads.__getitem__)
        loads[rank] += spec.num_bytes
        owners[spec.name] = rank
    return owners


def _write_text(path: Path, text: str) -> None:
    path.write_text(text)
