"""How busy the inference and the sandbox fleet are."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import NamedTuple


class EngineUsage(NamedTuple):
    """What one engine's worker has counted since it started, in seconds."""

    generate_busy_s: float
    """At least one request was under way."""
    sandbox_work_s: float
    """Work of sandbox workers on its verdicts, queueing left out; cached verdicts cost none."""


@dataclass(frozen=True)
class Usage:
    """Shares of a stretch of time, in [0, 1]; None = not known."""

    inference: float | None
    """Mean over the engines: something was being sampled."""
    sandbox: float | None
    """Of the workers of the servers that this run started."""


class BusyClock:
    """Counts the time during which anything is under way."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._num_under_way = 0
        self._since = 0.0
        self._total_s = 0.0

    @contextmanager
    def busy(self) -> Iterator[None]:
        """Count the body."""
        if self._num_under_way == 0:
            self._since = self._clock()
        self._num_under_way += 1
        try:
            yield
        finally:
            self._num_under_way -= 1
            if self._num_under_way == 0:
                self._total_s += self._clock() - self._since

    @property
    def total_s(self) -> float:
        """Seconds, up to now."""
        return self._total_s + (self._clock() - self._since if self._num_under_way else 0.0)


class UsageMeter:
    """Turns the workers' growing counts into shares of the time between two readings.

    Args:
        num_sandbox_workers: verdicts that the run's servers can work on at once; None = not known.
        clock: seconds.
    """

    def __init__(self, num_sandbox_workers: int | None, clock: Callable[[], float] = time.monotonic) -> None:
        self._num_sandbox_workers = num_sandbox_workers
        self._clock = clock
        self._read_at = clock()
        self._before: dict[str, EngineUsage] = {}

    def read(self, now: Mapping[str, EngineUsage]) -> Usage:
        """Shares since the last reading; a worker that is new, or was restarted, counts from 0."""
        at = self._clock()
        seconds, self._read_at = max(at - self._read_at, 1e-9), at
        busy_s, work_s = 0.0, 0.0
        for name, usage in now.items():
            before = self._before.get(name, EngineUsage(0.0, 0.0))
            if usage.generate_busy_s < before.generate_busy_s:
                before = EngineUsage(0.0, 0.0)
            busy_s += usage.generate_busy_s - before.generate_busy_s
            work_s += max(0.0, usage.sandbox_work_s - before.sandbox_work_s)
        self._before = dict(now)
        workers = self._num_sandbox_workers
        return Usage(
            inference=min(1.0, busy_s / (seconds * len(now))) if now else None,
            sandbox=None if workers is None else min(1.0, work_s / (seconds * workers)),
        )
