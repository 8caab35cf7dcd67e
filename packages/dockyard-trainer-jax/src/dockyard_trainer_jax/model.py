"""The decoder, and the one forward pass that training needs.

The blocks of a model are one block whose parameters have a leading axis, scanned over: XLA compiles the block once,
however many there are. Names stay per layer for everybody else (`names`).

Shape legend: B = rows, L = row length, D = hidden width, V = vocabulary.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import jax
import jax.numpy as jnp
from flax import nnx
from jax import Array
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from dockyard_trainer_jax.attention import Attention, ModelInputs, Packed, PackedInputs, Shared
from dockyard_trainer_jax.layers import KEPT, Embedding, Linear, Mlp, RmsNorm, Stack
from dockyard_trainer_jax.model_config import ModelConfig
from dockyard_trainer_jax.moe import SparseMlp

_KEEP = jax.checkpoint_policies.save_only_these_names(KEPT)


@dataclass(frozen=True, kw_only=True)
class ComputeOptions:
    """How a forward pass is computed; none of it changes what is computed, up to rounding."""

    dtype: Literal["float32", "bfloat16"] = "float32"
    """Of activations and of matrix products; parameters are float32 always."""
    remat: bool = False
    """Keep a block's input only, and compute the block again in the backward pass (arXiv:1604.06174)."""
    mesh: Mesh | None = None
    """Devices that share the model and the rows; None = one device."""


class Block(nnx.Module):
    """One decoder layer: attention, then an MLP, each added to its input."""

    def __init__(self, config: ModelConfig, *, stack: Stack = ()) -> None:
        width, eps = config.hidden_size, config.rms_norm_eps
        self.input_layernorm = RmsNorm(width, eps=eps, stack=stack)
        self.self_attn = Attention(config, stack=stack)
        self.post_attention_layernorm = RmsNorm(width, eps=eps, stack=stack)
        self.mlp: Mlp | SparseMlp = (
            Mlp(width, config.intermediate_size, use_bias=config.mlp_bias, stack=stack)
            if config.moe is None
            else SparseMlp(width, config.moe, stack=stack)
        )

    def __call__(self, x_BLD: Array, inputs: Packed | Shared, mesh: Mesh | None) -> Array:
        """[B, L, D] -> [B, L, D]."""
        x_BLD = x_BLD + self.self_attn(self.input_layernorm(x_BLD), inputs)
        normed_BLD = self.post_attention_layernorm(x_BLD)
        return x_BLD + (self.mlp(normed_BLD, mesh) if isinstance(self.mlp, SparseMlp) else self.mlp(normed_BLD))


class Decoder(nnx.Module):
    """Everything but the output embedding."""

    def __init__(self, config: ModelConfig) -> None:
        self.embed_tokens = Embedding(config.vocab_size, config.hidden_size)
        self.layers = Block(config, stack=(config.num_hidden_layers,))
        self.norm = RmsNorm(config.hidden_size, eps=config.rms_norm_eps)


class CausalLM(nnx.Module):
    """A causal language model whose parameters' paths are Hugging Face's names, but for the layers' index."""

    def __init__(self, config: ModelConfig, options: ComputeOptions) -> None:
        self.config = config
        self.options = options
        self.model = Decoder(config)
        self.lm_head = None if config.tie_word_embeddings else Linear(config.hidden_size, config.vocab_size)


def abstract_causal_lm(config: ModelConfig, options: ComputeOptions | None = None) -> CausalLM:
    """The model without memory: its parameters have shapes and dtypes only."""
    model: CausalLM = nnx.eval_shape(lambda: CausalLM(config, options or ComputeOptions()))
    return model


def output_embedding(model: CausalLM) -> Array:
    """The matrix [V, D] that turns hidden states into logits; the input embedding when the two are tied."""
    return model.model.embed_tokens.weight[...] if model.lm_head is None else model.lm_head.weight[...]


def hidden(model: CausalLM, inputs: ModelInputs) -> Array:
    """Hidden states after the last norm, in the dtype of ``options``: [B, L, D] of packed rows, [P L + N S, D] of
    prefixes and suffixes."""
    options = model.options
    dtype = jnp.dtype(options.dtype)
    # An accelerator would otherwise shorten the factors of float32 products.
    with jax.default_matmul_precision("highest" if options.dtype == "float32" else "default"):
        rows: Packed | Shared
        if isinstance(inputs, PackedInputs):
            rows, token_ids = Packed.of(model.config, inputs, dtype), inputs.token_ids_BL
        else:
            rows = Shared.of(model.config, inputs, dtype)
            token_ids = jnp.concatenate([inputs.prefix_ids_PL.reshape(-1), inputs.suffix_ids_NS.reshape(-1)])
        x = _by_rows(model.model.embed_tokens(token_ids).astype(dtype), options.mesh)
        return model.model.norm(_through_layers(model.model.layers, x, rows, options))


def _through_layers(layers: Block, x_BLD: Array, inputs: Packed | Shared, options: ComputeOptions) -> Array:
    graph, stacked = nnx.split(layers)

    def one_layer(x_BLD: Array, state: nnx.State) -> tuple[Array, None]:
        block: Block = nnx.merge(graph, state)
        return _by_rows(block(x_BLD, inputs, options.mesh), options.mesh), None

    # Without a policy the scan would write everything a block computes, which costs more time than it saves: the
    # products and attention's probabilities are kept, and what is cheap (norms, rotations, activations) computed again.
    # Inside a scan nothing can be merged with the forward pass, which is what prevent_cse guards against.
    policy = None if options.remat else _KEEP
    body = jax.checkpoint(one_layer, prevent_cse=False, policy=policy)
    return jax.lax.scan(body, x_BLD, stacked)[0]


def _by_rows(x_BLD: Array, mesh: Mesh | None) -> Array:
    """Rows over ``fsdp``: without being told, XLA may gather activations where it should gather weights."""
    if mesh is None:
        return x_BLD
    return jax.lax.with_sharding_constraint(x_BLD, NamedSharding(mesh, PartitionSpec("fsdp")))
