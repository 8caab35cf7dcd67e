"""Every invariant of the simulation is shown to bite: each planted bug is found within a few schedules."""

from __future__ import annotations

import random
from collections.abc import Callable

import pytest

from dockyard_core import GroupId
from dockyard_core.data import TaskSampler
from dockyard_core.loop import Ledger, LoopConfig, LoopMachine, RefitOrder, ReplayBuffer
from dockyard_core.loop.simulate import INVARIANTS, InvariantBroken, random_schedule, simulate
from dockyard_core.loop.simulate_driver import Driver
from dockyard_core.loop.simulate_fleet import Fleet
from dockyard_core.loop.simulate_world import World

MAX_SCHEDULES = 500

Patch = pytest.MonkeyPatch
Mutation = Callable[[Patch], None]
MUTATIONS: list[tuple[Mutation, str]] = []


def breaks(*invariants: str) -> Callable[[Mutation], Mutation]:
    def register(mutation: Mutation) -> Mutation:
        MUTATIONS.extend((mutation, invariant) for invariant in invariants)
        return mutation

    return register


def after(patch: Patch, kind: type, name: str, then: Callable) -> None:
    """Let ``then(self, answer)`` follow a method; what it returns is the new answer."""
    original = getattr(kind, name)
    patch.setattr(kind, name, lambda self, *args, **kwargs: then(self, original(self, *args, **kwargs)))


@breaks("handshake")
def admits_while_an_engine_is_stale(patch: Patch) -> None:
    def num_admissible(self: LoopMachine) -> int:
        needed = self.config.max_steps * self.config.num_prompts_per_step
        needed -= self.ledger.trained_groups + len(self._buffer) + self._nonfinite_groups
        return min(self.config.num_slots - self.num_slots_taken, needed)

    patch.setattr(LoopMachine, "num_admissible", property(num_admissible))


@breaks("handshake")
def skips_the_attestation_of_all_but_one_engine(patch: Patch) -> None:
    patch.setattr(RefitOrder, "is_fresh", property(lambda self: self._wanted in self._held.values()))


@breaks("handshake", "exactly_once")
def takes_the_attestation_of_any_version(patch: Patch) -> None:
    patch.setattr(RefitOrder, "attest", lambda self, engine, version, **_: self._held.update({engine: self._wanted}))


@breaks("handshake")
def takes_the_engines_for_fresh_after_a_restore(patch: Patch) -> None:
    original = RefitOrder.__init__
    patch.setattr(
        RefitOrder, "__init__", lambda self, engines, policy_version=0, **_: original(
            self, engines, policy_version=policy_version
        )
    )  # fmt: skip


@breaks("slots")
def frees_the_slots_before_the_refit(patch: Patch) -> None:
    after(patch, LoopMachine, "trained", lambda self, version: setattr(self, "_awaiting_refit", 0) or version)


@breaks("wakeup", "progress")
def never_frees_the_slots_of_trained_groups(patch: Patch) -> None:
    patch.setattr(LoopMachine, "end_refit", lambda self: self.refit.end())


@breaks("slots", "wakeup", "progress")
def keeps_the_slot_of_a_dropped_group(patch: Patch) -> None:
    after(
        patch, LoopMachine, "_discard", lambda self, _: setattr(self, "_awaiting_refit", self._awaiting_refit + 1)
    )  # fmt: skip


def _more_slots(patch: Patch, more: int) -> None:
    patch.setattr(
        LoopConfig, "num_slots", property(lambda self: (self.max_staleness + 1) * self.num_prompts_per_step + more)
    )


def _trusts_staleness(patch: Patch) -> None:
    patch.setattr(LoopMachine, "staleness", lambda self, group_id: 0)


@breaks("slots", "staleness")
def has_one_slot_too_many(patch: Patch) -> None:
    _more_slots(patch, 1)
    _trusts_staleness(patch)


@breaks("wakeup", "progress")
def has_one_slot_too_few(patch: Patch) -> None:
    _more_slots(patch, -1)


@breaks("order", "starvation", "staleness")
def consumes_the_younger_version_first(patch: Patch) -> None:
    def peek(self: ReplayBuffer, count: int) -> tuple[GroupId, ...] | None:
        batch = [group_id for version in sorted(self._finished, reverse=True) for group_id in self._finished[version]]
        return tuple(batch[:count]) if len(batch) >= count else None

    patch.setattr(ReplayBuffer, "peek", peek)
    _trusts_staleness(patch)


