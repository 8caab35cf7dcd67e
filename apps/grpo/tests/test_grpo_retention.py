from __future__ import annotations

import json
import math
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dockyard_core import ConfigError
from dockyard_grpo import checkpoint_files
from dockyard_grpo.config import dump_config, load_config
from dockyard_grpo.deadline import SaveBy
from dockyard_grpo.retention import Retention

METRICS = {
    2: {"val_reward_mean": 0.25, "loss": 3.0},
    4: {"val_reward_mean": 0.5, "loss": 2.0},
    6: {"loss": float("nan")},
    8: {"val_reward_mean": 0.5, "loss": float("inf")},
    10: {"val_reward_mean": None, "loss": 1.0},
    12: {"val_reward_mean": True, "loss": 1.0},
}


def retention(keep_last: int, keep_best: int, metric: str = "val_reward_mean", mode: str = "max") -> Retention:
    return Retention(keep_last=keep_last, keep_best=keep_best, metric=metric, mode=mode)


@pytest.mark.parametrize(
    ("rule", "best", "kept"),
    [
        (retention(1, 0), [], {12}),
        (retention(2, 0), [], {10, 12}),
        (retention(1, 1), [8], {8, 12}),
        (retention(1, 2), [8, 4], {4, 8, 12}),
        (retention(1, 9), [8, 4, 2], {2, 4, 8, 12}),
        (retention(1, 1, mode="min"), [2], {2, 12}),
        (retention(1, 2, "loss", "min"), [12, 10], {10, 12}),
        (retention(2, 1, "loss", "max"), [2], {2, 10, 12}),
        (retention(1, 3, "no_such_field"), [], {12}),
    ],
)
def test_the_newest_and_the_best_are_kept_and_ties_keep_the_newest(rule, best, kept) -> None:
    assert rule.best(METRICS) == best
    assert rule.kept(METRICS) == kept


@given(
    st.dictionaries(st.integers(0, 99), st.one_of(st.none(), st.floats(), st.integers(-9, 9)), min_size=1),
    st.integers(1, 4),
    st.integers(0, 4),
    st.sampled_from(["max", "min"]),
)
def test_no_checkpoint_that_goes_is_better_than_one_that_stays_as_best(values, keep_last, keep_best, mode) -> None:
    rule = retention(keep_last, keep_best, "m", mode)
    metrics = {step: {"m": value} for step, value in values.items()}
    best, kept = rule.best(metrics), rule.kept(metrics)
    numbers = {step: value for step, value in values.items() if value is not None and math.isfinite(value)}
    assert len(best) == min(keep_best, len(numbers))
    assert set(best) <= kept
    assert set(sorted(values)[-keep_last:]) <= kept
    assert len(kept) <= keep_last + keep_best
    sign = 1 if mode == "max" else -1
    for step in numbers.keys() - set(best):
        assert all((sign * numbers[step], step) < (sign * numbers[other], other) for other in best)


def store(folder: Path, step: int, metrics: dict, rule: Retention) -> None:
    partial = checkpoint_files.open_partial(folder, step)
    (partial / "loop.json").write_text("{}")
    checkpoint_files.commit(partial, metrics)
    checkpoint_files.prune(folder, rule, newest=step)


def names(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir() if not path.is_symlink())


def test_the_best_checkpoint_outlives_the_newest_ones_and_has_a_name(tmp_path: Path) -> None:
    rule = retention(2, 1)
    for step, value in ((1, 0.1), (2, 0.9), (3, 0.2), (4, 0.3), (5, 0.4)):
        store(tmp_path, step, {"val_reward_mean": value}, rule)
    assert names(tmp_path) == ["step-000002", "step-000004", "step-000005"]
    assert (tmp_path / "best").resolve().name == "step-000002"
    assert (tmp_path / "latest").resolve().name == "step-000005"
    store(tmp_path, 6, {"val_reward_mean": 0.95}, rule)
    assert names(tmp_path) == ["step-000005", "step-000006"]
    assert (tmp_path / "best").resolve().name == "step-000006"
    manifest = json.loads((tmp_path / "best" / "manifest.json").read_text())
    assert (manifest["step"], manifest["metrics"]) == (6, {"val_reward_mean": 0.95})


