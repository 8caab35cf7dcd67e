"""Finding the state to go on from, and taking back what came after it."""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from dockyard_core import ConfigError
from dockyard_core.loop import surviving
from dockyard_grpo.config import Config


@dataclass(frozen=True)
class RestorePoint:
    """A complete checkpoint, or the start of a run that has none yet."""

    incarnation: int
    """Grows at every restore; 0 = the run's first life."""
    checkpoint: Path | None
    loop: Mapping[str, Any] | None
    """loop.json of the checkpoint: step, state machine, sampler, dataset fingerprint."""

    @property
    def step(self) -> int:
        """Optimizer steps that are kept."""
        return int(self.loop["step"]) if self.loop is not None else 0


def find_restore_point(run: Path) -> RestorePoint:
    """The newest checkpoint whose every file has the hash of its manifest.

    An incomplete or damaged one is passed over for the one before it.
    """
    incarnation = 1 + sum(event["event"] == "restored" for event in read_rows(run / "events.jsonl"))
    for checkpoint in sorted((run / "checkpoints").glob("step-*"), reverse=True):
        if is_complete(checkpoint):
            return RestorePoint(incarnation, checkpoint, json.loads((checkpoint / "loop.json").read_text()))
    return RestorePoint(incarnation, None, None)


def is_complete(checkpoint: Path) -> bool:
    """Whether every file of the manifest is there with its hash."""
    try:
        manifest = json.loads((checkpoint / "manifest.json").read_text())
        return all(sha256(checkpoint / name) == digest for name, digest in manifest["sha256"].items())
    except (FileNotFoundError, json.JSONDecodeError, KeyError):
        return False


def loop_sizes(config: Config) -> dict[str, int]:
    """What a resumed run cannot change: groups under way have these sizes."""
    grpo = config.grpo
    return {
        "num_prompts_per_step": grpo.num_prompts_per_step,
        "num_generations_per_prompt": grpo.num_generations_per_prompt,
        "max_staleness": grpo.max_staleness,
    }


def check_same_run(point: RestorePoint, config: Config, fingerprint: str) -> None:
    """Raise ConfigError when the run was made with other tasks or other sizes of its loop."""
    if point.loop is not None and point.loop["sizes"] != loop_sizes(config):
        changed = [
            f"grpo.{name} was {was}, now {now}"
            for (name, was), now in zip(point.loop["sizes"].items(), loop_sizes(config).values(), strict=True)
            if was != now
        ]
        raise ConfigError(
            f"a resumed run keeps the sizes of its loop: {', '.join(changed)}; leave them as they were, or start a "
            f"new run with policy.model={point.checkpoint}/hf"
        )
    if point.loop is not None and point.loop["dataset"] != fingerprint:
        raise ConfigError(
            f"the run was made with another training set (fingerprint {point.loop['dataset'][:12]}, now "
            f"{fingerprint[:12]}); give the same data.train, or start a new run with policy.model={point.checkpoint}/hf"
        )


def roll_back(run: Path, point: RestorePoint) -> int:
    """Take back the rows of steps that are not kept; returns how many.

    They move to ``<name>.rolled_back.jsonl``: metrics.jsonl and rollouts.jsonl hold the surviving
    lineage only. events.jsonl stays whole, because the ledger itself says what was rolled back.
    """
    complete_last_line(run / "events.jsonl")
    for checkpoint in (run / "checkpoints").glob("step-*"):
        if checkpoint.name > f"step-{point.step:06d}":  # damaged, or it would be the restore point
            checkpoint.rename(checkpoint.with_name(f"damaged-{checkpoint.name}-{point.incarnation}"))
    kept_drops = {
        event["group"]
        for event in surviving(read_rows(run / "events.jsonl"))
        if event["event"] == "dropped" and event["seq"] < _frontier(point)
    }

    def is_kept_metric(row: Mapping[str, Any]) -> bool:
        return int(row["step"]) <= point.step

    def is_kept_rollout(row: Mapping[str, Any]) -> bool:
        if row["step"] is None:
            return f"{row['task']}#{row['repetition']}" in kept_drops
        return int(row["step"]) <= point.step

    return _keep(run / "metrics.jsonl", is_kept_metric) + _keep(run / "rollouts.jsonl", is_kept_rollout)


def read_rows(path: Path) -> list[dict[str, Any]]:
    """Objects of a JSONL file; a last line that a crash cut short does not count."""
    if not path.exists():
        return []
    return [json.loads(line) for line in path.read_text(encoding="utf-8").split("\n")[:-1]]


def complete_last_line(path: Path) -> None:
    """Cut off a last line that a crash left without its end."""
    if path.exists() and (content := path.read_bytes()) and not content.endswith(b"\n"):
        os.truncate(path, content.rfind(b"\n") + 1)


def sha256(path: Path) -> str:
    """Hex digest of a file."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def _frontier(point: RestorePoint) -> int:
    return int(point.loop["machine"]["ledger"]["frontier"]) if point.loop is not None else 0


def _keep(path: Path, is_kept: Callable[[Mapping[str, Any]], bool]) -> int:
    complete_last_line(path)
    rows = read_rows(path)
    lost = [row for row in rows if not is_kept(row)]
    if lost:
        with path.with_suffix(".rolled_back.jsonl").open("a", encoding="utf-8") as aside:
            aside.writelines(json.dumps(row, ensure_ascii=False) + "\n" for row in lost)
        partial = path.with_suffix(".partial")
        with partial.open("w", encoding="utf-8") as file:
            file.writelines(json.dumps(row, ensure_ascii=False) + "\n" for row in rows if is_kept(row))
            file.flush()
            os.fsync(file.fileno())
        partial.replace(path)
    return len(lost)