@breaks("order", "staleness")
def does_not_wait_for_an_older_group_under_way(patch: Patch) -> None:
    def peek(self: ReplayBuffer, count: int) -> tuple[GroupId, ...] | None:
        batch = [group_id for version in sorted(self._finished) for group_id in self._finished[version]]
        return tuple(batch[:count]) if len(batch) >= count else None

    patch.setattr(ReplayBuffer, "peek", peek)
    _trusts_staleness(patch)


@breaks("order")
def consumes_the_last_finished_first(patch: Patch) -> None:
    def rotate(self: ReplayBuffer, _: None) -> None:
        for finished in self._finished.values():
            finished.insert(0, finished.pop()) if finished else None

    after(patch, ReplayBuffer, "finish", rotate)


@breaks("wakeup")
def waits_for_a_whole_version(patch: Patch) -> None:
    original = ReplayBuffer.peek

    def peek(self: ReplayBuffer, count: int) -> tuple[GroupId, ...] | None:
        batch = original(self, count)
        return None if batch and any(self._pending.get(self._version_of[group_id]) for group_id in batch) else batch

    patch.setattr(ReplayBuffer, "peek", peek)


@breaks("wakeup", "progress")
def does_not_wake_the_trainer(patch: Patch) -> None:
    patch.setattr(Driver, "_changed", lambda self: None)


@breaks("conservation")
def forgets_a_drop(patch: Patch) -> None:
    patch.setattr(Ledger, "drop", lambda self, group_id, cause, **_: self._leave(group_id, "dropped"))


@breaks("conservation")
def does_not_record_a_drop(patch: Patch) -> None:
    def drop(self: Ledger, group_id: GroupId, cause: str, **_: object) -> None:
        self.dropped_groups[cause] += 1
        self.dropped_rollouts[cause] += self._leave(group_id, "dropped")

    patch.setattr(Ledger, "drop", drop)


@breaks("conservation")
def saves_a_checkpoint_before_the_events_that_it_vouches_for(patch: Patch) -> None:
    patch.setattr(World, "sync", lambda self: None)


@breaks("conservation")
def keeps_the_counts_of_what_was_rolled_back(patch: Patch) -> None:
    after(patch, Ledger, "restore", lambda self, alive: setattr(self, "trained_groups", 0) or alive)


@breaks("conservation")
def books_the_groups_alive_at_a_restore_again(patch: Patch) -> None:
    def admit_again(self: LoopMachine, alive: tuple[GroupId, ...]) -> tuple[GroupId, ...]:
        for group_id in alive:
            del self.ledger._alive[group_id]
            self.ledger.admit(group_id, num_rollouts=self.config.num_generations_per_prompt, policy_version=0)
        return alive

    after(patch, LoopMachine, "restore", admit_again)


@breaks("exactly_once", "same_work")
def does_not_restore_the_sampler(patch: Patch) -> None:
    patch.setattr(TaskSampler, "from_state", lambda state: TaskSampler(state["num_tasks"], state["seed"]))


@breaks("same_work")
def restores_the_sampler_one_visit_ahead(patch: Patch) -> None:
    original = TaskSampler.from_state

    def from_state(state: dict[str, int]) -> TaskSampler:
        sampler = original(state)
        sampler.next()
        return sampler

    patch.setattr(TaskSampler, "from_state", from_state)


@breaks("same_work", "progress")
def does_not_run_the_last_group_anew(patch: Patch) -> None:
    after(patch, LoopMachine, "restore", lambda self, alive: alive[:-1])


@breaks("exactly_once")
def takes_the_end_of_a_group_twice(patch: Patch) -> None:
    original = ReplayBuffer.finish

    def finish(self: ReplayBuffer, group_id: GroupId) -> None:
        if group_id not in self._finished.get(self._version_of.get(group_id, -1), ()):
            original(self, group_id)

    patch.setattr(ReplayBuffer, "finish", finish)


@breaks("exactly_once")
def takes_an_attestation_that_answers_an_earlier_try(patch: Patch) -> None:
    original = RefitOrder.attest
    patch.setattr(
        RefitOrder, "attest", lambda self, engine, version, **_: None if not self._is_under_way and self._held[engine]
        == version else original(self, engine, version)
    )  # fmt: skip


@breaks("handshake")
def takes_a_dead_engine_for_a_fresh_one(patch: Patch) -> None:
    patch.setattr(RefitOrder, "lose", lambda self, engine: None)


@breaks("progress")
def never_takes_an_engine_back(patch: Patch) -> None:
    patch.setattr(Driver, "_take_engine_back", lambda self, engine: None)


@breaks("progress")
def does_not_wake_up_when_an_engine_is_back(patch: Patch) -> None:
    patch.setattr(Driver, "_take_engine_back", lambda self, engine: self._fleet.lost.discard(engine))


