"""Mixture of experts: each token's MLP is a weighted sum of a few, chosen by a router (arXiv:1701.06538).

Every token gets all the experts it asked for: there is no capacity, hence nothing is dropped. Over a mesh each
data shard deals its own tokens, and tensor shards hold a part of each expert's width.

Shape legend: B = rows, L = row length, T = tokens, D = hidden width, X = experts, C = experts of a token,
I = inner width of an expert, R = T C; N and S as in `grouped`.
"""

from __future__ import annotations

from functools import partial

import jax
import jax.numpy as jnp
from flax import nnx
from jax import Array
from jax.sharding import Mesh, PartitionSpec

from dockyard_trainer_jax.grouped import deal, grouped_product
from dockyard_trainer_jax.layers import Linear, Stack
from dockyard_trainer_jax.model_config import MoeConfig


class Experts(nnx.Module):
    """The experts' matrices, each kind one parameter [X, ...]: their names have the expert's index in them."""

    def __init__(self, width: int, config: MoeConfig, *, stack: Stack = ()) -> None:
        stack = (*stack, config.num_experts)
        inner_width = config.moe_intermediate_size
        self.gate_proj = Linear(width, inner_width, stack=stack)
        self.up_proj = Linear(width, inner_width, stack=stack)
        self.down_proj = Linear(inner_width, width, stack=stack)

    def matrices(self) -> tuple[Array, Array, Array]:
        """Gate and up [X, I, D], down [X, D, I]."""
        return self.gate_proj.weight[...], self.up_proj.weight[...], self.down_proj.weight[...]


class SparseMlp(nnx.Module):
    """Router and experts, in place of an MLP."""

    def __init__(self, width: int, config: MoeConfig, *, stack: Stack = ()) -> None:
        self.gate = Linear(width, config.num_experts, stack=stack)
        self.experts = Experts(width, config, stack=stack)
        self.config = config

    def __call__(self, x_BLD: Array, mesh: Mesh | None) -> Array:
        """[B, L, D] -> [B, L, D]."""
        weights_BLC, experts_BLC = self._route(x_BLD)
        if mesh is None:
            return _mix(x_BLD, weights_BLC, experts_BLC, *self.experts.matrices())
        rows, by_output, by_input = PartitionSpec("fsdp"), PartitionSpec(None, "tp"), PartitionSpec(None, None, "tp")
        mix = jax.shard_map(
            partial(_mix, sum_over="tp"),
            mesh=mesh,
            in_specs=(rows, rows, rows, by_output, by_output, by_input),
            out_specs=rows,
            check_vma=False,  # the scan's carry starts as zeros, which are the same on every device
        )
        return mix(x_BLD, weights_BLC, experts_BLC, *self.experts.matrices())

    def _route(self, x_BLD: Array) -> tuple[Array, Array]:
        """Weights and indices of each token's experts, [B, L, C]; the softmax is over all experts, in float32."""
        shares_BLX = jax.nn.softmax(self.gate(x_BLD).astype(jnp.float32), axis=-1)
        weights_BLC, experts_BLC = jax.lax.top_k(shares_BLX, self.config.num_experts_per_tok)
        if self.config.norm_topk_prob:
            weights_BLC = weights_BLC / weights_BLC.sum(axis=-1, keepdims=True)
        return weights_BLC.astype(x_BLD.dtype), experts_BLC


def _mix(
    x_BLD: Array,
    weights_BLC: Array,
    experts_BLC: Array,
    gate_XID: Array,
    up_XID: Array,
    down_XDI: Array,
    *,
    sum_over: str | None = None,
) -> Array:
    """Sum of each token's experts, [B, L, D]."""
    num_chosen, width = experts_BLC.shape[-1], x_BLD.shape[-1]
    x_TD = x_BLD.reshape(-1, width)
    blocks = deal(experts_BLC.reshape(-1), gate_XID.shape[0])
    num_blocks, block_rows = len(blocks.group_N), blocks.block_rows
    rows_RD = jnp.repeat(x_TD, num_chosen, axis=0)
    x_NSD = jnp.zeros((num_blocks * block_rows, width), x_TD.dtype).at[blocks.slot_R].set(rows_RD, unique_indices=True)
    x_NSD = x_NSD.reshape(num_blocks, block_rows, width)
    gate_NSI = grouped_product(x_NSD, gate_XID, blocks.group_N)
    up_NSI = grouped_product(x_NSD, up_XID, blocks.group_N)
    out_NSD = grouped_product(jax.nn.silu(gate_NSI) * up_NSI, down_XDI, blocks.group_N)
    out_TCD = out_NSD.reshape(-1, width)[blocks.slot_R].reshape(-1, num_chosen, width)
    mixed_TD = jnp.einsum("tcd,tc->td", out_TCD, weights_BLC.reshape(-1, num_chosen))
    if sum_over is not None:
        mixed_TD = jax.lax.psum(mixed_TD, sum_over)
    return mixed_TD.reshape(x_BLD.shape)
