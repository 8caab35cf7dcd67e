"""How a micro-batch is laid out for the model: packed rows, padded so that few shapes occur.

A program is compiled for one shape (`shapes`). Masked slots are left behind here: sampled logprobs and advantages are
read at trained positions only, so what the others hold cannot reach the loss.

Shape legend: B = rows, L = row length, F = blocks of rows (one for each device along ``fsdp``), M = token slots of a
block, U = slots of distinct tokens (`prefixes`), R = trained tokens of the micro-batch.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple, Protocol

import jax
import numpy as np

from dockyard_core.batch import MicroBatch
from dockyard_trainer_jax.attention import PADDING_SEGMENT, ModelInputs, PackedInputs
from dockyard_trainer_jax.shapes import Shape


@partial(
    jax.tree_util.register_dataclass,
    data_fields=[
        "inputs",
        "predictors_FU",
        "target_ids_FU",
        "is_scored_FU",
        "distinct_FM",
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

    inputs: ModelInputs
    predictors_FU: Any
    """Position, counted through those of the block, that predicts the slot's token."""
    target_ids_FU: Any
    is_scored_FU: Any
    """False at padding."""
    distinct_FM: Any
    """Slot in U of each trained token; None = U is M, and no position predicts two tokens."""
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
    def layout(self) -> tuple[Any, ...]:
        """What a program is compiled for, besides the model and the loss."""
        return tuple((leaf.shape, str(leaf.dtype)) for leaf in jax.tree.leaves(self)), jax.tree.structure(self)


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


class Plan(Protocol):
    """A micro-batch that is read, and still to be padded."""

    @property
    def num_tokens(self) -> int:
        """Trained ones."""
        ...

    @property
    def needed(self) -> Shape:
        """The smallest shape it fits in."""
        ...

    def laid_out(self, shape: Shape) -> LaidOut:
        """Padded to a shape that covers what is needed, in host memory."""
        ...


