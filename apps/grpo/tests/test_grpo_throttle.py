from __future__ import annotations

import asyncio
from pathlib import Path

import pytest

from dockyard_core import EngineBusy, SandboxBusy, SandboxTimeout, Task, Verdict, VerdictStatus
from dockyard_core.data import read_tasks
from dockyard_core.loop import AdaptiveLimit
from dockyard_grpo import compose
from dockyard_grpo.throttle import Throttle, ThrottledSandbox
from dockyard_sandbox import SandboxClient, start_server

TASK = Task(
    instance_id="t", repo="/r", base_commit="0" * 40, problem_statement="p", test_patch="", fail_to_pass=("a",),
)  # fmt: skip


class Server:
    """Takes ``capacity`` calls at once and says so beyond; the calls end when they are told to, or by themselves."""

    def __init__(self, capacity: int, seconds: float = 0.0) -> None:
        self.capacity = capacity
        self.seconds = seconds
        self.num_running = self.most_running = self.num_refused = self.num_done = 0

    async def call(self) -> int:
        if self.num_running >= self.capacity:
            self.num_refused += 1
            raise SandboxBusy("queue is full", retry_after_s=0.0)
        self.num_running += 1
        self.most_running = max(self.most_running, self.num_running)
        try:
            await asyncio.sleep(self.seconds)
        finally:
            self.num_running -= 1
        self.num_done += 1
        return self.num_done

    async def judge(self, task: Task, patch: str, *, attempt_id: str) -> Verdict:
        await self.call()
        return Verdict(status=VerdictStatus.RESOLVED)


def test_every_call_is_answered_and_refusals_become_rare() -> None:
    async def run() -> tuple[Server, Throttle]:
        server, throttle = Server(capacity=5), Throttle(32, maximum=64)
        answers = await asyncio.gather(*(throttle.run(server.call) for _ in range(500)))
        assert sorted(answers) == list(range(1, 501))
        return server, throttle

    server, throttle = asyncio.run(run())
    assert server.most_running <= 5
    assert throttle.limit.num_refused == server.num_refused < 500
    assert throttle.limit.num_under_way == 0
    assert throttle.limit.limit <= 10  # it learnt what the server takes


def test_an_engine_that_is_busy_is_asked_again() -> None:
    refusals = iter([EngineBusy("full", retry_after_s=0.0)] * 3)

    async def call() -> str:
        for refusal in refusals:
            raise refusal
        return "done"

    assert asyncio.run(Throttle(8, maximum=8).run(call)) == "done"


def test_calls_are_let_through_in_the_order_they_came() -> None:
    async def run() -> list[int]:
        throttle, order = Throttle(1, maximum=1), []

        async def call(number: int) -> None:
            async def body() -> None:
                order.append(number)
                await asyncio.sleep(0)

            await throttle.run(body)

        await asyncio.gather(*(call(number) for number in range(50)))
        return order

    assert asyncio.run(run()) == list(range(50))


@pytest.mark.parametrize("cancel_first", [True, False])
def test_a_cancelled_call_gives_its_turn_away(cancel_first: bool) -> None:
    async def run() -> None:
        throttle, gate = Throttle(1, maximum=1), asyncio.Event()
        running = asyncio.create_task(throttle.run(gate.wait))
        await asyncio.sleep(0)
        waiting = [asyncio.create_task(throttle.run(gate.wait)) for _ in range(3)]
        await asyncio.sleep(0)
        if cancel_first:
            waiting[0].cancel()
        gate.set()
        if not cancel_first:
            await asyncio.sleep(0)  # it may be the turn of the first one now
            waiting[0].cancel()
        async with asyncio.timeout(30):
            await asyncio.gather(running, *waiting, return_exceptions=True)
        assert all(task.done() and not task.cancelled() for task in waiting[1:])
        assert throttle.limit.num_under_way == 0

    asyncio.run(run())


def test_a_failure_says_nothing_about_load() -> None:
    throttle = Throttle(8, maximum=8)

    async def call() -> None:
        raise KeyError("broken")

    with pytest.raises(KeyError):
        asyncio.run(throttle.run(call))
    assert throttle.limit.num_refused == throttle.limit.num_under_way == 0


def test_a_sandbox_that_stays_busy_ends_with_the_deadline() -> None:
    async def run() -> None:
        sandbox = ThrottledSandbox(Server(capacity=0), Throttle(1, maximum=1), timeout_s=0.05)
        await sandbox.judge(TASK, "", attempt_id="a")

    with pytest.raises(SandboxTimeout, match=r"no verdict on 't' within 0.05 s"):
        asyncio.run(run())


def test_a_real_server_with_a_short_queue_is_asked_no_more_than_it_takes_and_nothing_is_lost(tmp_path: Path) -> None:
    tasks = read_tasks(compose.data_path("quickstart:train.jsonl"), limit=6)

    async def run(url: str) -> tuple[list[Verdict], AdaptiveLimit]:
        throttle = Throttle(16, maximum=48)
        async with SandboxClient(url, raises_busy=True) as client:
            sandbox = ThrottledSandbox(client, throttle, timeout_s=240)
            judging = [
                sandbox.judge(task, task.gold_patch or "", attempt_id=f"{number}/{task.instance_id}")
                for number in range(4)
                for task in tasks
            ]
            return await asyncio.gather(*judging), throttle.limit

    server = start_server(tmp_path / "server", workers=1, max_queue=2)
    try:
        verdicts, limit = asyncio.run(run(server.url))
    finally:
        server.stop()
    assert [verdict.status for verdict in verdicts] == [VerdictStatus.RESOLVED] * 24
    assert limit.num_refused > 0
    assert limit.limit < 16
