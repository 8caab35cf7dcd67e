"""What a checkpoint holds: this rank's part of weights and moments, its random state, and the counters.

Only trained parameters are held. Frozen ones (the base under adapters) are named with their shapes, because
a checkpoint fits no other base.
"""

from __future__ import annotations

import secrets
from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor, nn

from dockyard_core.checkpoint_format import FORMAT, MOMENTS
from dockyard_trainer_torch.names import Naming, parts_of, pieces_of, shape_of
from dockyard_trainer_torch.ranks import Ranks, local
from dockyard_trainer_torch.sharded_files import ShardFiles, TensorShard, is_first_copy, region_of

if TYPE_CHECKING:
    from dockyard_trainer_torch.policy import TorchPolicy


class State(NamedTuple):
    """A policy's state on this rank, in host memory."""

    weights: Mapping[str, TensorShard]
    """Float32, by Hugging Face name. A block that several ranks hold is with the first of them only."""
    optimizer: Mapping[str, TensorShard]
    """``<moment>.<name>`` in float32, and the random state of this rank."""
    meta: Mapping[str, Any]
    """trainer.json."""


def trained(policy: TorchPolicy) -> dict[str, nn.Parameter]:
    """Parameters that a step changes, in the model's order."""
    return {name: param for name, param in policy.causal_lm.named_parameters() if param.requires_grad}


def frozen(policy: TorchPolicy) -> dict[str, nn.Parameter]:
    """Parameters that no step changes."""
    return {name: param for name, param in policy.causal_lm.named_parameters() if not param.requires_grad}


def whole_shapes(params: Mapping[str, nn.Parameter], naming: Naming = parts_of) -> dict[str, tuple[int, ...]]:
    """Whole shapes of what parameters hold, under the names of a checkpoint."""
    return {
        part.name: shape_of(part, tuple(param.shape))
        for name, param in params.items()
        for part in naming(name, tuple(param.shape))
    }


def copy_state(policy: TorchPolicy) -> State:
    """Copy this rank's blocks; nothing is gathered (collective only to agree on the name of the save)."""
    ranks = policy.ranks
    written = {name: param for name, param in trained(policy).items() if is_first_copy(param, ranks.mesh)}
    weights: dict[str, TensorShard] = {}
    moments: dict[str, TensorShard] = {}
    for name, param in written.items():
        weights |= _copied(name, param, param)
    for moment in MOMENTS:
        for name, param in written.items():
            copied = _copied(name, param, policy.optimizer.state[param][moment])
            moments |= {f"{moment}.{part}": shard for part, shard in copied.items()}
    meta = {
        "format": FORMAT,
        "version": policy.version,
        "num_updates": policy.num_updates,
        "num_skipped_steps": policy.num_skipped_steps,
        "world_size": ranks.world_size,
        "save": _save_id(ranks),
        "frozen": {name: list(shape) for name, shape in whole_shapes(frozen(policy)).items()},
        "config": policy.config.model_dump(mode="json"),
    }
    return State(_not_empty(weights), _not_empty(moments) | _random_state(policy), meta)


def read_blocks(policy: TorchPolicy, files: ShardFiles, naming: Naming) -> list[tuple[Tensor, Tensor]]:
    """Read what this rank holds of weights and moments; pairs of where it goes and what goes there."""
    pairs = []
    for name, param in trained(policy).items():
        held = {"": local(param.detach())}
        held |= {f"{moment}.": local(policy.optimizer.state[param][moment]) for moment in MOMENTS}
        for piece in pieces_of(name, tuple(param.shape), region_of(param), naming):
            pairs += [
                (tensor[piece.index], files.read(prefix + piece.name, piece.region)) for prefix, tensor in held.items()
            ]
    return pairs


def random_names(policy: TorchPolicy) -> Iterator[tuple[str, str]]:
    """Name and device of each random state of this rank."""
    yield f"rng.{policy.ranks.rank}", "cpu"
    if torch.device(policy.config.device).type == "cuda":
        yield f"cuda_rng.{policy.ranks.rank}", policy.config.device


def set_random_state(device: str, state: Tensor) -> None:
    """Let the device's generator go on from ``state``."""
    if device == "cpu":
        torch.set_rng_state(state)
    else:
        torch.cuda.set_rng_state(state, device)


def _random_state(policy: TorchPolicy) -> dict[str, TensorShard]:
    states = {
        name: torch.get_rng_state() if device == "cpu" else torch.cuda.get_rng_state(device)
        for name, device in random_names(policy)
    }
    return {name: TensorShard(region_of(state), state) for name, state in states.items()}


def _copied(name: str, param: Tensor, tensor: Tensor) -> dict[str, TensorShard]:
    """Copies of what this rank's block of a tensor that lies as its parameter does holds, by name."""
    block = local(tensor.detach())
    region = region_of(param)
    assert tuple(block.shape) == region.shape, f"a rank holds the block {region}, got {tuple(block.shape)}"
    return {
        piece.name: TensorShard(piece.region, block[piece.index].to("cpu", torch.float32, copy=True).contiguous())
        for piece in pieces_of(name, tuple(param.shape), region)
    }


def _not_empty(shards: Mapping[str, TensorShard]) -> dict[str, TensorShard]:
    """Without those of which this rank has no part: with more ranks than rows, some have none."""
    return {name: shard for name, shard in shards.items() if shard.region.num_elements}


def _save_id(ranks: Ranks) -> str:
    """The same on every rank and in no other save; not drawn from the generators that a checkpoint holds."""
    drawn = secrets.randbits(62) if ranks.rank == 0 else 0
    return f"{int(ranks.sum(torch.tensor(drawn, device=ranks.device)).item()):016x}"
