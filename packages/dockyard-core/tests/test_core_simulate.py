from __future__ import annotations

import random
import statistics
import time
from collections import Counter

import pytest
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule, run_state_machine_as_test

from dockyard_core import GroupId, LedgerViolation
from dockyard_core.data import TaskSampler
from dockyard_core.loop import Ledger, LoopConfig, LoopMachine, Member
from dockyard_core.loop.simulate import (
    INVARIANTS,
    Durations,
    Faults,
    InvariantBroken,
    Schedule,
    random_schedule,
    sampler_prefix,
    simulate,
)
from dockyard_core.loop.simulate_driver import Driver
from dockyard_core.loop.simulate_watch import Watch
from dockyard_core.loop.simulate_world import Event, World


def fixed(ticks: int) -> Durations:
    return Durations(mean=ticks)


def run_many(seeds: range) -> Counter[str]:
    seen: Counter[str] = Counter()
    for seed in seeds:
        rng = random.Random(seed)
        schedule = random_schedule(rng)
        try:
            outcome = simulate(schedule, rng)
        except Exception as error:
            error.add_note(f"seed {seed}: {schedule}")
            raise
        seen += Counter(outcome.delivered) + outcome.dropped + Counter(crash=outcome.num_crashes)
        seen["checkpoint_failed"] += sum(event["event"] == "checkpoint_failed" for event in outcome.events)
        seen["kept"] += outcome.num_kept
        seen["rolled_back"] += sum(event.get("rolled_back", 0) > 0 for event in outcome.events)
    return seen


def test_2000_random_schedules_with_faults_keep_every_invariant() -> None:
    seen = run_many(range(2_000))
    # Each kind of fault must have struck often enough for the sentence above to mean something.
    assert seen["crash"] > 2_000
    assert seen["rolled_back"] > 1_000
    often = ("attested_again", "group_lost", "nonfinite", "deadline", "infra_error", "zero_signal", "engine_died")
    for kind in (*often, "checkpoint_failed"):
        assert seen[kind] > 500, kind
    assert seen["kept"] > 200


@pytest.mark.nightly
@pytest.mark.timeout(3600)
def test_100000_random_schedules_with_faults_keep_every_invariant() -> None:
    run_many(range(10_000, 110_000))


@given(st.randoms(use_true_random=False))
@settings(max_examples=150, deadline=None, suppress_health_check=[HealthCheck.too_slow, HealthCheck.data_too_large])
def test_any_schedule_keeps_every_invariant_and_shrinks(rng: random.Random) -> None:
    simulate(random_schedule(rng), rng)


def test_equal_seeds_give_equal_runs() -> None:
    schedule = random_schedule(random.Random(5))
    one, two, other = (simulate(schedule, random.Random(seed)) for seed in (1, 1, 2))
    assert one == two
    assert one.events != other.events


class AnyOrder(World):
    """Delivers the pending events in any order, not only in that of the clock."""

    choice = 0

    def next_event(self, life: int) -> Event | None:
        pending = sorted(event for event in self._queue if event.life == life)
        if not pending:
            return None
        event = pending[self.choice % len(pending)]
        self._queue.remove(event)
        self.now = max(self.now, event.time)
        return event


class LoopInAnyOrder(RuleBasedStateMachine):
    """hypothesis chooses what happens next, and shrinks it to the shortest history that breaks."""

    def __init__(self) -> None:
        super().__init__()
        faults = Faults(
            max_faults=40,
            duplicated=0.2,
            lost=0.1,
            infra_error=0.1,
            not_attested=0.3,
            nonfinite=0.2,
            zero_signal=0.2,
            engine_death=0.1,
            disk_full=0.2,
        )
        schedule = Schedule(
            max_staleness=2,
            max_steps=5,
            num_engines=2,
            max_replaced_per_step=2,
            evaluate_every=2,
            is_pinned=False,
            checkpoint_every=1,
            faults=faults,
        )
        self.world = AnyOrder(schedule, random.Random(0))
        self.watch = Watch(schedule, INVARIANTS, self.world.events)
        self.is_broken = False
        self.live()

    def live(self) -> None:
        self.driver = Driver(self.world, self.watch)
        self.driver.start()

    @rule(choices=st.lists(st.integers(0, 7), min_size=1, max_size=40))
    def deliver(self, choices: list[int]) -> None:
        self.is_broken = True
        for choice in choices:
            if not self.driver.is_done:
                self.world.choice = choice
                self.driver.step()
        self.is_broken = False

    @precondition(lambda self: not self.driver.is_done)
    @rule(is_damaged=st.booleans())
    def crash(self, is_damaged: bool) -> None:
        self.world.num_crashes += 1
        if is_damaged and self.world.checkpoints:
            del self.world.checkpoints[max(self.world.checkpoints)]
        self.live()

    @invariant()
    def counts_are_those_of_the_recorded_events(self) -> None:
        self.watch.recounts()

    def teardown(self) -> None:
        if self.is_broken:
            return
        self.world.choice = 0
        while not self.driver.is_done:
            self.driver.step()
        self.watch.at_end()


TestLoopInAnyOrder = LoopInAnyOrder.TestCase
SETTINGS = settings(max_examples=60, stateful_step_count=8, deadline=None, phases=set(Phase) - {Phase.explain})
TestLoopInAnyOrder.settings = SETTINGS


