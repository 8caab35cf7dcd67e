"""What a policy refuses to train on, whatever its backend."""

from __future__ import annotations

import math

import numpy as np

from dockyard_core.batch import BatchShard, MicroBatch

_WANTED = {
    "token_ids_BL": "iu",
    "position_ids_BL": "iu",
    "sequence_ids_BL": "iu",
    "loss_mask_BL": "b",
    "sampled_logprobs_BL": "f",
    "advantages_BL": "f",
    "proximal_logprobs_BL": "f",
}
"""Field -> the kinds of dtype it may have, as in ``numpy.dtype.kind``."""
_KINDS = {"iu": "integers", "b": "bool", "f": "floats"}


def check_shard(shard: BatchShard, *, vocab_size: int) -> None:
    """Raise ValueError unless the shard can be trained on by a policy with this vocabulary."""
    if not shard.micro_batches:
        raise ValueError("a shard needs at least 1 micro-batch, got 0; pack_batch([]) makes one of padding")
    if not 0 < shard.temperature < math.inf:
        raise ValueError(
            f"temperature must be positive and finite, got {shard.temperature}; greedy rollouts have no "
            "log-probabilities to train on"
        )
    counts = (shard.num_valid_tokens, shard.num_sequences, shard.num_trained_sequences)
    if min(counts) < 0:
        raise ValueError(
            f"counts of a step must be >= 0, got {counts[0]} tokens, {counts[1]} sequences, {counts[2]} "
            "of them trained; take all from pack_batch"
        )
    for micro_batch in shard.micro_batches:
        _check_arrays(micro_batch)
        _check_tokens(micro_batch, vocab_size)
        _check_sequences(micro_batch)
    num_trained = sum(int(micro_batch.loss_mask_BL.sum()) for micro_batch in shard.micro_batches)
    if shard.num_valid_tokens < num_trained:
        raise ValueError(
            f"num_valid_tokens counts the whole step and must be >= this shard's {num_trained}, got "
            f"{shard.num_valid_tokens}; take it from pack_batch"
        )


def _check_arrays(micro_batch: MicroBatch) -> None:
    shape = micro_batch.token_ids_BL.shape
    if len(shape) != 2 or 0 in shape:
        raise ValueError(
            f"token_ids_BL must have 2 dimensions [B, L] of 1 or more, got {shape}; pack sequences into rows"
        )
    for name, kinds in _WANTED.items():
        array = getattr(micro_batch, name)
        if array is None:
            continue
        if array.shape != shape:
            raise ValueError(f"{name} must have the shape {shape} of token_ids_BL, got {array.shape}; pad it")
        if array.dtype.kind not in kinds:
            raise ValueError(f"{name} must hold {_KINDS[kinds]}, got {array.dtype}; convert it with astype")


def _check_tokens(micro_batch: MicroBatch, vocab_size: int) -> None:
    ids_BL = micro_batch.token_ids_BL
    largest, smallest = int(ids_BL.max(initial=0)), int(ids_BL.min(initial=0))
    if largest >= vocab_size or smallest < 0:
        wrong = largest if largest >= vocab_size else smallest
        raise ValueError(
            f"token ids must lie in [0, {vocab_size}), the policy's vocabulary, got {wrong}; "
            "encode with the tokenizer of the policy's own model"
        )


def _check_sequences(micro_batch: MicroBatch) -> None:
    ids_BL = micro_batch.sequence_ids_BL
    is_start_BL = np.diff(ids_BL, axis=1, prepend=ids_BL[:, :1] - 1) != 0
    is_token_BL = ids_BL >= 0
    if bool((micro_batch.loss_mask_BL & (is_start_BL | ~is_token_BL)).any()):
        raise ValueError(
            "the first token of a sequence has no past and cannot be trained, nor can padding, got a mask of True; "
            "clear it"
        )
    started = ids_BL[is_start_BL & is_token_BL]
    if len(np.unique(started)) < len(started):
        raise ValueError(
            f"sequence_ids_BL must give each sequence of a micro-batch an id of its own, got {started.tolist()[:20]} "
            "in the order of the rows; number them through"
        )
    columns_L = np.arange(ids_BL.shape[1])
    starts_BL = np.maximum.accumulate(np.where(is_start_BL, columns_L, 0), axis=1)
    if bool(((micro_batch.position_ids_BL != columns_L - starts_BL) & is_token_BL).any()):
        raise ValueError(
            "position_ids_BL must count from 0 in every sequence, got others, so that attention would mix sequences; "
            "take them from pack_batch"
        )
