from __future__ import annotations

import json
import random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from dockyard_core import GroupId, LedgerViolation, RefitError
from dockyard_core.loop import Ledger, LoopConfig, LoopMachine, Member, RefitOrder, ReplayBuffer, recount, surviving


def group(number: int) -> GroupId:
    return GroupId(f"task-{number}", 0)


def machine(*, prompts: int = 2, staleness: int = 1, max_steps: int | None = None, engines: int = 1):
    events: list[dict] = []
    config = LoopConfig(
        num_prompts_per_step=prompts, num_generations_per_prompt=2, max_staleness=staleness, max_steps=max_steps
    )
    return LoopMachine(config, Ledger(events.append), [f"engine-{i}" for i in range(engines)]), events


def valid(version: int) -> list[Member]:
    return [Member(None, version), Member(None, version)]


def refit(loop: LoopMachine) -> None:
    for engine in loop.begin_refit():
        loop.attest(engine, loop.policy_version)
    assert loop.end_refit()


def test_a_younger_version_waits_for_every_older_group() -> None:
    buffer = ReplayBuffer()
    for number, version in ((0, 0), (1, 0), (2, 1)):
        buffer.admit(group(number), version)
    buffer.finish(group(2))
    buffer.finish(group(1))
    assert buffer.peek(2) is None
    assert buffer.peek(1) == (group(1),)
    buffer.finish(group(0))
    assert buffer.finished == (group(1), group(0), group(2))
    assert buffer.peek(1) == (group(1),)
    assert buffer.peek(3) == (group(0), group(1), group(2))  # inside a batch: in the order of admission


def test_slots_are_freed_only_after_every_engine_attested() -> None:
    loop, events = machine(engines=2)
    for number in range(4):
        loop.admit(group(number))
    assert loop.num_admissible == 0
    loop.finish(group(0), valid(0))
    loop.finish(group(1), valid(0))
    batch = loop.next_batch()
    assert batch == (group(0), group(1))
    assert loop.trained(batch) == 1
    assert loop.num_admissible == 0
    assert loop.begin_refit() == ("engine-0", "engine-1")
    loop.attest("engine-1", 1)
    assert not loop.end_refit()
    assert loop.num_admissible == 0
    assert loop.begin_refit() == ("engine-0",)
    loop.attest("engine-0", 1)
    assert loop.end_refit()
    assert loop.num_admissible == 2
    assert [event["event"] for event in events[-7:]] == [
        "trained", "trained", "refit_begun", "attested", "refit_begun", "attested", "refit_committed",
    ]  # fmt: skip


def test_a_group_with_one_valid_member_is_dropped_and_replaced_at_once() -> None:
    loop, events = machine(prompts=1, staleness=0, max_steps=1)
    loop.admit(group(0))
    assert loop.finish(group(0), [Member("infra_error", None), Member(None, 0)]) == "infra_error"
    assert loop.num_admissible == 1
    assert loop.ledger.dropped_rollouts == {"infra_error": 2}
    loop.admit(group(1))
    loop.finish(group(1), [Member(None, 0), Member(None, 0)])
    loop.trained(loop.next_batch())
    refit(loop)
    assert loop.num_admissible == 0
    assert recount(events) == {
        "admitted": 2, "admitted_rollouts": 4, "trained": 1, "trained_rollouts": 2,
        "dropped": 1, "dropped_rollouts": 2, "alive": 0, "alive_rollouts": 0,
    }  # fmt: skip


def test_a_skipped_step_frees_its_slots_and_keeps_the_version() -> None:
    loop, _ = machine(prompts=1, staleness=0)
    loop.admit(group(0))
    loop.finish(group(0), valid(0))
    loop.skipped(loop.next_batch())
    assert loop.policy_version == 0
    assert loop.ledger.dropped_groups == {"nonfinite": 1}
    assert loop.num_drops_in_a_row == 0
    assert loop.num_admissible == 1


def test_double_bookings_name_the_group() -> None:
    ledger = Ledger(lambda event: None)
    ledger.admit(group(0), num_rollouts=2, policy_version=0)
    with pytest.raises(LedgerViolation, match="task-0#0"):
        ledger.admit(group(0), num_rollouts=2, policy_version=0)
    ledger.drop(group(0), "deadline")
    with pytest.raises(LedgerViolation, match="task-0#0"):
        ledger.train(group(0), policy_version=1, invalid={}, staleness=0)


def test_a_lost_booking_stops_the_run_at_the_next_event() -> None:
    ledger = Ledger(lambda event: None)
    ledger.admit(group(0), num_rollouts=2, policy_version=0)
    ledger._alive.pop(group(0))
    with pytest.raises(LedgerViolation, match="admitted 1 groups"):
        ledger.note("checkpoint")


def test_an_engine_that_attests_another_version_is_refused() -> None:
    order = RefitOrder(["a"])
    order.trained(1)
    order.begin()
    with pytest.raises(RefitError, match="wanted policy version 1, holds 0"):
        order.attest("a", 0)
    with pytest.raises(ValueError, match="under way"):
        order.trained(2)


