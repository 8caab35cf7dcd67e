"""How a micro-batch is laid out for the model: packed rows, padded so that few shapes occur.

A program is compiled for one shape. Rows, their length and the number of token slots are therefore rounded up, each
to a size that others meet too. Masked slots are left behind here: sampled logprobs and advantages are read at trained
positions only, so what the others hold cannot reach the loss.

Shape legend: B = rows, L = row length, F = blocks of rows (one for each device along ``fsdp``), M = token slots of a
block.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple

import jax
import numpy as np

from dockyard_core.batch import MicroBatch
from dockyard_trainer_jax.model import PADDING_SEGMENT

_SHORTEST = 16
"""Rows are at least this long: shorter ones take the same time, and are one more shape."""
_SHARES = 4
"""Token slots are a multiple of this part of a block's positions."""


@partial(
    jax.tree_util.register_dataclass,
    data_fields=[
        "token_ids_BL",
        "position_ids_BL",
        "segment_ids_BL",
        "predictors_FM",
        "target_ids_FM",
        "mask_FM",
        "sequence_FM",
        "sampled_logprobs_FM",
        "advantages_FM",
        "proximal_logprobs_FM",
        "ref_logprobs_FM",
    ],
    meta_fields=[],
)
@dataclass(frozen=True, kw_only=True)
class PaddedBatch:
    """A micro-batch: the model's inputs, and the loss's inputs at trained tokens. Arrays of numpy, or on devices."""

    token_ids_BL: Any
    position_ids_BL: Any
    segment_ids_BL: Any
    """-1 at padding."""
    predictors_FM: Any
    """Position, counted through the rows of the block, that predicts the slot's token; no two slots have the same."""
    target_ids_FM: Any
    mask_FM: Any
    """True on trained tokens; the other slots are padding."""
    sequence_FM: Any
    """Which sequence a trained token belongs to, in [0, F M): those with trained tokens, counted through."""
    sampled_logprobs_FM: Any
    advantages_FM: Any
    proximal_logprobs_FM: Any = None
    """Carried by the batch, or of the weights before its first update."""
    ref_logprobs_FM: Any = None
    """Of the frozen reference."""

    @property
    def shape(self) -> Shape:
        """What a program is compiled for."""
        (num_rows, row_length), (num_blocks, num_slots) = self.token_ids_BL.shape, self.mask_FM.shape
        return Shape(
            num_rows=num_rows,
            row_length=row_length,
            num_blocks=num_blocks,
            num_slots=num_slots,
            has_proximal=self.proximal_logprobs_FM is not None,
            has_reference=self.ref_logprobs_FM is not None,
        )


class Shape(NamedTuple):
    """Sizes of a `PaddedBatch`, and which logprobs it carries."""

    num_rows: int
    row_length: int
    num_blocks: int
    num_slots: int
    has_proximal: bool
    has_reference: bool


class LaidOut(NamedTuple):
    """A micro-batch for the model, and the way back."""

    batch: PaddedBatch
    num_tokens: int
    """Trained ones."""
    origin_FM: np.ndarray
    """Index into the flat [B, L] of the micro-batch; 0 at padding."""
    is_token_FM: np.ndarray

    def unpadded(self, values_FM: np.ndarray, shape: tuple[int, int]) -> np.ndarray:
        """The values of token slots where their tokens are in the micro-batch, [B, L]; 0 elsewhere."""
        array_BL = np.zeros(shape, np.float32)
        array_BL.reshape(-1)[self.origin_FM[self.is_token_FM]] = values_FM[self.is_token_FM]
        return array_BL


def bucket(size: int) -> int:
    """The smallest of 1, 2, 3, 4, 6, 8, 12, 16, ... that is not below ``size``: at most a half is added."""
    power = 1 << max(size - 1, 0).bit_length()
    return power * 3 // 4 if power >= 4 and size <= power * 3 // 4 else power


def row_length_bucket(length: int, lengths: Sequence[int] | None) -> int:
    """The length that rows are padded to: of the user's list as far as it goes."""
    return next((one for one in lengths or () if one >= length), bucket(max(length, _SHORTEST)))


