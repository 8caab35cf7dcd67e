from __future__ import annotations

import random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dockyard_core.loop import AdaptiveLimit


def test_a_round_of_answers_adds_one_and_a_refusal_takes_a_share() -> None:
    limit = AdaptiveLimit(10, maximum=100)
    for _ in range(10):
        limit.send()
    for _ in range(10):
        limit.answered()
    assert limit.limit == 10  # 10.96: the eleventh answer of the next round makes it 11
    ticket = limit.send()
    limit.answered()
    assert limit.limit == 11
    ticket = limit.send()
    limit.refused(ticket)
    assert limit.limit == 7
    assert limit.num_refused == 1


def test_refusals_of_one_round_count_once() -> None:
    limit = AdaptiveLimit(100, maximum=100)
    tickets = [limit.send() for _ in range(100)]
    for ticket in tickets:
        limit.refused(ticket)
    assert limit.limit == 70
    limit.refused(limit.send())
    assert limit.limit == 49


def test_above_the_limit_nothing_is_sent() -> None:
    limit = AdaptiveLimit(1, maximum=1)
    limit.send()
    assert not limit.may_send
    with pytest.raises(ValueError, match="the limit is 1"):
        limit.send()


@pytest.mark.parametrize(("initial", "maximum", "decrease"), [(0, 1, 0.5), (2, 1, 0.5), (1, 1, 1.0), (1, 1, 0.0)])
def test_impossible_limits_are_refused(initial: int, maximum: int, decrease: float) -> None:
    with pytest.raises(ValueError):
        AdaptiveLimit(initial, maximum=maximum, decrease=decrease)


@given(st.integers(1, 50), st.integers(0, 2**32))
def test_it_settles_around_what_the_server_can_take(capacity: int, seed: int) -> None:
    """A server refuses whatever comes beyond its capacity; rounds of sends and answers in any order."""
    rng = random.Random(seed)
    limit = AdaptiveLimit(1, maximum=1000)
    limits = []
    for _ in range(300):
        tickets = []
        while limit.may_send:
            tickets.append(limit.send())
        rng.shuffle(tickets)
        for number, ticket in enumerate(tickets):
            if number < capacity:
                limit.answered()
            else:
                limit.refused(ticket)
        assert 1 <= limit.limit <= 1000
        limits.append(limit.limit)
    settled = limits[150:]
    assert max(settled) <= capacity + 2
    assert sum(settled) / len(settled) >= 0.6 * capacity
