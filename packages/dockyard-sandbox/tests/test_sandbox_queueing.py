"""Who enters and who goes next: shares, turns, prompt refusals."""

from __future__ import annotations

import asyncio
from collections import Counter

import pytest

from dockyard_sandbox.queueing import TENANT, Admission, FairSlots, QueueFull


def test_a_lone_tenant_may_hold_everything_and_no_more() -> None:
    admission = Admission(workers=2, max_queue=8)
    ticket = admission.admit("a", 10)
    with pytest.raises(QueueFull, match="share is 10"):
        admission.admit("a", 1)
    ticket.release(4)
    ticket.release()
    ticket.release()  # a ticket gives back once what it took
    assert admission.num_held == 0
    assert admission.held_by_tenant() == {}


def test_a_late_tenant_gets_its_share_although_the_queue_is_full() -> None:
    admission = Admission(workers=2, max_queue=8)
    admission.admit("a", 10)
    admission.admit("b", 5)
    for tenant in ("a", "b"):
        with pytest.raises(QueueFull, match="share is 5"):
            admission.admit(tenant, 1)


def test_what_is_held_together_stays_below_a_harmonic_bound() -> None:
    admission = Admission(workers=1, max_queue=99)
    for index in range(40):
        fill(admission, f"tenant-{index}")
    assert admission.num_held <= 100 * sum(1 / n for n in range(1, 41)) + 40


def fill(admission: Admission, tenant: str) -> None:
    try:
        while True:
            admission.admit(tenant, 1)
    except QueueFull:
        return


def test_a_deadline_that_cannot_be_kept_is_refused_at_once() -> None:
    admission = Admission(workers=1, max_queue=1000)
    for _ in range(200):
        admission.observe(2.0)
    admission.admit("a", 10, deadline_s=30.0)
    with pytest.raises(QueueFull, match="deadline_s=5") as refused:
        admission.admit("a", 1, deadline_s=5.0)
    assert 10 <= refused.value.retry_after_s <= 60
    admission.admit("b", 1, deadline_s=5.0)  # turns are taken, so its one task does not wait for ten


def test_what_is_let_through_is_counted_and_never_refused() -> None:
    admission = Admission(workers=1, max_queue=1)
    full = admission.admit("a", 2)
    tickets = [admission.let_through(tenant) for tenant in ("a", "b")]
    assert admission.held_by_tenant() == {"a": 3, "b": 1}
    full.release()
    with pytest.raises(QueueFull, match="share is 1"):
        admission.admit("a", 1)  # its finished session has the place
    for ticket in tickets:
        ticket.release()
    assert admission.num_held == 0


def test_waiting_tenants_take_turns() -> None:
    async def run() -> list[str]:
        slots, order = FairSlots(1), []

        async def work(tenant: str) -> None:
            TENANT.set(tenant)
            async with slots:
                order.append(tenant)
                await asyncio.sleep(0)

        async with slots:
            tasks = [asyncio.create_task(work(name)) for name in "aaaaaabbc"]
            await asyncio.sleep(0)
            assert slots.num_waiting == 9
        await asyncio.gather(*tasks)
        return order

    assert "".join(asyncio.run(run())) == "abcabaaaa"


def test_cancelled_waiters_leave_and_no_slot_is_lost() -> None:
    async def run() -> None:
        slots = FairSlots(2)
        running = 0

        async def work(index: int) -> None:
            nonlocal running
            TENANT.set(f"t{index % 3}")
            async with slots:
                running += 1
                assert running <= 2
                try:
                    await asyncio.sleep(0)
                finally:
                    running -= 1

        for seed in range(60):
            tasks = [asyncio.create_task(work(index)) for index in range(12)]
            for _ in range(seed % 5):
                await asyncio.sleep(0)
            for task in tasks[seed % 7 :: 3]:
                task.cancel()
            results = await asyncio.gather(*tasks, return_exceptions=True)
            assert running == 0
            kinds = Counter(type(result) for result in results)
            assert set(kinds) <= {type(None), asyncio.CancelledError}
            assert slots.num_waiting == 0
        async with slots, asyncio.timeout(5), slots:
            pass  # both slots are still there

    asyncio.run(run())
