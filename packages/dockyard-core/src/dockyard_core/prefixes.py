"""What the sequences of a micro-batch have in common, so that it goes through a model once.

A sequence is its prefix, up to the first trained token, and its suffix. The rollouts of a group share their prefix;
sequences that are equal token by token share everything.

Shape legend: N = distinct sequences.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from itertools import pairwise
from typing import NamedTuple

import numpy as np

from dockyard_core.batch import MicroBatch


class Suffix(NamedTuple):
    """A sequence from its first trained token on."""

    token_ids: np.ndarray
    """int64."""
    trained: np.ndarray
    """Offsets of the trained tokens; the first is 0."""


@dataclass(frozen=True, kw_only=True)
class SharedPrefixes:
    """Distinct prefixes, and distinct sequences that go on from them."""

    prefixes: list[np.ndarray]
    """Token ids, int64."""
    suffixes: list[Suffix]
    """Of the distinct sequences."""
    prefix_of_N: np.ndarray
    """Index of each one's prefix."""
    distinct_of: list[int]
    """Index of the distinct sequence of each sequence with trained tokens, in the order of the rows of [B, L]."""

    @classmethod
    def of(cls, micro_batch: MicroBatch) -> SharedPrefixes:
        """Sequences without trained tokens are left out; there may be none at all."""
        prefixes: dict[bytes, int] = {}
        rows: dict[tuple[int, bytes, bytes], int] = {}
        suffixes: list[Suffix] = []
        distinct_of: list[int] = []
        for prefix_ids, suffix in _sequences(micro_batch):
            prefix = prefixes.setdefault(prefix_ids.tobytes(), len(prefixes))
            key = (prefix, suffix.token_ids.tobytes(), suffix.trained.tobytes())
            if key not in rows:
                rows[key] = len(suffixes)
                suffixes.append(suffix)
            distinct_of.append(rows[key])
        return cls(
            prefixes=[np.frombuffer(key, np.int64) for key in prefixes],
            suffixes=suffixes,
            prefix_of_N=np.array([prefix for prefix, _, _ in rows], np.int64),
            distinct_of=distinct_of,
        )

    @property
    def num_distinct_tokens(self) -> int:
        """Trained tokens of the distinct sequences."""
        return sum(len(suffix.trained) for suffix in self.suffixes)

    @property
    def distinct_tokens(self) -> np.ndarray:
        """Place of each trained token, in the order of the rows of [B, L], among those of the distinct sequences."""
        starts_N = np.cumsum([0, *(len(suffix.trained) for suffix in self.suffixes)])
        places = [np.arange(starts_N[row], starts_N[row + 1]) for row in self.distinct_of]
        return np.concatenate(places) if places else np.zeros(0, np.int64)


def _sequences(micro_batch: MicroBatch) -> Iterator[tuple[np.ndarray, Suffix]]:
    """Prefix and suffix of each sequence with trained tokens, in the order of the rows of [B, L]."""
    ids, mask = micro_batch.token_ids_BL.reshape(-1).astype(np.int64), micro_batch.loss_mask_BL.reshape(-1)
    sequence_ids = micro_batch.sequence_ids_BL.reshape(-1)
    edges = np.flatnonzero(np.diff(sequence_ids, prepend=-1, append=-1))
    for start, stop in pairwise(edges):
        trained = np.flatnonzero(mask[start:stop])
        if sequence_ids[start] >= 0 and len(trained):
            first = start + trained[0]
            yield ids[start:first], Suffix(ids[first:stop], trained - trained[0])