def test_hypothesis_finds_a_planted_bug_and_shrinks_it(monkeypatch: pytest.MonkeyPatch) -> None:
    """The sampler is not restored: shown by two calls, up to a checkpoint and a crash after it."""
    monkeypatch.setattr(TaskSampler, "from_state", lambda state: TaskSampler(state["num_tasks"], state["seed"]))
    search = settings(SETTINGS, max_examples=1_000, database=None, derandomize=True, report_multiple_bugs=False)
    with pytest.raises((InvariantBroken, LedgerViolation)) as caught:
        run_state_machine_as_test(LoopInAnyOrder, settings=search)
    calls = "".join(caught.value.__notes__)
    assert 2 <= calls.count(".deliver(") + calls.count(".crash(") <= 4


@pytest.mark.parametrize("staleness", [0, 1, 3])
def test_a_crash_at_every_moment_changes_nothing_that_is_trained(staleness: int) -> None:
    """The moments are every event of the schedule and, before it is written, every event of the ledger."""

    def schedule(*moments: int) -> Schedule:
        return Schedule(
            max_staleness=staleness,
            num_engines=2,
            checkpoint_every=1,
            evaluate_every=2,
            is_pinned=staleness != 1,
            train=fixed(3),
            refit=fixed(2),
            faults=Faults(crash_moments=frozenset(moments)),
        )

    whole = simulate(schedule(), random.Random(0))
    assert Counter(whole.trained) == Counter(sampler_prefix(schedule(), 8))
    assert whole.num_moments > 50
    for moment in range(whole.num_moments):
        outcome = simulate(schedule(moment, moment + 1, moment + 9), random.Random(0))
        assert outcome.num_crashes >= 1
        assert Counter(outcome.trained) == Counter(whole.trained)
        if staleness == 0:
            assert outcome.trained == whole.trained


@pytest.mark.parametrize("staleness", range(5))
@pytest.mark.parametrize(
    ("generate", "train", "refit"), [(60, 10, 2), (7, 10, 3), (45, 9, 6), (1, 1, 0), (120, 20, 10)]
)
@pytest.mark.parametrize(("prompts", "engines"), [(1, 1), (3, 2)])
def test_the_period_is_that_of_the_law(
    staleness: int, generate: int, train: int, refit: int, prompts: int, engines: int
) -> None:
    """max(T + F, (G + T + F) / (S + 1)), exactly: over any S + 1 steps after the first S + 1."""
    schedule = Schedule(
        num_prompts_per_step=prompts,
        num_engines=engines,
        max_staleness=staleness,
        max_steps=8 * (staleness + 1),
        generate=fixed(generate),
        train=fixed(train),
        refit=fixed(refit),
    )
    ends = simulate(schedule, random.Random(0)).step_ends
    for step in range(staleness + 1, schedule.max_steps - staleness):
        lasted = ends[step + staleness + 1] - ends[step] if step + staleness + 1 in ends else None
        if lasted is not None:
            assert lasted == max((staleness + 1) * (train + refit), generate + train + refit)


@pytest.mark.parametrize("staleness", [0, 1, 4])
def test_a_straggler_delays_by_at_most_its_deadline_and_is_trained_if_it_ends_before(staleness: int) -> None:
    def run(deadline: int, *slow: int):
        schedule = Schedule(
            max_staleness=staleness,
            max_steps=12,
            generate=fixed(10),
            train=fixed(4),
            refit=fixed(1),
            deadline=deadline,
            slow_groups=frozenset(slow),
            slow_factor=50,
        )
        return simulate(schedule, random.Random(0))

    even = run(600)
    patient, strict = run(600, 3), run(200, 3)
    assert even.ticks < patient.ticks <= even.ticks + 500
    assert Counter(patient.trained) == Counter(even.trained)
    assert patient.dropped == {}
    assert even.ticks < strict.ticks <= even.ticks + 200
    assert strict.dropped == {"deadline": 1}
    assert len(strict.trained) == len(even.trained)


def test_waiting_for_slow_work_keeps_its_share_where_discarding_it_would_not() -> None:
    """Every fifth task takes 8 times as long. A tight deadline stands for discarding."""

    def slow_share(deadline: int | None) -> float:
        schedule = Schedule(
            num_prompts_per_step=4,
            max_staleness=2,
            max_steps=25,
            num_tasks=1_000,
            generate=fixed(10),
            deadline=deadline,
            slow_groups=frozenset(range(4, 1_000, 5)),
            slow_factor=8,
        )
        visits = sampler_prefix(schedule, 1_000)
        slow = {visits[number] for number in schedule.slow_groups}
        trained = simulate(schedule, random.Random(0)).trained
        assert len(trained) == 100
        return sum(group in slow for group in trained) / len(trained)

    assert slow_share(None) == slow_share(80) == 0.2
    assert slow_share(79) == 0.0


def test_10000_live_rollouts_cost_less_than_a_millisecond_per_event() -> None:
    config = LoopConfig(num_prompts_per_step=500, num_generations_per_prompt=4, max_staleness=4)
    loop = LoopMachine(config, Ledger(lambda event: None), ["engine-0"])
    groups = [GroupId(f"task-{number}", 0) for number in range(2_500)]
    for group_id in groups:
        loop.admit(group_id)
    costs = []
    for group_id in groups[:300]:
        started = time.process_time()
        loop.finish(group_id, [Member(None, 0)] * 4)
        loop.next_batch()
        assert loop.num_admissible == 0
        costs.append(time.process_time() - started)
    assert loop.ledger.admitted_rollouts == 10_000
    assert statistics.median(costs) < 1e-3
