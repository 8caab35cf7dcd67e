from __future__ import annotations

import gzip
import json
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from dockyard_core import ConfigError, DataError
from dockyard_core.advantage import group_advantages
from dockyard_core.offline.batches import BatchPlan, grpo_sequences
from dockyard_core.offline.dataset import OfflineDataset


def row(**fields: Any) -> dict[str, Any]:
    """A row of one advantage; None removes a field."""
    values = {"token_ids": [1, 2, 3], "prompt_length": 1, "logprobs": [-1, -2], "advantage": 1.0} | fields
    return {name: value for name, value in values.items() if value is not None}


def rewarded(group: str | int, reward: float = 0.0, **fields: Any) -> dict[str, Any]:
    return row(advantage=None, reward=reward, group=group, **fields)


def load(path: Path, rows: Sequence[dict[str, Any]], command: str = "grpo") -> OfflineDataset:
    path.write_text("".join(json.dumps(item) + "\n" for item in rows))
    return OfflineDataset(path, command=command, vocab_size=64)


def take(plan: BatchPlan, count: int, epoch: int = 0, batch: int = 0) -> list[tuple[int, int, list[int]]]:
    steps = plan.steps_from(epoch, batch)
    return [(step.epoch, step.batch, step.row_indices.tolist()) for step, _ in zip(steps, range(count), strict=False)]


def test_rows_are_found_again_behind_blank_lines_and_long_ones(tmp_path) -> None:
    path = tmp_path / "rows.jsonl"
    items = [row(token_ids=list(range(n)), prompt_length=1, logprobs=[-1] * (n - 1)) for n in (2, 60, 3)]
    path.write_text("\n" + "\n\n".join(json.dumps(item, indent=None) for item in items))  # no end of line at the end
    with OfflineDataset(path, command="grpo", vocab_size=64) as dataset:
        assert len(dataset) == 3
        assert [item.num_tokens for item in dataset.read([2, 0, 1])] == [3, 2, 60]


def test_a_bad_row_is_found_before_the_first_step_and_by_its_line(tmp_path) -> None:
    path = tmp_path / "rows.jsonl"
    path.write_text("\n" + json.dumps(row()) + "\n" + json.dumps(row(advantage="x")) + "\n")
    with pytest.raises(DataError) as caught:
        OfflineDataset(path, command="grpo", vocab_size=64)
    assert str(caught.value).startswith(f"{path}:3: advantage: must be a finite number")


@pytest.mark.parametrize(
    ("rows", "message"),
    [
        ([], ": file: must hold at least one row, got none; add rows"),
        ([rewarded("a"), rewarded("a"), rewarded("b"), rewarded("a")], ":4: group: rows of one group must stand toge"),
        ([rewarded("a"), rewarded("b"), rewarded("c")], ": group: some group must have 2 rows or more, got 1 in each"),
        ([rewarded("a"), row(group="a")], ":2: reward: the rows of a group must all have a reward or all an advantage"),
        ([row(step=1), row()], ":2: step: every row must have it or none, got none here and some before; give it in"),
        ([row(), row(step=1)], ":2: step: every row must have it or none, got one here and none before; give it in"),
        ([row(step=1), row(step=2), row(step=1)], ":3: step: rows of one step must stand together, got 1 again after "),
        ([row(proximal_logprobs=[-1, -1]), row()], ":2: proximal_logprobs: every row must have it or none, got none"),
    ],
)
def test_rows_that_contradict_each_other_are_refused(tmp_path, rows, message) -> None:
    path = tmp_path / "rows.jsonl"
    with pytest.raises(DataError) as caught:
        load(path, rows)
    assert str(caught.value).startswith(f"{path}{message}")


@pytest.mark.parametrize(
    ("rows", "has_signal"),
    [
        ([row()], True),
        ([row(advantage=0), row(advantage=0.0)], False),
        ([row(prompt_length=3, logprobs=[])], False),
        ([rewarded("a", 1), rewarded("a", 1), rewarded("b", 0), rewarded("b", 0)], False),
        ([rewarded("a", 1), rewarded("a", 1), rewarded("a", 0)], True),
    ],
)
def test_a_file_has_a_signal_if_some_advantage_is_not_0(tmp_path, rows, has_signal) -> None:
    assert load(tmp_path / "rows.jsonl", rows).has_signal is has_signal


def test_a_file_that_is_not_there_is_told_in_one_line(tmp_path) -> None:
    with pytest.raises(
        DataError, match=r"nothing\.jsonl: file: must be readable, got No such file or directory; check"
    ):
        OfflineDataset(tmp_path / "nothing.jsonl", command="sft", vocab_size=64)


@pytest.mark.parametrize(
    ("held", "message"),
    [
        (gzip.compress(b"{}\n"), "must be plain UTF-8 JSONL, got a gzip file; unpack it first"),
        (b"\xef\xbb\xbf{}\n", "must be plain UTF-8 JSONL, got a byte order mark before the first row; save it without"),
        ("{}\n".encode("utf-16"), "must be plain UTF-8 JSONL, got UTF-16; convert the file to UTF-8"),
    ],
)
def test_a_file_of_another_kind_is_named(tmp_path, held, message) -> None:
    path = tmp_path / "rows.jsonl"
    path.write_bytes(held)
    with pytest.raises(DataError) as caught:
        OfflineDataset(path, command="sft", vocab_size=64)
    assert str(caught.value).startswith(f"{path}: file: {message}")


