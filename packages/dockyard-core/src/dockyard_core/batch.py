"""Rollouts -> packed micro-batches, equal in number on every rank; the step's global counts.

Shape legend: B = rows of a micro-batch, L = row length, T = tokens of one sequence.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from dockyard_core.rollout import Rollout


@dataclass(frozen=True, kw_only=True)
class TrainSequence:
    """One token sequence with what the loss needs. Index t of every array belongs to token t."""

    token_ids_T: np.ndarray  # int64
    loss_mask_T: np.ndarray  # bool; token 0 has no past and is never trained
    sampled_logprobs_T: np.ndarray  # float32, 0 where the mask is False
    advantage: float

    def __post_init__(self) -> None:
        if len(self.token_ids_T) == 0:
            raise ValueError("a sequence needs at least 1 token, got 0")
        if self.loss_mask_T[0]:
            raise ValueError("token 0 has no past and cannot be trained; set loss_mask_T[0] to False")

    @property
    def num_tokens(self) -> int:
        """T."""
        return len(self.token_ids_T)

    @property
    def num_valid_tokens(self) -> int:
        """Trained tokens."""
        return int(self.loss_mask_T.sum())


@dataclass(frozen=True, kw_only=True)
class MicroBatch:
    """One forward-backward. Each row packs whole sequences one after another, then padding.

    ``position_ids`` restart at 0 at every sequence (and at the padding), which is how attention
    tells the sequences of a row apart.
    """

    token_ids_BL: np.ndarray  # int64, 0 at padding
    position_ids_BL: np.ndarray  # int64
    sequence_ids_BL: np.ndarray  # int64, index of the sequence in this shard; -1 at padding
    loss_mask_BL: np.ndarray  # bool
    sampled_logprobs_BL: np.ndarray  # float32
    advantages_BL: np.ndarray  # float32, the rollout's advantage on each of its tokens

    @property
    def shape(self) -> tuple[int, int]:
        """(B, L)."""
        return (self.token_ids_BL.shape[0], self.token_ids_BL.shape[1])


@dataclass(frozen=True, kw_only=True)
class BatchShard:
    """One rank's share of an optimizer step, with the counts of the WHOLE step."""

    micro_batches: tuple[MicroBatch, ...]
    num_valid_tokens: int
    """Trained tokens over all ranks and micro-batches: the loss normaliser."""
    num_sequences: int
    """Admitted valid rollouts of the step over all ranks."""
    temperature: float = 1.0
    """Sampling temperature of the step's rollouts; trainer logprobs are taken at it."""


def sequence_of(rollout: Rollout, advantage: float) -> TrainSequence:
    """Concatenate a rollout's segments; sampled text is never tokenised again."""
    token_ids = [token for segment in rollout.segments for token in segment.token_ids]
    mask = [flag for segment in rollout.segments for flag in segment.loss_mask]
    logprobs = [value for segment in rollout.segments for value in segment.logprobs]
    return TrainSequence(
        token_ids_T=np.asarray(token_ids, np.int64),
        loss_mask_T=np.asarray(mask, bool),
        sampled_logprobs_T=np.asarray(logprobs, np.float32),
        advantage=float(advantage),
    )


def pack_batch(
    sequences: Sequence[TrainSequence],
    *,
    num_ranks: int = 1,
    micro_batch_tokens: int = 4096,
    row_length: int | None = None,
    skip_zero_advantage: bool = False,
    temperature: float = 1.0,
) -> tuple[BatchShard, ...]:
    """Split one step's sequences into one shard per rank.

    Sequences are packed first-fit by decreasing length into rows, rows are dealt into micro-batches
    of at most ``micro_batch_tokens`` tokens, and micro-batches to ranks; ranks that would have fewer
    get empty ones (all padding), because every rank takes part in every collective.

    Args:
        sequences: the step's valid sequences, possibly none.
        num_ranks: data-parallel ranks.
        micro_batch_tokens: upper bound of B·L, except that one row is always allowed.
        row_length: tokens per row; None = the longest sequence. Raised to the longest sequence.
        skip_zero_advantage: leave out sequences with advantage 0. Exact only when the loss has no
            KL and no entropy term; the counts still include them.
        temperature: sampling temperature of the rollouts.
    """
    num_valid_tokens = sum(sequence.num_valid_tokens for sequence in sequences)
    kept = [s for s in sequences if s.num_valid_tokens and not (skip_zero_advantage and s.advantage == 0.0)]
    kept.sort(key=lambda sequence: -sequence.num_tokens)
    length = max([row_length or 0, *(sequence.num_tokens for sequence in kept)], default=1) or 1
    rows = _pack_rows(kept, length)
    rows_per_micro_batch = max(1, micro_batch_tokens // length)
    num_micro_batches = max(1, -(-len(rows) // rows_per_micro_batch))
    num_micro_batches = -(-num_micro_batches // num_ranks) * num_ranks
    dealt = [rows[index::num_micro_batches] for index in range(num_micro_batches)]
    return tuple(
        BatchShard(
            micro_batches=tuple(_micro_batch(part, length) for part in dealt[rank::num_ranks]),
            num_valid_tokens=num_valid_tokens,
            num_sequences=len(sequences),
            temperature=temperature,
        )
        for rank in range(num_ranks)
    )


def _pack_rows(sequences: Sequence[TrainSequence], length: int) -> list[list[TrainSequence]]:
    rows: list[list[TrainSequence]] = []
    free: list[int] = []
    for sequence in sequences:
        for index, room in enumerate(free):
            if sequence.num_tokens <= room:
                rows[index].append(sequence)
                free[index] -= sequence.num_tokens
                break
        else:
            rows.append([sequence])
            free.append(length - sequence.num_tokens)
    return rows


def _micro_batch(rows: Sequence[Sequence[TrainSequence]], length: int) -> MicroBatch:
    shape = (max(1, len(rows)), length)
    token_ids, position_ids = np.zeros(shape, np.int64), np.zeros(shape, np.int64)
    sequence_ids = np.full(shape, -1, np.int64)
    loss_mask, advantages = np.zeros(shape, bool), np.zeros(shape, np.float32)
    sampled_logprobs = np.zeros(shape, np.float32)
    count = 0
    for index in range(shape[0]):
        start = 0
        for sequence in rows[index] if index < len(rows) else ():
            span = slice(start, start + sequence.num_tokens)
            token_ids[index, span] = sequence.token_ids_T
            position_ids[index, span] = np.arange(sequence.num_tokens)
            sequence_ids[index, span] = count
            loss_mask[index, span] = sequence.loss_mask_T
            sampled_logprobs[index, span] = sequence.sampled_logprobs_T
            advantages[index, span] = sequence.advantage
            start, count = span.stop, count + 1
        position_ids[index, start:] = np.arange(length - start)
    return MicroBatch(
        token_ids_BL=token_ids,
        position_ids_BL=position_ids,
        sequence_ids_BL=sequence_ids,
        loss_mask_BL=loss_mask,
        sampled_logprobs_BL=sampled_logprobs,
        advantages_BL=advantages,
    )
