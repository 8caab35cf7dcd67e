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
from jax.ad_checkpoint import checkpoint_name
from jax.typing import DTypeLike

Stack = tuple[int, ...]


KEPT = "kept"
"""Name of what the backward pass of a block does not compute again: products, and attention's probabilities."""


def contract(subscripts: str, left: Array, right: Array, dtype: DTypeLike | None = None) -> Array:
    """A product of two arrays; ``dtype`` of the sum and the result, None = theirs.

    An accelerator would otherwise shorten the factors of float32 products; what is set around a function does not
    reach the gradient of its own that it may have.
    """
    precision = jax.lax.Precision.HIGHEST if left.dtype in (jnp.float32, jnp.float64) else None
    return jnp.einsum(subscripts, left, right, precision=precision, preferred_element_type=dtype)


@jax.custom_vjp
def product(x: Array, weight_OI: Array) -> Array:
    """x W^T, [..., I] -> [..., O]."""
    return contract("...i,oi->...o", x, weight_OI)


def _product_forward(x: Array, weight_OI: Array) -> tuple[Array, tuple[Array, Array]]:
    return product(x, weight_OI), (x, weight_OI)


def _product_backward(saved: tuple[Array, Array], pull: Array) -> tuple[Array, Array]:
    """The usual gradients. XLA transposes the left factor of a product over rows, and computes it anew, element by
    element, while it does: so the narrower one is on the left."""
    x, weight_OI = saved
    if x.shape[-1] <= pull.shape[-1]:
        grad_OI = contract("...i,...o->io", x, pull).T
    else:
        grad_OI = contract("...o,...i->oi", pull, x)
    return contract("...o,oi->...i", pull, weight_OI), grad_OI


product.defvjp(_product_forward, _product_backward)


class Linear(nnx.Module):
    """y = x W^T + b with W [O, I]."""

    def __init__(self, num_inputs: int, num_outputs: int, *, use_bias: bool = False, stack: Stack = ()) -> None:
        self.weight = nnx.Param(jnp.zeros((*stack, num_outputs, num_inputs), jnp.float32))
        self.bias = nnx.Param(jnp.zeros((*stack, num_outputs), jnp.float32)) if use_bias else None

    def __call__(self, x: Array) -> Array:
        """[..., I] -> [..., O], in the dtype of x."""
        y = checkpoint_name(product(x, self.weight[...].astype(x.dtype)), KEPT)
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
