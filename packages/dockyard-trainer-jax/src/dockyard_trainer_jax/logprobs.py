"""Log-probabilities and entropy at token positions; the [M, V] logits of a batch need never exist.

A scan makes the logits of one chunk of positions at a time and keeps three numbers for each position; the backward
pass makes them again. Everything is a matrix product, an elementwise operation or a reduction over the vocabulary,
so a weight whose rows are sharded over a mesh axis stays where it is: the compiler reduces the sums over that axis.

Shape legend: M = positions, N = chunks, C = positions of a chunk, D = hidden width, V = vocabulary.
"""

from __future__ import annotations

from functools import partial
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import Array, lax
from jax.typing import DTypeLike


class _Sums(NamedTuple):
    """What softmax needs of a position's logits z, in a chunk or in all."""

    max: Array
    exp: Array
    """Sum of exp(z - max)."""
    weighted: Array
    """Sum of (z - max) exp(z - max)."""


def sum_dtype(dtype: DTypeLike) -> DTypeLike:
    """Dtype of logits and sums, given that of the hidden states."""
    return jnp.float64 if dtype == jnp.float64 else jnp.float32


def _precision(dtype: DTypeLike) -> lax.Precision | None:
    """An accelerator would otherwise shorten the factors of float32 products."""
    return lax.Precision.HIGHEST if dtype in (jnp.float32, jnp.float64) else None