def test_without_a_best_one_there_is_no_such_name(tmp_path: Path) -> None:
    store(tmp_path, 1, {"val_reward_mean": 0.1}, retention(1, 1))
    assert (tmp_path / "best").is_symlink()
    store(tmp_path, 2, {}, retention(1, 0))
    assert names(tmp_path) == ["step-000002"]
    assert not (tmp_path / "best").is_symlink()


def test_steps_are_ordered_as_numbers_beyond_six_digits(tmp_path: Path) -> None:
    for step in (999_999, 1_000_000, 1_000_001):
        store(tmp_path, step, {}, retention(2, 0))
    assert names(tmp_path) == ["step-1000000", "step-1000001"]


@pytest.mark.parametrize(
    ("text", "seconds"),
    [("00:30:00", 1800), ("1:30:00", 5400), ("30:00", 1800), ("90:00", 5400), ("0:05", 5), ("48:00:00", 172_800),
     ("1:00:00:00", 86_400), ("3:12:30:15", 304_215)],
)  # fmt: skip
def test_a_time_limit_is_read_as_days_hours_minutes_seconds(text: str, seconds: int) -> None:
    assert SaveBy.parse(text).limit_s == seconds
    # The same text by another road: the command line, config.yaml, and back.
    config = load_config(None, [f"checkpoint.must_save_by={text}"])
    assert config.checkpoint.must_save_by == text


@pytest.mark.parametrize("text", ["00:30:00", "1:30:00", "30:00", "2:00:00:00"])
def test_a_time_limit_survives_config_yaml(tmp_path: Path, text: str) -> None:
    config = load_config(None, [f"checkpoint.must_save_by={text}"])
    (tmp_path / "config.yaml").write_text(dump_config(config))
    assert load_config(tmp_path / "config.yaml", []) == config


@pytest.mark.parametrize(
    ("written", "read"),
    [("00:30:00", "00:30:00"), ("'1:30:00'", "1:30:00"), ('"1:30:00"', "1:30:00"), ("1:30:00", None), ("5400", None),
     ("1:00:00:00", None)],
)  # fmt: skip
def test_a_time_limit_that_yaml_reads_as_a_number_is_refused_with_the_way_out(tmp_path, written, read) -> None:
    file = tmp_path / "run.yaml"
    file.write_text(
        "policy: {model: quickstart:policy}\ndata: {train: 'quickstart:train.jsonl'}\n"
        f"checkpoint:\n  must_save_by: {written}\n"
    )
    if read is not None:
        assert load_config(file, []).checkpoint.must_save_by == read
        return
    with pytest.raises(ConfigError, match=r"^checkpoint\.must_save_by must be quoted in YAML, got \d+: .*'1:30:00'$"):
        load_config(file, [])


@pytest.mark.parametrize("text", ["5400", "1h", "30", "1:2:3", "1:75:00", "1:00:99", "2:24:00:00", "0:00", "00:00:00"])
def test_other_forms_of_a_time_limit_are_refused_in_one_line(text: str) -> None:
    with pytest.raises(ConfigError, match=r"^checkpoint\.must_save_by must .*got '") as caught:
        load_config(None, [f"checkpoint.must_save_by={text}"])
    assert "\n" not in str(caught.value)


@given(st.floats(0, 1e5), st.floats(0, 1e4), st.floats(0, 1e4), st.integers(1, 100_000))
def test_a_run_that_goes_on_until_the_limit_is_near_saves_in_time(elapsed_s, step_s, save_s, limit_s) -> None:
    save_by = SaveBy(limit_s)
    if not save_by.is_near(elapsed_s, step_s, save_s):
        assert elapsed_s + step_s + save_s < limit_s, "one more step and the save after it fit"
    if save_by.is_near(elapsed_s, step_s, save_s):
        assert save_by.is_near(elapsed_s + 1, step_s, save_s), "it does not become far again"


def test_a_time_limit_is_near_when_no_further_step_fits() -> None:
    save_by = SaveBy.parse("10:00")
    assert not save_by.is_near(0, 60, 10)
    assert not save_by.is_near(500, 60, 10)
    assert save_by.is_near(530, 60, 10)
    assert save_by.is_near(600, 0, 0)
