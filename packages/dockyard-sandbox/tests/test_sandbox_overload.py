"""More work than the server takes: refused at once, and what was accepted is judged, whoever sent the rest."""

from __future__ import annotations

import asyncio
import contextlib
import uuid
from collections import Counter
from collections.abc import AsyncIterator, Awaitable, Callable
from pathlib import Path
from typing import Any

import httpx
import pytest

from dockyard_sandbox import ServerHandle, start_server

DEADLINE_S = 200.0
FIX = "sed -i 's/a - b/a + b/' calc/ops.py"


def processes_with(text: str) -> bool:
    for path in Path("/proc").glob("[0-9]*/cmdline"):
        with contextlib.suppress(OSError):
            if text.encode() in path.read_bytes():
                return True
    return False


async def wait_until(condition: Callable[[], Awaitable[bool]], what: str) -> None:
    for _ in range(3000):
        if await condition():
            return
        await asyncio.sleep(0.02)
    raise AssertionError(f"not within a minute: {what}")


class Crowd:
    """Clients of one server whose only worker the test can keep busy."""

    def __init__(self, http: httpx.AsyncClient, project: Any, body: Any) -> None:
        self.http = http
        self._task = body(project.task(), "")
        self._gold = project.gold()
        self.replies: list[httpx.Response] = []

    def fix(self) -> dict[str, Any]:
        """A task with a tree of its own that resolves."""
        return {**self._task, "model_patch": self._gold.replace("a + b", f"a + b  # {uuid.uuid4().hex}")}

    async def post(self, tenant: str, query: str = "") -> httpx.Response:
        reply = await self.http.post(f"/task/submit{query}", json=self.fix(), headers={"Dockyard-Tenant": tenant})
        self.replies.append(reply)
        return reply

    async def num_held(self) -> int:
        return int((await self.http.get("/readyz")).json()["num_held"])

    async def wait_until_held(self, count: int) -> None:
        async def is_so() -> bool:
            return await self.num_held() == count

        await wait_until(is_so, f"{count} tasks are held")

    async def open_session(self) -> str:
        reply = await self.http.post("/session", json=self._task)
        assert reply.status_code == 201, reply.text
        return f"/session/{reply.json()['session_id']}"

    @contextlib.asynccontextmanager
    async def busy_worker(self) -> AsyncIterator[None]:
        """Nothing is applied or run inside this block: a command of a session has the worker."""
        path, sleep = await self.open_session(), f"sleep 9{uuid.uuid4().int % 10**8:08d}"
        call = self.http.post(f"{path}/exec", json={"command": sleep, "timeout_s": 3600})
        running = asyncio.create_task(call)

        async def is_busy() -> bool:
            assert not running.done()
            return processes_with(sleep)

        try:
            await wait_until(is_busy, "the worker is busy")
            yield
        finally:
            running.cancel()
            await asyncio.wait([running])
            assert (await self.http.delete(path)).status_code == 204

    async def verdict(self, task_id: str, tenant: str) -> dict[str, Any]:
        while True:
            reply = await self.http.get(f"/task/{task_id}?wait_s=20", headers={"Dockyard-Tenant": tenant})
            if reply.status_code == 200:
                found: dict[str, Any] = reply.json()
                return found
            assert reply.status_code == 202


@contextlib.asynccontextmanager
async def crowd_at(handle: ServerHandle, project: Any, body: Any) -> AsyncIterator[Crowd]:
    limits = httpx.Limits(max_connections=None)
    async with httpx.AsyncClient(base_url=handle.url, timeout=None, limits=limits, trust_env=False) as http:
        yield Crowd(http, project, body)


def assert_refused_for_now(reply: httpx.Response) -> None:
    assert (reply.status_code, reply.json()["error"]["field"]) == (429, "")
    assert 1 <= int(reply.headers["Retry-After"]) <= 60


def test_a_full_queue_answers_429(project: Any, tmp_path: Path, body: Any) -> None:
    async def run() -> None:
        async with crowd_at(handle, project, body) as crowd:
            async with crowd.busy_worker():
                first = asyncio.create_task(crowd.post("a"))
                await crowd.wait_until_held(1)
                for _ in range(3):
                    assert_refused_for_now(await crowd.post("a"))
            assert (await first).json()["status"] == "resolved"
            assert (await crowd.post("a")).json()["status"] == "resolved"

    handle = start_server(tmp_path / "root", workers=1, max_queue=0)
    try:
        asyncio.run(run())
    finally:
        assert handle.stop() == 0


def test_a_burst_is_bounded_as_well(project: Any, tmp_path: Path, body: Any) -> None:
    """Tasks of one batch arrive within one turn of the event loop."""
    handle = start_server(tmp_path / "root", workers=1, max_queue=1)
    try:
        tasks = [body(project.task(), f"{project.gold()}#{n}\n") for n in range(3)]
        with httpx.Client(base_url=handle.url, timeout=60.0, trust_env=False) as http:
            assert http.post("/task/submit", json={"tasks": tasks}).status_code == 429
            assert http.post("/task/submit", json={"tasks": tasks[:2]}).status_code == 200
    finally:
        assert handle.stop() == 0


