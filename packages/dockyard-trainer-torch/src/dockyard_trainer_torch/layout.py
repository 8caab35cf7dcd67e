"""How a micro-batch is laid out for the model: packed rows, or shared prefixes computed once.

Masked slots are left behind here: sampled logprobs and advantages are read at trained positions
only, so what the others hold cannot reach the loss.

Shape legend: B = rows, L = row length, M = trained tokens of a micro-batch, P = distinct prefixes,
N = distinct sequences, S = suffix length, U = distinct trained tokens.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from dockyard_core.batch import MicroBatch
from dockyard_core.prefixes import SharedPrefixes

_WORTHWHILE = 0.8
"""Prefixes are shared when that leaves at most this part of the packed positions."""


@dataclass(frozen=True, kw_only=True)
class PackedLayout:
    """Rows of whole sequences; position ids restart where the next sequence starts."""

    token_ids_BL: Tensor
    position_ids_BL: Tensor
    predictors_M: Tensor
    """Flat index into [B, L] of the position that predicts each trained token."""
    target_ids_M: Tensor


@dataclass(frozen=True, kw_only=True)
class PrefixLayout:
    """Distinct prefixes, then the suffix of each distinct sequence against its prefix's keys and values.

    A prefix is what comes before a sequence's first trained token. The rollouts of a group share
    theirs, and rollouts that are equal token by token share everything; autograd adds up their
    gradients, so nothing is approximated. Suffixes lack their last token, which predicts nothing.
    """

    prefix_ids_PL: Tensor  # right-padded
    prefix_lengths_P: Tensor
    suffix_ids_NS: Tensor  # right-padded; S may be 0
    prefix_of_N: Tensor  # row of the prefix
    predictors_U: Tensor  # flat index into the P * L prefix positions followed by the N * S suffix ones
    target_ids_U: Tensor
    distinct_M: Tensor  # index in U of each trained token

    @property
    def suffix_position_ids_NS(self) -> Tensor:
        """Positions go on where the prefix ends."""
        offsets_S = torch.arange(self.suffix_ids_NS.shape[1], device=self.suffix_ids_NS.device)
        return self.prefix_lengths_P[self.prefix_of_N][:, None] + offsets_S

    @property
    def suffix_attention_mask(self) -> Tensor:
        """Bool [N, 1, S, L + S]: the sequence's own prefix without its padding, and its past."""
        num_rows, size = self.suffix_ids_NS.shape
        length = self.prefix_ids_PL.shape[1]
        device = self.suffix_ids_NS.device
        is_prefix_PL = torch.arange(length, device=device) < self.prefix_lengths_P[:, None]
        is_past_SS = torch.ones(size, size, dtype=torch.bool, device=device).tril()
        return torch.cat(
            [
                is_prefix_PL[self.prefix_of_N][:, None, None, :].expand(num_rows, 1, size, length),
                is_past_SS.expand(num_rows, 1, size, size),
            ],
            dim=-1,
        )


Layout = PackedLayout | PrefixLayout


@dataclass(frozen=True, kw_only=True)
class TensorBatch:
    """A micro-batch on the device: the model's inputs, and the loss's inputs at trained tokens."""

    layout: Layout
    sampled_logprobs_M: Tensor
    advantages_M: Tensor
    sequence_M: Tensor  # index of the sequence each trained token belongs to
    num_rows: int
    """1 + the largest of ``sequence_M``."""
    proximal_logprobs_M: Tensor | None = None
    """Carried by the batch, or of the weights before its first update."""
    ref_logprobs_M: Tensor | None = None
    """Of the frozen reference."""

    @property
    def num_tokens(self) -> int:
        """M."""
        return len(self.sequence_M)


