"""Saving a policy together, and restoring it from what its snapshots have written: safetensors and JSON only."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from dockyard_core.checkpoint_format import (
    COUNTERS,
    check_one_save,
    check_same_adapters,
    check_same_tensors,
    read_meta,
    tensor_files,
)
from dockyard_core.directories import write_aside_together
from dockyard_core.errors import UserError
from dockyard_trainer_torch.names import own_name, parts_of
from dockyard_trainer_torch.sharded_files import ShardFiles
from dockyard_trainer_torch.snapshot import take
from dockyard_trainer_torch.state import frozen, random_names, read_blocks, set_random_state, trained, whole_shapes

if TYPE_CHECKING:
    from dockyard_trainer_torch.policy import TorchPolicy


def save(policy: TorchPolicy, directory: Path) -> None:
    """Write weights, moments, RNG and counters; an existing directory is replaced (collective).

    Raises OSError on every rank when the disk of any does not take its part; ``directory`` is then as it was.
    """
    snapshot, ranks = take(policy, for_export=False), policy.ranks
    if ranks.world_size == 1:
        snapshot.write(directory)
        return
    write_aside_together(directory, snapshot.write, ranks)


@torch.no_grad()
def restore(policy: TorchPolicy, directory: Path) -> dict[str, int]:
    """Load what `save` or a snapshot's ``write`` wrote into the policy, and return its counters (collective).

    The ranks may be more or fewer than those that wrote, and sharded otherwise; each reads its own blocks.
    A rank goes on with the random state of the same rank; one that did not exist then keeps its own.

    Raises UserError on every rank when the directory is no checkpoint, lacks files, is of another format, or
    holds other tensors than the policy; the policy is then unchanged.
    """
    elsewhere = UserError(f"another rank could not read {str(directory)!r}; see that rank's error")
    with policy.ranks.together(elsewhere):
        counters, blocks, random_states = _read(policy, directory)
    for device, state in random_states:  # first, because torch refuses what another version of it wrote
        set_random_state(device, state)
    for target, block in blocks:
        target.copy_(block)
    for param in trained(policy).values():
        policy.optimizer.state[param]["step"].fill_(float(counters["num_updates"]))
    return counters


def _read(
    policy: TorchPolicy, directory: Path
) -> tuple[dict[str, int], list[tuple[Tensor, Tensor]], list[tuple[str, Tensor]]]:
    """Counters, blocks with where they go, and random states with their devices; the policy is only looked at."""
    meta = read_meta(directory)
    lora = policy.config.lora
    naming = own_name if meta["format"] < 3 else parts_of
    with ShardFiles(tensor_files(directory, meta["world_size"])) as files:
        check_one_save(files.metadata, meta, directory)
        check_same_adapters(None if lora is None else lora.model_dump(mode="json"), meta, directory)
        wanted, unchanged = (whole_shapes(params, naming) for params in (trained(policy), frozen(policy)))
        check_same_tensors(wanted, unchanged, files.blocks, meta, directory)
        blocks = read_blocks(policy, files, naming)
        named = [(files.read_as_written(name), device) for name, device in _names_of(meta, policy)]
    random_states = [(device, state) for state, device in named if state is not None]
    return {name: int(meta[name]) for name in COUNTERS}, blocks, random_states


def _names_of(meta: dict[str, Any], policy: TorchPolicy) -> list[tuple[str, str]]:
    if meta["format"] == 1:
        return [("rng", "cpu")] if policy.ranks.rank == 0 else []
    return list(random_names(policy))
