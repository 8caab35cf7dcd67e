import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from dockyard_core.batch import BatchShard, TrainSequence, pack_batch

lengths_lists = st.lists(st.integers(1, 24), max_size=20)
options = st.fixed_dictionaries(
    {
        "num_ranks": st.integers(1, 4),
        "micro_batch_tokens": st.integers(1, 96),
        "row_length": st.one_of(st.none(), st.integers(1, 48)),
        "skip_zero_advantage": st.booleans(),
    }
)


def make_sequence(index: int, num_tokens: int) -> TrainSequence:
    """A sequence whose every token is unique in the batch; every third one has advantage 0."""
    token_ids = 1000 * (index + 1) + np.arange(num_tokens)
    mask = np.arange(num_tokens) >= max(1, num_tokens // 2)
    return TrainSequence(
        token_ids_T=token_ids,
        loss_mask_T=mask,
        sampled_logprobs_T=np.where(mask, -token_ids / 1000, 0).astype(np.float32),
        advantage=float(index % 3) - 0.0,
    )


def unpack(shards: tuple[BatchShard, ...]) -> dict[tuple[int, ...], TrainSequence]:
    """Sequences read back from the micro-batches, by their token ids."""
    found: dict[tuple[int, ...], TrainSequence] = {}
    for micro_batch in (mb for shard in shards for mb in shard.micro_batches):
        for index in range(int(micro_batch.sequence_ids_BL.max()) + 1):
            where = micro_batch.sequence_ids_BL == index
            assert len(set(np.nonzero(where)[0])) == 1, "a sequence lies in one row"
            columns = np.nonzero(where)[1]
            assert (np.diff(columns) == 1).all(), "a sequence is contiguous"
            assert micro_batch.position_ids_BL[where].tolist() == list(range(len(columns)))
            advantages = set(micro_batch.advantages_BL[where].tolist())
            assert len(advantages) == 1
            ids = tuple(micro_batch.token_ids_BL[where].tolist())
            assert ids not in found, "a sequence is packed once"
            found[ids] = TrainSequence(
                token_ids_T=micro_batch.token_ids_BL[where],
                loss_mask_T=micro_batch.loss_mask_BL[where],
                sampled_logprobs_T=micro_batch.sampled_logprobs_BL[where],
                advantage=advantages.pop(),
            )
    return found


@settings(deadline=None)
@given(lengths_lists, options)
def test_every_token_with_a_gradient_is_packed_exactly_once(lengths, kwargs) -> None:
    sequences = [make_sequence(index, length) for index, length in enumerate(lengths)]
    found = unpack(pack_batch(sequences, **kwargs))
    kept = [s for s in sequences if s.num_valid_tokens and not (kwargs["skip_zero_advantage"] and s.advantage == 0)]
    assert found.keys() == {tuple(s.token_ids_T.tolist()) for s in kept}
    for sequence in kept:
        packed = found[tuple(sequence.token_ids_T.tolist())]
        np.testing.assert_array_equal(packed.loss_mask_T, sequence.loss_mask_T)
        np.testing.assert_array_equal(packed.sampled_logprobs_T, sequence.sampled_logprobs_T)
        assert packed.advantage == sequence.advantage


@settings(deadline=None)
@given(lengths_lists, options)
def test_every_rank_has_as_many_micro_batches_and_the_counts_of_the_whole_step(lengths, kwargs) -> None:
    sequences = [make_sequence(index, length) for index, length in enumerate(lengths)]
    shards = pack_batch(sequences, **kwargs)
    assert len(shards) == kwargs["num_ranks"]
    assert len({len(shard.micro_batches) for shard in shards}) == 1
    assert len(shards[0].micro_batches) >= 1
    # counts include what was left out for having no gradient
    assert {shard.num_valid_tokens for shard in shards} == {sum(s.num_valid_tokens for s in sequences)}
    assert {shard.num_sequences for shard in shards} == {len(sequences)}


@settings(deadline=None)
@given(lengths_lists, options)
def test_micro_batches_keep_to_their_token_limit_unless_one_row_exceeds_it(lengths, kwargs) -> None:
    sequences = [make_sequence(index, length) for index, length in enumerate(lengths)]
    for shard in pack_batch(sequences, **kwargs):
        for micro_batch in shard.micro_batches:
            num_rows, row_length = micro_batch.shape
            assert num_rows == 1 or num_rows * row_length <= kwargs["micro_batch_tokens"]
            padding = micro_batch.sequence_ids_BL < 0
            assert not micro_batch.loss_mask_BL[padding].any()
            assert (micro_batch.token_ids_BL[padding] == 0).all()


def test_short_sequences_share_a_row() -> None:
    (shard,) = pack_batch([make_sequence(i, 4) for i in range(6)], row_length=12)
    assert [micro_batch.shape for micro_batch in shard.micro_batches] == [(2, 12)]
    assert (shard.micro_batches[0].sequence_ids_BL >= 0).all()


def test_an_empty_step_still_gives_each_rank_a_micro_batch_of_padding() -> None:
    shards = pack_batch([], num_ranks=2)
    assert [len(shard.micro_batches) for shard in shards] == [1, 1]
    assert not any(mb.loss_mask_BL.any() for shard in shards for mb in shard.micro_batches)
    assert (shards[0].num_valid_tokens, shards[0].num_sequences) == (0, 0)


def test_the_order_of_the_sequences_is_kept_deterministic() -> None:
    sequences = [make_sequence(index, 3 + index % 4) for index in range(9)]
    first, second = pack_batch(sequences, num_ranks=2), pack_batch(sequences, num_ranks=2)
    for one, other in zip(first, second, strict=True):
        for a, b in zip(one.micro_batches, other.micro_batches, strict=True):
            np.testing.assert_array_equal(a.token_ids_BL, b.token_ids_BL)


def test_a_sequence_cannot_train_its_first_token() -> None:
    with pytest.raises(ValueError, match="token 0 has no past"):
        TrainSequence(
            token_ids_T=np.array([5]),
            loss_mask_T=np.array([True]),
            sampled_logprobs_T=np.zeros(1, np.float32),
            advantage=1.0,
        )