def num_chunks(num_positions: int, chunk_tokens: int) -> int:
    """How many chunks; a few more than needed if they then have equal lengths, since filling one up costs a copy."""
    fewest = max(-(-num_positions // chunk_tokens), 1)
    return next((count for count in range(fewest, 2 * fewest) if num_positions % count == 0), fewest)


def _to_chunks(values: Array, count: int) -> Array:
    """[M, ...] to [N, C, ...]; chunk n has the positions n, n + N, n + 2 N, ...

    Where the positions are sharded, each device then has a share of every chunk. Chunks of neighbours would be on
    one device each, and every device would be sent all of them.
    """
    length = -(-len(values) // count)
    filled = jnp.pad(values, [(0, length * count - len(values))] + [(0, 0)] * (values.ndim - 1))
    return filled.reshape(length, count, *values.shape[1:]).swapaxes(0, 1)


def _from_chunks(chunks: Array, num_positions: int) -> Array:
    return chunks.swapaxes(0, 1).reshape(-1, *chunks.shape[2:])[:num_positions]


def _logits(hidden_CD: Array, weight_VD: Array, temperature: Array) -> Array:
    product_CV = jnp.einsum(
        "cd,vd->cv",
        hidden_CD,
        weight_VD.astype(hidden_CD.dtype),
        precision=_precision(hidden_CD.dtype),
        preferred_element_type=sum_dtype(hidden_CD.dtype),
    )
    return product_CV / temperature


def _is_target(logits_CV: Array, targets_C: Array) -> Array:
    # Compared rather than gathered: a gather along a sharded vocabulary would bring the logits together.
    return lax.broadcasted_iota(targets_C.dtype, logits_CV.shape, 1) == targets_C[:, None]


def _forward(
    hidden_MD: Array, weight_VD: Array, targets_M: Array, temperature: Array, count: int
) -> tuple[Array, _Sums]:
    """Log-probability of the target [M], and sums [N, C]."""

    def of_chunk(_: None, chunk: tuple[Array, Array]) -> tuple[None, tuple[Array, _Sums]]:
        hidden_CD, targets_C = chunk
        logits_CV = _logits(hidden_CD, weight_VD, temperature)
        max_C = logits_CV.max(-1)
        logits_CV = logits_CV - max_C[:, None]
        exp_CV = jnp.exp(logits_CV)
        sums = _Sums(max=max_C, exp=exp_CV.sum(-1), weighted=(logits_CV * exp_CV).sum(-1))
        target_C = jnp.where(_is_target(logits_CV, targets_C), logits_CV, 0.0).sum(-1)
        is_possible_C = (targets_C >= 0) & (targets_C < len(weight_VD))
        return None, (jnp.where(is_possible_C, target_C, -jnp.inf) - jnp.log(sums.exp), sums)

    _, (logprobs_NC, sums) = lax.scan(of_chunk, None, (_to_chunks(hidden_MD, count), _to_chunks(targets_M, count)))
    return _from_chunks(logprobs_NC, len(hidden_MD)), sums


def _entropy(sums: _Sums, num_positions: int) -> Array:
    return _from_chunks(jnp.log(sums.exp) - sums.weighted / sums.exp, num_positions)


@partial(jax.custom_vjp, nondiff_argnums=(4,))
def _chunked(
    hidden_MD: Array, weight_VD: Array, targets_M: Array, temperature: Array, count: int
) -> tuple[Array, Array]:
    logprobs_M, sums = _forward(hidden_MD, weight_VD, targets_M, temperature, count)
    return logprobs_M, _entropy(sums, len(hidden_MD))


_Saved = tuple[Array, Array, Array, Array, _Sums]


def _chunked_forward(
    hidden_MD: Array, weight_VD: Array, targets_M: Array, temperature: Array, count: int
) -> tuple[tuple[Array, Array], _Saved]:
    logprobs_M, sums = _forward(hidden_MD, weight_VD, targets_M, temperature, count)
    return (logprobs_M, _entropy(sums, len(hidden_MD))), (hidden_MD, weight_VD, targets_M, temperature, sums)


def _logit_gradient(logits_CV: Array, targets_C: Array, sums: _Sums, pulls: tuple[Array, Array]) -> Array:
    """Gradient with respect to z, given those of log-probabilities and entropies.

    With p = softmax(z) and H = log Z - E[z]:  d logp_y / dz = e_y - p,  dH / dz = -p (log p + H).
    """
    pull_C, entropy_pull_C = pulls
    logits_CV = logits_CV - sums.max[:, None]
    constant_C = entropy_pull_C * sums.weighted / sums.exp - pull_C
    grad_CV = jnp.exp(logits_CV) * ((constant_C[:, None] - entropy_pull_C[:, None] * logits_CV) / sums.exp[:, None])
    return grad_CV + jnp.where(_is_target(logits_CV, targets_C), pull_C[:, None], 0.0)


def _chunked_backward(count: int, saved: _Saved, pulls: tuple[Array, Array]) -> tuple[Array, Array, None, None]:
    hidden_MD, weight_VD, targets_M, temperature, sums = saved
    dtype, wide = hidden_MD.dtype, sum_dtype(hidden_MD.dtype)
    product = partial(jnp.einsum, precision=_precision(dtype), preferred_element_type=wide)

    def of_chunk(grad_weight_VD: Array, chunk: tuple[Array, Array, _Sums, tuple[Array, Array]]) -> tuple[Array, Array]:
        hidden_CD, targets_C, sums_C, pulls_C = chunk
        # Positions without a gradient (advantage 0) are left out: if they are not finite, they spoil nothing.
        is_active_C1 = ((pulls_C[0] != 0) | (pulls_C[1] != 0))[:, None]
        grad_CV = _logit_gradient(_logits(hidden_CD, weight_VD, temperature), targets_C, sums_C, pulls_C)
        grad_CV = jnp.where(is_active_C1, grad_CV / temperature, 0.0).astype(dtype)
        hidden_CD = jnp.where(is_active_C1, hidden_CD, jnp.zeros_like(hidden_CD))
        grad_CD = product("cv,vd->cd", grad_CV, weight_VD.astype(dtype))
        added_VD = product("cv,cd->vd", grad_CV, hidden_CD)
        return grad_weight_VD + added_VD, grad_CD.astype(dtype)

    chunks = (
        _to_chunks(hidden_MD, count),
        _to_chunks(targets_M, count),
        sums,
        (_to_chunks(pulls[0], count), _to_chunks(pulls[1], count)),
    )
    grad_VD, grad_NCD = lax.scan(of_chunk, jnp.zeros_like(weight_VD, dtype=wide), chunks)
    return _from_chunks(grad_NCD, len(hidden_MD)), grad_VD.astype(weight_VD.dtype), None, None


_chunked.defvjp(_chunked_forward, _chunked_backward)


def chunked_logprobs(
    hidden_MD: Array,
    weight_VD: Array,
    targets_M: Array,
    mask_M: Array | None = None,
    *,
    temperature: Array | float,
    chunk_tokens: int,
) -> tuple[Array, Array]:
    """Return (logprobs_M, entropy_M) of softmax(hidden @ weight.T / temperature), in nats.

    Both are float32 (float64 for float64 inputs) and differentiable in ``hidden_MD`` and ``weight_VD``, once. The
    price of the memory that is saved is one more matrix product in the backward pass. Where nothing is done with the
    entropy, a compiled function does not compute it. A target outside the vocabulary has the log-probability -inf.

    Args:
        hidden_MD: last hidden states at the positions that predict the targets. Products are taken in this dtype.
        weight_VD: the output embedding; its rows may be sharded. Its gradient is summed in float32.
        targets_M: integers, the tokens whose log-probability is wanted.
        mask_M: True where there is a token; elsewhere results and gradients are 0 whatever the inputs are, NaN
            included. None: there is one everywhere.
        temperature: sampling temperature, > 0. An array may change without compiling anew; it gets no gradient.
        chunk_tokens: bounds the logits that exist at one time to ``chunk_tokens * V`` numbers over all devices.
            Changes the result by rounding only.
    """
    if isinstance(temperature, float | int) and temperature <= 0:
        raise ValueError(f"temperature must be > 0, got {temperature}; greedy samples have no log-probabilities")
    if chunk_tokens < 1:
        raise ValueError(f"chunk_tokens must be >= 1, got {chunk_tokens}; use a few hundred")
    if mask_M is not None:
        hidden_MD = jnp.where(mask_M[:, None], hidden_MD, jnp.zeros_like(hidden_MD))
        targets_M = jnp.where(mask_M, targets_M, 0)
    scale = lax.stop_gradient(jnp.asarray(temperature, sum_dtype(hidden_MD.dtype)))
    logprobs_M, entropy_M = _chunked(hidden_MD, weight_VD, targets_M, scale, num_chunks(len(targets_M), chunk_tokens))
    if mask_M is None:
        return logprobs_M, entropy_M
    return jnp.where(mask_M, logprobs_M, 0.0), jnp.where(mask_M, entropy_M, 0.0)
