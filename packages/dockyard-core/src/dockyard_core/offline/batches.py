"""Which rows make which optimizer step, and their sequences."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import groupby
from typing import Any

import numpy as np

from dockyard_core.advantage import Baseline, Scale, group_advantages
from dockyard_core.batch import TrainSequence
from dockyard_core.errors import ConfigError
from dockyard_core.offline.dataset import OfflineDataset
from dockyard_core.offline.rows import OfflineRow


@dataclass(frozen=True, kw_only=True, slots=True)
class StepRows:
    """The rows of one optimizer step."""

    epoch: int
    """From 0."""
    batch: int
    """Of the epoch, from 0."""
    row_indices: np.ndarray


class BatchPlan:
    """The order of rows: a function of the data, the seed and the epoch, so that any place in it can be found again.

    A step takes units (rows, groups or named steps) in order as long as they fit into ``batch_size``
    rows; the last step of an epoch takes what is left.

    Args:
        dataset: the rows.
        batch_size: rows of a step; None where the rows name their step.
        is_shuffled: another order of units in every epoch.
        seed: of the order; 0 <= seed < 2**32.

    Raises:
        ConfigError: the options contradict the data.
    """

    def __init__(self, dataset: OfflineDataset, *, batch_size: int | None, is_shuffled: bool, seed: int) -> None:
        self._starts = dataset.unit_starts
        self._sizes = np.diff(dataset.unit_starts)
        self._batch_size = batch_size
        self._is_shuffled = is_shuffled
        self._seed = seed
        if dataset.has_steps:
            for option, is_given in (("--batch-size", batch_size is not None), ("--shuffle", is_shuffled)):
                if is_given:
                    raise ConfigError(
                        f"{option} is for rows without a step, got rows that name theirs; leave out one of the two"
                    )
        else:
            assert batch_size is not None
            largest = int(self._sizes.max())
            if largest > batch_size:
                raise ConfigError(
                    f"--batch-size must hold the largest group, got {batch_size} < {largest} rows; "
                    f"use --batch-size {largest} or more"
                )

    def num_steps(self, *, epochs: int | None, steps: int | None) -> int:
        """Steps of a run: ``epochs`` passes (None: 1, or as many as ``steps`` needs), ``steps`` at most."""
        if epochs is None and steps is not None:
            return steps
        total = 0
        for epoch in range(epochs or 1):
            total += self._num_batches(epoch)
            if steps is not None and total >= steps:
                return steps
        return total

    def steps_from(self, epoch: int, batch: int) -> Iterator[StepRows]:
        """Steps from a place on, without end."""
        while True:
            for index, units in enumerate(self._batches(epoch)):
                if index >= batch:
                    rows = [np.arange(self._starts[unit], self._starts[unit + 1]) for unit in units]
                    yield StepRows(epoch=epoch, batch=index, row_indices=np.concatenate(rows))
            epoch, batch = epoch + 1, 0

    def _num_batches(self, epoch: int) -> int:
        if self._batch_size is None:
            return len(self._sizes)
        if self._sizes.min() == self._sizes.max():
            return -(-len(self._sizes) // (self._batch_size // int(self._sizes[0])))
        return sum(1 for _ in self._batches(epoch))

    def _batches(self, epoch: int) -> Iterator[np.ndarray]:
        """Units of each step of an epoch."""
        order = np.arange(len(self._sizes))
        if self._is_shuffled:
            # The legacy generator, whose stream numpy promises never to change.
            order = np.random.RandomState(np.array([self._seed, epoch])).permutation(order)
        if self._batch_size is None:
            yield from np.split(order, len(order))
            return
        begin, num_rows = 0, 0
        for place, size in enumerate(self._sizes[order]):
            if num_rows + size > self._batch_size:
                yield order[begin:place]
                begin, num_rows = place, 0
            num_rows += int(size)
        yield order[begin:]


def sft_sequences(rows: Sequence[OfflineRow]) -> list[TrainSequence]:
    """Advantage 1 on every trained token: `reinforce` then is the negative log-likelihood."""
    return [_sequence(row, 1.0) for row in rows]


def grpo_sequences(rows: Sequence[OfflineRow], *, baseline: Baseline, scale: Scale) -> list[TrainSequence]:
    """Sequences with the rows' own advantages, or those of their rewards within each group."""
    sequences = []
    for _, group in groupby(enumerate(rows), key=lambda item: item[0] if item[1].group is None else (item[1].group,)):
        members = [row for _, row in group]
        if members[0].advantage is not None:
            advantages = [row.advantage for row in members]
        else:
            rewards = np.array([row.reward for row in members], np.float64)
            advantages = group_advantages(rewards, baseline=baseline, scale=scale).tolist()
        sequences += [_sequence(row, float(value or 0.0)) for row, value in zip(members, advantages, strict=True)]
    return sequences


def _sequence(row: OfflineRow, advantage: float) -> TrainSequence:
    optional: dict[str, Any] = {}
    if row.proximal_logprobs_T is not None:
        optional["proximal_logprobs_T"] = row.proximal_logprobs_T
    return TrainSequence(
        token_ids_T=row.token_ids_T,
        loss_mask_T=row.loss_mask_T,
        sampled_logprobs_T=row.logprobs_T,
        advantage=advantage,
        **optional,
    )
