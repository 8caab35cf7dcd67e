"""Finding the state to go on from, and taking back what came after it."""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from dockyard_core import ConfigError
from dockyard_grpo.config import Config


@dataclass(frozen=True)
class RestorePoint:
    """A complete checkpoint, or the start of a run that has none yet."""

    incarnation: int
    """Grows at every restore; 0 = the run's first life."""
    checkpoint: Path | None
    loop: Mapping[str, Any] | None
    """loop.json of the checkpoint: step, state machine, sampler, dataset fingerprint."""
    next_seq: int = 0
    """Number of the next event of the ledger."""

    @property
    def step(self) -> int:
        """Optimizer steps that are kept."""
        return int(self.loop["step"]) if self.loop is not None else 0


def find_restore_point(run: Path) -> RestorePoint:
    """The newest checkpoint whose every file has the hash of its manifest.

    An incomplete or damaged one is passed over for the one before it.
    """
    steps = {path: step for path in (run / "checkpoints").glob("step-*") if (step := step_of(path)) is not None}
    for checkpoint in sorted(steps, key=lambda path: steps[path], reverse=True):
        if is_complete(checkpoint):
            loop = json.loads((checkpoint / "loop.json").read_text())
            # The checkpoint stands for all events before it: a long run is taken up as fast as a short one.
            tail = read_rows(run / "events.jsonl", start=loop["events_bytes"])
            frontier = loop["machine"]["ledger"]["frontier"]
            return RestorePoint(1 + loop["incarnation"] + _num_restores(tail), checkpoint, loop, frontier + len(tail))
    events = read_rows(run / "events.jsonl")
    return RestorePoint(1 + _num_restores(events), None, None, len(events))


def _num_restores(events: Sequence[Mapping[str, Any]]) -> int:
    return sum(event["event"] == "restored" for event in events)


def step_of(checkpoint: Path) -> int | None:
    """The step that a checkpoint's name gives; None for any other name."""
    digits = checkpoint.name.removeprefix("step-")
    is_name = checkpoint.name.startswith("step-") and digits.isascii() and digits.isdigit()
    return int(digits) if is_name else None


def is_complete(checkpoint: Path) -> bool:
    """Whether every file of the manifest is there with its hash, the loop's state among them."""
    try:
        hashes: Mapping[str, str] = json.loads((checkpoint / "manifest.json").read_text())["sha256"]
        return "loop.json" in hashes and all(sha256(checkpoint / name) == digest for name, digest in hashes.items())
    except (OSError, ValueError, KeyError, TypeError, AttributeError):  # gone, unreadable, or no manifest of ours
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
    if point.loop is not None and point.loop["dataset"] != fingerprint and not config.data.accept_change:
        raise ConfigError(
            f"the run was made with another training set (fingerprint {point.loop['dataset'][:12]}, now "
            f"{fingerprint[:12]}); give the same data.train, say data.accept_change=true, or start a new run with "
            f"policy.model={point.checkpoint}/hf"
        )


def sampler_state(loop: Mapping[str, Any], fingerprint: str, num_tasks: int) -> dict[str, int]:
    """Where the sampler goes on; over another dataset it starts an epoch that no group has had."""
    state: dict[str, int] = dict(loop["sampler"])
    if loop["dataset"] != fingerprint:
        state |= {"num_tasks": num_tasks, "epoch": state["epoch"] + 1, "position": 0}
    return state


def roll_back(run: Path, point: RestorePoint) -> int:
    """Take back the rows of steps that are not kept; returns how many.

    They move to ``<name>.rolled_back.jsonl``: metrics.jsonl and rollouts.jsonl hold the surviving
    lineage only. events.jsonl stays whole, because the ledger itself says what was rolled back.
    """
    complete_last_line(run / "events.jsonl")
    for checkpoint in (run / "checkpoints").glob("step-*"):
        if (step_of(checkpoint) or 0) > point.step:  # damaged, or it would be the restore point
            checkpoint.rename(checkpoint.with_name(f"damaged-{checkpoint.name}-{point.incarnation}"))
    frontier = _frontier(point)

    def is_kept_metric(row: Mapping[str, Any]) -> bool:
        return int(row["step"]) <= point.step

    def is_kept_rollout(row: Mapping[str, Any]) -> bool:
        if row["step"] is None:
            return int(row["seq"]) < frontier
        return int(row["step"]) <= point.step

    return _keep(run / "metrics.jsonl", is_kept_metric) + _keep(run / "rollouts.jsonl", is_kept_rollout)


def read_rows(path: Path, *, start: int = 0) -> list[dict[str, Any]]:
    """Objects of a JSONL file from byte ``start`` on; a last line that a crash cut short does not count."""
    if not path.exists():
        return []
    with path.open("rb") as file:
        file.seek(start)
        return [json.loads(line) for line in file.read().split(b"\n")[:-1]]


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
    """Line by line: rollouts.jsonl may be larger than the memory."""
    complete_last_line(path)
    if not path.exists() or _keeps_all(path, is_kept):
        return 0
    partial, aside = path.with_suffix(".partial"), path.with_suffix(".rolled_back.jsonl")
    num_lost = 0
    with path.open("rb") as rows, partial.open("wb") as kept, aside.open("ab") as lost:
        for line in rows:
            is_lost = not is_kept(json.loads(line))
            (lost if is_lost else kept).write(line)
            num_lost += is_lost
        for file in (lost, kept):
            file.flush()
            os.fsync(file.fileno())
    partial.replace(path)
    return num_lost


def _keeps_all(path: Path, is_kept: Callable[[Mapping[str, Any]], bool]) -> bool:
    with path.open("rb") as rows:
        return all(is_kept(json.loads(line)) for line in rows)
