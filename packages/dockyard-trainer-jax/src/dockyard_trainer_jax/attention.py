"""Causal attention with rotary positions, over rows that may hold several sequences.

Shape legend: B = rows, L = row length, D = hidden width, H = heads, K = key-value heads, E = width of a head,
F = E / 2 frequencies.
"""

from __future__ import annotations

import math
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax import Array

from dockyard_trainer_jax.attending import Sight, attend
from dockyard_trainer_jax.layers import Linear, RmsNorm, Stack, contract
from dockyard_trainer_jax.model_config import Llama3Rope, ModelConfig

PADDING_SEGMENT = -1
"""Segment id of positions that hold no token."""


class PackedInputs(NamedTuple):
    """Rows that may hold several sequences. A position sees those at or before it in its row that are of its segment.

    A position always sees itself, padding too: no softmax is over nothing.
    """

    token_ids_BL: Any
    position_ids_BL: Any
    segment_ids_BL: Any
    """-1 at padding."""


class SharedInputs(NamedTuple):
    """Prefixes, each with any number of suffixes that see it and their own past; padded on the right by 0."""

    prefix_ids_PL: Any
    prefix_lengths_P: Any
    suffix_ids_NS: Any
    prefix_of_N: Any


ModelInputs = PackedInputs | SharedInputs


class Packed(NamedTuple):
    """Attention within rows; [B, L, ...]."""

    cos_BLF: Array
    sin_BLF: Array
    is_visible_BLL: Array | Sight
    """True where the second position's key is seen from the first."""

    @classmethod
    def of(cls, config: ModelConfig, inputs: PackedInputs, dtype: jnp.dtype) -> Packed:
        """The same for every block."""
        sight = Sight.of_past(inputs.segment_ids_BL)
        return cls(*rotations(config, inputs.position_ids_BL, dtype), sight.for_width(config.head_dim))

    def rotated(self, x_BLHE: Array) -> Array:
        """By each position's angle."""
        return rotate(x_BLHE, self.cos_BLF, self.sin_BLF)

    def mixed(self, queries_BLHE: Array, keys_BLKE: Array, values_BLKE: Array) -> Array:
        """[B, L, H, E]."""
        return attend(queries_BLHE, keys_BLKE, values_BLKE, self.is_visible_BLL)


class Shared(NamedTuple):
    """Attention within prefixes and of suffixes to theirs; tokens are flat, [P L + N S, ...], prefixes first."""

    cos_TF: Array
    sin_TF: Array
    is_past_PLL: Array | Sight
    is_visible_NSJ: Array | Sight
    """J = L + S: the prefix without its padding, and the suffix's own past."""
    is_prefix_NP: Array
    length: int
    """L."""

    @classmethod
    def of(cls, config: ModelConfig, inputs: SharedInputs, dtype: jnp.dtype) -> Shared:
        """The same for every block."""
        (num_prefixes, length), (num_rows, size) = inputs.prefix_ids_PL.shape, inputs.suffix_ids_NS.shape
        lengths_N1 = inputs.prefix_lengths_P[inputs.prefix_of_N][:, None]
        positions_T = jnp.concatenate(
            [
                jnp.broadcast_to(jnp.arange(length), (num_prefixes, length)).reshape(-1),
                (lengths_N1 + jnp.arange(size)).reshape(-1),
            ]
        )
        past = Sight.of_past(jnp.zeros((num_prefixes, length), jnp.int32))
        # What fills up a prefix comes after everything.
        prefix_NL = jnp.where(jnp.arange(length) < lengths_N1, 0, size + 1)
        own_NS = jnp.broadcast_to(jnp.arange(1, size + 1), (num_rows, size))
        orders_NJ = jnp.concatenate([prefix_NL, own_NS], axis=1)
        seen = Sight(own_NS, jnp.zeros_like(own_NS), orders_NJ, jnp.zeros_like(orders_NJ))
        return cls(
            *rotations(config, positions_T, dtype),
            is_past_PLL=past.for_width(config.head_dim),
            is_visible_NSJ=seen.for_width(config.head_dim),
            is_prefix_NP=inputs.prefix_of_N[:, None] == jnp.arange(num_prefixes),
            length=length,
        )

    def rotated(self, x_THE: Array) -> Array:
        """By each position's angle."""
        return rotate(x_THE, self.cos_TF, self.sin_TF)

    def mixed(self, queries_THE: Array, keys_TKE: Array, values_TKE: Array) -> Array:
        """[P L + N S, H, E]."""
        queries, keys, values = (self._parts(x) for x in (queries_THE, keys_TKE, values_TKE))
        prefix_PLHE = attend(queries[0], keys[0], values[0], self.is_past_PLL)
        keys_NJKE, values_NJKE = (jnp.concatenate([self._of_rows(x), own], axis=1) for x, own in (keys, values))
        suffix_NSHE = attend(queries[1], keys_NJKE, values_NJKE, self.is_visible_NSJ)
        tail = queries_THE.shape[1:]
        return jnp.concatenate([prefix_PLHE.reshape(-1, *tail), suffix_NSHE.reshape(-1, *tail)])

    def _parts(self, x_THE: Array) -> tuple[Array, Array]:
        """[P, L, H, E] and [N, S, H, E]."""
        num_rows, num_prefixes = self.is_prefix_NP.shape
        edge, tail = num_prefixes * self.length, x_THE.shape[1:]
        return x_THE[:edge].reshape(num_prefixes, self.length, *tail), x_THE[edge:].reshape(num_rows, -1, *tail)

    def _of_rows(self, x_PLKE: Array) -> Array:
        """Each suffix's prefix, [N, L, K, E]."""
        return _picked(x_PLKE, self.is_prefix_NP)


