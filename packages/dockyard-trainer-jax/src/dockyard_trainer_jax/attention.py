"""Causal attention with rotary positions, over rows that may hold several sequences.

Shape legend: B = rows, L = row length, D = hidden width, H = heads, K = key-value heads, E = width of a head,
F = E / 2 frequencies.
"""

from __future__ import annotations

import math
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax import Array

from dockyard_trainer_jax.layers import Linear, RmsNorm, Stack
from dockyard_trainer_jax.model_config import Llama3Rope, ModelConfig


class AttentionInputs(NamedTuple):
    """What every block's attention needs and no block changes."""

    cos_BLF: Array
    sin_BLF: Array
    is_visible_BLL: Array
    """True where the second position's key is seen from the first."""


def attention_inputs(
    config: ModelConfig, position_ids_BL: Array, segment_ids_BL: Array, dtype: jnp.dtype
) -> AttentionInputs:
    """Rotary tables, and the mask: a position sees those at or before it in its row that are of its segment.

    A position always sees itself, padding too (its segment is -1): no softmax is over nothing.
    """
    angles_BLF = position_ids_BL[..., None].astype(jnp.float32) * inverse_frequencies(config)
    length = segment_ids_BL.shape[1]
    is_past_LL = jnp.tril(jnp.ones((length, length), bool))
    return AttentionInputs(
        cos_BLF=jnp.cos(angles_BLF).astype(dtype),
        sin_BLF=jnp.sin(angles_BLF).astype(dtype),
        is_visible_BLL=is_past_LL & (segment_ids_BL[:, :, None] == segment_ids_BL[:, None, :]),
    )


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


def rotate(x_BLHE: Array, inputs: AttentionInputs) -> Array:
    """Turn each pair (x_i, x_{i + E/2}) by its position's angle."""
    first, second = jnp.split(x_BLHE, 2, axis=-1)
    cos, sin = inputs.cos_BLF[:, :, None], inputs.sin_BLF[:, :, None]
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

    def __call__(self, x_BLD: Array, inputs: AttentionInputs) -> Array:
        """[B, L, D] -> [B, L, D]."""
        heads = (*x_BLD.shape[:2], -1, self.head_dim)
        queries_BLHE = self.q_proj(x_BLD).reshape(heads)
        keys_BLKE = self.k_proj(x_BLD).reshape(heads)
        values_BLKE = self.v_proj(x_BLD).reshape(heads)
        if self.q_norm is not None and self.k_norm is not None:
            queries_BLHE, keys_BLKE = self.q_norm(queries_BLHE), self.k_norm(keys_BLKE)
        mixed_BLHE = jax.nn.dot_product_attention(
            rotate(queries_BLHE, inputs),
            rotate(keys_BLKE, inputs),
            values_BLKE,
            mask=inputs.is_visible_BLL[:, None],
        )
        return self.o_proj(mixed_BLHE.reshape(*x_BLD.shape[:2], -1))