def test_a_pipe_is_refused_before_it_is_read() -> None:
    reader, writer = os.pipe()
    try:
        with pytest.raises(DataError, match="must be a regular file, whose rows are read again, got a pipe; write it"):
            OfflineDataset(Path(f"/dev/fd/{reader}"), command="sft", vocab_size=64)
    finally:
        os.close(reader)
        os.close(writer)


def test_steps_take_whole_groups_as_long_as_they_fit(tmp_path) -> None:
    rows = [rewarded(group) for group, size in (("a", 3), ("b", 2), ("c", 4), ("d", 1), (5, 2)) for _ in range(size)]
    with load(tmp_path / "rows.jsonl", rows) as dataset:
        plan = BatchPlan(dataset, batch_size=5, is_shuffled=False, seed=0)
        assert take(plan, 4) == [
            (0, 0, [0, 1, 2, 3, 4]),
            (0, 1, [5, 6, 7, 8, 9]),
            (0, 2, [10, 11]),
            (1, 0, [0, 1, 2, 3, 4]),
        ]
        with pytest.raises(ConfigError, match="must hold the largest group, got 3 < 4 rows; use --batch-size 4"):
            BatchPlan(dataset, batch_size=3, is_shuffled=False, seed=0)


def test_named_steps_are_taken_in_the_order_of_the_file_and_may_repeat_a_group(tmp_path) -> None:
    rows = [rewarded("a", step=7), rewarded("a", step=7), rewarded("a", step=3), rewarded("b", step=3)]
    with load(tmp_path / "rows.jsonl", rows) as dataset:
        plan = BatchPlan(dataset, batch_size=None, is_shuffled=False, seed=0)
        assert take(plan, 2) == [(0, 0, [0, 1]), (0, 1, [2, 3])]
        assert plan.num_steps(epochs=None, steps=None) == 2
        with pytest.raises(ConfigError, match="--batch-size is for rows without a step"):
            BatchPlan(dataset, batch_size=4, is_shuffled=False, seed=0)
        with pytest.raises(ConfigError, match="--shuffle is for rows without a step"):
            BatchPlan(dataset, batch_size=None, is_shuffled=True, seed=0)


@settings(deadline=None, max_examples=30, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    sizes=st.lists(st.integers(1, 4), min_size=1, max_size=12),
    batch_size=st.integers(4, 9),
    is_shuffled=st.booleans(),
    seed=st.integers(0, 2**32 - 1),
)
def test_an_epoch_visits_every_row_once_and_any_place_is_found_again(
    tmp_path, sizes, batch_size, is_shuffled, seed
) -> None:
    rows = [row(group=group) for group, size in enumerate(sizes) for _ in range(size)]
    with load(tmp_path / "rows.jsonl", rows) as dataset:
        plan = BatchPlan(dataset, batch_size=batch_size, is_shuffled=is_shuffled, seed=seed)
        num_steps = plan.num_steps(epochs=2, steps=None)
        steps = take(plan, num_steps)
        assert {epoch for epoch, _, _ in steps} == {0, 1}
        for epoch in (0, 1):
            visited = [index for of, _, indices in steps if of == epoch for index in indices]
            assert sorted(visited) == list(range(len(rows)))
        groups = [{item.group for item in dataset.read(indices)} for _, _, indices in steps]
        assert sum(map(len, groups)) == 2 * len(sizes), "no group is split"
        assert all(len(indices) <= batch_size for _, _, indices in steps)
        for index, (epoch, batch, _) in enumerate(steps):
            assert take(plan, num_steps - index, epoch, batch) == steps[index:]
        assert [take(plan, 1, epoch, batch + 1)[0] for epoch, batch, _ in steps[:-1]] == steps[1:]


def test_epochs_are_shuffled_differently_and_by_the_seed(tmp_path) -> None:
    with load(tmp_path / "rows.jsonl", [row() for _ in range(40)]) as dataset:

        def order(epoch: int, seed: int) -> list[int]:
            plan = BatchPlan(dataset, batch_size=40, is_shuffled=True, seed=seed)
            return take(plan, 1, epoch)[0][2]

        assert order(0, 1) == order(0, 1)
        assert len({tuple(order(epoch, seed)) for epoch in (0, 1) for seed in (1, 2)}) == 4
        assert order(0, 1)[:8] == [16, 26, 7, 11, 20, 34, 0, 21], "the order of a seed never changes between releases"


@pytest.mark.parametrize(
    ("epochs", "steps", "wanted"), [(None, None, 3), (2, None, 6), (None, 50, 50), (2, 50, 6), (2, 4, 4), (1, 1, 1)]
)
def test_steps_and_epochs_are_both_upper_bounds(tmp_path, epochs, steps, wanted) -> None:
    with load(tmp_path / "rows.jsonl", [row() for _ in range(10)]) as dataset:
        plan = BatchPlan(dataset, batch_size=4, is_shuffled=False, seed=0)
        assert plan.num_steps(epochs=epochs, steps=steps) == wanted


def test_rewards_become_advantages_within_their_group_and_given_ones_stay(tmp_path) -> None:
    rows = [rewarded("a", 1.0), rewarded("a"), rewarded("a"), row(advantage=0.7), row(advantage=-0.2, group="b")]
    rows += [rewarded("c", 0.5), rewarded("c", 0.5)]
    with load(tmp_path / "rows.jsonl", rows) as dataset:
        sequences = grpo_sequences(dataset.read(range(7)), baseline="mean", scale="none")
    wanted = [*group_advantages([1.0, 0.0, 0.0], baseline="mean", scale="none"), 0.7, -0.2, 0.0, 0.0]
    np.testing.assert_allclose([sequence.advantage for sequence in sequences], wanted)
