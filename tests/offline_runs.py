"""Files of rows for the commands that train from a file, and processes that run them and are ended on purpose."""

from __future__ import annotations

import json
import os
import subprocess
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np

DEADLINE_S = 240


def make_rows(
    *, num_groups: int, group_size: int = 4, lengths: Sequence[int] = range(2, 9), seed: int = 0
) -> list[dict[str, Any]]:
    """Of grpo, for a vocabulary of 64; ``lengths`` are those that completions may have."""
    rng = np.random.default_rng(seed)
    rows = []
    for group in range(num_groups):
        prompt = rng.integers(2, 64, 4).tolist()
        for member in range(group_size):
            completion = rng.integers(2, 64, int(rng.choice(lengths))).tolist()
            logprobs = (-4 + rng.normal(0, 0.3, len(completion))).round(3).tolist()
            row = {"token_ids": prompt + completion, "prompt_length": 4, "logprobs": logprobs}
            rows.append(row | {"reward": float(member == 0), "group": f"task-{group}"})
    return rows


def sft_rows(rows: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """What sft takes of them."""
    return [{name: row[name] for name in ("token_ids", "prompt_length")} for row in rows]


def write_rows(path: Path, rows: Sequence[Mapping[str, Any]]) -> Path:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def read_metrics(out: Path) -> list[dict[str, Any]]:
    """Without what depends on the clock, or on what a process had compiled already."""
    lines = [json.loads(line) for line in (out / "metrics.jsonl").read_text().splitlines()]
    return [
        {name: value for name, value in line.items() if not name.endswith("_s") and name != "num_compiled"}
        for line in lines
    ]


def arguments_of(command: str, model: Path, data: Path, out: Path, *more: object) -> list[str]:
    return [command, "--model", str(model), "--data", str(data), "--out", str(out), *map(str, more)]


@contextmanager
def started(command: Sequence[str], log: Path, **environment: str) -> Iterator[subprocess.Popen[bytes]]:
    """A process whose standard error goes to ``log``, and which is gone afterwards."""
    with log.open("wb") as file:
        process = subprocess.Popen(command, stderr=file, env=os.environ | {"OMP_NUM_THREADS": "1"} | environment)
        try:
            yield process
        finally:
            process.kill()
            process.wait()


def wait_for(is_true: Callable[[], bool], process: subprocess.Popen[bytes], log: Path) -> None:
    deadline = time.monotonic() + DEADLINE_S
    while not is_true():
        assert process.poll() is None, log.read_text()
        assert time.monotonic() < deadline, log.read_text()
        time.sleep(0.01)


def has_taken(out: Path, num_steps: int) -> bool:
    return (out / "metrics.jsonl").exists() and len(read_metrics(out)) >= num_steps


def has_saved(out: Path, step: int) -> bool:
    saved = [int(path.name.removeprefix("step-")) for path in (out / "checkpoints").glob("step-*")]
    return max(saved, default=0) >= step
