"""What outlives the driver in a simulation: the clock, the disk, and the messages under way."""

from __future__ import annotations

import heapq
import json
import random
from collections.abc import Mapping
from typing import Any, NamedTuple

from dockyard_core.loop.simulate_schedule import Schedule


class Crash(Exception):
    """The driver and its engines are gone; the disk stays."""


class Event(NamedTuple):
    """Something that will happen; the order of scheduling decides between equal times.

    ``life`` counts the crashes before it, and not the incarnations that the disk knows of: a crash of
    the power may take the record of an incarnation with it.
    """

    time: int
    order: int
    life: int
    kind: str
    subject: Any


class World:
    """Clock, messages under way, and the disk of one simulated run."""

    def __init__(self, schedule: Schedule, rng: random.Random) -> None:
        self.schedule = schedule
        self.rng = rng
        self.now = 0
        self.num_moments = 0
        self.num_crashes = 0
        self.num_faults = 0
        self.events: list[dict[str, Any]] = []
        """events.jsonl."""
        self.checkpoints: dict[int, str] = {}
        """Step -> loop.json of every complete checkpoint."""
        self._num_synced = 0
        self._queue: list[Event] = []
        self._num_scheduled = 0

    def chance(self, probability: float) -> bool:
        """Whether a fault of this probability strikes now."""
        return probability > 0 and self.rng.random() < probability and self.strike()

    def strike(self) -> bool:
        """Spend one fault. False = as many struck as may: the loop must end once they cease, not before."""
        self.num_faults += 1
        return self.num_faults <= self.schedule.faults.max_faults

    def moment(self) -> None:
        """A point at which a crash may strike; raises Crash when it does."""
        faults = self.schedule.faults
        moment, self.num_moments = self.num_moments, self.num_moments + 1
        may_crash = self.num_crashes < faults.max_crashes
        if moment in faults.crash_moments or (may_crash and self.chance(faults.crash)):
            self.num_crashes += 1
            raise Crash(f"at moment {moment}")

    def after(self, ticks: int, life: int, kind: str, subject: Any = None) -> None:
        """Schedule an event for one life of the driver."""
        heapq.heappush(self._queue, Event(self.now + ticks, self._num_scheduled, life, kind, subject))
        self._num_scheduled += 1

    def next_event(self, life: int) -> Event | None:
        """Let time pass to the next event of this life; None = nothing will ever happen again.

        What was sent to an earlier life does not reach this one: its connections died with it.
        """
        while self._queue:
            event = heapq.heappop(self._queue)
            if event.life == life:
                self.now = event.time
                return event
        return None

    def book(self, event: Mapping[str, Any]) -> None:
        """The ledger's sink."""
        self.moment()
        self.events.append(dict(event))

    def sync(self) -> None:
        """Commit point of the events."""
        self._num_synced = len(self.events)

    def save(self, step: int, loop_state: str) -> None:
        """A checkpoint is complete; the oldest beyond ``keep_last`` goes."""
        self.checkpoints[step] = loop_state
        for old in sorted(self.checkpoints)[: -self.schedule.keep_last]:
            del self.checkpoints[old]

    def lose(self) -> None:
        """What a crash takes from the disk."""
        faults = self.schedule.faults
        if self.chance(faults.power_loss):
            del self.events[self._num_synced :]
        if self.checkpoints and self.chance(faults.damaged):
            del self.checkpoints[max(self.checkpoints)]

    @property
    def incarnation(self) -> int:
        """Of the life that starts now; 0 when nothing was ever written."""
        return 1 + sum(event["event"] == "restored" for event in self.events) if self.events else 0

    def restore_point(self) -> tuple[int, dict[str, Any] | None]:
        """(step, loop.json) of the newest complete checkpoint, or (0, None)."""
        if not self.checkpoints:
            return 0, None
        step = max(self.checkpoints)
        return step, json.loads(self.checkpoints[step])
