"""How a model lies on a mesh of devices: a table from names to axes.

The mesh has two axes. ``fsdp`` deals the rows of a batch, and a part of every matrix, which XLA gathers when a layer
needs it (arXiv:1910.02054). ``tp`` deals heads, inner width and vocabulary: linear layers come in pairs, the first
split by outputs and the second by inputs (Megatron-LM, arXiv:1909.08053). Norms and the biases that are added after
a sum over ``tp`` are small, and whole on every device.
"""

from __future__ import annotations

from collections.abc import Callable
from fnmatch import fnmatchcase
from functools import cache
from typing import TYPE_CHECKING

import jax
from jax.sharding import AxisType, Mesh, NamedSharding, PartitionSpec

from dockyard_core.errors import ConfigError
from dockyard_trainer_jax.names import num_stacked

if TYPE_CHECKING:
    from jax import Array

AXES = ("fsdp", "tp")

_BY_OUTPUT = ("tp", "fsdp")
_BY_INPUT = ("fsdp", "tp")
TABLE: tuple[tuple[str, tuple[str | None, ...]], ...] = (
    ("*.embed_tokens.weight", ("tp", "fsdp")),
    ("lm_head.weight", ("tp", "fsdp")),
    ("*.self_attn.[qkv]_proj.weight", _BY_OUTPUT),
    ("*.self_attn.[qkv]_proj.bias", ("tp",)),
    ("*.self_attn.o_proj.weight", _BY_INPUT),
    ("*.self_attn.o_proj.bias", (None,)),
    ("*.gate_proj.weight", _BY_OUTPUT),
    ("*.gate_proj.bias", ("tp",)),
    ("*.up_proj.weight", _BY_OUTPUT),
    ("*.up_proj.bias", ("tp",)),
    ("*.down_proj.weight", _BY_INPUT),
    ("*.down_proj.bias", (None,)),
    ("*.mlp.gate.weight", (None, "fsdp")),
    ("*norm.weight", (None,)),
    # Of adapters: A has the layer's inputs, B its outputs, and neither is dealt by rank.
    *((f"*.{name}.lora_A", (None, "tp")) for name in ("o_proj", "down_proj")),
    *((f"*.{name}.lora_B", ("fsdp", None)) for name in ("o_proj", "down_proj")),
    ("*.lora_A", (None, "fsdp")),
    ("*.lora_B", ("tp", None)),
)
"""Pattern of a name -> axis of each dimension of the Hugging Face tensor; the first match counts."""


def make_mesh(fsdp: int, tp: int) -> Mesh:
    """All devices of all processes as fsdp x tp; neighbours share a layer.

    Raises ConfigError unless that is their number.
    """
    num_devices = jax.device_count()
    if fsdp < 1 or tp < 1 or fsdp * tp != num_devices:
        raise ConfigError(
            f"fsdp_size x tensor_parallel_size must be the number of devices = {num_devices}, got {fsdp} x {tp}; "
            "change one of them"
        )
    return jax.make_mesh((fsdp, tp), AXES, axis_types=(AxisType.Auto, AxisType.Auto))


def partition_spec(name: str) -> PartitionSpec:
    """Axes of a parameter's dimensions; those it is stacked in are never dealt."""
    for pattern, axes in TABLE:
        if fnmatchcase(name, pattern):
            return PartitionSpec(*(None,) * num_stacked(name), *axes)
    raise ValueError(f"a parameter's name must match a pattern of the sharding table, got {name!r}; add one")


def sharding_of(name: str, mesh: Mesh | None) -> jax.sharding.Sharding:
    """Where a parameter lies; without a mesh, on the first device of this process."""
    if mesh is None:
        return jax.sharding.SingleDeviceSharding(jax.local_devices()[0])
    return NamedSharding(mesh, partition_spec(name))


def batch_sharding(mesh: Mesh) -> NamedSharding:
    """Where the rows of a batch lie."""
    return NamedSharding(mesh, PartitionSpec("fsdp"))


@cache
def _gather(everywhere: NamedSharding) -> Callable[[Array], Array]:
    gather: Callable[[Array], Array] = jax.jit(lambda array: array, out_shardings=everywhere)
    return gather


def whole_here(array: Array, sharding: jax.sharding.Sharding) -> Array:
    """The array on the first device of this process, gathered from all (collective).

    Args:
        array: over the devices of ``sharding``, in whatever way.
        sharding: of a parameter.
    """
    if isinstance(sharding, NamedSharding) and not sharding.is_fully_addressable:
        return _gather(NamedSharding(sharding.mesh, PartitionSpec()))(array).addressable_data(0)
    first = min(sharding.addressable_devices, key=lambda device: device.id)
    return jax.device_put(array, first)