@breaks("progress")
def forgets_the_groups_of_a_dead_engine(patch: Patch) -> None:
    original = Fleet.die

    def die(self: Fleet, engine: str) -> None:
        self._runs = {group_id: run for group_id, run in self._runs.items() if run[0] != engine}
        original(self, engine)

    patch.setattr(Fleet, "die", die)


@breaks("signal")
def replaces_every_group_without_signal(patch: Patch) -> None:
    patch.setattr(LoopMachine, "_may_replace", property(lambda self: self.config.max_replaced_per_step > 0))


@breaks("signal")
def trains_groups_without_signal(patch: Patch) -> None:
    patch.setattr(LoopMachine, "_may_replace", False)


@breaks("signal")
def forgets_after_a_crash_how_many_groups_were_replaced(patch: Patch) -> None:
    after(patch, LoopMachine, "restore", lambda self, anew: setattr(self, "_num_replaced", 0) or anew)


@breaks("evaluation")
def refits_under_a_pinned_evaluation(patch: Patch) -> None:
    patch.setattr(LoopMachine, "is_pinned", False)


@breaks("evaluation")
def does_not_begin_an_interrupted_evaluation_anew(patch: Patch) -> None:
    after(patch, LoopMachine, "restore", lambda self, anew: setattr(self, "interrupted_evaluations", ()) or anew)


@breaks("evaluation")
def begins_an_evaluation_anew_that_was_over(patch: Patch) -> None:
    def also_the_first(self: LoopMachine, anew: tuple[GroupId, ...]) -> tuple[GroupId, ...]:
        self.interrupted_evaluations = ((1, False),)
        return anew

    after(patch, LoopMachine, "restore", also_the_first)


@breaks("same_work")
def runs_finished_groups_anew_and_keeps_them(patch: Patch) -> None:
    after(patch, LoopMachine, "restore", lambda self, _: tuple(self.ledger.alive))


@breaks("order")
def takes_restored_groups_for_admitted_just_now(patch: Patch) -> None:
    original = LoopMachine.restore

    def restore(self: LoopMachine, snapshot: dict, *, incarnation: int) -> tuple[GroupId, ...]:
        versions = [snapshot["policy_version"] for _ in snapshot["admission_versions"]]
        return original(self, {**snapshot, "admission_versions": versions}, incarnation=incarnation)

    patch.setattr(LoopMachine, "restore", restore)


@breaks("progress", "same_work")
def takes_a_failed_checkpoint_for_a_complete_one(patch: Patch) -> None:
    def step_of_the_last_snapshot(self: World) -> tuple[int, dict | None]:
        taken = [event["step"] for event in self.events if event["event"] in ("checkpoint", "checkpoint_failed")]
        step, state = original(self)
        return max([step, *taken]), state

    original = World.restore_point
    patch.setattr(World, "restore_point", step_of_the_last_snapshot)


@breaks("same_work")
def replaces_the_groups_of_a_skipped_step(patch: Patch) -> None:
    patch.setattr(LoopMachine, "_nonfinite_groups", 0)


@breaks("progress")
def makes_a_version_of_a_skipped_step(patch: Patch) -> None:
    after(patch, LoopMachine, "skipped", lambda self, _: self.refit.trained(self.policy_version + 1))


@breaks("same_work")
def admits_groups_that_no_step_will_train(patch: Patch) -> None:
    def num_admissible(self: LoopMachine) -> int:
        return self.config.num_slots - self.num_slots_taken if self.refit.is_fresh else 0

    patch.setattr(LoopMachine, "num_admissible", property(num_admissible))


def found_after(invariant: str) -> int | None:
    """Schedules until this invariant alone finds a bug; other failures of a broken machine do not count."""
    for seed in range(MAX_SCHEDULES):
        rng = random.Random(seed)
        try:
            simulate(random_schedule(rng), rng, invariants={invariant})
        except InvariantBroken as broken:
            if broken.invariant == invariant:
                return seed + 1
        except (AssertionError, KeyError, ValueError):
            continue
    return None


@pytest.mark.parametrize(("mutation", "invariant"), MUTATIONS, ids=lambda part: getattr(part, "__name__", part))
def test_an_invariant_finds_a_planted_bug(mutation: Mutation, invariant: str, monkeypatch: Patch) -> None:
    mutation(monkeypatch)
    assert found_after(invariant) is not None


def test_every_invariant_has_a_bug_that_it_finds() -> None:
    assert {invariant for _, invariant in MUTATIONS} == set(INVARIANTS)
