"""Matrix products in which each row of the left side meets the matrix of its group.

`jax.lax.ragged_dot` says the same, but where no kernel is known (the CPU, for one) it becomes a dense product of
every row with every group, in memory too. Here rows are dealt into blocks of one group each, and a scan over the
blocks does only the work that is asked for, plus at most one block of padding per group.

Shape legend: R = rows, G = groups, N = blocks, S = rows of a block, I = inputs, O = outputs.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import Array
from jax.ad_checkpoint import checkpoint_name

from dockyard_trainer_jax.layers import KEPT

_MAX_BLOCK_ROWS = 512
_MIN_BLOCK_ROWS = 8


class Blocks(NamedTuple):
    """Where each row goes."""

    slot_R: Array
    """Index of a row in the N * S rows of all blocks."""
    group_N: Array
    """Group of each block; blocks past the last row belong to some group and hold zeros."""
    block_rows: int


def deal(group_R: Array, num_groups: int) -> Blocks:
    """Deal rows into blocks of one group, in their order. Every group's last block may be partly empty."""
    num_rows = group_R.shape[0]
    block_rows = _block_rows(num_rows, num_groups)
    num_blocks = -(-num_rows // block_rows) + num_groups  # no choice of groups needs more
    sizes_G = jnp.bincount(group_R, length=num_groups)
    blocks_G = -(-sizes_G // block_rows)
    stop_G = jnp.cumsum(blocks_G)
    order_R = jnp.argsort(group_R, stable=True)
    sorted_group_R = group_R[order_R]
    rank_R = jnp.arange(num_rows) - (jnp.cumsum(sizes_G) - sizes_G)[sorted_group_R]
    sorted_slot_R = (stop_G - blocks_G)[sorted_group_R] * block_rows + rank_R
    group_N = jnp.searchsorted(stop_G, jnp.arange(num_blocks), side="right")
    return Blocks(
        slot_R=jnp.zeros_like(order_R).at[order_R].set(sorted_slot_R),
        group_N=jnp.minimum(group_N, num_groups - 1),
        block_rows=block_rows,
    )


def _block_rows(num_rows: int, num_groups: int) -> int:
    """A power of two near the mean group, so that padding never doubles the work by much."""
    mean = max(num_rows // num_groups, 1)
    return min(max(1 << (mean.bit_length() - 1), _MIN_BLOCK_ROWS), _MAX_BLOCK_ROWS)


def grouped_product(x_NSI: Array, weight_GOI: Array, group_N: Array) -> Array:
    """y[n] = x[n] W[group[n]]^T, [N, S, O]."""
    return checkpoint_name(_product(x_NSI, weight_GOI, group_N), KEPT)


@jax.custom_vjp
def _product(x_NSI: Array, weight_GOI: Array, group_N: Array) -> Array:
    def one_block(_: None, block: tuple[Array, Array]) -> tuple[None, Array]:
        x_SI, group = block
        return None, _einsum("si,oi->so", x_SI, weight_GOI[group].astype(x_SI.dtype))

    return jax.lax.scan(one_block, None, (x_NSI, group_N))[1]


def _einsum(formula: str, left: Array, right: Array, **options: Any) -> Array:
    """A product of float32 factors is not shortened: the backward pass is traced where no caller's wish is known."""
    precision = jax.lax.Precision.HIGHEST if left.dtype == jnp.float32 else None
    return jnp.einsum(formula, left, right, precision=precision, **options)


def _forward(x_NSI: Array, weight_GOI: Array, group_N: Array) -> tuple[Array, tuple[Array, Array, Array]]:
    return _product(x_NSI, weight_GOI, group_N), (x_NSI, weight_GOI, group_N)


def _backward(kept: tuple[Array, Array, Array], grad_NSO: Array) -> tuple[Array, Array, None]:
    """Own rule, because the transpose of the scan would add a whole [G, O, I] for every block."""
    x_NSI, weight_GOI, group_N = kept

    def one_block(grad_GOI: Array, block: tuple[Array, Array, Array]) -> tuple[Array, Array]:
        x_SI, grad_SO, group = block
        grad_x_SI = _einsum("so,oi->si", grad_SO, weight_GOI[group].astype(grad_SO.dtype))
        product_OI = _einsum("so,si->oi", grad_SO, x_SI, preferred_element_type=grad_GOI.dtype)
        return grad_GOI.at[group].add(product_OI), grad_x_SI

    grad_GOI, grad_x_NSI = jax.lax.scan(one_block, jnp.zeros_like(weight_GOI), (x_NSI, grad_NSO, group_N))
    return grad_x_NSI, grad_GOI, None


_product.defvjp(_forward, _backward)