def test_a_late_tenants_tasks_are_judged_although_the_queue_was_full(project: Any, tmp_path: Path, body: Any) -> None:
    """Admission is the only bound: what it let in, above the places of the queue too, gets its verdict."""

    async def run() -> None:
        async with crowd_at(handle, project, body) as crowd:
            async with crowd.busy_worker():
                accepted = []
                for tenant, share in (("a", 4), ("b", 2)):
                    for _ in range(share):
                        reply = await crowd.post(tenant, "?wait=false")
                        assert reply.status_code == 202, reply.text
                        accepted.append((reply.json()["task_id"], tenant))
                    assert_refused_for_now(await crowd.post(tenant, "?wait=false"))
                assert await crowd.num_held() == 6  # of four places
            verdicts = [await crowd.verdict(*one) for one in accepted]
            assert [(one["status"], one["cached"]) for one in verdicts] == [("resolved", False)] * 6
            assert await crowd.num_held() == 0

    handle = start_server(tmp_path / "root", workers=1, max_queue=3)
    try:
        asyncio.run(run())
    finally:
        assert handle.stop() == 0


def test_a_session_is_finished_although_the_queue_is_full(project: Any, tmp_path: Path, body: Any) -> None:
    """It was let in when it was opened. Asked twice at once, it gives one answer twice."""

    async def run() -> None:
        async with crowd_at(handle, project, body) as crowd:
            session = await crowd.open_session()
            assert (await crowd.http.post(f"{session}/exec", json={"command": FIX})).json()["exit_code"] == 0
            async with crowd.busy_worker():
                waiting = asyncio.create_task(crowd.post("a"))
                await crowd.wait_until_held(1)
                finishing = [asyncio.create_task(crowd.http.post(f"{session}/finish")) for _ in range(2)]
                await crowd.wait_until_held(2)
                assert_refused_for_now(await crowd.post("a"))
            finished = [await one for one in finishing]
            assert [reply.status_code for reply in finished] == [200, 200], finished[0].text
            assert finished[0].json() == finished[1].json()
            assert finished[0].json()["verdict"]["status"] == "resolved"
            assert (await waiting).json()["status"] == "resolved"
            assert await crowd.num_held() == 0

    handle = start_server(tmp_path / "root", workers=1, max_queue=0)
    try:
        asyncio.run(run())
    finally:
        assert handle.stop() == 0


def test_too_many_sessions_are_refused_at_once(project: Any, body: Any, tmp_path: Path) -> None:
    handle = start_server(tmp_path / "root", max_sessions=1)
    try:
        with httpx.Client(base_url=handle.url, timeout=60.0, trust_env=False) as http:
            first = http.post("/session", json=body(project.task(), ""))
            reply = http.post("/session", json=body(project.task(), ""))
            assert (reply.status_code, reply.headers["retry-after"]) == (429, "1")
            assert http.delete(f"/session/{first.json()['session_id']}").status_code == 204
            assert http.post("/session", json=body(project.task(), "")).status_code == 201
    finally:
        assert handle.stop() == 0


@pytest.mark.ci
def test_ten_times_too_much_work_is_refused_promptly_and_the_rest_is_in_time(
    project: Any, body: Any, tmp_path: Path
) -> None:
    """Three waves of 40 tasks of two tenants at four places.

    Each wave meets a busy worker, so no verdict can come before its refusals have. Between the first and the
    second nothing gets done, between the second and the third a part.
    """

    async def wave(crowd: Crowd, held: int) -> list[asyncio.Task[httpx.Response]]:
        """Send 40 tasks to a server that holds some; return those that are let in, when all others are refused."""
        query, seen = f"?deadline_s={DEADLINE_S}", len(crowd.replies)
        sent = [asyncio.create_task(crowd.post("ab"[index % 2], query)) for index in range(40)]

        async def is_decided() -> bool:
            return len(crowd.replies) - seen + await crowd.num_held() - held == 40

        await wait_until(is_decided, "every task is held or refused")
        for reply in crowd.replies[seen:]:
            assert_refused_for_now(reply)
        return [one for one in sent if not one.done()]

    async def settled(crowd: Crowd, sent: list[asyncio.Task[httpx.Response]]) -> bool:
        return await crowd.num_held() == sum(not one.done() for one in sent)

    async def run() -> None:
        async with crowd_at(handle, project, body) as crowd:
            async with crowd.busy_worker():
                first = await wave(crowd, 0)
                assert 4 <= len(first) <= 6  # places; each tenant has its share, also if the other one came first
                assert await wave(crowd, len(first)) == []
            await asyncio.wait(first[:-3])
            async with crowd.busy_worker():
                await wait_until(lambda: settled(crowd, first), "the answers that were given have arrived")
                third = await wave(crowd, await crowd.num_held())
                assert third
            served = [await one for one in first + third]
            # a task that misses its deadline is answered, too: by an infra_error
            assert {(reply.status_code, reply.json()["status"]) for reply in served} == {(200, "resolved")}
            codes = Counter(reply.status_code for reply in crowd.replies)
            assert codes == {200: len(served), 429: 120 - len(served)}
            assert await crowd.num_held() == 0

    handle = start_server(tmp_path / "root", workers=1, max_queue=3)
    try:
        asyncio.run(run())
    finally:
        assert handle.stop() == 0
