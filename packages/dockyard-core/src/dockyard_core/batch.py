"""Rollouts -> packed micro-batches, equal in number on every rank; the step's global counts.

Which sequences meet in a micro-batch is decided by `dockyard_core.packing`.

Shape legend: B = rows of a micro-batch, L = row length, T = tokens of one sequence.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import chain

import numpy as np

from dockyard_core.packing import deal, fill_rows, group_units, level_rows, unit_of
from dockyard_core.rollout import Rollout


@dataclass(frozen=True, kw_only=True)
class TrainSequence:
    """One token sequence with what the loss needs. Index t of every array belongs to token t."""

    token_ids_T: np.ndarray  # int64
    loss_mask_T: np.ndarray  # bool; token 0 has no past and is never trained
    sampled_logprobs_T: np.ndarray  # float32, 0 where the mask is False
    advantage: float
    proximal_logprobs_T: np.ndarray | None = None
    """float32, under the policy that pi_theta / pi_prox is taken to; None = the trainer computes them."""

    def __post_init__(self) -> None:
        ids, mask = self.token_ids_T, self.loss_mask_T
        if len(ids) == 0:
            raise ValueError("a sequence needs at least 1 token, got 0; leave it out")
        arrays = {"token_ids_T": ids, "loss_mask_T": mask, "sampled_logprobs_T": self.sampled_logprobs_T}
        if self.proximal_logprobs_T is not None:
            arrays["proximal_logprobs_T"] = self.proximal_logprobs_T
        for name, array in arrays.items():
            if array.shape != (len(ids),):
                raise ValueError(
                    f"{name} must have shape ({len(ids)},), one entry per token, got {array.shape}; "
                    "fill slots that are not trained with 0"
                )
        if ids.dtype.kind not in "iu":
            raise ValueError(f"token_ids_T must be integers, got {ids.dtype}; pass the tokenizer's ids as int64")
        if int(ids.min()) < 0:
            raise ValueError(f"token ids must be >= 0, got {int(ids.min())}; mark untrained tokens in loss_mask_T")
        if mask.dtype != bool:
            raise ValueError(f"loss_mask_T must be bool, got {mask.dtype}; convert it with astype(bool)")
        if mask[0]:
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
    sequence_ids_BL: np.ndarray  # int64, index of the sequence in this micro-batch; -1 at padding
    loss_mask_BL: np.ndarray  # bool
    sampled_logprobs_BL: np.ndarray  # float32
    advantages_BL: np.ndarray  # float32, the rollout's advantage on each of its tokens
    proximal_logprobs_BL: np.ndarray | None = None
    """float32, 0 at padding; None unless every sequence of the step carries them."""

    @property
    def shape(self) -> tuple[int, int]:
        """(B, L)."""
        return (self.token_ids_BL.shape[0], self.token_ids_BL.shape[1])

    @property
    def num_tokens(self) -> int:
        """Tokens of sequences, trained or not; the rest of B·L is padding."""
        return int((self.sequence_ids_BL >= 0).sum())

    @property
    def used_length(self) -> int:
        """Columns up to the last that is not padding in every row, at least 1."""
        used = np.flatnonzero((self.sequence_ids_BL >= 0).any(axis=0))
        return int(used[-1]) + 1 if len(used) else 1

    @property
    def num_positions(self) -> int:
        """What a trainer computes: the used columns of every row."""
        return self.shape[0] * self.used_length


@dataclass(frozen=True, kw_only=True)
class BatchShard:
    """One rank's share of an optimizer step, with the counts of the WHOLE step."""

    micro_batches: tuple[MicroBatch, ...]
    num_valid_tokens: int
    """Trained tokens over all ranks and micro-batches: the loss normaliser."""
    num_sequences: int
    """Admitted valid rollouts of the step over all ranks: the normaliser of `dr_grpo`."""
    num_trained_sequences: int
    """Those of them with a trained token: the normaliser of `sequence`."""
    temperature: float = 1.0
    """Sampling temperature of the step's rollouts; trainer logprobs are taken at it."""

    @property
    def padding_fraction(self) -> float:
        """1 - tokens / computed positions of this rank, prefixes not shared; 1.0 when all is padding."""
        num_positions = sum(micro_batch.num_positions for micro_batch in self.micro_batches)
        return 1.0 - sum(micro_batch.num_tokens for micro_batch in self.micro_batches) / num_positions


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
    keep_groups: bool | None = None,
) -> tuple[BatchShard, ...]:
    """Split one step's sequences into one shard per rank, all with the same number of micro-batches.

    Sequences of similar length are dealt evenly over the ranks' k-th micro-batches, which run at the
    same time; `dockyard_core.packing.deal` states the bound. A rank left without sequences gets padding,
    because every rank takes part in every collective. The order of the sequences does not matter.

    With ``row_length=None`` a micro-batch is as long as its own content needs: of the layouts with at
    most 5 % padding it has the most rows, hence the shortest. Often that is one sequence per row, and
    attention needs no mask. Give ``row_length`` to a trainer that compiles once per row length.

    Args:
        sequences: the step's valid sequences, possibly none.
        num_ranks: data-parallel ranks.
        micro_batch_tokens: upper bound of B·L, except that one row is always allowed.
        row_length: tokens per row, raised to the longest sequence; None = see above.
        skip_zero_advantage: leave out sequences with advantage 0. Exact only when the loss has no
            KL and no entropy term; the counts still include them.
        temperature: sampling temperature of the rollouts.
        keep_groups: sequences with the same prompt stay in one micro-batch as long as it holds them, so
            that a trainer can compute the prompt once; ranks are balanced less well. None = on one rank
            without ``row_length``.
    """
    _check_options(num_ranks, micro_batch_tokens, row_length, keep_groups)
    has_proximal, counts = _has_proximal(sequences), _counts(sequences)
    kept = [s for s in sequences if s.num_valid_tokens and not (skip_zero_advantage and s.advantage == 0.0)]
    kept.sort(key=_content)
    lengths = [sequence.num_tokens for sequence in kept]
    if row_length is not None:
        row_length = max([row_length, *lengths])
        filled = fill_rows(range(len(kept)), lengths, row_length, num_ranks=num_ranks)
        units = [unit_of(row, lengths, size=row_length) for row in filled]
    elif keep_groups or (keep_groups is None and num_ranks == 1):
        units = group_units(_groups(kept), lengths, micro_batch_tokens)
    else:
        units = [unit_of([index], lengths) for index in range(len(kept))]
    dealt: list[list[MicroBatch]] = [[] for _ in range(num_ranks)]
    for wave in deal(units, num_ranks=num_ranks, budget=micro_batch_tokens):
        for rank, share in enumerate(wave):
            members = [unit.members for unit in share]
            rows = members if row_length else level_rows(list(chain(*members)), lengths, micro_batch_tokens)
            dealt[rank].append(_micro_batch(kept, rows, row_length, has_proximal=has_proximal))
    return tuple(BatchShard(micro_batches=tuple(share), temperature=temperature, **counts) for share in dealt)


