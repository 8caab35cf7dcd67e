import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from dockyard_core.advantage import group_advantages

BASELINES, SCALES = ("leave_one_out", "mean"), ("std", "none")
rewards_lists = st.lists(st.sampled_from([-1.0, -0.5, 0.0, 0.25, 1.0, 3.0]), min_size=2, max_size=12)
options = {"baseline": st.sampled_from(BASELINES), "scale": st.sampled_from(SCALES)}


@pytest.mark.parametrize(
    ("baseline", "scale", "expected"),
    [
        ("leave_one_out", "none", [1, -1 / 3, -1 / 3, -1 / 3]),
        ("leave_one_out", "std", [2, -2 / 3, -2 / 3, -2 / 3]),
        ("mean", "std", [1.5, -0.5, -0.5, -0.5]),
        ("mean", "none", [0.75, -0.25, -0.25, -0.25]),
    ],
)
def test_one_success_in_four_has_the_hand_computed_advantages(baseline, scale, expected) -> None:
    advantages = group_advantages([1, 0, 0, 0], baseline=baseline, scale=scale)
    assert advantages.dtype == np.float64
    np.testing.assert_allclose(advantages, expected, rtol=0, atol=1e-12)


def test_rewards_that_are_not_exact_in_float32_do_not_explode() -> None:
    advantages = group_advantages([0.9, *[0.7] * 7])
    np.testing.assert_allclose(advantages, [2.82843, *[-0.40406] * 7], atol=1e-5)


@pytest.mark.parametrize(
    ("rewards", "valid"),
    [
        ([0.1 + 0.2, 0.3, 0.3], None),  # differ in the last bit only
        ([1.0, 1.0, 1.0, 1.0], None),
        ([1e9, 1e9 + 1, 1e9], None),
        ([1.0], None),
        ([], None),
        ([1.0, 0.0, 0.0], [True, False, False]),
        ([1.0, 0.0], [False, False]),
    ],
)
def test_a_group_without_a_difference_gives_no_signal(rewards, valid) -> None:
    assert group_advantages(rewards, valid).tolist() == [0.0] * len(rewards)


@given(rewards_lists, *options.values())
def test_advantages_sum_to_zero(rewards, baseline, scale) -> None:
    assert abs(group_advantages(rewards, baseline=baseline, scale=scale).sum()) < 1e-9


@given(rewards_lists, *options.values(), st.randoms(use_true_random=False))
def test_order_inside_a_group_does_not_matter(rewards, baseline, scale, random) -> None:
    order = list(range(len(rewards)))
    random.shuffle(order)
    whole = group_advantages(rewards, baseline=baseline, scale=scale)
    shuffled = group_advantages([rewards[i] for i in order], baseline=baseline, scale=scale)
    np.testing.assert_allclose(shuffled, whole[order], atol=1e-12)


@given(rewards_lists, *options.values(), st.floats(-5, 5), st.floats(0.5, 4.0))
def test_a_shift_changes_nothing_and_a_factor_only_without_std(rewards, baseline, scale, shift, factor) -> None:
    plain = group_advantages(rewards, baseline=baseline, scale=scale)
    moved = group_advantages(np.asarray(rewards) * factor + shift, baseline=baseline, scale=scale)
    np.testing.assert_allclose(moved, plain * (1.0 if scale == "std" else factor), atol=1e-9)


@given(rewards_lists, *options.values(), st.data())
def test_invalid_rollouts_get_zero_and_do_not_vote(rewards, baseline, scale, data) -> None:
    places = data.draw(st.lists(st.integers(0, len(rewards)), max_size=4))
    mixed, valid = list(rewards), [True] * len(rewards)
    for place in sorted(places, reverse=True):
        mixed.insert(place, float("nan"))
        valid.insert(place, False)
    advantages = group_advantages(mixed, valid, baseline=baseline, scale=scale)
    assert (advantages[~np.asarray(valid)] == 0).all()
    np.testing.assert_array_equal(
        advantages[np.asarray(valid)], group_advantages(rewards, baseline=baseline, scale=scale)
    )


def test_leave_one_out_is_the_reward_minus_the_mean_of_the_others() -> None:
    rewards = np.array([0.2, 0.9, 0.4])
    others = [(rewards.sum() - reward) / 2 for reward in rewards]
    np.testing.assert_allclose(group_advantages(rewards, scale="none"), rewards - others, atol=1e-12)


@pytest.mark.parametrize(
    ("kwargs", "message"),
    [
        ({"rewards_G": [[1.0, 0.0]]}, r"must both be \[G\]"),
        ({"rewards_G": [1.0, 0.0], "valid_G": [True]}, r"must both be \[G\]"),
        ({"rewards_G": [1.0, float("nan")]}, "must be finite"),
        ({"rewards_G": [1.0, 0.0], "baseline": "median"}, "'median'"),
        ({"rewards_G": [1.0, 0.0], "scale": "batch"}, "'batch'"),
    ],
)
def test_misuse_is_refused_with_the_value(kwargs, message) -> None:
    with pytest.raises(ValueError, match=message):
        group_advantages(**kwargs)
