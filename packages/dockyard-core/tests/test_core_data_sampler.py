from __future__ import annotations

import json
from collections import Counter

import pytest

from dockyard_core.data import TaskSampler


def test_every_epoch_visits_every_task_once_in_its_own_order() -> None:
    sampler = TaskSampler(50, seed=3)
    visits = [sampler.next() for _ in range(150)]
    assert Counter(visits) == Counter((index, epoch) for index in range(50) for epoch in range(3))
    orders = [[index for index, _ in visits[start : start + 50]] for start in (0, 50, 100)]
    assert [{epoch for _, epoch in visits[start : start + 50]} for start in (0, 50, 100)] == [{0}, {1}, {2}]
    assert orders[0] != orders[1] != orders[2] != list(range(50))


def test_the_order_depends_on_the_seed_and_is_the_same_everywhere() -> None:
    sampler = TaskSampler(5, seed=0)
    # `printf 0/0/4 | sha256sum` is the smallest of the five, then 0/0/2, ...
    assert [sampler.next() for _ in range(6)] == [(4, 0), (2, 0), (0, 0), (1, 0), (3, 0), (1, 1)]
    one, two = TaskSampler(50, seed=1), TaskSampler(50, seed=2)
    assert [one.next() for _ in range(50)] != [two.next() for _ in range(50)]


@pytest.mark.parametrize("num_visits", [0, 1, 6, 7, 8, 20])
def test_a_restored_sampler_goes_on_where_it_was(num_visits: int) -> None:
    sampler = TaskSampler(7, seed=5)
    for _ in range(num_visits):
        sampler.next()
    state = json.loads(json.dumps(sampler.state()))
    restored = TaskSampler.from_state(state)
    assert [restored.next() for _ in range(20)] == [sampler.next() for _ in range(20)]


def test_impossible_samplers_are_refused() -> None:
    with pytest.raises(ValueError, match="num_tasks must be >= 1"):
        TaskSampler(0, seed=0)
    with pytest.raises(ValueError, match="needs position"):
        TaskSampler.from_state({"num_tasks": 3, "seed": 0, "epoch": 0})
    with pytest.raises(ValueError, match="within its epoch"):
        TaskSampler.from_state({"num_tasks": 3, "seed": 0, "epoch": 0, "position": 4})
