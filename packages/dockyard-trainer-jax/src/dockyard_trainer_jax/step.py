"""The programs of a step: logprobs of a micro-batch, its gradient added to a sum, and the update.

Everything that differs from step to step is an argument, so that only shapes are compiled for. The micro-batches of a
step are added up by one program that is called for each of them: how many there are is no shape. Its calls return
before they have run, so that nothing waits for Python.

Shape legend: B = rows, L = row length, D = hidden width, F = blocks of rows, M = token slots of a block.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax import Array

from dockyard_core.batch import BatchShard
from dockyard_core.loss_config import LossConfig
from dockyard_core.optimizer_config import OptimizerConfig
from dockyard_trainer_jax.layout import PaddedBatch
from dockyard_trainer_jax.logprobs import chunked_logprobs
from dockyard_trainer_jax.loss import LossTerms, TokenBatch, policy_loss
from dockyard_trainer_jax.model import CausalLM, hidden, output_embedding
from dockyard_trainer_jax.optim import AdamState, GradientReport, apply_gradients

Params = dict[str, Array]
"""Parameters by name (`names`)."""

_BUFFER_ELEMENTS = 1 << 26
"""Logits that exist at one time, if nothing is said: 256 MiB."""


@dataclass(frozen=True, kw_only=True)
class ModelSpec:
    """What a model computes, without its parameters; part of what is compiled."""

    graph: nnx.GraphDef[CausalLM]
    chunk_tokens: int

    @classmethod
    def of(cls, model: CausalLM, *, chunk_tokens: int | None) -> ModelSpec:
        """Of a model; None = as many tokens as fit in a buffer of fixed size."""
        fitting = max(_BUFFER_ELEMENTS // model.config.vocab_size, 1)
        return cls(graph=nnx.split(model)[0], chunk_tokens=fitting if chunk_tokens is None else chunk_tokens)

    def bound(self, params: Params) -> CausalLM:
        """The model with these parameters."""
        flat = {tuple(name.split(".")): nnx.Param(array) for name, array in params.items()}
        model: CausalLM = nnx.merge(self.graph, nnx.from_flat_state(flat))
        return model


class StepNumbers(NamedTuple):
    """What the loss needs of the whole step, float32."""

    temperature: Any
    num_valid_tokens: Any
    num_sequences: Any

    @classmethod
    def of(cls, shard: BatchShard, loss: LossConfig) -> StepNumbers:
        """Of a shard, whose counts are those of all shards."""
        is_by_sequence = loss.effective_aggregation == "sequence"
        num_sequences = shard.num_trained_sequences if is_by_sequence else shard.num_sequences
        return cls(*map(np.float32, (shard.temperature, shard.num_valid_tokens, num_sequences)))


class Totals(NamedTuple):
    """What the micro-batches of an update add up to."""

    grads: Params
    loss: Array
    sums: Mapping[str, Array]
    """Over trained tokens; dividing by ``num_tokens`` gives means."""
    largest: Mapping[str, Array]


def _token_logprobs(spec: ModelSpec, params: Params, batch: PaddedBatch, temperature: Array) -> tuple[Array, Array]:
    """Log-probabilities and entropies [F M]; 0 at padding."""
    model = spec.bound(params)
    states = hidden(model, batch.inputs)
    num_blocks, width = batch.mask_FM.shape[0], states.shape[-1]

    def of_block(hidden_ND: Array, predictors_U: Array) -> Array:
        return hidden_ND.at[predictors_U].get(mode="promise_in_bounds", unique_indices=batch.distinct_FM is None)

    # Block by block: each device reads its own rows only.
    hidden_FUD = jax.vmap(of_block)(states.reshape(num_blocks, -1, width), batch.predictors_FU)
    logprobs_N, entropy_N = chunked_logprobs(
        hidden_FUD.reshape(-1, width),
        output_embedding(model),
        batch.target_ids_FU.reshape(-1),
        batch.is_scored_FU.reshape(-1),
        temperature=temperature,
        chunk_tokens=spec.chunk_tokens,
    )
    if batch.distinct_FM is None:
        return logprobs_N, entropy_N
    distinct_M, mask_M = batch.distinct_FM.reshape(-1), batch.mask_FM.reshape(-1)
    return jnp.where(mask_M, logprobs_N[distinct_M], 0.0), jnp.where(mask_M, entropy_N[distinct_M], 0.0)


def score(params: Params, batch: PaddedBatch, temperature: Array, *, spec: ModelSpec) -> Array:
    """Log-probabilities of the tokens of a micro-batch, [F, M] (pure)."""
    return _token_logprobs(spec, params, batch, temperature)[0].reshape(batch.mask_FM.shape)


def _loss_of(
    params: Params, frozen: Params, batch: PaddedBatch, numbers: StepNumbers, spec: ModelSpec, loss: LossConfig
) -> tuple[Array, LossTerms]:
    logprobs_M, entropy_M = _token_logprobs(spec, params | frozen, batch, numbers.temperature)

    def flat(values_FM: Array | None) -> Array | None:
        return None if values_FM is None else values_FM.reshape(-1)

    tokens = TokenBatch(
        logprobs_M=logprobs_M,
        sampled_logprobs_M=batch.sampled_logprobs_FM.reshape(-1),
        advantages_M=batch.advantages_FM.reshape(-1),
        sequence_M=batch.sequence_FM.reshape(-1),
        mask_M=batch.mask_FM.reshape(-1),
        num_rows=batch.mask_FM.size,
        proximal_logprobs_M=flat(batch.proximal_logprobs_FM),
        ref_logprobs_M=flat(batch.ref_logprobs_FM),
        entropy_M=entropy_M,
    )
    terms = policy_loss(loss, tokens, num_valid_tokens=numbers.num_valid_tokens, num_sequences=numbers.num_sequences)
    return terms.loss, terms


def added(
    totals: Totals,
    params: Params,
    frozen: Params,
    batch: PaddedBatch,
    numbers: StepNumbers,
    *,
    spec: ModelSpec,
    loss: LossConfig,
) -> Totals:
    """The totals with those of one more micro-batch (pure; compile it, and give it the memory of ``totals``).

    There are gradients of ``params`` only; ``frozen`` has the rest of the model's parameters, if any.
    """
    (_, terms), grads = jax.value_and_grad(_loss_of, has_aux=True)(params, frozen, batch, numbers, spec, loss)
    found = {
        "offpolicy_abs_diff_max": terms.offpolicy_abs_diff_max,
        "mismatch_abs_diff_max": terms.mismatch_abs_diff_max,
    }
    return Totals(
        grads=jax.tree.map(jnp.add, totals.grads, grads),
        loss=totals.loss + terms.loss,
        sums={name: totals.sums[name] + value for name, value in terms.sums.items()},
        largest={name: jnp.maximum(totals.largest[name], value) for name, value in found.items()},
    )


def empty_totals(params: Params, *, has_reference: bool) -> Totals:
    """Of no micro-batch (pure)."""
    names = [
        "num_tokens",
        "clip_fraction",
        "correction_bound_fraction",
        "correction_mean",
        "offpolicy_abs_diff_mean",
        "mismatch_abs_diff_mean",
        "kl_sampled_proximal",
        "entropy",
        *(["kl_ref"] if has_reference else []),
    ]
    zero = jnp.zeros((), jnp.float32)
    return Totals(
        grads=jax.tree.map(lambda param: jnp.zeros(param.shape, jnp.float32), params),
        loss=zero,
        sums=dict.fromkeys(names, zero),
        largest={"offpolicy_abs_diff_max": zero, "mismatch_abs_diff_max": zero},
    )


def updated(
    params: Params, state: AdamState, totals: Totals, learning_rate: Array, *, config: OptimizerConfig
) -> tuple[Params, AdamState, GradientReport]:
    """One step on the totals (pure; compile it, and give it the memory of parameters and state)."""
    moved: tuple[Params, AdamState, GradientReport] = apply_gradients(
        params, totals.grads, state, config, learning_rate=learning_rate, loss=totals.loss
    )
    return moved


@dataclass(frozen=True, kw_only=True)
class StepSums:
    """What the micro-batches of an update add up to, on the host."""

    loss: float
    means: Mapping[str, float]
    """Means over the tokens that went through the model; 0.0 when there were none."""
    largest: Mapping[str, float]
    grad_norm: float
    is_skipped: bool

    @classmethod
    def of(cls, totals: Totals, report: GradientReport) -> StepSums:
        """Wait for an update, and fetch its numbers; ``totals`` without gradients."""
        loss, sums, largest, norm, is_skipped = jax.device_get(
            (totals.loss, totals.sums, totals.largest, report.grad_norm, report.is_skipped)
        )
        num_tokens = max(float(sums["num_tokens"]), 1.0)
        return cls(
            loss=float(loss),
            means={name: float(total) / num_tokens for name, total in sums.items() if name != "num_tokens"},
            largest={name: float(value) for name, value in largest.items()},
            grad_norm=float(norm),
            is_skipped=bool(is_skipped),
        )
