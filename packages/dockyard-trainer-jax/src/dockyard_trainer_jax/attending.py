"""Softmax attention of rows to rows, with a gradient of its own (arXiv:1706.03762, 2205.14135).

Short rows keep their probabilities, so that the backward pass computes no product and no exponential again; long ones
are taken a few queries at a time, forward and backward, and keep one number for each query: memory grows with the
length of a row, not with its square.

Shape legend: R = rows, S = positions that ask, J = positions that are asked, H = heads, K = key-value heads,
G = heads of a key-value head, E = width of a head, N = chunks, C = positions of a chunk.
"""

from __future__ import annotations

import math
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jax import Array
from jax.ad_checkpoint import checkpoint_name

from dockyard_trainer_jax.layers import KEPT, contract

_LONG = 8
"""Rows are long where more positions are asked than so many times the width of a head: their probabilities would take
more memory than what else a block keeps."""
_CHUNK_SCORES = 1 << 24
"""Scores that exist at one time for long rows, of one matrix: 64 MiB."""


def attend(queries_RSHE: Array, keys_RJKE: Array, values_RJKE: Array, is_visible_RSJ: Array) -> Array:
    """softmax(q k^T / sqrt(E)) v over the visible positions, [R, S, H, E]; the softmax is in float32.

    Heads share keys in the order of Hugging Face's models: G neighbours each (arXiv:2305.13245). Every query sees
    something.
    """
    num_rows, size, num_heads, width = queries_RSHE.shape
    num_asked, num_groups = keys_RJKE.shape[1:3]
    queries_RSKGE = queries_RSHE.reshape(num_rows, size, num_groups, num_heads // num_groups, width)
    queries_RSKGE = queries_RSKGE * (1.0 / math.sqrt(width))
    if num_asked <= _LONG * width:
        mixed_RSKGE = _short(queries_RSKGE, keys_RJKE, values_RJKE, is_visible_RSJ)
    else:
        chunk = max(_CHUNK_SCORES // (num_rows * num_heads * num_asked), 1)
        mixed_RSKGE = _long(queries_RSKGE, keys_RJKE, values_RJKE, is_visible_RSJ, min(chunk, size))
    return mixed_RSKGE.reshape(queries_RSHE.shape)


def _scores(queries_RSKGE: Array, keys_RJKE: Array, is_visible_RSJ: Array) -> Array:
    scores_RKGSJ = contract("rskge,rjke->rkgsj", queries_RSKGE, keys_RJKE, jnp.float32)
    return jnp.where(is_visible_RSJ[:, None, None], scores_RKGSJ, -jnp.inf)


@jax.custom_vjp
def _short(queries_RSKGE: Array, keys_RJKE: Array, values_RJKE: Array, is_visible_RSJ: Array) -> Array:
    return _short_forward(queries_RSKGE, keys_RJKE, values_RJKE, is_visible_RSJ)[0]


_Saved = tuple[Array, Array, Array, Array]


def _short_forward(
    queries_RSKGE: Array, keys_RJKE: Array, values_RJKE: Array, is_visible_RSJ: Array
) -> tuple[Array, _Saved]:
    scores_RKGSJ = _scores(queries_RSKGE, keys_RJKE, is_visible_RSJ)
    exp_RKGSJ = jnp.exp(scores_RKGSJ - scores_RKGSJ.max(-1, keepdims=True))
    shares_RKGSJ = (exp_RKGSJ / exp_RKGSJ.sum(-1, keepdims=True)).astype(queries_RSKGE.dtype)
    shares_RKGSJ = checkpoint_name(shares_RKGSJ, KEPT)
    mixed_RSKGE = checkpoint_name(contract("rkgsj,rjke->rskge", shares_RKGSJ, values_RJKE), KEPT)
    return mixed_RSKGE, (queries_RSKGE, keys_RJKE, values_RJKE, shares_RKGSJ)


def _short_backward(saved: _Saved, pull_RSKGE: Array) -> tuple[Array, Array, Array, None]:
    queries_RSKGE, keys_RJKE, values_RJKE, shares_RKGSJ = saved
    pull_shares_RKGSJ = contract("rskge,rjke->rkgsj", pull_RSKGE, values_RJKE, jnp.float32)
    weighted_RKGSJ = shares_RKGSJ * pull_shares_RKGSJ
    pull_scores_RKGSJ = weighted_RKGSJ - shares_RKGSJ * weighted_RKGSJ.sum(-1, keepdims=True)
    return (*_pulls(queries_RSKGE, keys_RJKE, shares_RKGSJ, pull_scores_RKGSJ, pull_RSKGE), None)


def _pulls(
    queries_RSKGE: Array, keys_RJKE: Array, shares_RKGSJ: Array, pull_scores_RKGSJ: Array, pull_RSKGE: Array
) -> tuple[Array, Array, Array]:
    """Gradients of queries, keys and values."""
    pull_scores_RKGSJ = pull_scores_RKGSJ.astype(queries_RSKGE.dtype)
    return (
        contract("rkgsj,rjke->rskge", pull_scores_RKGSJ, keys_RJKE),
        contract("rkgsj,rskge->rjke", pull_scores_RKGSJ, queries_RSKGE),
        contract("rkgsj,rskge->rjke", shares_RKGSJ, pull_RSKGE),
    )


_short.defvjp(_short_forward, _short_backward)


def _to_chunks(x_RS: Array, chunk: int) -> Array:
    """[R, S, ...] -> [N, R, C, ...], filled up by 0."""
    num_chunks = -(-x_RS.shape[1] // chunk)
    filled = jnp.pad(x_RS, [(0, 0), (0, num_chunks * chunk - x_RS.shape[1])] + [(0, 0)] * (x_RS.ndim - 2))
    return filled.reshape(x_RS.shape[0], num_chunks, chunk, *x_RS.shape[2:]).swapaxes(0, 1)


def _from_chunks(x_NRC: Array, size: int) -> Array:
    joined = x_NRC.swapaxes(0, 1)
    return joined.reshape(joined.shape[0], -1, *joined.shape[3:])[:, :size]


def _visible_chunks(is_visible_RSJ: Array, chunk: int) -> Array:
    """[N, R, C, J]; queries that fill up see everything, because no softmax may be over nothing."""
    return ~_to_chunks(~is_visible_RSJ, chunk)


def _long_impl(
    queries_RSKGE: Array, keys_RJKE: Array, values_RJKE: Array, is_visible_RSJ: Array, chunk: int
) -> tuple[Array, Array]:
    """Mixed values, and log of the sum of the exponentials of the scores, [R, S, K, G]."""

    def of_chunk(given: tuple[Array, Array]) -> tuple[Array, Array]:
        queries_RCKGE, is_visible_RCJ = given
        scores_RKGCJ = _scores(queries_RCKGE, keys_RJKE, is_visible_RCJ)
        logsumexp_RKGC = jax.nn.logsumexp(scores_RKGCJ, axis=-1)
        shares_RKGCJ = jnp.exp(scores_RKGCJ - logsumexp_RKGC[..., None]).astype(queries_RCKGE.dtype)
        mixed_RCKGE = contract("rkgcj,rjke->rckge", shares_RKGCJ, values_RJKE)
        return mixed_RCKGE, jnp.moveaxis(logsumexp_RKGC, -1, 1)

    chunks = _to_chunks(queries_RSKGE, chunk), _visible_chunks(is_visible_RSJ, chunk)
    mixed, logsumexp = jax.lax.map(of_chunk, chunks)
    size = queries_RSKGE.shape[1]
    return _from_chunks(mixed, size), _from_chunks(logsumexp, size)


@partial(jax.custom_vjp, nondiff_argnums=(4,))
def _long(queries_RSKGE: Array, keys_RJKE: Array, values_RJKE: Array, is_visible_RSJ: Array, chunk: int) -> Array:
    return _long_impl(queries_RSKGE, keys_RJKE, values_RJKE, is_visible_RSJ, chunk)[0]


def _long_forward(
    queries_RSKGE: Array, keys_RJKE: Array, values_RJKE: Array, is_visible_RSJ: Array, chunk: int
) -> tuple[Array, tuple[Any, ...]]:
    mixed_RSKGE, logsumexp_RSKG = _long_impl(queries_RSKGE, keys_RJKE, values_RJKE, is_visible_RSJ, chunk)
    mixed_RSKGE, logsumexp_RSKG = checkpoint_name((mixed_RSKGE, logsumexp_RSKG), KEPT)
    return mixed_RSKGE, (queries_RSKGE, keys_RJKE, values_RJKE, is_visible_RSJ, mixed_RSKGE, logsumexp_RSKG)


def _long_backward(chunk: int, saved: tuple[Any, ...], pull_RSKGE: Array) -> tuple[Array, Array, Array, None]:
    queries_RSKGE, keys_RJKE, values_RJKE, is_visible_RSJ, mixed_RSKGE, logsumexp_RSKG = saved
    # Sum over keys of share x pull, which is that over the width of output x pull.
    weighted_RSKG = (mixed_RSKGE.astype(jnp.float32) * pull_RSKGE).sum(-1)

    def of_chunk(sums: tuple[Array, Array], given: tuple[Array, ...]) -> tuple[tuple[Array, Array], Array]:
        queries_RCKGE, is_visible_RCJ, logsumexp_RCKG, weighted_RCKG, pull_RCKGE = given
        scores_RKGCJ = _scores(queries_RCKGE, keys_RJKE, is_visible_RCJ)
        shares_RKGCJ = jnp.exp(scores_RKGCJ - jnp.moveaxis(logsumexp_RCKG, 1, -1)[..., None])
        pull_shares = contract("rckge,rjke->rkgcj", pull_RCKGE, values_RJKE, jnp.float32)
        pull_scores = shares_RKGCJ * (pull_shares - jnp.moveaxis(weighted_RCKG, 1, -1)[..., None])
        shares_RKGCJ = shares_RKGCJ.astype(queries_RCKGE.dtype)
        pull_queries, *more = _pulls(queries_RCKGE, keys_RJKE, shares_RKGCJ, pull_scores, pull_RCKGE)
        return (sums[0] + more[0], sums[1] + more[1]), pull_queries

    per_query = (logsumexp_RSKG, weighted_RSKG, pull_RSKGE)
    chunks = (
        _to_chunks(queries_RSKGE, chunk),
        _visible_chunks(is_visible_RSJ, chunk),
        *(_to_chunks(x, chunk) for x in per_query),
    )
    zeros = (jnp.zeros(keys_RJKE.shape, jnp.float32), jnp.zeros(values_RJKE.shape, jnp.float32))
    (pull_keys, pull_values), pull_queries = jax.lax.scan(of_chunk, zeros, chunks)
    dtype = queries_RSKGE.dtype
    return _from_chunks(pull_queries, queries_RSKGE.shape[1]), pull_keys.astype(dtype), pull_values.astype(dtype), None


_long.defvjp(_long_forward, _long_backward)