@jax.custom_vjp
def _picked(x_P: Array, is_picked_NP: Array) -> Array:
    """One of P for each of N. Not by a product with ones and zeros: what is not finite in one would get into all."""
    return x_P[is_picked_NP.argmax(axis=1)]


def _picked_forward(x_P: Array, is_picked_NP: Array) -> tuple[Array, Array]:
    return _picked(x_P, is_picked_NP), is_picked_NP


def _picked_backward(is_picked_NP: Array, pull_N: Array) -> tuple[Array, None]:
    """A product: adding up row by row is slower, and on a GPU in no fixed order."""
    return contract("np,n...->p...", is_picked_NP.astype(pull_N.dtype), pull_N), None


_picked.defvjp(_picked_forward, _picked_backward)


def rotations(config: ModelConfig, position_ids: Array, dtype: jnp.dtype) -> tuple[Array, Array]:
    """Cosines and sines, [..., F]."""
    angles = position_ids[..., None].astype(jnp.float32) * inverse_frequencies(config)
    return jnp.cos(angles).astype(dtype), jnp.sin(angles).astype(dtype)


def inverse_frequencies(config: ModelConfig) -> np.ndarray:
    """theta^(-2i/E) for i < E/2, float32 [F] (arXiv:2104.09864), stretched if the configuration says so."""
    exponents_F = np.arange(0, config.head_dim, 2, dtype=np.float32) / np.float32(config.head_dim)
    frequencies_F = (1.0 / np.float32(config.rope_theta) ** exponents_F).astype(np.float32)
    return frequencies_F if config.llama3_rope is None else _stretched(frequencies_F, config.llama3_rope)


def _stretched(frequencies_F: np.ndarray, rope: Llama3Rope) -> np.ndarray:
    """Llama 3.1's rule by wavelength, against the context length of pre-training.

    Longer than context / low: divided by ``factor``. Shorter than context / high: as it is. Between: blended.
    """
    turns_F = rope.original_max_position_embeddings * frequencies_F / (2 * math.pi)
    kept_F = np.clip((turns_F - rope.low_freq_factor) / (rope.high_freq_factor - rope.low_freq_factor), 0.0, 1.0)
    stretched_F: np.ndarray = ((1 - kept_F) * frequencies_F / rope.factor + kept_F * frequencies_F).astype(np.float32)
    return stretched_F


def rotate(x: Array, cos: Array, sin: Array) -> Array:
    """Turn each pair (x_i, x_{i + E/2}) of [..., H, E] by its position's angle, [..., F]."""
    first, second = jnp.split(x, 2, axis=-1)
    cos, sin = cos[..., None, :], sin[..., None, :]
    return jnp.concatenate([first * cos - second * sin, second * cos + first * sin], axis=-1)


class Attention(nnx.Module):
    """Grouped-query attention (arXiv:2305.13245); the softmax is in float32."""

    def __init__(self, config: ModelConfig, *, stack: Stack = ()) -> None:
        width, head_dim = config.hidden_size, config.head_dim
        query_width, key_width = config.num_attention_heads * head_dim, config.num_key_value_heads * head_dim
        self.q_proj = Linear(width, query_width, use_bias=config.has_qkv_bias, stack=stack)
        self.k_proj = Linear(width, key_width, use_bias=config.has_qkv_bias, stack=stack)
        self.v_proj = Linear(width, key_width, use_bias=config.has_qkv_bias, stack=stack)
        self.o_proj = Linear(query_width, width, use_bias=config.attention_bias, stack=stack)
        eps, has_norms = config.rms_norm_eps, config.has_head_norms
        self.q_norm = RmsNorm(head_dim, eps=eps, stack=stack) if has_norms else None
        self.k_norm = RmsNorm(head_dim, eps=eps, stack=stack) if has_norms else None
        self.head_dim = head_dim

    def __call__(self, x: Array, rows: Packed | Shared) -> Array:
        """[..., D] -> [..., D]."""
        heads = (*x.shape[:-1], -1, self.head_dim)
        queries, keys, values = (one(x).reshape(heads) for one in (self.q_proj, self.k_proj, self.v_proj))
        if self.q_norm is not None and self.k_norm is not None:
            queries, keys = self.q_norm(queries), self.k_norm(keys)
        mixed = rows.mixed(rows.rotated(queries), rows.rotated(keys), values)
        return self.o_proj(mixed.reshape(*x.shape[:-1], -1))
