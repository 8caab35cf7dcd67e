import dataclasses

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from dockyard_core.batch import BatchShard, MicroBatch, TrainSequence, pack_batch
from dockyard_core.packing import MAX_PADDING, deal, unit_of, work

lengths_lists = st.lists(st.integers(2, 40), min_size=1, max_size=40)


def make_sequence(num_tokens: int, *, prompt: int = 1, seed: int = 0, advantage: float = 1.0) -> TrainSequence:
    """Random token ids; sequences of one seed share their first ``prompt`` tokens, which are not trained."""
    mask = np.arange(num_tokens) >= prompt
    token_ids = np.random.default_rng(seed).integers(0, 1000, num_tokens)
    token_ids[mask] = np.random.default_rng([seed, num_tokens]).integers(0, 1000, int(mask.sum()))
    return TrainSequence(
        token_ids_T=token_ids,
        loss_mask_T=mask,
        sampled_logprobs_T=np.where(mask, -1.0, 0.0).astype(np.float32),
        advantage=advantage,
    )


def make_step(num_sequences: int, *, seed: int = 0, group_size: int = 8) -> list[TrainSequence]:
    """Groups with prompts of 200-2000 tokens and log-normal completions (median 500) up to 4096."""
    rng = np.random.default_rng(seed)
    made = []
    for group in range(num_sequences // group_size):
        prompt = int(rng.integers(200, 2001))
        completions = np.clip(rng.lognormal(np.log(500), 1.0, group_size), 1, 4096).astype(int)
        made += [make_sequence(prompt + int(length), prompt=prompt, seed=group) for length in completions]
    return made


def sequence_lengths(micro_batch: MicroBatch) -> list[int]:
    ids = micro_batch.sequence_ids_BL
    return np.bincount(ids[ids >= 0]).tolist()


def waves(shards: tuple[BatchShard, ...]) -> list[list[list[int]]]:
    """Lengths per wave, rank and sequence."""
    columns = zip(*(shard.micro_batches for shard in shards), strict=True)
    return [[sequence_lengths(micro_batch) for micro_batch in column] for column in columns]


def padding(shards: tuple[BatchShard, ...]) -> float:
    micro_batches = [micro_batch for shard in shards for micro_batch in shard.micro_batches]
    return 1 - sum(mb.num_tokens for mb in micro_batches) / sum(mb.num_positions for mb in micro_batches)


def waiting(shards: tuple[BatchShard, ...]) -> float:
    """Part of the ranks' time in which they wait for the busiest one of their wave."""
    works = np.array([[sum(map(work, lengths)) for lengths in wave] for wave in waves(shards)])
    return float(1 - works.sum() / (works.max(axis=1).sum() * works.shape[1]))


@settings(deadline=None)
@given(lengths_lists, st.integers(1, 4), st.integers(1, 160), st.booleans())
def test_no_micro_batch_is_padded_by_more_than_one_part_in_twenty(lengths, num_ranks, budget, keep_groups) -> None:
    sequences = [make_sequence(length, seed=index % 5) for index, length in enumerate(lengths)]
    shards = pack_batch(sequences, num_ranks=num_ranks, micro_batch_tokens=budget, keep_groups=keep_groups)
    for micro_batch in (mb for shard in shards for mb in shard.micro_batches):
        if micro_batch.num_tokens:
            assert micro_batch.num_positions == micro_batch.token_ids_BL.size, "no column is all padding"
            assert micro_batch.num_tokens >= (1 - MAX_PADDING) * micro_batch.num_positions
            assert micro_batch.num_positions <= budget or len(sequence_lengths(micro_batch)) == 1


@settings(deadline=None)
@given(lengths_lists, st.integers(2, 5), st.integers(1, 160))
def test_micro_batches_that_run_together_differ_by_less_than_their_longest_sequence(lengths, num_ranks, budget) -> None:
    sequences = [make_sequence(length, seed=index) for index, length in enumerate(lengths)]
    for wave in waves(pack_batch(sequences, num_ranks=num_ranks, micro_batch_tokens=budget)):
        everything = sorted(length for share in wave for length in share)
        shares_are_even = len({len(share) for share in wave}) == 1
        for cost in (float, work):
            costs = [sum(map(cost, share)) for share in wave]
            bound = cost(everything[-1]) - (cost(everything[0]) if shares_are_even else 0.0)
            assert max(costs) - min(costs) <= bound + 1e-6


@settings(deadline=None)
@given(lengths_lists, st.integers(1, 5), st.integers(1, 160))
def test_ranks_are_no_further_apart_than_the_units_of_one_round(lengths, num_ranks, budget) -> None:
    for wave in deal([unit_of([i], lengths) for i in range(len(lengths))], num_ranks=num_ranks, budget=budget):
        ordered = sorted((unit.work for share in wave for unit in share), reverse=True)
        rounds = [ordered[start : start + num_ranks] for start in range(0, len(ordered), num_ranks)]
        bound = max(max(r) - (min(r) if len(r) == num_ranks else 0.0) for r in rounds)
        works = [sum(unit.work for unit in share) for share in wave]
        assert max(works) - min(works) <= bound + 1e-6


@settings(deadline=None)
@given(lengths_lists, st.integers(1, 3), st.sampled_from([None, 50]), st.randoms(use_true_random=False))
def test_the_order_of_the_input_changes_nothing(lengths, num_ranks, row_length, random) -> None:
    sequences = [make_sequence(n, seed=i % 4, advantage=float(i % 2)) for i, n in enumerate(lengths)]
    shuffled = random.sample(sequences, len(sequences))
    one, other = (
        pack_batch(given, num_ranks=num_ranks, micro_batch_tokens=100, row_length=row_length)
        for given in (sequences, shuffled)
    )
    for left, right in zip(one, other, strict=True):
        for a, b in zip(left.micro_batches, right.micro_batches, strict=True):
            for name in ("token_ids_BL", "loss_mask_BL", "sequence_ids_BL", "advantages_BL"):
                np.testing.assert_array_equal(getattr(a, name), getattr(b, name))


@settings(deadline=None)
@given(st.lists(st.integers(6, 30), min_size=1, max_size=30), st.integers(1, 200))
def test_a_group_is_cut_only_where_it_would_pass_the_budget(lengths, budget) -> None:
    sequences = [make_sequence(length, prompt=5, seed=index % 4) for index, length in enumerate(lengths)]
    (shard,) = pack_batch(sequences, micro_batch_tokens=budget)
    for seed in range(min(4, len(lengths))):
        prompt = sequences[seed].token_ids_T[:5]
        members = [s.num_tokens for s in sequences if (s.token_ids_T[:5] == prompt).all()]
        held_by = 0
        for mb in shard.micro_batches:
            starts = np.argwhere((mb.position_ids_BL == 0) & (mb.sequence_ids_BL >= 0))
            held_by += any((mb.token_ids_BL[row, at : at + 5] == prompt).all() for row, at in starts)
        assert (held_by == 1) == (sum(members) <= budget or len(members) == 1)


@pytest.mark.parametrize("num_sequences", [64, 128, 512])
@pytest.mark.parametrize("num_ranks", [1, 2, 4, 8])
@pytest.mark.parametrize("budget", [8192, 16384, 32768])
def test_a_realistic_step_is_packed_tightly_and_evenly(num_sequences, num_ranks, budget) -> None:
    sequences = make_step(num_sequences)
    tokens = sum(sequence.num_tokens for sequence in sequences)
    shards = pack_batch(sequences, num_ranks=num_ranks, micro_batch_tokens=budget)
    assert padding(shards) <= 0.05
    assert waiting(shards) <= (0.05 if num_sequences >= 32 * num_ranks else 0.15)
    fewest = -(-tokens // (budget * num_ranks))
    assert len(shards[0].micro_batches) <= 1 + 1.4 * fewest
    fixed = pack_batch(sequences, num_ranks=num_ranks, micro_batch_tokens=budget, row_length=8192)
    assert padding(fixed) <= 0.05
    assert waiting(fixed) <= 0.1
    assert {mb.shape[1] for shard in fixed for mb in shard.micro_batches} == {8192}


def test_sequences_of_one_length_get_a_row_each() -> None:
    shards = pack_batch([make_sequence(10, seed=seed) for seed in range(12)], num_ranks=2, micro_batch_tokens=30)
    assert [[mb.shape for mb in shard.micro_batches] for shard in shards] == [[(3, 10), (3, 10)]] * 2


def test_no_wave_is_full_while_another_is_nearly_empty() -> None:
    """Nine sequences, four to a micro-batch: 3 + 3 + 3, not 4 + 4 + 1."""
    (shard,) = pack_batch([make_sequence(10, seed=seed) for seed in range(9)], micro_batch_tokens=40)
    assert [len(sequence_lengths(mb)) for mb in shard.micro_batches] == [3, 3, 3]


def test_whole_groups_can_be_kept_on_several_ranks() -> None:
    sequences = [make_sequence(6 + index, prompt=5, seed=seed) for seed in range(4) for index in range(3)]
    shards = pack_batch(sequences, num_ranks=2, micro_batch_tokens=50, keep_groups=True)
    held = [sorted(sequence_lengths(mb)) for shard in shards for mb in shard.micro_batches]
    assert held == [[6, 6, 7, 7, 8, 8]] * 2


def test_the_padding_fraction_counts_what_is_computed() -> None:
    (shard,) = pack_batch([make_sequence(n, seed=n) for n in (8, 6)], row_length=10, micro_batch_tokens=20)
    (micro_batch,) = shard.micro_batches
    assert (micro_batch.shape, micro_batch.num_tokens, micro_batch.num_positions) == ((2, 10), 14, 16)
    assert shard.padding_fraction == pytest.approx(2 / 16)
    assert pack_batch([])[0].padding_fraction == 1.0


def with_proximal(sequence: TrainSequence) -> TrainSequence:
    values = np.where(sequence.loss_mask_T, -sequence.token_ids_T / 7, 0)
    return dataclasses.replace(sequence, proximal_logprobs_T=values)


@pytest.mark.parametrize("row_length", [None, 20])
def test_proximal_logprobs_travel_with_their_tokens(row_length) -> None:
    sequences = [with_proximal(make_sequence(5 + index, seed=index)) for index in range(5)]
    for shard in pack_batch(sequences, num_ranks=3, micro_batch_tokens=20, row_length=row_length):
        for mb in shard.micro_batches:
            assert mb.proximal_logprobs_BL.dtype == np.float32
            wanted = np.where(mb.loss_mask_BL, -mb.token_ids_BL / 7, 0).astype(np.float32)
            np.testing.assert_array_equal(mb.proximal_logprobs_BL, wanted)


def test_a_micro_batch_of_padding_has_proximal_logprobs_when_the_others_do() -> None:
    first, second = pack_batch([with_proximal(make_sequence(5))], num_ranks=2)
    assert first.micro_batches[0].proximal_logprobs_BL is not None
    assert second.micro_batches[0].proximal_logprobs_BL.tolist() == [[0.0]]
    assert pack_batch([make_sequence(5)])[0].micro_batches[0].proximal_logprobs_BL is None
    assert pack_batch([])[0].micro_batches[0].proximal_logprobs_BL is None


def test_some_proximal_logprobs_are_refused() -> None:
    sequences = [make_sequence(5), with_proximal(make_sequence(6)), make_sequence(7)]
    with pytest.raises(ValueError, match=r"must carry proximal_logprobs_T or none, got 1 of 3; compute the missing"):
        pack_batch(sequences)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"token_ids_T": np.zeros(0, int)}, "at least 1 token, got 0; leave it out"),
        ({"loss_mask_T": np.zeros(3, bool)}, r"loss_mask_T must have shape \(4,\).*got \(3,\); fill"),
        ({"sampled_logprobs_T": np.zeros((4, 1))}, r"sampled_logprobs_T must have shape \(4,\).*got \(4, 1\)"),
        ({"proximal_logprobs_T": np.zeros(5)}, r"proximal_logprobs_T must have shape \(4,\).*got \(5,\)"),
        ({"token_ids_T": np.ones(4)}, "must be integers, got float64; pass"),
        ({"token_ids_T": np.array([1, -100, 2, 3])}, "must be >= 0, got -100; mark"),
        ({"loss_mask_T": np.array([0, 1, 1, 1])}, "must be bool, got int64; convert"),
    ],
)
def test_arrays_that_do_not_fit_are_refused(change, message) -> None:
    with pytest.raises(ValueError, match=message):
        dataclasses.replace(make_sequence(4), **change)


@pytest.mark.parametrize("name", ["num_ranks", "micro_batch_tokens", "row_length"])
def test_counts_below_one_are_refused(name) -> None:
    with pytest.raises(ValueError, match=f"{name} must be >= 1, got 0; raise it"):
        pack_batch([], **{name: 0})


def test_groups_cannot_be_kept_in_rows_of_fixed_length() -> None:
    with pytest.raises(ValueError, match="keep_groups needs row_length=None, got 64"):
        pack_batch([], row_length=64, keep_groups=True)