def _counts(sequences: Sequence[TrainSequence]) -> dict[str, int]:
    """The counts of a step that every shard carries."""
    num_valid_tokens = [sequence.num_valid_tokens for sequence in sequences]
    return {
        "num_valid_tokens": sum(num_valid_tokens),
        "num_sequences": len(num_valid_tokens),
        "num_trained_sequences": sum(count > 0 for count in num_valid_tokens),
    }


def _check_options(num_ranks: int, micro_batch_tokens: int, row_length: int | None, keep_groups: bool | None) -> None:
    options = {"num_ranks": num_ranks, "micro_batch_tokens": micro_batch_tokens, "row_length": row_length}
    for name, value in options.items():
        if value is not None and value < 1:
            raise ValueError(f"{name} must be >= 1, got {value}; raise it")
    if keep_groups and row_length is not None:
        raise ValueError(f"keep_groups needs row_length=None, got {row_length}; leave one of them out")


def _has_proximal(sequences: Sequence[TrainSequence]) -> bool:
    num_carried = sum(sequence.proximal_logprobs_T is not None for sequence in sequences)
    if num_carried not in (0, len(sequences)):
        raise ValueError(
            f"all sequences of a step must carry proximal_logprobs_T or none, got {num_carried} of "
            f"{len(sequences)}; compute the missing ones, or leave all out and let the trainer compute them"
        )
    return num_carried > 0


def _content(sequence: TrainSequence) -> tuple[int, bytes, bytes, bytes, bytes, bytes]:
    """Sort key: longest first, ties by content, so that the order of the input does not matter."""
    proximal = sequence.proximal_logprobs_T
    return (
        -sequence.num_tokens,
        sequence.token_ids_T.tobytes(),
        sequence.loss_mask_T.tobytes(),
        sequence.sampled_logprobs_T.tobytes(),
        np.float64(sequence.advantage).tobytes(),
        b"" if proximal is None else proximal.tobytes(),
    )


def _groups(sequences: Sequence[TrainSequence]) -> Iterable[list[int]]:
    """Indices of the sequences that share what comes before their first trained token."""
    groups: dict[bytes, list[int]] = {}
    for index, sequence in enumerate(sequences):
        prefix = sequence.token_ids_T[: int(sequence.loss_mask_T.argmax())]
        groups.setdefault(prefix.astype(np.int64).tobytes(), []).append(index)
    return groups.values()


def _micro_batch(
    sequences: Sequence[TrainSequence], rows: Sequence[Sequence[int]], row_length: int | None, *, has_proximal: bool
) -> MicroBatch:
    length = row_length or max((sum(sequences[member].num_tokens for member in row) for row in rows), default=1)
    shape = (max(1, len(rows)), length)
    token_ids, sequence_ids = np.zeros(shape, np.int64), np.full(shape, -1, np.int64)
    position_ids = np.tile(np.arange(length), (shape[0], 1))
    loss_mask, advantages = np.zeros(shape, bool), np.zeros(shape, np.float32)
    sampled_logprobs = np.zeros(shape, np.float32)
    proximal_logprobs = np.zeros(shape, np.float32) if has_proximal else None
    count = 0
    for index, row in enumerate(rows):
        start = 0
        for sequence in (sequences[member] for member in row):
            span = slice(start, start + sequence.num_tokens)
            token_ids[index, span] = sequence.token_ids_T
            position_ids[index, span] = np.arange(sequence.num_tokens)
            sequence_ids[index, span] = count
            loss_mask[index, span] = sequence.loss_mask_T
            sampled_logprobs[index, span] = sequence.sampled_logprobs_T
            advantages[index, span] = sequence.advantage
            if proximal_logprobs is not None:
                proximal_logprobs[index, span] = sequence.proximal_logprobs_T
            start, count = span.stop, count + 1
        position_ids[index, start:] = np.arange(length - start)
    return MicroBatch(
        token_ids_BL=token_ids,
        position_ids_BL=position_ids,
        sequence_ids_BL=sequence_ids,
        loss_mask_BL=loss_mask,
        sampled_logprobs_BL=sampled_logprobs,
        advantages_BL=advantages,
        proximal_logprobs_BL=proximal_logprobs,
    )
