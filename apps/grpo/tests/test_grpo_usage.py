from __future__ import annotations

import pickle

import pytest

from dockyard_core import GroupId
from dockyard_grpo.config.sections import RecoverySection
from dockyard_grpo.recovery import Budget
from dockyard_grpo.summary import GroupSummary, RolloutSummary
from dockyard_grpo.usage import BusyClock, EngineUsage, UsageMeter


class Clock:
    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        return self.now


def test_overlapping_work_is_busy_once() -> None:
    clock = Clock()
    busy = BusyClock(clock)
    with busy.busy():
        clock.now = 3.0
        with busy.busy():
            clock.now = 5.0
            assert busy.total_s == 5.0
    clock.now = 9.0
    with busy.busy():
        clock.now = 10.0
    assert busy.total_s == 6.0


def test_shares_are_of_the_time_between_two_readings_and_a_restarted_engine_counts_anew() -> None:
    clock = Clock()
    meter = UsageMeter(num_sandbox_workers=2, clock=clock)
    clock.now = 10.0
    first = meter.read({"a": EngineUsage(10.0, 4.0), "b": EngineUsage(5.0, 6.0)})
    assert (first.inference, first.sandbox) == (0.75, 0.5)
    clock.now = 20.0
    second = meter.read({"a": EngineUsage(12.0, 4.0), "b": EngineUsage(2.0, 1.0)})
    assert second.inference == pytest.approx((2.0 + 2.0) / 20.0)
    clock.now = 30.0
    assert meter.read({}).inference is None


def test_without_servers_of_its_own_a_run_does_not_know_how_busy_they_are() -> None:
    meter = UsageMeter(num_sandbox_workers=None)
    assert meter.read({"a": EngineUsage(0.0, 1.0)}).sandbox is None


def test_deaths_are_counted_within_an_hour() -> None:
    clock = Clock()
    budget = Budget(RecoverySection(max_per_hour=2), clock)
    assert budget.spend()
    assert budget.spend()
    clock.now = 3599.0
    assert not budget.spend()
    clock.now = 3601.0  # the first two are an hour ago
    assert budget.spend()


def test_the_driver_learns_at_most_a_kilobyte_of_a_rollout() -> None:
    worst = RolloutSummary(
        reward=-0.1234567890123456,
        invalid_cause="test_patch_failed",
        unshaped_reward=0.1234567890123456,
        oldest_version=2**40,
        newest_version=2**40,
        num_sampled_tokens=2**40,
        finish_reason="length",
        status="test_patch_failed",
        is_cached=False,
        generate_s=1234.123456789,
        judge_s=1234.123456789,
        detail="\u4e16" * 200,
    )
    assert len(pickle.dumps(worst, protocol=5)) <= 1024
    group = GroupSummary(GroupId("organisation__repository-123456", 12), (worst,) * 16)
    assert len(pickle.dumps(group, protocol=5)) <= 16 * 1024
