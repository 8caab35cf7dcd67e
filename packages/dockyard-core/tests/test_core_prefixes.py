"""Shared prefixes: what is taken apart can be put together again."""

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from dockyard_core.batch import TrainSequence, pack_batch
from dockyard_core.prefixes import SharedPrefixes


def sequence(token_ids: list[int], trained: list[bool]) -> TrainSequence:
    mask_T = np.array(trained)
    return TrainSequence(
        token_ids_T=np.array(token_ids),
        loss_mask_T=mask_T,
        sampled_logprobs_T=np.where(mask_T, -1.0, 0.0).astype(np.float32),
        advantage=1.0,
    )


@st.composite
def sequences(draw) -> list[TrainSequence]:
    made = []
    for _ in range(draw(st.integers(1, 12))):
        # Few tokens and lengths, so that prefixes and whole sequences meet.
        token_ids = draw(st.lists(st.integers(0, 1), min_size=2, max_size=6))
        trained = [False, *draw(st.lists(st.booleans(), min_size=len(token_ids) - 1, max_size=len(token_ids) - 1))]
        made.append(sequence(token_ids, trained))
    return made


@settings(deadline=None)
@given(sequences(), st.sampled_from([None, 12]))
def test_every_trained_token_is_found_again_with_all_that_comes_before(given_sequences, row_length) -> None:
    shard = pack_batch(given_sequences, row_length=row_length)[0]
    for mb in shard.micro_batches:
        shared = SharedPrefixes.of(mb)
        wholes = [
            np.concatenate([shared.prefixes[prefix], suffix.token_ids])
            for prefix, suffix in zip(shared.prefix_of_N, shared.suffixes, strict=True)
        ]
        keys = [
            (len(whole) - len(suffix.token_ids), whole.tobytes(), suffix.trained.tobytes())
            for whole, suffix in zip(wholes, shared.suffixes, strict=True)
        ]
        assert len(set(keys)) == len(keys), "no two are equal"
        assert len({prefix.tobytes() for prefix in shared.prefixes}) == len(shared.prefixes)
        pasts = [
            whole[: len(shared.prefixes[prefix]) + offset + 1].tolist()
            for whole, prefix, suffix in zip(wholes, shared.prefix_of_N, shared.suffixes, strict=True)
            for offset in suffix.trained
        ]
        assert len(pasts) == shared.num_distinct_tokens
        found = [pasts[place] for place in shared.distinct_tokens]
        assert found == list(trained_pasts(mb))


def trained_pasts(mb):
    """Each trained token with its past, in the order of the rows of [B, L]."""
    for row, column in zip(*np.nonzero(mb.loss_mask_BL), strict=True):
        is_own = mb.sequence_ids_BL[row] == mb.sequence_ids_BL[row, column]
        yield mb.token_ids_BL[row, : column + 1][is_own[: column + 1]].tolist()


def test_rollouts_of_a_group_share_their_prompt_and_equal_ones_everything() -> None:
    prompt = [False, False, False]
    given_sequences = [
        sequence([5, 6, 7, 1], [*prompt, True]),
        sequence([5, 6, 7, 1, 2], [*prompt, True, True]),
        sequence([5, 6, 7, 1], [*prompt, True]),
        sequence([5, 6, 8], prompt),
    ]
    shared = SharedPrefixes.of(pack_batch(given_sequences)[0].micro_batches[0])
    assert [prefix.tolist() for prefix in shared.prefixes] == [[5, 6, 7]]
    assert sorted(suffix.token_ids.tolist() for suffix in shared.suffixes) == [[1], [1, 2]]
    assert len(shared.distinct_of) == 3
    assert shared.num_distinct_tokens == 3


def test_nothing_to_train_is_nothing_to_share() -> None:
    shared = SharedPrefixes.of(pack_batch([sequence([5, 6], [False, False])])[0].micro_batches[0])
    assert (shared.prefixes, shared.suffixes, shared.distinct_tokens.tolist()) == ([], [], [])
