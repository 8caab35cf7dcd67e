"""A layout in which what several sequences start with goes through the model once; exact.

Suffixes of one prefix attend to it and to their own past; sequences that are equal token by token share everything.
Gradients add up where paths meet.

Shape legend: P = distinct prefixes, L = their padded length, N = distinct suffixes, S = their padded length,
U = distinct trained tokens, M = trained tokens; a leading 1 is the one block of rows.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from dockyard_core.batch import MicroBatch
from dockyard_core.prefixes import SharedPrefixes
from dockyard_trainer_jax.attention import SharedInputs
from dockyard_trainer_jax.layout import DistinctTokens, LaidOut, PackedPlan, Plan, TokenSlots, tokens_at
from dockyard_trainer_jax.shapes import Shape

_WORTHWHILE = 0.8
"""Shared if there are at most so many positions, of those of the packed rows: attention to a prefix costs more."""


class SharedPlan:
    """Prefixes and suffixes of a micro-batch, on the devices of one row of the mesh."""

    def __init__(self, micro_batch: MicroBatch) -> None:
        self._micro_batch = micro_batch
        self._shared = SharedPrefixes.of(micro_batch)
        self.num_tokens = int(micro_batch.loss_mask_BL.sum())

    @property
    def is_worthwhile(self) -> bool:
        """Whether there is something to train, and sharing leaves out enough of the model's work."""
        if not self._shared.suffixes:
            return False
        return self.needed.num_positions <= _WORTHWHILE * self._micro_batch.num_positions

    @property
    def needed(self) -> Shape:
        """Without padding but to the longest. A suffix lacks its last token, which predicts nothing."""
        shared = self._shared
        return Shape(
            num_rows=len(shared.suffixes),
            row_length=max(len(suffix.token_ids) for suffix in shared.suffixes) - 1,
            num_blocks=1,
            num_slots=self.num_tokens,
            num_prefixes=len(shared.prefixes),
            prefix_length=max(map(len, shared.prefixes)),
            num_distinct=shared.num_distinct_tokens,
        )

    def laid_out(self, shape: Shape) -> LaidOut:
        """Padded, in host memory. Padded suffixes belong to prefix 0, and nothing reads them."""
        suffixes = self._shared.suffixes
        prefix_ids_PL = _padded(self._shared.prefixes, shape.num_prefixes, shape.prefix_length)
        prefix_lengths_P = np.ones(shape.num_prefixes, np.int32)
        prefix_lengths_P[: len(self._shared.prefixes)] = [len(prefix) for prefix in self._shared.prefixes]
        prefix_of_N = _filled(self._shared.prefix_of_N, shape.num_rows)
        # The first trained token is predicted by the prefix's end, offset k > 0 by suffix position k - 1.
        first_N = prefix_of_N * shape.prefix_length + prefix_lengths_P[prefix_of_N] - 1
        starts_N = prefix_ids_PL.size + np.arange(shape.num_rows) * shape.row_length
        predictors = [
            np.where(suffix.trained == 0, first_N[row], starts_N[row] + suffix.trained - 1)
            for row, suffix in enumerate(suffixes)
        ]
        targets = [suffix.token_ids[suffix.trained] for suffix in suffixes]
        return tokens_at(
            self._micro_batch,
            self._slots(shape.num_slots),
            inputs=SharedInputs(
                prefix_ids_PL=prefix_ids_PL,
                prefix_lengths_P=prefix_lengths_P,
                suffix_ids_NS=_padded([suffix.token_ids[:-1] for suffix in suffixes], shape.num_rows, shape.row_length),
                prefix_of_N=prefix_of_N,
            ),
            predictors_FU=_filled(np.concatenate(predictors), shape.num_distinct)[None],
            distinct=DistinctTokens(
                target_ids_FU=_filled(np.concatenate(targets), shape.num_distinct)[None],
                is_scored_FU=(np.arange(shape.num_distinct) < self._shared.num_distinct_tokens)[None],
                distinct_FM=_filled(self._shared.distinct_tokens, shape.num_slots)[None],
            ),
        )

    def _slots(self, num_slots: int) -> TokenSlots:
        """Trained tokens in the order of the rows of [B, L]."""
        origin_M = np.flatnonzero(self._micro_batch.loss_mask_BL)
        return TokenSlots(
            origin_FM=np.pad(origin_M, (0, num_slots - len(origin_M)))[None],
            mask_FM=(np.arange(num_slots) < len(origin_M))[None],
        )


def plan_of(micro_batch: MicroBatch, *, num_blocks: int, share_prefixes: bool) -> Plan:
    """With shared prefixes, if that may be and is worth it."""
    if share_prefixes:
        shared = SharedPlan(micro_batch)
        if shared.is_worthwhile:
            return shared
    return PackedPlan(micro_batch, num_blocks=num_blocks)


def _padded(rows: Sequence[np.ndarray], num_rows: int, length: int) -> np.ndarray:
    """By 0, on the right and with more rows."""
    padded = np.zeros((num_rows, length), np.int32)
    for index, row in enumerate(rows):
        padded[index, : len(row)] = row
    return padded


def _filled(values: np.ndarray, size: int) -> np.ndarray:
    return np.pad(values, (0, size - len(values))).astype(np.int32)
