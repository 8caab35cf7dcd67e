"""Saving a policy together, and restoring it from what its snapshots have written: safetensors and JSON only."""

from __future__ import annotations

import errno
import json
import shutil
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from dockyard_core.errors import UserError
from dockyard_trainer_torch.disk import open_aside, partial_path, put_in_place
from dockyard_trainer_torch.sharded_files import ShardFiles, file_name
from dockyard_trainer_torch.snapshot import take
from dockyard_trainer_torch.state import (
    FORMAT,
    MOMENTS,
    frozen_shapes,
    random_names,
    read_blocks,
    set_random_state,
    trained,
)

if TYPE_CHECKING:
    from dockyard_trainer_torch.policy import TorchPolicy

_COUNTERS = ("version", "num_updates", "num_skipped_steps")
_META_KEYS = {*_COUNTERS, "world_size", "save", "frozen"}


def save(policy: TorchPolicy, directory: Path) -> None:
    """Write weights, moments, RNG and counters; an existing directory is replaced (collective).

    Raises OSError on every rank when the disk of any does not take its part; ``directory`` is then as it was.
    """
    snapshot, ranks = take(policy, for_export=False), policy.ranks
    if ranks.world_size == 1:
        snapshot.write(directory)
        return
    is_first = ranks.rank == 0
    aside = partial_path(directory)
    elsewhere = OSError(errno.EIO, "another rank could not write its part; see that rank's error", str(directory))
    try:
        with ranks.together(elsewhere):
            if is_first:
                open_aside(directory)
        with ranks.together(elsewhere):
            snapshot.write(aside)
        with ranks.together(elsewhere):
            if is_first:
                put_in_place(aside, directory)
    finally:
        if is_first:
            shutil.rmtree(aside, ignore_errors=True)  # it is there only if something raised


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
    meta = _read_meta(directory)
    world_size = meta["world_size"]
    paths = [
        directory / file_name(kind, rank, world_size) for kind in ("model", "optimizer") for rank in range(world_size)
    ]
    with ShardFiles(paths) as files:
        _check_one_save(files, meta, directory)
        _check_same_adapters(policy, meta, directory)
        _check_same_tensors(policy, files, meta, directory)
        blocks = read_blocks(policy, files)
        named = [(files.read_as_written(name), device) for name, device in _names_of(meta, policy)]
    random_states = [(device, state) for state, device in named if state is not None]
    return {name: int(meta[name]) for name in _COUNTERS}, blocks, random_states


def _read_meta(directory: Path) -> dict[str, Any]:
    path = directory / "trainer.json"
    if not path.is_file():
        raise UserError(f"a checkpoint has trainer.json, got {str(directory)!r}; give a directory written by save")
    try:
        meta = json.loads(path.read_text())
        found = meta["format"]
    except (ValueError, KeyError, TypeError) as error:
        raise UserError(
            f"trainer.json must be as save wrote it, got {str(path)!r} ({error!r}); copy it again, or restore another"
        ) from error
    if found == 1:  # one rank wrote it, one update made a version, everything was trained
        return dict(meta) | {"num_updates": meta["version"], "world_size": 1, "save": None, "frozen": {}}
    if found != FORMAT:
        raise UserError(f"checkpoint format must be at most {FORMAT}, got {found!r}; restore it with its own release")
    missing = _META_KEYS - meta.keys()
    if missing:
        raise UserError(
            f"trainer.json must be as save wrote it, got {str(path)!r} without {min(missing)!r}; restore another save"
        )
    return dict(meta)


def _names_of(meta: dict[str, Any], policy: TorchPolicy) -> list[tuple[str, str]]:
    if meta["format"] == 1:
        return [("rng", "cpu")] if policy.ranks.rank == 0 else []
    return list(random_names(policy))


def _check_one_save(files: ShardFiles, meta: dict[str, Any], directory: Path) -> None:
    """Raise UserError when files of two saves lie in the directory."""
    for path, metadata in files.metadata.items():
        is_named = meta["save"] is not None and path.name != "model.safetensors"
        if is_named and metadata.get("save") != meta["save"]:
            raise UserError(
                f"a checkpoint's files must be of one save, got {path.name!r} of save {metadata.get('save')!r} beside "
                f"trainer.json of {meta['save']!r} in {str(directory)!r}; copy one whole directory"
            )
    declared = {path.name for path in files.metadata}
    others = {
        path.name for kind in ("model", "optimizer") for path in directory.glob(f"{kind}*.safetensors")
    } - declared
    if others:
        raise UserError(
            f"a checkpoint of {meta['world_size']} ranks has {len(declared)} files of tensors, got {min(others)!r} "
            f"beside them in {str(directory)!r}; copy one whole directory"
        )


def _check_same_adapters(policy: TorchPolicy, meta: dict[str, Any], directory: Path) -> None:
    """Raise UserError for other adapters: of another alpha, the same tensors are another policy."""
    lora = policy.config.lora
    wanted = None if lora is None else lora.model_dump(mode="json")
    held = meta.get("config", {}).get("lora")
    if held != wanted:
        raise UserError(
            f"a checkpoint must be restored with the adapters it was trained with, got lora={wanted} for "
            f"{held} in {str(directory)!r}; set lora to the checkpoint's"
        )


def _check_same_tensors(policy: TorchPolicy, files: ShardFiles, meta: dict[str, Any], directory: Path) -> None:
    params = {name: tuple(param.shape) for name, param in trained(policy).items()}
    moments = {f"{moment}.{name}": shape for moment in MOMENTS for name, shape in params.items()}
    frozen = {f"{name} (frozen)": tuple(shape) for name, shape in frozen_shapes(policy).items()}
    wanted = params | moments | frozen
    held = {name: shape for name, shape in files.shapes.items() if not name.startswith(("rng", "cuda_rng"))}
    held |= {f"{name} (frozen)": tuple(shape) for name, shape in meta["frozen"].items()}
    different = wanted.items() ^ held.items()
    if different:
        raise UserError(
            f"a checkpoint must hold the policy's tensors, got {len(different)} differences in {str(directory)!r}, "
            f"first {min(different)}; restore it with the model it was made from"
        )
    if files.incomplete:
        raise UserError(
            f"the files of a checkpoint must hold every element once, got {len(files.incomplete)} tensors that they "
            f"do not, first {min(files.incomplete)!r} in {str(directory)!r}; restore another save"
        )