class PackedPlan:
    """Rows as they were packed, dealt to ``num_blocks`` devices."""

    def __init__(self, micro_batch: MicroBatch, *, num_blocks: int) -> None:
        self._micro_batch = micro_batch
        self._num_blocks = num_blocks
        self._rows_per_block = -(-micro_batch.shape[0] // num_blocks)
        """As they are dealt, whatever they are padded to: tokens must not move to blocks without slots for them."""
        self._rows_R, self._columns_R = np.nonzero(micro_batch.loss_mask_BL)
        self.num_tokens = len(self._rows_R)

    @property
    def needed(self) -> Shape:
        """Rows are dealt evenly."""
        return Shape(
            num_rows=self._rows_per_block * self._num_blocks,
            row_length=self._micro_batch.used_length,
            num_blocks=self._num_blocks,
            num_slots=int(self._counts_F().max()),
        )

    def _counts_F(self) -> np.ndarray:
        """Trained tokens of each block."""
        return np.bincount(self._rows_R // self._rows_per_block, minlength=self._num_blocks)

    def laid_out(self, shape: Shape) -> LaidOut:
        """Padded, in host memory."""
        micro_batch, used = self._micro_batch, self._micro_batch.used_length
        blocks_B, rows_in_block_B = np.divmod(np.arange(micro_batch.shape[0]), self._rows_per_block)
        places_B = blocks_B * (shape.num_rows // shape.num_blocks) + rows_in_block_B

        def padded(array_BL: np.ndarray, value: int) -> np.ndarray:
            filled_BL = np.full((shape.num_rows, shape.row_length), value, np.int32)
            filled_BL[places_B, :used] = array_BL[:, :used]
            return filled_BL

        segment_ids_BL = padded(_segment_ids(micro_batch.sequence_ids_BL), PADDING_SEGMENT)
        inputs = PackedInputs(
            # The contents of padding are not to be read: they may be ids of another vocabulary.
            token_ids_BL=np.where(segment_ids_BL < 0, 0, padded(micro_batch.token_ids_BL, 0)).astype(np.int32),
            position_ids_BL=padded(micro_batch.position_ids_BL, 0),
            segment_ids_BL=segment_ids_BL,
        )
        predictors_FM, slots = self._token_slots(shape)
        return tokens_at(micro_batch, slots, inputs=inputs, predictors_FU=predictors_FM)

    def _token_slots(self, shape: Shape) -> tuple[np.ndarray, TokenSlots]:
        """Trained tokens, dealt to the blocks that hold their rows."""
        num_positions = shape.num_rows // shape.num_blocks * shape.row_length
        num_slots = min(shape.num_slots, num_positions)
        counts_F = self._counts_F()
        blocks_R, rows_in_block_R = np.divmod(self._rows_R, self._rows_per_block)
        # Tokens are in the order of rows, hence of blocks; the slot is the place among those of the block.
        slots_R = np.arange(len(blocks_R)) - np.repeat(np.cumsum(counts_F) - counts_F, counts_F)
        origin_FM = np.zeros((shape.num_blocks, num_slots), np.int64)
        origin_FM[blocks_R, slots_R] = self._rows_R * self._micro_batch.shape[1] + self._columns_R
        # Token t is predicted at t - 1; token 0 of a sequence is never trained, so t - 1 is in its row.
        predictors_R = rows_in_block_R * shape.row_length + self._columns_R - 1
        predictors_FM = np.empty((shape.num_blocks, num_slots), np.int32)
        for block, count in enumerate(counts_F):
            own = predictors_R[blocks_R == block]
            # Padding takes positions that are left: with no position twice, its gradient is written without a sum.
            is_free = np.ones(num_positions, bool)
            is_free[own] = False
            predictors_FM[block, :count] = own
            predictors_FM[block, count:] = np.flatnonzero(is_free)[: num_slots - count]
        return predictors_FM, TokenSlots(origin_FM, np.arange(num_slots) < counts_F[:, None])


def _segment_ids(sequence_ids_BL: np.ndarray) -> np.ndarray:
    """The sequences counted through: ids are 64 bits wide, and two may be equal in the 32 of a device."""
    numbers_N = np.unique(sequence_ids_BL, return_inverse=True)[1]
    return np.where(sequence_ids_BL < 0, PADDING_SEGMENT, numbers_N.reshape(sequence_ids_BL.shape))


class TokenSlots(NamedTuple):
    """Where trained tokens of a micro-batch go."""

    origin_FM: np.ndarray
    """Index into the flat [B, L] of the micro-batch; 0 at padding."""
    mask_FM: np.ndarray


class DistinctTokens(NamedTuple):
    """Trained tokens whose log-probability is computed, where several may have the same."""

    target_ids_FU: np.ndarray
    is_scored_FU: np.ndarray
    distinct_FM: np.ndarray


def tokens_at(
    micro_batch: MicroBatch,
    slots: TokenSlots,
    *,
    inputs: ModelInputs,
    predictors_FU: np.ndarray,
    distinct: DistinctTokens | None = None,
) -> LaidOut:
    """What the loss needs of the trained tokens, read from the micro-batch."""

    def at_slots(array_BL: np.ndarray | None) -> np.ndarray | None:
        if array_BL is None:
            return None
        return np.where(slots.mask_FM, array_BL.reshape(-1)[slots.origin_FM], 0).astype(np.float32)

    target_ids_FM = np.where(slots.mask_FM, micro_batch.token_ids_BL.reshape(-1)[slots.origin_FM], 0)
    batch = PaddedBatch(
        inputs=inputs,
        predictors_FU=predictors_FU,
        target_ids_FU=target_ids_FM.astype(np.int32) if distinct is None else distinct.target_ids_FU,
        is_scored_FU=slots.mask_FM if distinct is None else distinct.is_scored_FU,
        distinct_FM=None if distinct is None else distinct.distinct_FM,
        mask_FM=slots.mask_FM,
        sequence_FM=_trained_sequences(micro_batch, slots),
        sampled_logprobs_FM=at_slots(micro_batch.sampled_logprobs_BL),
        advantages_FM=at_slots(micro_batch.advantages_BL),
        proximal_logprobs_FM=at_slots(micro_batch.proximal_logprobs_BL),
    )
    return LaidOut(batch, int(slots.mask_FM.sum()), slots.origin_FM, slots.mask_FM)


def _trained_sequences(micro_batch: MicroBatch, slots: TokenSlots) -> np.ndarray:
    sequence_FM = np.zeros(slots.mask_FM.shape, np.int32)
    held = micro_batch.sequence_ids_BL.reshape(-1)[slots.origin_FM[slots.mask_FM]]
    sequence_FM[slots.mask_FM] = np.unique(held, return_inverse=True)[1]
    return sequence_FM
