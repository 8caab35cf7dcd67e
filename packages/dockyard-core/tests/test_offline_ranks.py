"""What the loop does with the other ranks and with its options: a policy that notes what it is given."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from pydantic import BaseModel, ConfigDict

from dockyard_core.advantage import group_advantages
from dockyard_core.batch import BatchShard
from dockyard_core.loss_config import LossConfig
from dockyard_core.offline import run_command
from dockyard_core.policy import StepMetrics


class NotingConfig(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid")

    learning_rate: float = 0.5
    loss: LossConfig = LossConfig()
    seed: int = 0


@dataclass
class NotingBackend:
    """Backend, session and policy of one rank of several, the others of which are imagined."""

    data_rank: int = 0
    num_data_ranks: int = 1
    stopped_elsewhere_at: int | None = None
    """Step after which another rank has got a signal."""
    shards: list[BatchShard] = field(default_factory=list)
    saved: list[int] = field(default_factory=list)

    is_lead: bool = True

    prog = "dockyard-train-fake"
    policy_config = NotingConfig
    free_policy_fields = frozenset[str]()

    def vocab_size(self, model: str) -> int:
        return 64

    def policy_defaults(self) -> dict[str, Any]:
        return {}

    @contextmanager
    def open(self, model: str, config: NotingConfig) -> Iterator[NotingBackend]:
        yield self

    @property
    def policy(self) -> Any:
        return self

    def any(self, flag: bool) -> bool:
        return flag or len(self.shards) == self.stopped_elsewhere_at

    def train_step(self, shard: BatchShard) -> StepMetrics:
        self.shards.append(shard)
        numbers = ("loss", "grad_norm", "learning_rate", "entropy", "clip_fraction", "kl_ref")
        more = ("offpolicy_abs_diff_mean", "offpolicy_abs_diff_max")
        values = dict.fromkeys((*numbers, *more), 0.0)
        return StepMetrics(policy_version=len(self.shards), num_valid_tokens=shard.num_valid_tokens, **values)

    def save(self, directory: Path) -> None:
        directory.mkdir()
        self.saved.append(len(self.shards))

    def snapshot(self) -> NotingBackend:
        return self

    def export(self, directory: Path) -> None:
        directory.mkdir()


REWARDS = (1.0, 0.25, 0.0, 0.0)


@pytest.fixture
def data(tmp_path: Path) -> Path:
    """Three groups of four; a row's second token says which row it is."""
    rows = [
        {"token_ids": [1, index, 3], "prompt_length": 2, "logprobs": [-1], "reward": REWARDS[index % 4]}
        | {"group": index // 4}
        for index in range(12)
    ]
    path = tmp_path / "rows.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def run(backend: NotingBackend, out: Path, data: Path, *more: str) -> int:
    arguments = ["grpo", "--model", "m", "--data", str(data), "--out", str(out), "--batch-size", "4", *more]
    return run_command(arguments, backend)


def advantages(shards: Sequence[BatchShard]) -> dict[int, float]:
    """By row."""
    held = {}
    for shard in shards:
        for mb in shard.micro_batches:
            for row, start in zip(*np.nonzero((mb.position_ids_BL == 0) & (mb.sequence_ids_BL >= 0)), strict=True):
                held[int(mb.token_ids_BL[row, start + 1])] = float(mb.advantages_BL[row, start])
    return held


def test_the_ranks_take_all_rows_once_between_them(tmp_path, data) -> None:
    ranks = [NotingBackend(data_rank=rank, num_data_ranks=2) for rank in range(2)]
    for rank, backend in enumerate(ranks):
        assert run(backend, tmp_path / str(rank), data, "--scale", "none") == 0
    first, second = (set(advantages(backend.shards)) for backend in ranks)
    assert first
    assert second
    assert not first & second
    assert first | second == set(range(12))


def test_a_signal_on_another_rank_stops_this_one_after_the_same_step(tmp_path, data) -> None:
    backend = NotingBackend(data_rank=1, num_data_ranks=2, stopped_elsewhere_at=2)
    assert run(backend, tmp_path / "out", data, "--save-every", "0") == 143
    assert (len(backend.shards), backend.saved) == (2, [2])
    assert not (tmp_path / "out" / "hf").exists()


@pytest.mark.parametrize(("baseline", "scale"), [("leave_one_out", "std"), ("mean", "none"), ("mean", "std")])
def test_baseline_and_scale_reach_the_advantages(tmp_path, data, baseline, scale) -> None:
    backend = NotingBackend()
    assert run(backend, tmp_path / "out", data, "--baseline", baseline, "--scale", scale) == 0
    wanted = group_advantages(REWARDS, baseline=baseline, scale=scale)
    held = advantages(backend.shards)
    assert [held[index] for index in range(12)] == pytest.approx([*wanted] * 3)


def test_another_rank_lets_the_lead_speak_first_and_then_says_why_it_ends(tmp_path, capsys, monkeypatch) -> None:
    """A launcher that sees one rank end kills the others: the lead must have said its line by then."""
    said_before: list[str] = []
    monkeypatch.setattr(
        "dockyard_core.offline.command.time.sleep", lambda _: said_before.append(capsys.readouterr().err)
    )
    refusal = "dockyard-train-fake: nowhere: file: must be readable, got No such file or directory; check the path\n"
    assert run(NotingBackend(), tmp_path / "out", Path("nowhere")) == 2
    assert (capsys.readouterr().err, said_before) == (refusal, [])
    assert run(NotingBackend(data_rank=1, is_lead=False), tmp_path / "out", Path("nowhere")) == 2
    assert (capsys.readouterr().err, said_before) == (refusal, [""])
