"""The invariants of the loop, checked against a model that shares no code with the machine.

slots          (S+1)·P groups at most hold a slot, and the machine counts them right
handshake      a group is admitted only while every engine serves the trainer's version
staleness      0 <= version at consumption - version of the oldest valid token <= S
order          no group is consumed before one of an older version, or one that finished earlier in its own
starvation     a finished group is consumed by one of the next S + 1 steps
wakeup         no slot stays free, and no complete batch waits for an idle trainer
progress       something will happen until the last step is done, and versions count the steps that trained
conservation   the counts of machine, model and a recount of the recorded events are equal
exactly_once   in the surviving lineage nothing is admitted, trained or dropped twice
signal         a group without signal is replaced, and no other one, until the step's bound is spent
evaluation     each due evaluation ends once in the surviving lineage; a pinned one sees one version
same_work      what is consumed is the sampler's prefix: what the run without faults would consume
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Mapping, Sequence
from typing import Any, NamedTuple

from dockyard_core.data import TaskSampler
from dockyard_core.loop.ledger import recount, surviving
from dockyard_core.loop.machine import LoopMachine
from dockyard_core.loop.simulate_schedule import Schedule
from dockyard_core.rollout import GroupId

INVARIANTS = (
    "slots",
    "handshake",
    "staleness",
    "order",
    "starvation",
    "wakeup",
    "progress",
    "conservation",
    "exactly_once",
    "signal",
    "evaluation",
    "same_work",
)


class InvariantBroken(AssertionError):
    """A simulated run broke an invariant of the loop."""

    def __init__(self, invariant: str, message: str) -> None:
        super().__init__(f"{invariant}: {message}")
        self.invariant = invariant


class _Finished(NamedTuple):
    order: int
    steps_begun: int
    oldest_version: int


class Watch:
    """A model of one life of the loop, and the checks against it."""

    def __init__(self, schedule: Schedule, invariants: Collection[str], events: Sequence[Mapping[str, Any]]) -> None:
        self._schedule = schedule
        self._enabled = frozenset(invariants)
        self._events = events
        # Not LoopConfig.num_slots: the model shares no figure with the machine either.
        self._num_slots = (schedule.max_staleness + 1) * schedule.num_prompts_per_step
        self.num_kept = 0
        self._oldest: dict[GroupId, int] = {}  # outlives a crash, as the tokens of finished groups do
        self._start()

    def _start(self) -> None:
        self.alive: dict[GroupId, int] = {}
        """Admission version of every group that holds a slot and is not trained."""
        self.finished: dict[GroupId, _Finished] = {}
        self.held: dict[str, int | None] = {}
        """The version that each engine truly serves; None while it is fenced."""
        self._num_awaiting = 0
        self._num_finished = 0
        self._steps_begun = 0
        self.version = 0
        self._num_replaced = 0
        self._versions_seen: dict[int, set[int]] = {}
        self._counts: Counter[str] = Counter()

    def check(self, invariant: str, holds: bool, message: str) -> None:
        """Raise InvariantBroken unless it holds or is not asked about."""
        if not holds and invariant in self._enabled:
            raise InvariantBroken(invariant, message)

    def begin(self, engines: Sequence[str]) -> None:
        """A run starts."""
        self._start()
        self.held = dict.fromkeys(engines, None)

    def restored(self, engines: Sequence[str], step: int, anew: Sequence[GroupId]) -> None:
        """A life goes on after ``step``: rebuild the model from the recorded events alone."""
        self._start()
        self.held = dict.fromkeys(engines, None)
        for event in surviving(self._events):
            self._replay(event)
        self.check("progress", self._steps_begun == step, f"{self._steps_begun} steps were begun, restored is {step}")
        self.version = self._counts["trained"] // self._schedule.num_prompts_per_step
        under_way = [group_id for group_id in self.alive if group_id not in self.finished]
        self.num_kept += len(self.finished)
        self.check("same_work", list(anew) == under_way, f"under way were {under_way}, run anew are {anew}")

    def _replay(self, event: Mapping[str, Any]) -> None:
        task_id, _, repetition = event.get("group", "#0").rpartition("#")
        kind, group_id = event["event"], GroupId(task_id, int(repetition))
        if kind == "admitted":
            self.alive[group_id] = event["policy_version"]
            self._counts["admitted"] += 1
        elif kind == "finished":
            self.ended(group_id, self._oldest.get(group_id, 0))
        elif kind == "step_begun":
            self._steps_begun += 1
        elif kind in ("trained", "dropped"):
            self.check("conservation", group_id in self.alive, f"{group_id} is {kind}, but its admission is lost")
            self.alive.pop(group_id, None)
            self.finished.pop(group_id, None)
            is_consumed = kind == "trained" or event["cause"] == "nonfinite"
            self._counts[kind] += 1
            self._counts["consumed"] += is_consumed
            self._num_replaced = 0 if is_consumed else self._num_replaced + (event["cause"] == "zero_signal")

    def admitted(self, group_id: GroupId) -> None:
        """A group took a slot."""
        held = {engine: version for engine, version in self.held.items() if version != self.version}
        self.check("handshake", not held, f"{group_id} was admitted at version {self.version} while {held}")
        self.alive[group_id] = self.version
        self._counts["admitted"] += 1
        taken, most = self._num_taken, self._num_slots
        self.check("slots", taken <= most, f"{group_id} took one of {taken} slots, there are {most}")

    def sampled(self, group_id: GroupId, oldest_version: int) -> None:
        """A rollout of a group under way was sampled by this version and later ones."""
        admitted = self.alive.get(group_id, 0)
        self.check("handshake", oldest_version >= admitted, f"{group_id} of {admitted} was sampled by {oldest_version}")

    def ended(self, group_id: GroupId, oldest_version: int) -> None:
        """A group waits to be trained."""
        self._oldest[group_id] = oldest_version
        self.finished[group_id] = _Finished(self._num_finished, self._steps_begun, oldest_version)
        self._num_finished += 1

    def dropped(self, group_id: GroupId) -> None:
        """A group left before any step."""
        del self.alive[group_id]
        self.finished.pop(group_id, None)
        self._counts["dropped"] += 1

    def signal(self, group_id: GroupId, cause: str | None, *, is_equal: bool) -> None:
        """A group ended and left by ``cause``, if it left; ``is_equal``: its rollouts are all worth the same."""
        may_replace = self._num_replaced < self._schedule.max_replaced_per_step
        is_replaced = cause == "zero_signal"
        self.check("signal", is_replaced == (is_equal and may_replace), f"{group_id} left by {cause}: {is_equal=}")
        self._num_replaced += is_replaced

    def is_under_way(self, group_id: GroupId) -> bool:
        """Whether the end of this group is still to come."""
        return group_id in self.alive and group_id not in self.finished

    def step_begins(self, batch: Sequence[GroupId]) -> None:
        """A batch was chosen."""
        is_whole = len(set(batch)) == self._schedule.num_prompts_per_step
        self.check("progress", is_whole, f"a step takes {self._schedule.num_prompts_per_step} groups, got {batch}")
        left = [group_id for group_id in self.alive if group_id not in batch]
        for group_id in batch:
            version, finished = self.alive[group_id], self.finished[group_id]
            for other in left:
                earlier = other in self.finished and self.finished[other].order < finished.order
                is_fair = self.alive[other] > version or (self.alive[other] == version and not earlier)
                self.check("order", is_fair, f"{group_id} of {version} overtook {other} of {self.alive[other]}")
            waited = self._steps_begun - finished.steps_begun
            self.check("starvation", waited <= self._schedule.max_staleness, f"{group_id} waited for {waited} steps")
        for group_id in (other for other in left if other in self.finished):
            waited = self._steps_begun - self.finished[group_id].steps_begun
            self.check("starvation", waited < self._schedule.max_staleness, f"{group_id} has waited for {waited} steps")
        self._steps_begun += 1

    def step_ends(self, batch: Sequence[GroupId], *, is_skipped: bool) -> None:
        """A batch left the loop."""
        for group_id in batch:
            staleness = self.version - self.finished[group_id].oldest_version
            self.check(
                "staleness",
                is_skipped or 0 <= staleness <= self._schedule.max_staleness,
                f"{group_id} was trained {staleness} versions late, bound {self._schedule.max_staleness}",
            )
            del self.alive[group_id], self.finished[group_id]
        self._counts["dropped" if is_skipped else "trained"] += len(batch)
        self._counts["consumed"] += len(batch)
        self._num_replaced = 0
        if not is_skipped:
            self._num_awaiting += len(batch)
            self.version += 1

    def refit_begins(self, engines: Sequence[str]) -> None:
        """Engines are fenced."""
        self.held |= dict.fromkeys(engines, None)

    def evaluation_begins(self, step: int) -> None:
        """Held-out tasks are sampled."""
        self._versions_seen[step] = self._versions_held

    def evaluation_ends(self, step: int, *, is_pinned: bool) -> None:
        """Held-out tasks have been judged."""
        seen = self._versions_seen.pop(step) | self._versions_held
        self.check("evaluation", not is_pinned or len(seen) <= 1, f"that after step {step} was pinned, saw {seen}")

    def refit_ended(self, is_fresh: bool) -> None:
        """A try of a refit is over, and the machine says whether all engines are fresh."""
        truly = self._is_fresh
        self.check("handshake", is_fresh == truly, f"fresh is said to be {is_fresh}, engines hold {self.held}")
        if truly:
            self._num_awaiting = 0

    def after_event(self, machine: LoopMachine, *, is_idle: bool) -> None:
        """Check what holds after every event; ``is_idle``: the trainer waits for a batch."""
        taken, counted = self._num_taken, machine.num_slots_taken
        self.check("slots", counted == taken, f"{taken} slots are taken, the machine counts {counted}")
        missing = self._schedule.num_groups - self._counts["consumed"] - len(self.alive)
        free = min(self._num_slots - taken, missing) if self._is_fresh else 0
        self.check("wakeup", free <= 0, f"{free} slots stay free at version {self.version}")
        self.check("wakeup", not (is_idle and self._holds_batch), "a complete batch waits for an idle trainer")
        version, ledger = machine.policy_version, machine.ledger
        self.check("progress", version == self.version, f"the version is {self.version}, the machine says {version}")
        counts = (ledger.admitted_groups, ledger.trained_groups, ledger.dropped_groups.total(), len(ledger.alive))
        self.check("conservation", counts == self._model_counts, f"ledger {counts}, model {self._model_counts}")

    def recounts(self) -> None:
        """Count the recorded events again; none of them may be missing."""
        sequence = [event["seq"] for event in self._events]
        self.check("conservation", sequence == list(range(len(sequence))), f"the events are numbered {sequence}")
        counts = recount(self._events)
        counted = tuple(counts[kind] for kind in ("admitted", "trained", "dropped", "alive"))
        self.check("conservation", counted == self._model_counts, f"events {counts}, model {self._model_counts}")
        size = self._schedule.num_generations_per_prompt
        rollouts = counts["trained_rollouts"] + counts["dropped_rollouts"] + counts["alive_rollouts"]
        self.check(
            "conservation",
            counts["admitted_rollouts"] == rollouts == size * counts["admitted"],
            f"the rollouts do not add up: {counts}",
        )

    def at_end(self) -> None:
        """Check the surviving lineage of a whole run."""
        lineage: dict[str, list[str]] = {"admitted": [], "trained": [], "dropped": [], "nonfinite": []}
        for event in surviving(self._events):
            kind = event["event"]
            if kind in lineage:
                lineage[kind].append(event["group"])
            if kind == "dropped" and event["cause"] == "nonfinite":
                lineage["nonfinite"].append(event["group"])
        for what, groups in (("admitted", lineage["admitted"]), ("left", lineage["trained"] + lineage["dropped"])):
            twice = [group for group, count in Counter(groups).items() if count > 1]
            self.check("exactly_once", not twice, f"{what} more than once: {twice}")
        consumed = Counter(lineage["trained"] + lineage["nonfinite"])
        needed = self._schedule.num_groups
        self.check("same_work", consumed.total() == needed, f"{consumed.total()} groups were consumed, not {needed}")
        self.check("same_work", not self.alive, f"nothing would train {list(self.alive)}")
        evaluated = [event["step"] for event in surviving(self._events) if event["event"] == "evaluated"]
        self.check("evaluation", sorted(evaluated) == self._schedule.evaluations, f"evaluated after {evaluated}")
        visits = sampler_prefix(self._schedule, len(lineage["admitted"]))
        self.check("same_work", lineage["admitted"] == visits, f"admitted {lineage['admitted']}, visits {visits}")
        if not self._schedule.drops_groups:
            self.check("same_work", consumed == Counter(visits), f"trained {consumed}, visits {visits}")
        self.recounts()

    @property
    def _num_taken(self) -> int:
        return len(self.alive) + self._num_awaiting

    @property
    def _versions_held(self) -> set[int]:
        return {version for version in self.held.values() if version is not None}

    @property
    def _is_fresh(self) -> bool:
        return all(version == self.version for version in self.held.values())

    @property
    def _holds_batch(self) -> bool:
        oldest_pending = min((v for g, v in self.alive.items() if g not in self.finished), default=self.version)
        ready = sum(self.alive[group_id] <= oldest_pending for group_id in self.finished)
        return ready >= self._schedule.num_prompts_per_step

    @property
    def _model_counts(self) -> tuple[int, ...]:
        return *(self._counts[kind] for kind in ("admitted", "trained", "dropped")), len(self.alive)


def sampler_prefix(schedule: Schedule, count: int) -> list[str]:
    """The first visits of the sampler, as they are written in the ledger."""
    sampler = TaskSampler(schedule.num_tasks, schedule.sampler_seed)
    return [f"task-{index}#{repetition}" for index, repetition in (sampler.next() for _ in range(count))]
