"""Writes rollouts.jsonl beside the driver, so that texts and tokens never pass through it."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from dockyard_core import Rollout, RolloutGroup
from dockyard_grpo import group_files
from dockyard_grpo.storage_errors import reason_of
from dockyard_grpo.summary import GroupSummary, summarize


class Recorder:
    """Appends one object per rollout."""

    def __init__(self, path: Path) -> None:
        self._path = path

    def record(self, fields: Sequence[Mapping[str, Any]], *groups: RolloutGroup) -> int:
        """Append the rollouts of groups that left the loop; returns how many.

        Args:
            fields: one mapping per group: ``step``, ``dropped`` and ``seq``, which its rollouts share, and
                ``staleness`` and ``advantage``, one per rollout.
            groups: in the same order.
        """
        count = 0
        with self._path.open("a", encoding="utf-8") as file:
            for common, group in zip(fields, groups, strict=True):
                shared = {"step": common["step"], "dropped": common["dropped"], "seq": common["seq"]}
                each = zip(group.rollouts, common["staleness"], common["advantage"], strict=True)
                for rollout, lag, advantage in each:
                    row = {**_row(group, rollout), **shared, "staleness": lag, "advantage": advantage}
                    file.write(json.dumps(row, ensure_ascii=False) + "\n")
                    count += 1
        return count

    def flush(self) -> None:
        """Return when what was recorded before is on disk (an actor answers in order)."""
        if self._path.exists():
            descriptor = os.open(self._path, os.O_RDONLY)
            try:
                os.fsync(descriptor)
            finally:
                os.close(descriptor)

    def write_groups(self, path: Path, *groups: RolloutGroup) -> str | None:
        """Write whole groups, one per line; returns None, or why the disk did not take them."""
        try:
            group_files.write_groups(path, groups)
        except OSError as error:
            return reason_of(error)
        return None

    def load_group(self, path: Path, index: int) -> tuple[GroupSummary, RolloutGroup]:
        """The group of one line of what `write_groups` wrote, for two references (``num_returns=2``)."""
        group = group_files.read_group(path, index)
        return summarize(group), group


def _row(group: RolloutGroup, rollout: Rollout) -> dict[str, Any]:
    verdict = rollout.verdict
    return {
        "task": rollout.task_id,
        "repetition": group.group_id.repetition,
        "rollout_id": rollout.rollout_id,
        "prompt": rollout.prompt_text,
        "completion": rollout.completion_text,
        "patch": rollout.patch,
        "verdict": str(verdict.status),
        "isolation": verdict.isolation,
        "evidence": verdict.evidence,
        "flags": list(verdict.flags),
        "cached": verdict.cached,
        "tests": {test: str(status) for test, status in verdict.tests.items()},
        "detail": verdict.detail,
        "reward": rollout.reward,
        "invalid_cause": rollout.invalid_cause,
        "versions": sorted({span.policy_version for s in rollout.segments for span in s.version_spans}),
        "num_sampled_tokens": rollout.num_sampled_tokens,
        "finish_reason": rollout.finish_reason,
        "timings_s": {name: round(seconds, 6) for name, seconds in rollout.timings_s.items()},
    }