@given(
    seed=st.integers(0, 2**32 - 1),
    prompts=st.integers(1, 4),
    staleness=st.integers(0, 3),
    steps=st.integers(1, 6),
    drop_rate=st.sampled_from([0.0, 0.2]),
)
@settings(max_examples=200, deadline=None)
def test_any_schedule_ends_within_the_staleness_bound(seed, prompts, staleness, steps, drop_rate) -> None:
    """Groups finish in a random order, each sampled by any version it lived through."""
    rng = random.Random(seed)
    loop, events = machine(prompts=prompts, staleness=staleness, max_steps=steps)
    admitted, under_way, seen = 0, {}, []
    while loop.policy_version < steps:
        moves = ["admit"] * bool(loop.num_admissible) + ["finish"] * bool(under_way)
        moves += ["train"] * bool(loop.next_batch() and loop.refit.is_fresh) + ["refit"] * (not loop.refit.is_fresh)
        assert moves, "deadlock"
        match rng.choice(moves):
            case "admit":
                under_way[group(admitted)] = loop.admit(group(admitted))
                admitted += 1
            case "finish":
                chosen = rng.choice(sorted(under_way))
                oldest = rng.randint(under_way.pop(chosen), loop.policy_version)
                cause = "infra_error" if rng.random() < drop_rate else None
                loop.finish(chosen, [Member(cause, oldest)] * 2)
            case "train":
                batch = loop.next_batch()
                seen += [loop.staleness(one) for one in batch]
                loop.trained(batch)
            case "refit":
                refit(loop)
        assert len(under_way) <= loop.config.num_slots
    assert max(seen) <= staleness
    counts = recount(events)
    assert counts["trained"] == steps * prompts
    assert counts["admitted"] == counts["trained"] + counts["dropped"] + counts["alive"]
    assert counts["alive"] == 0


def test_a_restore_takes_back_what_came_after_its_frontier() -> None:
    loop, events = machine(prompts=1, staleness=1, max_steps=3)
    loop.admit(group(0))
    loop.admit(group(1))
    loop.finish(group(0), valid(0))
    loop.trained(loop.next_batch())
    refit(loop)
    snapshot = loop.snapshot()
    loop.finish(group(1), valid(0))
    loop.trained(loop.next_batch())
    lost = len(events) - snapshot["ledger"]["frontier"]

    again = LoopMachine(loop.config, Ledger(events.append, next_seq=len(events)), ["engine-0"])
    assert again.restore(snapshot, incarnation=1) == (group(1),)
    assert events[-1] == {
        "seq": len(events) - 1, "event": "restored", "incarnation": 1,
        "frontier": snapshot["ledger"]["frontier"], "rolled_back": lost,
    }  # fmt: skip
    assert again.policy_version == 1
    assert again.num_admissible == 0
    refit(again)
    assert again.num_admissible == 1
    again.admit(group(2))
    again.finish(group(1), valid(1))
    assert again.next_batch() == (group(1),)
    assert again.staleness(group(1)) == 0
    again.trained(again.next_batch())
    trained = [event["group"] for event in surviving(events) if event["event"] == "trained"]
    assert trained == ["task-0#0", "task-1#0"]
    assert recount(events)["alive"] == 1


def members(*rewards: float, version: int = 0) -> list[Member]:
    return [Member(None, version, reward) for reward in rewards]


def dynamic(bound: int) -> tuple[LoopMachine, list[dict]]:
    events: list[dict] = []
    config = LoopConfig(
        num_prompts_per_step=1, num_generations_per_prompt=2, max_staleness=2, max_steps=9, max_replaced_per_step=bound
    )
    return LoopMachine(config, Ledger(events.append), ["engine-0"]), events


def test_dynamic_sampling_replaces_groups_without_signal_up_to_the_bound_of_the_step() -> None:
    loop, events = dynamic(2)
    for number in range(3):
        loop.admit(group(number))
    assert loop.finish(group(0), members(1.0, 1.0)) == "zero_signal"
    assert loop.num_admissible == 1
    assert loop.finish(group(1), members(0.0, 0.0)) == "zero_signal"
    assert loop.finish(group(2), members(0.0, 0.0)) is None  # the bound is spent: it is trained
    assert loop.num_drops_in_a_row == 0  # the infrastructure works
    loop.trained(loop.next_batch())
    refit(loop)
    loop.admit(group(3))
    assert loop.finish(group(3), members(0.5, 0.5)) == "zero_signal"  # a new step, a new bound
    assert loop.ledger.dropped_groups == {"zero_signal": 3}
    assert recount(events)["dropped_rollouts"] == 6


def test_dynamic_sampling_looks_at_the_unshaped_rewards_of_valid_members_only() -> None:
    loop, _ = dynamic(5)
    loop.admit(group(0))
    assert loop.finish(group(0), members(1.0, 0.0)) is None
    config = LoopConfig(num_prompts_per_step=1, num_generations_per_prompt=3, max_staleness=0, max_replaced_per_step=1)
    loop = LoopMachine(config, Ledger(lambda event: None), ["engine-0"])
    loop.admit(group(1))
    assert loop.finish(group(1), [*members(1.0, 1.0), Member("infra_error", None, 0.0)]) == "zero_signal"


