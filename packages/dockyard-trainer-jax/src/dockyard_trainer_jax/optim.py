"""AdamW, gradient clipping, and steps that are skipped."""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax
from jax import Array
from jax.sharding import NamedSharding, PartitionSpec, Sharding
from jax.typing import ArrayLike

from dockyard_core.optimizer_config import OptimizerConfig

Tree = Any
"""A pytree of arrays, such as the trained parameters."""
KeyPath = tuple[Any, ...]


class AdamState(NamedTuple):
    """Moments of every trained parameter, as pytrees like the parameters, and how many updates they saw."""

    count: Array
    exp_avg: Tree
    exp_avg_sq: Tree


@partial(jax.tree_util.register_dataclass, data_fields=["grad_norm", "is_skipped"], meta_fields=[])
@dataclass(frozen=True, kw_only=True)
class GradientReport:
    """What became of an update's gradient."""

    grad_norm: Array
    """Global, before clipping."""
    is_skipped: Array
    """The norm or the loss was not finite: weights, moments and count are untouched."""


def _zero_state(params: Tree) -> AdamState:
    def zeros(param: Array) -> Array:
        return jnp.zeros(param.shape, jnp.float32)

    return AdamState(jnp.zeros((), jnp.int32), jax.tree.map(zeros, params), jax.tree.map(zeros, params))


def state_shardings(params: Tree) -> AdamState:
    """Where each part of the state belongs: moments beside their parameters, the count everywhere.

    For ``out_shardings`` of a compiled step; left to the compiler, moments may be gathered on every device.
    """
    shardings = jax.tree.map(lambda param: param.sharding, params)
    first: Sharding = jax.tree.leaves(shardings)[0]
    everywhere = NamedSharding(first.mesh, PartitionSpec()) if isinstance(first, NamedSharding) else first
    return AdamState(everywhere, shardings, shardings)


def init_state(params: Tree) -> AdamState:
    """Count 0 and moments 0 in float32, made in place on the devices that hold the parameters."""
    shapes = jax.tree.map(lambda param: jax.ShapeDtypeStruct(param.shape, param.dtype), params)
    made: AdamState = jax.jit(lambda: _zero_state(shapes), out_shardings=state_shardings(params))()
    return made


def apply_gradients(
    params: Tree,
    grads: Tree,
    state: AdamState,
    config: OptimizerConfig,
    *,
    learning_rate: ArrayLike,
    loss: ArrayLike,
) -> tuple[Tree, AdamState, GradientReport]:
    """Clip by global norm and take one step, or none when the norm or the loss is not finite (pure; compile it).

    Args:
        params: trained parameters.
        grads: of the whole update, over all micro-batches.
        state: of `init_state`, or of the update before.
        config: fixed when compiled.
        learning_rate: of the schedule; an argument of the compiled function, or each step compiles anew.
        loss: of the whole update.
    """
    grad_norm = optax.tree.norm(jax.tree.map(lambda grad: grad.astype(jnp.float32), grads))
    is_skipped = ~(jnp.isfinite(grad_norm) & jnp.isfinite(loss))
    share = jnp.where(grad_norm > config.max_grad_norm, config.max_grad_norm / grad_norm, 1.0)
    clipped = jax.tree.map(lambda grad: grad.astype(jnp.float32) * share, grads)
    stepped = _adamw(params, clipped, state, config, learning_rate)

    # A selection for each element, not a branch: it is part of the update's own pass over the arrays.
    def kept(old: Array, new: Array) -> Array:
        return jnp.where(is_skipped, old, new)

    params, state = jax.tree.map(kept, (params, state), stepped)
    return params, state, GradientReport(grad_norm=grad_norm, is_skipped=is_skipped)


def _adamw(
    params: Tree, grads: Tree, state: AdamState, config: OptimizerConfig, learning_rate: ArrayLike
) -> tuple[Tree, AdamState]:
    """AdamW that decays matrices only, which their names tell; epsilon is added to the root, as in torch.

    The corrections 1 - beta^count are by expm1: optax's own, a difference of float32 numbers, is off by 1e-5 in the
    first steps if beta is 0.999.
    """
    count = optax.safe_increment(state.count)
    (beta1, beta2), lr = config.betas, jnp.asarray(learning_rate, jnp.float32)
    exp_avg = optax.tree.update_moment(grads, state.exp_avg, beta1, 1)
    exp_avg_sq = optax.tree.update_moment(grads, state.exp_avg_sq, beta2, 2)
    correction1, correction2 = _bias_correction(beta1, count), _bias_correction(beta2, count)

    def moved(path: KeyPath, param: Array, first: Array, second: Array) -> Array:
        decayed = param * (1 - lr * config.weight_decay) if is_decayed(dotted_name(path)) else param
        change = lr * (first / correction1) / (jnp.sqrt(second / correction2) + config.eps)
        return (decayed - change).astype(param.dtype)

    moved_params = jax.tree_util.tree_map_with_path(moved, params, exp_avg, exp_avg_sq)
    return moved_params, AdamState(count, exp_avg, exp_avg_sq)


def is_decayed(name: str) -> bool:
    """Whether a parameter is a matrix. Its dimensions do not tell: those of all layers are stacked."""
    return not name.endswith(("norm.weight", "bias"))


def _bias_correction(beta: float, count: Array) -> Array:
    return -jnp.expm1(count * math.log(beta)) if beta else jnp.ones(())


def dotted_name(path: KeyPath) -> str:
    """``model.layers.0.mlp.up_proj.weight`` of a key path; NNX's own last step, ``value``, is left out."""
    keys = [key for key in path if not (isinstance(key, jax.tree_util.GetAttrKey) and key.name == "value")]
    return str(jax.tree_util.keystr(tuple(keys), simple=True, separator="."))
