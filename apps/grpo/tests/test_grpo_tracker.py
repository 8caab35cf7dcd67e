"""Trackers write what TensorBoard reads, and can neither stop nor slow their caller."""

from __future__ import annotations

import subprocess
import sys
import threading
import time
from collections.abc import Mapping
from pathlib import Path

import pytest
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from dockyard_core import ConfigError
from dockyard_grpo.config import load_config
from dockyard_grpo.tracker import BackgroundTracker, TensorBoardTracker, make_tracker, scalars


class Stubborn:
    """A tracker that blocks until it is let go, or raises."""

    def __init__(self, *, error: Exception | None = None) -> None:
        self.error = error
        self.let_go = threading.Event()
        self.entered = threading.Event()
        self.steps: list[int] = []
        self.is_closed = False

    def log(self, step: int, values: Mapping[str, float]) -> None:
        self.entered.set()
        if self.error is not None:
            raise self.error
        self.let_go.wait()
        self.steps.append(step)

    def close(self) -> None:
        self.is_closed = True


def read_back(folder: Path) -> dict[str, list[tuple[int, float]]]:
    accumulator = EventAccumulator(str(folder))
    accumulator.Reload()
    tags = accumulator.Tags()["scalars"]
    return {tag: [(event.step, event.value) for event in accumulator.Scalars(tag)] for tag in tags}


def test_tensorboard_reads_back_every_scalar_at_its_step(tmp_path: Path) -> None:
    tracker = make_tracker(["tensorboard", "tensorboard"], tmp_path)
    for step in range(1, 6):
        tracker.log(step, {"train/reward_mean": step / 8, "dropped/deadline": 2.0})
    tracker.close()
    assert len(list((tmp_path / "tensorboard").iterdir())) == 1, "a repeated name is one tracker"
    assert read_back(tmp_path / "tensorboard") == {
        "train/reward_mean": [(step, step / 8) for step in range(1, 6)],
        "dropped/deadline": [(step, 2.0) for step in range(1, 6)],
    }


def test_a_step_is_on_disk_before_the_end(tmp_path: Path) -> None:
    tracker = TensorBoardTracker(tmp_path)
    tracker.log(3, {"a": 0.5})
    assert read_back(tmp_path) == {"a": [(3, 0.5)]}
    tracker.close()


def test_a_resumed_run_replaces_the_steps_that_were_rolled_back(tmp_path: Path) -> None:
    for first, value in ((1, 0.25), (4, 0.5)):
        tracker = make_tracker(["tensorboard"], tmp_path)
        for step in range(first, first + 5):
            tracker.log(step, {"a": value})
        tracker.close()
    assert read_back(tmp_path / "tensorboard") == {
        "a": [(step, 0.25) for step in range(1, 4)] + [(step, 0.5) for step in range(4, 9)]
    }


def test_neither_torch_nor_tensorflow_is_imported(tmp_path: Path) -> None:
    (tmp_path / "tensorflow.py").write_text("raise RuntimeError('tensorflow was imported')\n")
    program = (
        "import sys; from pathlib import Path; from dockyard_grpo.tracker import TensorBoardTracker as T\n"
        f"t = T(Path({str(tmp_path / 'out')!r})); t.log(1, {{'a': 1.0}}); t.close()\n"
        "print(sorted({'torch', 'tensorflow', 'ray'} & sys.modules.keys()))"
    )
    command = [sys.executable, "-c", program]
    answer = subprocess.run(command, capture_output=True, text=True, env={"PYTHONPATH": str(tmp_path)})
    assert answer.stdout == "[]\n", answer.stderr
    assert read_back(tmp_path / "out") == {"a": [(1, 1.0)]}


def test_a_tracker_that_blocks_forever_delays_nobody_and_is_counted() -> None:
    inner, lines = Stubborn(), []
    tracker = BackgroundTracker(inner, name="slow", capacity=4, close_timeout_s=0.2, report=lines.append)
    tracker.log(0, {})
    assert inner.entered.wait(20)
    started = time.perf_counter()
    for step in range(1, 1001):
        tracker.log(step, {"a": 1.0})
    assert time.perf_counter() - started < 1.0
    assert tracker.num_dropped == 996
    tracker.close()
    assert tracker.num_dropped == 1000, "what was still queued at the end is lost too"
    assert time.perf_counter() - started < 5.0
    assert [line.split(";")[0] for line in lines] == [
        "tracker slow is too slow: 4 steps wait, newer ones are dropped",
        "tracker slow did not finish in 0.2 s and is left behind",
    ]
    inner.let_go.set()


def test_a_tracker_that_raises_is_counted_and_said_once_by_name() -> None:
    inner, lines = Stubborn(error=OSError(28, "No space left on device")), []
    tracker = BackgroundTracker(inner, name="tensorboard", report=lines.append)
    for step in range(5):
        tracker.log(step, {"a": 1.0})
    tracker.close()
    assert (tracker.num_errors, tracker.num_dropped, inner.is_closed) == (5, 0, True)
    assert lines == [
        "tracker tensorboard failed (OSError: [Errno 28] No space left on device); "
        "the run goes on, metrics.jsonl has every step"
    ]


def test_order_and_values_are_those_of_the_calls() -> None:
    inner = Stubborn()
    inner.let_go.set()
    tracker = BackgroundTracker(inner, capacity=100)
    values = {"a": 1.0}
    for step in range(50):
        tracker.log(step, values)
    tracker.close()
    tracker.close()
    assert (inner.steps, inner.is_closed, tracker.num_dropped) == (list(range(50)), True, 0)


def test_a_folder_that_cannot_be_made_is_an_error_of_the_tracker_only(tmp_path: Path) -> None:
    (tmp_path / "tensorboard").write_text("a file is in the way")
    lines: list[str] = []
    tracker = make_tracker(["tensorboard"], tmp_path, report=lines.append)
    tracker.log(1, {"a": 1.0})
    tracker.close()
    assert len(lines) == 1
    assert lines[0].startswith("tracker tensorboard failed (")


def test_no_tracker_and_an_unknown_one(tmp_path: Path) -> None:
    nothing = make_tracker([], tmp_path)
    nothing.log(1, {"a": 1.0})
    nothing.close()
    assert list(tmp_path.iterdir()) == []
    with pytest.raises(ConfigError, match="must be of tensorboard, got 'wandb'"):
        make_tracker(["wandb"], tmp_path)


def test_the_default_is_tensorboard_and_a_list_turns_it_off() -> None:
    assert load_config(None, []).logging.trackers == ("tensorboard",)
    assert load_config(None, ["logging.trackers=[]"]).logging.trackers == ()


def test_a_metrics_row_becomes_scalars_by_section() -> None:
    row = {
        "step": 3,
        "reward_mean": 0.5,
        "is_skipped": True,
        "val_resolved_rate": 0.25,
        "time_train_s": 2,
        "refit_probe_abs_diff_max": 1e-6,
        "kl_ref": None,
        "dropped": {"deadline": 1},
        "note": "text",
    }
    assert scalars(row) == {
        "train/reward_mean": 0.5,
        "train/is_skipped": 1.0,
        "held_out/val_resolved_rate": 0.25,
        "time/time_train_s": 2.0,
        "refit/refit_probe_abs_diff_max": 1e-6,
        "dropped/deadline": 1.0,
    }
