"""Which checkpoints are kept: the newest, and the best by a metric of their step."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal

from dockyard_grpo.config.sections import CheckpointSection


@dataclass(frozen=True, kw_only=True)
class Retention:
    """The rule; pure."""

    keep_last: int
    """At least 1."""
    keep_best: int = 0
    metric: str = ""
    """Field of the metrics row of a checkpoint's step."""
    mode: Literal["max", "min"] = "max"

    @classmethod
    def of(cls, section: CheckpointSection) -> Retention:
        """As configured."""
        return cls(
            keep_last=section.keep_last,
            keep_best=section.keep_best,
            metric=section.best_metric,
            mode=section.best_mode,
        )

    def best(self, metrics: Mapping[int, Mapping[str, Any]]) -> list[int]:
        """Steps of the ``keep_best`` best checkpoints, best first; of equal ones the newest.

        A checkpoint without the field, or with one that is no finite number, is none of them.

        Args:
            metrics: row by step, of every complete checkpoint.
        """
        sign = 1 if self.mode == "max" else -1
        values = {step: float(row[self.metric]) for step, row in metrics.items() if _is_number(row.get(self.metric))}
        return sorted(values, key=lambda step: (sign * values[step], step), reverse=True)[: self.keep_best]

    def kept(self, metrics: Mapping[int, Mapping[str, Any]]) -> set[int]:
        """Steps to keep: the newest ``keep_last`` and the best."""
        return {*sorted(metrics)[-self.keep_last :], *self.best(metrics)}


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)
