"""Restoring a policy from what its snapshots have written: safetensors and JSON only."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from dockyard_core.errors import UserError
from dockyard_trainer_torch.ranks import copy_whole
from dockyard_trainer_torch.snapshot import FORMAT, MOMENTS
from dockyard_trainer_torch.weights import named_weights

if TYPE_CHECKING:
    from dockyard_trainer_torch.policy import TorchPolicy


def restore(policy: TorchPolicy, directory: Path) -> dict[str, int]:
    """Load what `TorchSnapshot.write` wrote into the policy and return its counters.

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
        for moment in MOMENTS:
            copy_whole(policy.optimizer.state[param][moment], state[f"{moment}.{name}"])
        policy.optimizer.state[param]["step"].fill_(float(meta["optimizer_steps"]))
    torch.set_rng_state(state["rng"])
    return {"version": int(meta["version"]), "num_skipped_steps": int(meta["num_skipped_steps"])}


def _check_same_tensors(
    params: dict[str, torch.nn.Parameter], weights: dict[str, Tensor], state: dict[str, Tensor], directory: Path
) -> None:
    wanted = {name: tuple(param.shape) for name, param in params.items()}
    wanted_state = {f"{moment}.{name}": shape for moment in MOMENTS for name, shape in wanted.items()}
    held = {name: tuple(tensor.shape) for name, tensor in weights.items()}
    held_state = {name: tuple(tensor.shape) for name, tensor in state.items() if name != "rng"}
    different = {*(wanted.items() ^ held.items()), *(wanted_state.items() ^ held_state.items())}
    if different:
        raise UserError(
            f"a checkpoint must hold the policy's tensors, got {len(different)} differences in {str(directory)!r}, "
            f"first {min(different)}; restore it with the model it was made from"
        )
