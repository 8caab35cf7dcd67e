"""Saving a policy together, and restoring it from what its snapshots, or the PyTorch trainer's, have written."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from contextlib import ExitStack
from pathlib import Path
from typing import TYPE_CHECKING, Any

from dockyard_core.checkpoint_format import (
    check_one_save,
    check_same_adapters,
    check_same_tensors,
    read_meta,
    tensor_files,
)
from dockyard_core.directories import write_aside_together
from dockyard_core.errors import UserError
from dockyard_trainer_jax.sharded_files import ShardFiles
from dockyard_trainer_jax.snapshot import take
from dockyard_trainer_jax.state import load_blocks, whole_shapes

if TYPE_CHECKING:
    from dockyard_trainer_jax.policy import JaxPolicy


def save(policy: JaxPolicy, directory: Path) -> None:
    """Write weights, moments and counters; an existing directory is replaced (collective).

    Raises OSError on every process when the disk of any does not take its part; ``directory`` is then as it was.
    """
    snapshot = take(policy, for_export=False)
    if policy.ranks.world_size == 1:
        snapshot.write(directory)
    else:
        write_aside_together(directory, snapshot.write, policy.ranks)


def restore(policy: JaxPolicy, directory: Path) -> dict[str, Any]:
    """Load what any number of ranks of either trainer wrote into the policy, and return trainer.json (collective).

    Each device's part is read straight from the files, and takes the place of what the device held.

    Raises UserError on every process when the directory is no checkpoint, lacks files, is of another format, or
    holds other tensors than the policy; the policy is then unchanged.
    """
    elsewhere = UserError(f"another rank could not read {str(directory)!r}; see that rank's error")
    with ExitStack() as stack:
        with policy.ranks.together(elsewhere):
            meta = read_meta(directory)
            files = stack.enter_context(ShardFiles(tensor_files(directory, meta["world_size"])))
            check_one_save(files.metadata, meta, directory)
            check_adapters(policy, meta, directory)
            _check_experts_apart([*files.blocks.shapes, *meta["frozen"]], meta, directory)
            wanted, frozen = whole_shapes(policy.params), whole_shapes(policy.frozen)
            check_same_tensors(wanted, frozen, files.blocks, meta, directory)
        with policy.ranks.together(elsewhere):  # or the others would wait for one whose disk fails now
            load_blocks(policy, files, int(meta["num_updates"]))
    return meta


def _check_experts_apart(names: Iterable[str], meta: Mapping[str, Any], directory: Path) -> None:
    """Raise UserError for a mixture of experts of an earlier format, which the PyTorch trainer still reads."""
    fused = [name for name in names if ".experts." in name and name.endswith("_proj")]
    if fused:
        raise UserError(
            f"experts must be saved one by one, got {fused[0]!r} of format {meta['format']} in {str(directory)!r}; "
            "restore it with the PyTorch trainer, and save it again"
        )


def check_adapters(policy: JaxPolicy, meta: dict[str, Any], directory: Path) -> None:
    """Raise UserError for other adapters than the policy's."""
    lora = policy.config.lora
    check_same_adapters(None if lora is None else lora.model_dump(mode="json"), meta, directory)
