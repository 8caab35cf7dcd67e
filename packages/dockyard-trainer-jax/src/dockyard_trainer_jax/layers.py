"""The layers every decoder is made of. Weights are float32 and laid out as Hugging Face stores them.

``stack`` holds leading axes of a parameter: the layers of a model are one parameter each, [layers, ...], and
`jax.lax.scan` hands a block its slices. A layer is only ever called with parameters without those axes.

Shape legend: ... = any leading axes, I = inputs, O = outputs, D = hidden width, V = vocabulary.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp
from flax import nnx
from jax import Array

Stack = tuple[int, ...]


class Linear(nnx.Module):
    """y = x W^T + b with W [O, I]."""

    def __init__(self, num_inputs: int, num_outputs: int, *, use_bias: bool = False, stack: Stack = ()) -> None:
        self.weight = nnx.Param(jnp.zeros((*stack, num_outputs, num_inputs), jnp.float32))
        self.bias = nnx.Param(jnp.zeros((*stack, num_outputs), jnp.float32)) if use_bias else None

    def __call__(self, x: Array) -> Array:
        """[..., I] -> [..., O], in the dtype of x."""
        y = jnp.einsum("...i,oi->...o", x, self.weight[...].astype(x.dtype))
        return y if self.bias is None else y + self.bias[...].astype(x.dtype)


class RmsNorm(nnx.Module):
    """x / sqrt(mean(x^2) + eps) * w over the last axis; computed in float32 (arXiv:1910.07467)."""

    def __init__(self, width: int, *, eps: float, stack: Stack = ()) -> None:
        self.weight = nnx.Param(jnp.ones((*stack, width), jnp.float32))
        self.eps = eps

    def __call__(self, x: Array) -> Array:
        """Same shape and dtype as x."""
        wide = x.astype(jnp.float32)
        scale = jax.lax.rsqrt(jnp.mean(wide * wide, axis=-1, keepdims=True) + self.eps)
        return self.weight[...].astype(x.dtype) * (wide * scale).astype(x.dtype)


class Embedding(nnx.Module):
    """A row for each token of the vocabulary, [V, D]."""

    def __init__(self, vocab_size: int, width: int) -> None:
        self.weight = nnx.Param(jnp.zeros((vocab_size, width), jnp.float32))

    def __call__(self, token_ids: Array) -> Array:
        """[...] -> [..., D]; a token id outside the vocabulary gives NaN, never another token's row."""
        return self.weight[...].at[token_ids].get(mode="fill", fill_value=jnp.nan, wrap_negative_indices=False)


class Mlp(nnx.Module):
    """down(silu(gate(x)) * up(x)) (arXiv:2002.05202)."""

    def __init__(self, width: int, inner_width: int, *, use_bias: bool, stack: Stack = ()) -> None:
        self.gate_proj = Linear(width, inner_width, use_bias=use_bias, stack=stack)
        self.up_proj = Linear(width, inner_width, use_bias=use_bias, stack=stack)
        self.down_proj = Linear(inner_width, width, use_bias=use_bias, stack=stack)

    def __call__(self, x: Array) -> Array:
        """[..., D] -> [..., D]."""
        return self.down_proj(jax.nn.silu(self.gate_proj(x)) * self.up_proj(x))
