"""Saving and restoring a policy: safetensors and JSON only, and never a half-written directory.

<directory>/
  config.json, model.safetensors, tokenizer files    a Hugging Face model, weights in float32
  optimizer.safetensors                              moments, by weight name; the RNG state
  trainer.json                                       format, version, optimizer steps, counters
"""

from __future__ import annotations

import json
import os
import shutil
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from dockyard_core.errors import UserError
from dockyard_trainer_torch.ranks import copy_whole, whole
from dockyard_trainer_torch.weights import gather_weights, named_weights, write_hf

if TYPE_CHECKING:
    from dockyard_trainer_torch.policy import TorchPolicy

FORMAT = 1
_MOMENTS = ("exp_avg", "exp_avg_sq")


def save(policy: TorchPolicy, directory: Path) -> None:
    """Write aside, fsync, rename; an existing directory is replaced. Collective; rank 0 writes."""
    weights = gather_weights(policy.causal_lm, torch.float32)
    optimizer_state = _gather_optimizer(policy)
    if policy.ranks.rank == 0:
        aside = directory.with_name(f".{directory.name}.partial")
        shutil.rmtree(aside, ignore_errors=True)
        aside.mkdir(parents=True)
        _write(policy, aside, weights, optimizer_state)
        _fsync_tree(aside)
        _put_in_place(aside, directory)
    policy.ranks.barrier()


def restore(policy: TorchPolicy, directory: Path) -> dict[str, int]:
    """Load what ``save`` wrote into the policy and return its counters.

    Raises UserError when the directory is no checkpoint, is of another format, or holds other
    tensors than the policy; the policy is then unchanged.
    """
    from safetensors.torch import load_file

    if not (directory / "trainer.json").is_file():
        raise UserError(f"a checkpoint has trainer.json, got {str(directory)!r}; give a directory written by save")
    meta: dict[str, Any] = json.loads((directory / "trainer.json").read_text())
    if meta["format"] != FORMAT:
        raise UserError(f"checkpoint format must be {FORMAT}, got {meta['format']!r}; restore it with its own release")
    weights = load_file(directory / "model.safetensors")
    state = load_file(directory / "optimizer.safetensors")
    params = dict(named_weights(policy.causal_lm))
    _check_same_tensors(params, weights, state, directory)
    for name, param in params.items():
        copy_whole(param, weights[name])
        for moment in _MOMENTS:
            copy_whole(policy.optimizer.state[param][moment], state[f"{moment}.{name}"])
        policy.optimizer.state[param]["step"].fill_(float(meta["optimizer_steps"]))
    torch.set_rng_state(state["rng"])
    return {"version": int(meta["version"]), "num_skipped_steps": int(meta["num_skipped_steps"])}


def _gather_optimizer(policy: TorchPolicy) -> dict[str, Tensor]:
    state = {"rng": torch.get_rng_state()}
    for name, param in named_weights(policy.causal_lm):
        for moment in _MOMENTS:
            tensor: Tensor = policy.optimizer.state[param][moment]
            state[f"{moment}.{name}"] = whole(tensor).detach().to("cpu").contiguous()
    return state


def _write(
    policy: TorchPolicy, directory: Path, weights: dict[str, Tensor], optimizer_state: dict[str, Tensor]
) -> None:
    from safetensors.torch import save_file

    write_hf(policy, directory, weights, torch.float32)
    save_file(optimizer_state, directory / "optimizer.safetensors")
    meta = {
        "format": FORMAT,
        "version": policy.version,
        "optimizer_steps": policy.version,
        "num_skipped_steps": policy.num_skipped_steps,
        "config": policy.config.model_dump(mode="json"),
    }
    (directory / "trainer.json").write_text(json.dumps(meta, indent=2) + "\n")


def _fsync_tree(directory: Path) -> None:
    for path in (*directory.iterdir(), directory):
        descriptor = os.open(path, os.O_RDONLY)
        try:
            os.fsync(descriptor)
        finally:
            os.close(descriptor)


def _put_in_place(aside: Path, directory: Path) -> None:
    """Rename; a rename onto a full directory is refused by the system, so the old one steps aside."""
    replaced = directory.with_name(f".{directory.name}.replaced")
    shutil.rmtree(replaced, ignore_errors=True)
    if directory.exists():
        directory.rename(replaced)
    aside.rename(directory)
    shutil.rmtree(replaced, ignore_errors=True)
    descriptor = os.open(directory.parent, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _check_same_tensors(
    params: dict[str, torch.nn.Parameter], weights: dict[str, Tensor], state: dict[str, Tensor], directory: Path
) -> None:
    wanted = {name: tuple(param.shape) for name, param in params.items()}
    wanted_state = {f"{moment}.{name}": shape for moment in _MOMENTS for name, shape in wanted.items()}
    held = {name: tuple(tensor.shape) for name, tensor in weights.items()}
    held_state = {name: tuple(tensor.shape) for name, tensor in state.items() if name != "rng"}
    different = {*(wanted.items() ^ held.items()), *(wanted_state.items() ^ held_state.items())}
    if different:
        raise UserError(
            f"a checkpoint must hold the policy's tensors, got {len(different)} differences in {str(directory)!r}, "
            f"first {min(different)}; restore it with the model it was made from"
        )
