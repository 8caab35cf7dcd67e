"""What a checkpoint holds: this process's part of weights and moments, and the counters.

Only trained parameters are held. Frozen ones (the base under adapters) are named with their shapes, because a
checkpoint fits no other base.
"""

from __future__ import annotations

import secrets
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

import jax
import numpy as np

from dockyard_core.checkpoint_format import FORMAT, MOMENTS
from dockyard_core.regions import Region
from dockyard_trainer_jax.loading import load_array
from dockyard_trainer_jax.names import shape_of
from dockyard_trainer_jax.sharded_files import DeviceBlock, ShardFiles, TensorShard, device_blocks
from dockyard_trainer_jax.weights import ordered_places

if TYPE_CHECKING:
    from dockyard_trainer_jax.policy import JaxPolicy
    from dockyard_trainer_jax.step import Params


class FilePair(NamedTuple):
    """What belongs into the two files of one rank of a checkpoint."""

    weights: dict[str, TensorShard]
    """Float32, by Hugging Face name, in the manifest's order."""
    moments: dict[str, TensorShard]
    """``<moment>.<name>`` in float32."""


class State(NamedTuple):
    """A policy's state on this process, in host memory."""

    files: Mapping[int, FilePair]
    """By rank of the checkpoint, which several processes have one of for each device (`checkpoint_format`)."""
    meta: Mapping[str, Any]
    """trainer.json."""


def whole_shapes(params: Params) -> dict[str, tuple[int, ...]]:
    """Whole shapes of what parameters hold, by Hugging Face name."""
    return {place.part.name: shape_of(place.part, params[place.param].shape) for place in ordered_places(params)}


def copy_state(policy: JaxPolicy) -> State:
    """Copy this process's blocks; nothing is gathered (collective only to agree on the name of the save)."""
    ranks = _checkpoint_ranks(policy)
    files = {number: FilePair({}, {}) for number in sorted(set(ranks.values()))}
    for kind in ("", *MOMENTS):
        params = policy.params if not kind else getattr(policy.state, kind)
        blocks = {name: _blocks(policy, param) for name, param in params.items()}
        for name, part in ordered_places(params):
            for block in blocks[name]:
                shard = block.of_part(part)
                if shard is not None and kind:
                    files[ranks[block.device_id]].moments[f"{kind}.{part.name}"] = shard
                elif shard is not None:
                    files[ranks[block.device_id]].weights[part.name] = shard
    world_size = 1 if policy.ranks.world_size == 1 else jax.device_count()
    return State(files, meta_of(policy) | {"format": FORMAT, "world_size": world_size, "save": _save_id(policy)})


def meta_of(policy: JaxPolicy) -> dict[str, Any]:
    """What every kind of checkpoint says about a policy."""
    return {
        "version": policy.version,
        "num_updates": policy.num_updates,
        "num_skipped_steps": policy.num_skipped_steps,
        "frozen": {name: list(shape) for name, shape in whole_shapes(policy.frozen).items()},
        "shapes": sorted(policy.shapes),
        "config": policy.config.model_dump(mode="json"),
    }


def load_blocks(policy: JaxPolicy, files: ShardFiles, num_updates: int) -> None:
    """Put what this process's devices hold of weights and moments in place, one array at a time.

    Each array takes the place of the one before at once, so that no device ever holds two of the rest.
    """
    for kind in ("", *MOMENTS):
        held = policy.params if not kind else getattr(policy.state, kind)
        prefix = f"{kind}." if kind else ""

        def read(name: str, region: Region, prefix: str = prefix) -> np.ndarray:
            return files.read(prefix + name, region)

        for name, array in held.items():
            held[name] = load_array(name, array.shape, array.sharding, read)
    policy.state = policy.state._replace(count=counted(num_updates, policy.state.count.sharding))


def counted(num_updates: int, sharding: jax.sharding.Sharding) -> jax.Array:
    """The optimizer's count of updates."""
    return jax.make_array_from_callback((), sharding, lambda _: np.asarray(num_updates, np.int32))


def _checkpoint_ranks(policy: JaxPolicy) -> dict[int, int]:
    """Rank in the checkpoint of each device of this process, by id."""
    if policy.ranks.mesh is None or policy.ranks.world_size == 1:
        return {device.id: 0 for device in jax.local_devices()}
    devices = policy.ranks.mesh.devices.flat
    return {device.id: number for number, device in enumerate(devices) if device.process_index == policy.ranks.rank}


def _blocks(policy: JaxPolicy, param: jax.Array) -> Sequence[DeviceBlock]:
    """The blocks that this process writes; a process alone puts its devices' blocks together."""
    if policy.ranks.world_size > 1:
        return tuple(device_blocks(param))
    whole = TensorShard(Region.whole(param.shape), np.array(param))
    return (DeviceBlock(jax.local_devices()[0].id, whole),)


def _save_id(policy: JaxPolicy) -> str:
    """The same on every process and in no other save."""
    return str(policy.ranks.gather(secrets.token_hex(8))[0])
