"""The loop and its directory, with a policy of one number: killed at any place, a run ends as if it had not been."""

from __future__ import annotations

import hashlib
import io
import json
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from pydantic import BaseModel, ConfigDict

from dockyard_core import UserError
from dockyard_core.batch import BatchShard
from dockyard_core.loss_config import LossConfig
from dockyard_core.offline import run_command
from dockyard_core.offline.progress import Progress
from dockyard_core.policy import StepMetrics


class FakeConfig(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid")

    learning_rate: float = 0.5
    schedule: str = "constant"
    total_steps: int | None = None
    loss: LossConfig = LossConfig()
    seed: int = 0
    threads: int = 1


class Killed(BaseException):
    """Stands for SIGKILL: nothing of the run may handle it."""


@dataclass
class FakePolicy:
    """State is a digest of all shards so far, so that a step too many, too few or in another order shows."""

    config: FakeConfig
    killed_at: str | None = None
    state: str = ""
    version: int = 0

    def _maybe_die(self, moment: str) -> None:
        if self.killed_at == moment:
            raise Killed

    def train_step(self, shard: BatchShard) -> StepMetrics:
        self._maybe_die(f"step {self.version + 1}")
        digest = hashlib.sha256(self.state.encode())
        for micro_batch in shard.micro_batches:
            digest.update(micro_batch.token_ids_BL.tobytes() + micro_batch.advantages_BL.tobytes())
        self.state = digest.hexdigest()
        self.version += 1
        is_skipped = self.config.loss.entropy_coef > 0
        return StepMetrics(
            policy_version=self.version,
            loss=float("nan") if is_skipped else int(self.state[:6], 16) / 1e6,
            grad_norm=float("inf") if is_skipped else 1.0,
            learning_rate=self.config.learning_rate,
            entropy=0.1,
            clip_fraction=0.0,
            kl_ref=0.0,
            offpolicy_abs_diff_mean=0.0,
            offpolicy_abs_diff_max=0.0,
            num_valid_tokens=shard.num_valid_tokens,
            is_skipped=is_skipped,
        )

    def save(self, directory: Path) -> None:
        self._maybe_die(f"before save {self.version}")
        directory.mkdir()
        (directory / "state").write_text(f"{self.version} {self.state}")
        self._maybe_die(f"after save {self.version}")

    def restore(self, directory: Path) -> None:
        version, self.state = (directory / "state").read_text().split()
        self.version = int(version)

    def snapshot(self) -> FakePolicy:
        return self

    def export(self, directory: Path) -> None:
        directory.mkdir()
        self._maybe_die("export")
        (directory / "state").write_text(self.state)


@dataclass
class FakeSession:
    policy: Any
    data_rank: int = 0
    num_data_ranks: int = 1

    def any(self, flag: bool) -> bool:
        return flag


class FakeBackend:
    prog = "dockyard-train-fake"
    policy_config = FakeConfig
    free_policy_fields = frozenset({"threads"})
    is_lead = True

    def __init__(self, killed_at: str | None = None) -> None:
        self.killed_at = killed_at

    def vocab_size(self, model: str) -> int:
        return 64

    def policy_defaults(self) -> dict[str, Any]:
        return {"threads": 3}

    @contextmanager
    def open(self, model: str, config: FakeConfig) -> Iterator[FakeSession]:
        yield FakeSession(FakePolicy(config, self.killed_at))


@pytest.fixture
def data(tmp_path: Path) -> Path:
    rng = np.random.default_rng(0)
    path = tmp_path / "rows.jsonl"
    rows = [
        {"token_ids": rng.integers(0, 64, 5).tolist(), "prompt_length": 3, "logprobs": [-1, -1], "advantage": 1 + index}
        for index in range(10)
    ]
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def run(out: Path, data: Path, *more: str, killed_at: str | None = None) -> int:
    arguments = ["grpo", "--model", "m", "--data", str(data), "--out", str(out), "--batch-size", "4", *more]
    return run_command(arguments, FakeBackend(killed_at))


def metrics(out: Path) -> list[dict[str, Any]]:
    lines = [json.loads(line) for line in (out / "metrics.jsonl").read_text().splitlines()]
    return [{name: value for name, value in line.items() if name != "tokens_per_s"} for line in lines]


MORE = ("--epochs", "3", "--shuffle", "--save-every", "2")  # 9 steps
MOMENTS = ["step 1", "step 2", "before save 2", "after save 2", "step 3", "after save 4", "step 9", "after save 9"]


@pytest.mark.parametrize("killed_at", [*MOMENTS, "export"])
def test_a_run_that_is_killed_anywhere_ends_as_the_one_that_is_not(tmp_path, data, killed_at) -> None:
    whole, cut = tmp_path / "whole", tmp_path / "cut"
    assert run(whole, data, *MORE) == 0
    with pytest.raises(Killed):
        run(cut, data, *MORE, killed_at=killed_at)
    assert not (cut / "hf").exists(), "the result is there only when the run is complete"
    assert run(cut, data, *MORE) == 0
    assert metrics(cut) == metrics(whole)
    assert [line["step"] for line in metrics(cut)] == list(range(1, 10))
    assert (cut / "hf" / "state").read_text() == (whole / "hf" / "state").read_text()
    for out in (whole, cut):
        assert sorted(path.name for path in out.iterdir()) == ["checkpoints", "config.json", "hf", "metrics.jsonl"]
        assert sorted(path.name for path in (out / "checkpoints").iterdir()) == ["step-000008", "step-000009"]


def test_what_a_killed_save_left_behind_goes_even_if_its_step_is_not_saved_again(tmp_path, data) -> None:
    out = tmp_path / "out"
    with pytest.raises(Killed):
        run(out, data, *MORE, killed_at="after save 2")
    assert [path.name for path in (out / "checkpoints").iterdir()] == [".step-000002.partial"]
    assert run(out, data, "--epochs", "3", "--shuffle", "--save-every", "0") == 0
    assert [path.name for path in (out / "checkpoints").iterdir()] == ["step-000009"]


def test_a_longer_run_takes_the_result_away_until_it_is_complete_again(tmp_path, data) -> None:
    out = tmp_path / "out"
    assert run(out, data, "--steps", "2") == 0
    with pytest.raises(Killed):
        run(out, data, "--steps", "5", killed_at="step 4")
    assert not (out / "hf").exists()
    assert run(out, data, "--steps", "5") == 0
    assert run(tmp_path / "whole", data, "--steps", "5") == 0
    assert (out / "hf" / "state").read_text() == (tmp_path / "whole" / "hf" / "state").read_text()


def test_the_config_file_says_everything_and_what_may_change(tmp_path, data) -> None:
    out = tmp_path / "out"
    assert run(out, data, "--loss", "clip_high=0.3") == 0
    record = json.loads((out / "config.json").read_text())
    assert record["run"]["policy"]["loss"] == LossConfig(clip_high=0.3).model_dump()
    assert record["run"]["data_sha256"] == hashlib.sha256(data.read_bytes()).hexdigest()
    assert record["execution"]["policy"] == {"threads": 3}, "the backend's default"
    assert (record["execution"]["num_data_ranks"], record["execution"]["total_steps"]) == (1, 3)
    assert run(out, data, "--loss", "clip_high=0.3", "--policy", "threads=5") == 0


def test_other_data_options_or_metrics_are_refused_and_nothing_is_touched(tmp_path, data, capsys) -> None:
    out = tmp_path / "out"
    assert run(out, data, "--steps", "3") == 0
    before = {path: path.read_bytes() for path in out.rglob("*") if path.is_file()}
    capsys.readouterr()
    assert run(out, data, "--seed", "1") == 2
    said = capsys.readouterr().err
    assert "holds a run with other options: policy.seed must be 0, got 1; give the same, or another --out" in said
    assert {path: path.read_bytes() for path in out.rglob("*") if path.is_file()} == before
    (out / "metrics.jsonl").write_text("")
    assert run(out, data, "--steps", "4") == 2
    assert "metrics.jsonl must hold the" in capsys.readouterr().err
    (out / "config.json").write_text("{}")
    assert run(out, data) == 2
    assert "got another program's" in capsys.readouterr().err


def test_a_disk_that_refuses_is_told_in_one_line(tmp_path, data, capsys, monkeypatch) -> None:
    def refuse(self: FakePolicy, directory: Path) -> None:
        raise OSError(28, "No space left on device", str(directory))

    monkeypatch.setattr(FakePolicy, "save", refuse)
    assert run(tmp_path / "out", data) == 2
    (line,) = [line for line in capsys.readouterr().err.splitlines() if "dockyard-train-fake" in line]
    assert "--out must take what is written, got No space left on device" in line
    assert "run the same command again" in line


def test_a_place_that_cannot_be_written_is_refused_before_the_model_is_loaded(data, capsys, monkeypatch) -> None:
    monkeypatch.setattr(FakeBackend, "open", lambda *_: pytest.fail("the model was loaded"))
    assert run(data / "out", data) == 2
    assert f"got {str(data / 'out')!r}, but {str(data)!r} is a file" in capsys.readouterr().err


def test_rows_without_any_signal_are_refused_unless_the_loss_has_another(tmp_path, data, capsys) -> None:
    row = {"token_ids": [1, 2, 3], "prompt_length": 1, "logprobs": [-1, -1], "reward": 1, "group": 0}
    data.write_text(f"{json.dumps(row)}\n{json.dumps(row)}\n")
    assert run(tmp_path / "out", data) == 2
    assert "must have an advantage other than 0, got none" in capsys.readouterr().err
    assert not (tmp_path / "out").exists()
    assert run(tmp_path / "out", data, "--loss", "kl_coef=0.1") == 0


def test_a_skipped_step_has_null_where_json_has_no_number(tmp_path, data, capsys) -> None:
    out = tmp_path / "out"
    assert run(out, data, "--loss", "entropy_coef=0.1", "--steps", "1") == 0
    (line,) = metrics(out)
    assert (line["loss"], line["grad_norm"], line["skipped"]) == (None, None, True)
    assert "SKIPPED" in capsys.readouterr().err


def test_a_fault_of_ours_is_not_told_as_the_users(tmp_path, data, monkeypatch) -> None:
    def broken(self: FakePolicy, shard: BatchShard) -> StepMetrics:
        raise FileNotFoundError("a bug")

    monkeypatch.setattr(FakePolicy, "train_step", broken)
    with pytest.raises(FileNotFoundError):
        run(tmp_path / "out", data)
    assert not issubclass(FileNotFoundError, UserError)


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


LINE = {"step": 2, "loss": 1.5, "grad_norm": 0.25, "learning_rate": 1e-5, "tokens_per_s": 10.0, "skipped": False}


def test_a_terminal_has_one_line_that_is_drawn_over() -> None:
    terminal = Terminal()
    progress = Progress(terminal, total_steps=4, is_lead=True, is_plain=False)
    progress.step({**LINE, "reward_mean": 123.456})
    progress.step(LINE | {"step": 3})
    progress.say("done")
    drawn = terminal.getvalue()
    assert drawn.count("\n") == 2
    first, second = drawn.split("\r")[1:]
    assert "step 2/4  [==========          ]" in first
    assert len(second.splitlines()[0]) == len(first), "what was longer is blanked"
    assert drawn.endswith("\ndone\n")


@pytest.mark.parametrize(("stream", "is_plain"), [(io.StringIO(), False), (Terminal(), True)])
def test_elsewhere_every_step_has_a_line(stream, is_plain) -> None:
    progress = Progress(stream, total_steps=4, is_lead=True, is_plain=is_plain)
    for step in (2, 3):
        progress.step(LINE | {"step": step})
    lines = stream.getvalue().splitlines()
    assert lines[0] == "step 2/4  loss 1.5  grad 0.25  lr 1e-05  10 tokens/s"
    assert lines[1].startswith("step 3/4  loss 1.5")
    assert lines[1].endswith(" left")


def test_other_ranks_say_nothing() -> None:
    stream = Terminal()
    progress = Progress(stream, total_steps=4, is_lead=False, is_plain=False)
    progress.step(LINE)
    progress.say("done")
    assert stream.getvalue() == ""