def tensor_batch(micro_batch: MicroBatch, device: str, *, share_prefixes: bool) -> TensorBatch:
    """Lay a micro-batch out and move it to the device; order M is that of the rows of [B, L]."""
    targets_M = np.flatnonzero(micro_batch.loss_mask_BL)
    sequence_M = micro_batch.sequence_ids_BL.reshape(-1)[targets_M].astype(np.int64)
    proximal_BL = micro_batch.proximal_logprobs_BL
    layout = (_prefix_layout(micro_batch, device) if share_prefixes else None) or _packed_layout(micro_batch, device)

    def at_targets(array_BL: np.ndarray) -> Tensor:
        return torch.from_numpy(array_BL.reshape(-1)[targets_M].astype(np.float32)).to(device)

    return TensorBatch(
        layout=layout,
        sampled_logprobs_M=at_targets(micro_batch.sampled_logprobs_BL),
        advantages_M=at_targets(micro_batch.advantages_BL),
        sequence_M=torch.from_numpy(sequence_M).to(device),
        num_rows=int(sequence_M.max(initial=-1)) + 1,
        proximal_logprobs_M=None if proximal_BL is None else at_targets(proximal_BL),
    )


def _packed_layout(micro_batch: MicroBatch, device: str) -> PackedLayout:
    used = micro_batch.used_length
    token_ids_BL = micro_batch.token_ids_BL[:, :used].astype(np.int64)
    targets_M = np.flatnonzero(micro_batch.loss_mask_BL[:, :used])
    return PackedLayout(
        token_ids_BL=torch.from_numpy(token_ids_BL).to(device),
        position_ids_BL=torch.from_numpy(_position_ids(micro_batch)[:, :used].astype(np.int64)).to(device),
        # Token t is predicted at t - 1; token 0 of a sequence is never trained, so t - 1 is in its row.
        predictors_M=torch.from_numpy(targets_M - 1).to(device),
        target_ids_M=torch.from_numpy(token_ids_BL.reshape(-1)[targets_M]).to(device),
    )


def _position_ids(micro_batch: MicroBatch) -> np.ndarray:
    """Position ids, not restarted at the padding when every row holds one sequence.

    Causal attention never looks ahead at padding, so nothing is computed differently; without a
    restart the model takes plain causal attention, which is faster than a mask per sequence.
    """
    ids_BL = micro_batch.sequence_ids_BL
    has_one_each = bool(((ids_BL == ids_BL[:, :1]) | (ids_BL < 0)).all())
    if has_one_each:
        return np.broadcast_to(np.arange(ids_BL.shape[1]), ids_BL.shape)
    return micro_batch.position_ids_BL


def _prefix_layout(micro_batch: MicroBatch, device: str) -> PrefixLayout | None:
    """The layout with shared prefixes, or None when sharing would save too little."""
    shared = SharedPrefixes.of(micro_batch)
    if not shared.suffixes:
        return None
    prefix_ids_PL, prefix_lengths_P = _padded(shared.prefixes)
    suffix_ids_NS, _ = _padded([suffix.token_ids[:-1] for suffix in shared.suffixes])
    if prefix_ids_PL.size + suffix_ids_NS.size > _WORTHWHILE * micro_batch.num_positions:
        return None
    # The first trained token is predicted by the prefix's end, offset k > 0 by suffix position k - 1.
    prefix_of_N = shared.prefix_of_N
    first_predictors_N = prefix_of_N * prefix_ids_PL.shape[1] + prefix_lengths_P[prefix_of_N] - 1
    suffix_starts_N = prefix_ids_PL.size + np.arange(len(shared.suffixes)) * suffix_ids_NS.shape[1]
    predictors = [
        np.where(suffix.trained == 0, first_predictors_N[row], suffix_starts_N[row] + suffix.trained - 1)
        for row, suffix in enumerate(shared.suffixes)
    ]

    def tensor(array: np.ndarray) -> Tensor:
        return torch.from_numpy(array).to(device)

    return PrefixLayout(
        prefix_ids_PL=tensor(prefix_ids_PL),
        prefix_lengths_P=tensor(prefix_lengths_P),
        suffix_ids_NS=tensor(suffix_ids_NS),
        prefix_of_N=tensor(prefix_of_N),
        predictors_U=tensor(np.concatenate(predictors)),
        target_ids_U=tensor(np.concatenate([suffix.token_ids[suffix.trained] for suffix in shared.suffixes])),
        distinct_M=tensor(shared.distinct_tokens),
    )


def _padded(rows: Sequence[np.ndarray]) -> tuple[np.ndarray, np.ndarray]:
    """Right-padded with 0, and the lengths."""
    lengths = np.array([len(row) for row in rows])
    padded = np.zeros((len(rows), lengths.max()), np.int64)
    for index, row in enumerate(rows):
        padded[index, : len(row)] = row
    return padded, lengths