def lay_out(
    micro_batch: MicroBatch, *, num_blocks: int = 1, row_length_buckets: Sequence[int] | None = None
) -> LaidOut:
    """Pad a micro-batch to a shape that others have too, in host memory.

    Args:
        micro_batch: checked.
        num_blocks: the rows are dealt to so many devices.
        row_length_buckets: lengths that rows are padded to.
    """
    used, num_given = micro_batch.used_length, micro_batch.shape[0]
    length = row_length_bucket(used, row_length_buckets)
    rows_per_block = bucket(-(-num_given // num_blocks))
    num_rows = rows_per_block * num_blocks

    def padded(array_BL: np.ndarray, value: int) -> np.ndarray:
        filled = np.full((num_rows, length), value, np.int32)
        filled[:num_given, :used] = array_BL[:, :used]
        return filled

    segment_ids_BL = padded(micro_batch.sequence_ids_BL, PADDING_SEGMENT)
    # The contents of padding are not to be read: they may be ids of another vocabulary.
    token_ids_BL = np.where(segment_ids_BL < 0, 0, padded(micro_batch.token_ids_BL, 0)).astype(np.int32)
    slots = _token_slots(micro_batch, num_rows, length, num_blocks)

    def at_slots(array_BL: np.ndarray | None) -> np.ndarray | None:
        if array_BL is None:
            return None
        return np.where(slots.mask_FM, array_BL.reshape(-1)[slots.origin_FM], 0).astype(np.float32)

    batch = PaddedBatch(
        token_ids_BL=token_ids_BL,
        position_ids_BL=padded(micro_batch.position_ids_BL, 0),
        segment_ids_BL=segment_ids_BL,
        predictors_FM=slots.predictors_FM,
        target_ids_FM=np.where(slots.mask_FM, micro_batch.token_ids_BL.reshape(-1)[slots.origin_FM], 0).astype(
            np.int32
        ),
        mask_FM=slots.mask_FM,
        sequence_FM=_trained_sequences(micro_batch, slots),
        sampled_logprobs_FM=at_slots(micro_batch.sampled_logprobs_BL),
        advantages_FM=at_slots(micro_batch.advantages_BL),
        proximal_logprobs_FM=at_slots(micro_batch.proximal_logprobs_BL),
    )
    return LaidOut(batch, int(slots.mask_FM.sum()), slots.origin_FM, slots.mask_FM)


class _Slots(NamedTuple):
    predictors_FM: np.ndarray
    origin_FM: np.ndarray
    mask_FM: np.ndarray


def _token_slots(micro_batch: MicroBatch, num_rows: int, length: int, num_blocks: int) -> _Slots:
    """Where trained tokens are, dealt to the blocks that hold their rows."""
    num_positions = num_rows // num_blocks * length
    rows_N, columns_N = np.nonzero(micro_batch.loss_mask_BL)
    blocks_N, rows_in_block_N = np.divmod(rows_N, num_rows // num_blocks)
    counts_F = np.bincount(blocks_N, minlength=num_blocks)
    share = -(-num_positions // _SHARES)
    num_slots = min(max(-(-int(counts_F.max()) // share), 1) * share, num_positions)
    # Tokens are in the order of rows, hence of blocks; the slot is the place among those of the block.
    slots_N = np.arange(len(rows_N)) - np.repeat(np.cumsum(counts_F) - counts_F, counts_F)
    origin_FM = np.zeros((num_blocks, num_slots), np.int64)
    origin_FM[blocks_N, slots_N] = rows_N * micro_batch.shape[1] + columns_N
    # Token t is predicted at t - 1; token 0 of a sequence is never trained, so t - 1 is in its row.
    predictors_N = rows_in_block_N * length + columns_N - 1
    predictors_FM = np.empty((num_blocks, num_slots), np.int32)
    mask_FM = np.arange(num_slots) < counts_F[:, None]
    for block, count in enumerate(counts_F):
        own = predictors_N[blocks_N == block]
        # Padding takes positions that are left: with no position twice, its gradient is written without a sum.
        is_free = np.ones(num_positions, bool)
        is_free[own] = False
        predictors_FM[block, :count] = own
        predictors_FM[block, count:] = np.flatnonzero(is_free)[: num_slots - count]
    return _Slots(predictors_FM, origin_FM, mask_FM)


def _trained_sequences(micro_batch: MicroBatch, slots: _Slots) -> np.ndarray:
    sequence_FM = np.zeros(slots.mask_FM.shape, np.int32)
    held = micro_batch.sequence_ids_BL.reshape(-1)[slots.origin_FM[slots.mask_FM]]
    sequence_FM[slots.mask_FM] = np.unique(held, return_inverse=True)[1]
    return sequence_FM
