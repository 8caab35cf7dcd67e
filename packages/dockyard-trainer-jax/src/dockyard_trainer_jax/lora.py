"""Low-rank adapters (LoRA, arXiv:2106.09685): a frozen base and two small trained matrices per layer.

A target layer computes W x + b + scale * B A x. Its weight and bias keep their names; the adapters stand beside them
as ``...q_proj.lora_A`` [r, I] and ``...q_proj.lora_B`` [O, r], those of all layers stacked like any other parameter.
B starts at 0, so that the first forward pass is the base's, bit for bit. There is no dropout: the same tokens must
have the same log-probabilities in every forward pass of a step.

Shape legend: ... = any leading axes, I = inputs, O = outputs, r = rank.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from functools import partial
from typing import TYPE_CHECKING

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax import Array
from jax.ad_checkpoint import checkpoint_name

from dockyard_core.errors import ConfigError
from dockyard_trainer_jax.layers import KEPT, Linear, product
from dockyard_trainer_jax.sharding import sharding_of

if TYPE_CHECKING:
    from dockyard_core.optimizer_config import LoraConfig
    from dockyard_trainer_jax.model import CausalLM
    from dockyard_trainer_jax.names import Part
    from dockyard_trainer_jax.step import Params


class LoraLinear(Linear):
    """A linear layer with a low-rank term; takes over the weight and the bias of the layer it replaces."""

    def __init__(self, base: Linear, config: LoraConfig, *, lora_A: Array, lora_B: Array) -> None:
        self.weight, self.bias = base.weight, base.bias
        self.lora_A = nnx.Param(lora_A)
        self.lora_B = nnx.Param(lora_B)
        # All of it: what is compiled for a model is told by its attributes, and not by the shapes of its parameters.
        self.config = config

    def __call__(self, x: Array) -> Array:
        """[..., I] -> [..., O], in the dtype of x."""
        low_rank = checkpoint_name(product(x, self.lora_A[...].astype(x.dtype)), KEPT)
        low_rank = product(low_rank, self.lora_B[...].astype(x.dtype))
        # The sum is kept in place of the base's product, which nothing else needs.
        return checkpoint_name(super().__call__(x) + self.config.scale * low_rank, KEPT)


def apply_lora(model: CausalLM, config: LoraConfig, *, seed: int) -> None:
    """Give each target layer of a loaded model adapters, in place, where the sharding table puts them.

    A is Kaiming-uniform, U(±1/sqrt(I)). Values are drawn whole, on the host, in the order of names: they depend on
    the seed, and not on the devices that share them.

    Raises ConfigError for a target of which the model has no plain linear layer.
    """
    layers = _plain_layers(model, config)
    absent = sorted(set(config.target_modules) - {path[-1] for path in layers})
    if absent:
        raise ConfigError(
            f"lora.target_modules must name plain linear layers of the model, got {absent}, "
            f"which this {model.config.model_type!r} lacks; leave them out"
        )
    generator = np.random.default_rng(seed)
    modules = dict(nnx.iter_modules(model))
    for path, layer in sorted(layers.items()):
        *stack, num_outputs, num_inputs = layer.weight.shape
        bound = 1 / math.sqrt(num_inputs)
        drawn = generator.uniform(-bound, bound, (*stack, config.rank, num_inputs)).astype(np.float32)
        zeros = np.zeros((*stack, num_outputs, config.rank), np.float32)
        name = ".".join(path)
        adapters = {
            key: _placed(f"{name}.{key}", values, model) for key, values in (("lora_A", drawn), ("lora_B", zeros))
        }
        setattr(modules[path[:-1]], path[-1], LoraLinear(layer, config, **adapters))


def _plain_layers(model: CausalLM, config: LoraConfig) -> dict[tuple[str, ...], Linear]:
    """By path. Experts are no plain layers: their matrices are multiplied in blocks (`grouped`)."""
    return {
        tuple(map(str, path)): module
        for path, module in nnx.iter_modules(model)
        if type(module) is Linear and path[-1] in config.target_modules and "experts" not in path
    }


def _placed(name: str, values: np.ndarray, model: CausalLM) -> Array:
    # Copied for each device: an array of JAX may share memory with numpy's, and a step takes that of its parameters.
    sharding = sharding_of(name, model.options.mesh)
    return jax.make_array_from_callback(values.shape, sharding, lambda index: np.array(values[index]))


def is_adapter(name: str) -> bool:
    """Whether a parameter of this name is A or B of a layer: trained, but no weight of the exported model."""
    return name.endswith((".lora_A", ".lora_B"))


def adapters_of(params: Mapping[str, Array]) -> Params:
    """The adapters among parameters."""
    return {name: param for name, param in params.items() if is_adapter(name)}


def base_of(params: Mapping[str, Array]) -> Params:
    """The parameters that are no adapters: with adapters, what is frozen, and the reference."""
    return {name: param for name, param in params.items() if not is_adapter(name)}


def adapters_beside(name: str, params: Mapping[str, Array]) -> tuple[Array, Array] | None:
    """A and B of the layer whose weight has this name; None for a parameter that has none."""
    stem, _, kind = name.rpartition(".")
    lora_A = params.get(f"{stem}.lora_A") if kind == "weight" else None
    return None if lora_A is None else (lora_A, params[f"{stem}.lora_B"])


def merged_part(weight: Array, adapters: tuple[Array, Array], part: Part, *, scale: float, dtype: str) -> Array:
    """W + scale * B A of one tensor of a stacked weight, summed in float32 and rounded once."""
    merged: Array = _merged_part(weight, *adapters, np.asarray(part.indices, np.int32), scale, dtype)
    return merged


@partial(jax.jit, static_argnames="dtype")
def _merged_part(weight: Array, lora_A: Array, lora_B: Array, indices: Array, scale: float, dtype: str) -> Array:
    for axis in range(indices.shape[0]):
        weight, lora_A, lora_B = (
            jax.lax.dynamic_index_in_dim(param, indices[axis], keepdims=False) for param in (weight, lora_A, lora_B)
        )
    product = jnp.einsum("or,ri->oi", lora_B, lora_A, precision=jax.lax.Precision.HIGHEST)
    return (weight + scale * product).astype(dtype)
