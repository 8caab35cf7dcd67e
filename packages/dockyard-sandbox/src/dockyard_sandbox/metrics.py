"""Counters and their Prometheus text, without a library: four kinds of lines are all that is needed."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping

CONTENT_TYPE = "text/plain; version=0.0.4; charset=utf-8"
_BUCKETS_S = (0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0, 300.0)
_PREFIX = "dockyard_sandbox_"

Labels = tuple[tuple[str, str], ...]


class Metrics:
    """What happened since the server started."""

    def __init__(self) -> None:
        self._counters: Counter[tuple[str, Labels]] = Counter()
        self._help: dict[str, str] = {}
        self._buckets: Counter[tuple[str, float]] = Counter()
        self._sums: dict[str, float] = defaultdict(float)
        self._counts: Counter[str] = Counter()

    def count(self, name: str, help_text: str, *, by: int = 1, **labels: str) -> None:
        """Add to the counter ``name``, which ends in ``_total``."""
        self._help[name] = help_text
        self._counters[name, tuple(sorted(labels.items()))] += by

    def observe(self, stage: str, seconds: float) -> None:
        """Add one duration of ``stage``."""
        for bound in _BUCKETS_S:
            if seconds <= bound:
                self._buckets[stage, bound] += 1
        self._sums[stage] += seconds
        self._counts[stage] += 1

    def text(self, gauges: Iterable[tuple[str, str, Mapping[Labels, float]]]) -> str:
        """The exposition: counters, the stages' histogram, and ``gauges`` as (name, help, value by labels)."""
        lines: list[str] = []
        for name in sorted(self._help):
            lines += [f"# HELP {_PREFIX}{name} {self._help[name]}", f"# TYPE {_PREFIX}{name} counter"]
            lines += [
                f"{_PREFIX}{name}{_braces(labels)} {value}"
                for (counter, labels), value in sorted(self._counters.items())
                if counter == name
            ]
        name = f"{_PREFIX}stage_seconds"
        lines += [f"# HELP {name} Seconds per stage of a task.", f"# TYPE {name} histogram"]
        for stage in sorted(self._counts):
            lines += [
                f"{name}_bucket{_braces((('le', f'{bound:g}'), ('stage', stage)))} {self._buckets[stage, bound]}"
                for bound in _BUCKETS_S
            ]
            lines.append(f"{name}_bucket{_braces((('le', '+Inf'), ('stage', stage)))} {self._counts[stage]}")
            lines.append(f"{name}_sum{_braces((('stage', stage),))} {self._sums[stage]:.6f}")
            lines.append(f"{name}_count{_braces((('stage', stage),))} {self._counts[stage]}")
        for gauge, help_text, values in gauges:
            lines += [f"# HELP {_PREFIX}{gauge} {help_text}", f"# TYPE {_PREFIX}{gauge} gauge"]
            lines += [f"{_PREFIX}{gauge}{_braces(labels)} {value:g}" for labels, value in values.items()]
        return "\n".join(lines) + "\n"


def _braces(labels: Labels) -> str:
    if not labels:
        return ""
    return "{" + ",".join(f'{name}="{_escape(value)}"' for name, value in labels) + "}"


def _escape(value: str) -> str:
    return value.replace("\\", "\\\\").replace('"', '\\"').replace("\n", "\\n")