def test_a_member_is_missing_for_no_reason_but_the_known_ones() -> None:
    loop, _ = machine()
    loop.admit(group(0))
    with pytest.raises(ValueError, match=r"task-0#0.*too_slow"):
        loop.finish(group(0), [Member("too_slow", 0), Member(None, 0)])
    assert loop.finish(group(0), [Member("deadline", 0), Member(None, 0)]) == "deadline"


def test_a_snapshot_keeps_finished_groups_and_the_places_of_those_under_way() -> None:
    loop, events = machine(prompts=2, staleness=2)
    for number in range(6):
        loop.admit(group(number))
    for number in (1, 0, 4):
        loop.finish(group(number), valid(0))
    loop.trained((group(0), group(1)))
    refit(loop)
    loop.admit(group(6))
    loop.finish(group(6), valid(1))
    again = LoopMachine(loop.config, Ledger(events.append, next_seq=len(events)), ["engine-0"])
    assert again.restore(json.loads(json.dumps(loop.snapshot())), incarnation=1) == (group(2), group(3), group(5))
    assert again.num_admissible == 0  # the engines are stale
    refit(again)
    assert again.next_batch() is None  # of version 0 only group 4 is finished; group 6 is younger
    again.finish(group(5), valid(1))
    assert again.next_batch() == (group(4), group(5))
    assert [again.staleness(name) for name in (group(4), group(5))] == [1, 0]


def test_a_checkpoint_stands_for_every_event_before_it() -> None:
    loop, events = machine(prompts=1, staleness=1)
    snapshots = []
    for number in range(5):
        loop.admit(group(number))
        loop.finish(group(number), valid(number))
        loop.trained(loop.next_batch())
        refit(loop)
        snapshots.append(loop.ledger.snapshot())
    for snapshot in snapshots:
        tail = [event for event in events if event["seq"] >= snapshot["frontier"]]
        assert recount(tail, start=snapshot) == recount(events)
    loop.ledger.restore(snapshots[1], incarnation=1)
    assert recount(events, start=snapshots[1]) == recount(events)
    with pytest.raises(ValueError, match="before the checkpoint's"):
        recount(events, start=snapshots[3])


def test_a_dead_engine_stops_admission_until_its_successor_attests() -> None:
    loop, events = machine(engines=2)
    loop.lose_engine("engine-1", "killed")
    assert loop.num_admissible == 0
    assert loop.begin_refit(["engine-0"]) == ()
    assert not loop.end_refit()
    assert loop.begin_refit() == ("engine-1",)
    late = loop.refit.try_number
    loop.end_refit()
    loop.begin_refit()
    with pytest.raises(ValueError, match="outside a refit"):
        loop.attest("engine-1", 0, try_number=late)
    loop.attest("engine-1", 0, try_number=loop.refit.try_number)
    assert loop.end_refit()
    assert loop.num_admissible == 4
    assert events[0] == {"seq": 0, "event": "engine_lost", "engine": "engine-1", "reason": "killed"}


def test_an_engine_that_dies_after_it_attested_is_late_again() -> None:
    order = RefitOrder(["a", "b"])
    order.trained(1)
    order.begin()
    order.attest("a", 1)
    order.lose("a")
    with pytest.raises(ValueError, match="outside a refit"):
        order.attest("a", 1, try_number=order.try_number)  # delivered twice: said by the one that died
    order.attest("b", 1)
    assert not order.end()
    assert order.late_engines == ("a",)


def test_a_pinned_evaluation_holds_the_refit_back_and_a_live_one_does_not() -> None:
    loop, events = machine(prompts=1, staleness=1)
    loop.begin_evaluation(0, is_pinned=True)
    loop.begin_evaluation(1, is_pinned=False)
    loop.admit(group(0))
    loop.finish(group(0), valid(0))
    loop.trained(loop.next_batch())
    with pytest.raises(ValueError, match="pin the engines"):
        loop.begin_refit()
    loop.end_evaluation(0, val_reward_mean=0.5)
    refit(loop)
    assert loop.snapshot()["evaluations"] == [(1, False)]
    with pytest.raises(ValueError, match="under way already"):
        loop.begin_evaluation(1, is_pinned=False)
    with pytest.raises(ValueError, match="no evaluation after step 0"):
        loop.end_evaluation(0)
    assert next(event for event in events if event["event"] == "evaluated")["val_reward_mean"] == 0.5


def test_a_finished_batch_blocked_by_an_older_group_is_head_of_line_blocking() -> None:
    loop, _ = machine(prompts=1, staleness=1)
    loop.admit(group(0))
    loop.admit(group(1))
    loop.finish(group(1), valid(0))
    assert not loop.is_blocked_by_head
    loop.trained(loop.next_batch())
    refit(loop)
    loop.admit(group(2))
    loop.finish(group(2), valid(1))
    assert loop.is_blocked_by_head
    loop.finish(group(0), valid(0))
    assert not loop.is_blocked_by_head
