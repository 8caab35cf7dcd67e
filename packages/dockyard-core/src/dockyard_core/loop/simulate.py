"""Deterministic simulation of the loop: a virtual clock, seeded faults, crashes, and its invariants.

The simulation drives the very `LoopMachine`, `Ledger`, `RefitOrder` and `TaskSampler` that the app
runs, with the moves of its pipeline, and checks `INVARIANTS` after every event. Equal schedules and
equal seeds give equal runs.

    outcome = simulate(random_schedule(random.Random(7)), random.Random(7))
"""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from dockyard_core.errors import LedgerViolation
from dockyard_core.loop.ledger import surviving
from dockyard_core.loop.simulate_driver import Driver
from dockyard_core.loop.simulate_schedule import Durations, Faults, Schedule, random_schedule
from dockyard_core.loop.simulate_watch import INVARIANTS, InvariantBroken, Watch, sampler_prefix
from dockyard_core.loop.simulate_world import Crash, World

__all__ = [
    "INVARIANTS",
    "Durations",
    "Faults",
    "InvariantBroken",
    "Outcome",
    "Schedule",
    "random_schedule",
    "sampler_prefix",
    "simulate",
]

MAX_EVENTS_PER_GROUP = 500
"""A run that takes more is taken to go on for ever."""


@dataclass(frozen=True)
class Outcome:
    """A run that kept every invariant to its last step."""

    events: Sequence[Mapping[str, Any]]
    """events.jsonl, with what was rolled back."""
    step_ends: Mapping[int, int]
    """Step -> tick at which its refit was over, in the surviving lineage."""
    ticks: int
    num_moments: int
    """Points at which a crash could have struck."""
    num_crashes: int
    num_kept: int
    """Finished groups that a restore brought back, so that they did not run anew."""
    delivered: Mapping[str, int]
    """Kind -> number of the schedule's events that happened."""

    @property
    def trained(self) -> list[str]:
        """Groups that were trained, ``task#repetition``, in their order, in the surviving lineage."""
        return [event["group"] for event in surviving(self.events) if event["event"] == "trained"]

    @property
    def dropped(self) -> Counter[str]:
        """Cause -> groups dropped, in the surviving lineage."""
        return Counter(event["cause"] for event in surviving(self.events) if event["event"] == "dropped")


def simulate(schedule: Schedule, rng: random.Random, *, invariants: Collection[str] = INVARIANTS) -> Outcome:
    """Run a schedule to its last step, through every crash.

    Args:
        schedule: sizes, durations, faults.
        rng: decides every draw, in the order of the events.
        invariants: which of `INVARIANTS` to check.

    Raises:
        InvariantBroken: names the invariant and what broke it.
    """
    world = World(schedule, rng)
    watch = Watch(schedule, invariants, world.events)
    step_ends: dict[int, int] = {}
    delivered: Counter[str] = Counter()
    most = MAX_EVENTS_PER_GROUP * (schedule.num_groups + schedule.loop.num_slots)
    while True:
        driver = Driver(world, watch)
        try:
            driver.start()
            while not driver.is_done:
                delivered[driver.step().kind] += 1
                if delivered.total() > most:
                    raise InvariantBroken("progress", f"after {most} events {driver.done} steps are done")
            break
        except Crash:
            world.lose()
        except LedgerViolation as error:
            raise InvariantBroken("conservation", str(error)) from error
        finally:
            # A later life overwrites the steps that it does again.
            step_ends |= driver.step_ends
    watch.at_end()
    return Outcome(world.events, step_ends, world.now, world.num_moments, world.num_crashes, watch.num_kept, delivered)
