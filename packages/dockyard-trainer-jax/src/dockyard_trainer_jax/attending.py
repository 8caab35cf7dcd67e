"""Softmax attention of rows to rows, with a gradient of its own (arXiv:1706.03762, 2205.14135).

Short rows keep their probabilities, so that the backward pass computes no product and no exponential again; long ones
are taken a few queries at a time, forward and backward, and keep one number for each query: memory grows with the
length of a row, not with its square.

Shape legend: R = rows, S = positions that ask, J = positions that are asked, H = heads, K = key-value heads,
G = heads of a key-value head, E = width of a head, N = chunks, C = positions of a chunk.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

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


class Sight(NamedTuple):
    """Who sees whom: of the positions of its segment, one sees those whose order is not above its own.

    Where it is asked for matters: [R, S, J] grows with the square of a row.
    """

    order_RS: Array
    segments_RS: Array
    orders_asked_RJ: Array
    segments_asked_RJ: Array

    @classmethod
    def of_past(cls, segments_RS: Array) -> Sight:
        """Positions that see themselves and those before them."""
        order_RS = jnp.broadcast_to(jnp.arange(segments_RS.shape[1]), segments_RS.shape)
        return cls(order_RS, segments_RS, order_RS, segments_RS)

    def mask(self) -> Array:
        """[R, S, J]."""
        is_of_segment_RSJ = self.segments_RS[:, :, None] == self.segments_asked_RJ[:, None]
        return is_of_segment_RSJ & (self.order_RS[:, :, None] >= self.orders_asked_RJ[:, None])

    def for_width(self, width: int) -> Array | Sight:
        """For heads of this width: the mask itself where rows are short, so that it is made once for all layers."""
        return self if _is_long(self.orders_asked_RJ.shape[1], width) else self.mask()


def _is_long(num_asked: int, width: int) -> bool:
    return num_asked > _LONG * width


def attend(queries_RSHE: Array, keys_RJKE: Array, values_RJKE: Array, is_visible_RSJ: Array | Sight) -> Array:
    """softmax(q k^T / sqrt(E)) v over the visible positions, [R, S, H, E]; the softmax is in float32.

    Heads share keys in the order of Hugging Face's models: G neighbours each (arXiv:2305.13245). Every query sees
    something.
    """
    num_rows, size, num_heads, width = queries_RSHE.shape
    num_asked, num_groups = keys_RJKE.shape[1:3]
    queries_RSKGE = queries_RSHE.reshape(num_rows, size, num_groups, num_heads // num_groups, width)
    # In float32, where bfloat16 would round the factor of every score alike.
    queries_RSKGE = (queries_RSKGE.astype(jnp.float32) / math.sqrt(width)).astype(queries_RSHE.dtype)
    if not _is_long(num_asked, width):
        mixed_RSKGE = _short(queries_RSKGE, keys_RJKE, values_RJKE, is_visible_RSJ)
    else:
        chunk = max(_CHUNK_SCORES // (num_rows * num_heads * num_asked), 1)
        mixed_RSKGE = _long(queries_RSKGE, keys_RJKE, values_RJKE, is_visible_RSJ, min(chunk, size))
    return mixed_RSKGE.reshape(queries_RSHE.shape)


def _scores(queries_RSKGE: Array, keys_RJKE: Array, is_visible_RSJ: Array | Sight) -> Array:
    scores_RKGSJ = contract("rskge,rjke->rkgsj", queries_RSKGE, keys_RJKE, jnp.float32)
    mask_RSJ = is_visible_RSJ.mask() if isinstance(is_visible_RSJ, Sight) else is_visible_RSJ
    return jnp.where(mask_RSJ[:, None, None], scores_RKGSJ, -jnp.inf)


@jax.custom_vjp
def _short(queries_RSKGE: Array, keys_RJKE: Array, values_RJKE: Array, is_visible_RSJ: Array | Sight) -> Array:
    return _short_forward(queries_RSKGE, keys_RJKE, values_RJKE, is_visible_RSJ)[0]


_Saved = tuple[Array, Array, Array, Array]


def _short_forward(
    queries_RSKGE: Array, keys_RJKE: Array, values_RJKE: Array, is_visible_RSJ: Array | Sight
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


def _to_chunks(x_RS: Array, chunk: int, mode: str = "constant") -> Array:
    """[R, S, ...] -> [N, R, C, ...], filled up by 0, or by what is at the edge."""
    num_chunks = -(-x_RS.shape[1] // chunk)
    filled = jnp.pad(x_RS, [(0, 0), (0, num_chunks * chunk - x_RS.shape[1])] + [(0, 0)] * (x_RS.ndim - 2), mode=mode)
    return filled.reshape(x_RS.shape[0], num_chunks, chunk, *x_RS.shape[2:]).swapaxes(0, 1)


def _from_chunks(x_NRC: Array, size: int) -> Array:
    joined = x_NRC.swapaxes(0, 1)
    return joined.reshape(joined.shape[0], -1, *joined.shape[3:])[:, :size]


def _scan(of_chunk: Callable[..., Any], carry: Any, given: tuple[Array, ...], sight: Array | Sight, chunk: int) -> Any:
    """``lax.scan`` over chunks, of which ``of_chunk`` is told who sees whom.

    Queries that fill up see what the last one sees, because no softmax may be over nothing.
    """
    asking = (sight.order_RS, sight.segments_RS) if isinstance(sight, Sight) else (sight,)
    chunks = [_to_chunks(x, chunk, "edge") for x in asking], [_to_chunks(x, chunk) for x in given]

    def body(carry: Any, chunks: Any) -> Any:
        # What depends on no query would be computed before the layers, of all chunks at one time.
        asking, given = jax.lax.optimization_barrier(chunks)
        if isinstance(sight, Sight):
            order_RC, segments_RC = asking
            return of_chunk(carry, sight._replace(order_RS=order_RC, segments_RS=segments_RC), *given)
        return of_chunk(carry, *asking, *given)

    return jax.lax.scan(body, carry, chunks)


def _long_impl(
    queries_RSKGE: Array, keys_RJKE: Array, values_RJKE: Array, is_visible_RSJ: Array | Sight, chunk: int
) -> tuple[Array, Array]:
    """Mixed values, and log of the sum of the exponentials of the scores, [R, S, K, G]."""

    def of_chunk(_: None, is_visible_RCJ: Array | Sight, queries_RCKGE: Array) -> tuple[None, tuple[Array, Array]]:
        scores_RKGCJ = _scores(queries_RCKGE, keys_RJKE, is_visible_RCJ)
        logsumexp_RKGC = jax.nn.logsumexp(scores_RKGCJ, axis=-1)
        shares_RKGCJ = jnp.exp(scores_RKGCJ - logsumexp_RKGC[..., None]).astype(queries_RCKGE.dtype)
        mixed_RCKGE = contract("rkgcj,rjke->rckge", shares_RKGCJ, values_RJKE)
        return None, (mixed_RCKGE, jnp.moveaxis(logsumexp_RKGC, -1, 1))

    _, (mixed, logsumexp) = _scan(of_chunk, None, (queries_RSKGE,), is_visible_RSJ, chunk)
    size = queries_RSKGE.shape[1]
    return _from_chunks(mixed, size), _from_chunks(logsumexp, size)


@partial(jax.custom_vjp, nondiff_argnums=(4,))
def _long(
    queries_RSKGE: Array, keys_RJKE: Array, values_RJKE: Array, is_visible_RSJ: Array | Sight, chunk: int
) -> Array:
    return _long_impl(queries_RSKGE, keys_RJKE, values_RJKE, is_visible_RSJ, chunk)[0]


def _long_forward(
    queries_RSKGE: Array, keys_RJKE: Array, values_RJKE: Array, is_visible_RSJ: Array | Sight, chunk: int
) -> tuple[Array, tuple[Any, ...]]:
    mixed_RSKGE, logsumexp_RSKG = _long_impl(queries_RSKGE, keys_RJKE, values_RJKE, is_visible_RSJ, chunk)
    mixed_RSKGE, logsumexp_RSKG = checkpoint_name((mixed_RSKGE, logsumexp_RSKG), KEPT)
    return mixed_RSKGE, (queries_RSKGE, keys_RJKE, values_RJKE, is_visible_RSJ, mixed_RSKGE, logsumexp_RSKG)


def _long_backward(chunk: int, saved: tuple[Any, ...], pull_RSKGE: Array) -> tuple[Array, Array, Array, None]:
    queries_RSKGE, keys_RJKE, values_RJKE, is_visible_RSJ, mixed_RSKGE, logsumexp_RSKG = saved
    # Sum over keys of share x pull, which is that over the width of output x pull.
    weighted_RSKG = (mixed_RSKGE.astype(jnp.float32) * pull_RSKGE).sum(-1)

    def of_chunk(
        sums: tuple[Array, Array],
        is_visible_RCJ: Array | Sight,
        queries_RCKGE: Array,
        logsumexp_RCKG: Array,
        weighted_RCKG: Array,
        pull_RCKGE: Array,
    ) -> tuple[tuple[Array, Array], Array]:
        scores_RKGCJ = _scores(queries_RCKGE, keys_RJKE, is_visible_RCJ)
        shares_RKGCJ = jnp.exp(scores_RKGCJ - jnp.moveaxis(logsumexp_RCKG, 1, -1)[..., None])
        pull_shares = contract("rckge,rjke->rkgcj", pull_RCKGE, values_RJKE, jnp.float32)
        pull_scores = shares_RKGCJ * (pull_shares - jnp.moveaxis(weighted_RCKG, 1, -1)[..., None])
        shares_RKGCJ = shares_RKGCJ.astype(queries_RCKGE.dtype)
        pull_queries, *more = _pulls(queries_RCKGE, keys_RJKE, shares_RKGCJ, pull_scores, pull_RCKGE)
        return (sums[0] + more[0], sums[1] + more[1]), pull_queries

    given = (queries_RSKGE, logsumexp_RSKG, weighted_RSKG, pull_RSKGE)
    zeros = (jnp.zeros(keys_RJKE.shape, jnp.float32), jnp.zeros(values_RJKE.shape, jnp.float32))
    (pull_keys, pull_values), pull_queries = _scan(of_chunk, zeros, given, is_visible_RSJ, chunk)
    dtype = queries_RSKGE.dtype
    return _from_chunks(pull_queries, queries_RSKGE.shape[1]), pull_keys.astype(dtype), pull_values.astype(dtype), None


_long.defvjp(_long_forward, _long_backward)
