"""timeline.json: a Chrome trace of the three fleets (opens in Perfetto)."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from dockyard_core import GroupId
from dockyard_grpo.summary import GroupSummary

_TRACKS = {"trainer": 1, "inference": 2, "sandbox": 3}


class Timeline:
    """Collects spans; times are microseconds since the start of the run."""

    def __init__(self) -> None:
        self._start = time.monotonic()
        self.earlier_s = 0.0
        """Seconds of the run's earlier lives."""
        self._events: list[dict[str, Any]] = [
            {"ph": "M", "name": "process_name", "pid": pid, "args": {"name": fleet}} for fleet, pid in _TRACKS.items()
        ]

    @property
    def wall_s(self) -> float:
        """Seconds since the start of the run."""
        return self.earlier_s + time.monotonic() - self._start

    def add(self, fleet: str, name: str, started_s: float, ended_s: float, *, lane: int = 0, **args: Any) -> None:
        """Add a span of a fleet, in seconds since the start of the run."""
        self._events.append(
            {
                "ph": "X",
                "name": name,
                "pid": _TRACKS[fleet],
                "tid": lane,
                "ts": round(started_s * 1e6),
                "dur": round((ended_s - started_s) * 1e6),
                "args": args,
            }
        )

    def add_group(self, group_id: GroupId, lane: int, engine: str, started_s: float, summary: GroupSummary) -> None:
        """Add a group that ends now: its whole life, and the time its verdicts took at the end of it."""
        ended_s = self.wall_s
        self.add("inference", str(group_id), started_s, ended_s, lane=lane, engine=engine)
        judge_s = max((rollout.judge_s for rollout in summary.rollouts), default=0.0)
        self.add("sandbox", str(group_id), max(started_s, ended_s - judge_s), ended_s, lane=lane)

    @contextmanager
    def span(self, fleet: str, name: str, **args: Any) -> Iterator[None]:
        """Time the body as a span."""
        started = self.wall_s
        try:
            yield
        finally:
            self.add(fleet, name, started, self.wall_s, **args)

    def trace(self) -> dict[str, Any]:
        """The whole trace as JSON-able data."""
        return {"traceEvents": self._events, "displayTimeUnit": "ms"}
