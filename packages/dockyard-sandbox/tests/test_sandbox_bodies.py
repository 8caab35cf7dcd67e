"""What requests may cost before they are tasks: bytes held, time to arrive, and who parses them."""

from __future__ import annotations

import asyncio
import random
import socket
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest
from starlette.requests import Request

from dockyard_core import VerdictStatus
from dockyard_sandbox import SandboxClient, ServerHandle, start_server
from dockyard_sandbox.bodies import LARGE_BYTES, MAX_HELD_BYTES, Bodies, Reserved
from dockyard_sandbox.refusals import RequestRefused
from dockyard_sandbox.wire import MAX_BODY_BYTES

MIB = 1024 * 1024


class Sender:
    """A request whose body arrives when the test says so."""

    def __init__(self, *, tenant: str = "a", declared: int | None = None) -> None:
        headers = [] if declared is None else [(b"content-length", str(declared).encode())]
        self.parts: asyncio.Queue[dict[str, Any]] = asyncio.Queue()
        self.num_reads = 0
        self.request = Request({"type": "http", "method": "POST", "headers": headers}, self._receive)
        self.request.state.tenant = tenant

    async def _receive(self) -> dict[str, Any]:
        self.num_reads += 1
        return await self.parts.get()

    def send(self, chunk: bytes, *, is_last: bool = False) -> None:
        self.parts.put_nowait({"type": "http.request", "body": chunk, "more_body": not is_last})


async def turns() -> None:
    for _ in range(10):
        await asyncio.sleep(0)


def refused(task: asyncio.Future[Any]) -> tuple[int, str | None]:
    error = task.exception()
    assert isinstance(error, RequestRefused), error
    return error.status, error.response.headers.get("retry-after")


def test_a_declared_body_is_counted_before_it_is_read_and_until_it_is_released() -> None:
    async def run() -> None:
        bodies, slow, other = Bodies(max_held_bytes=100), Sender(declared=50), Sender(declared=1)
        reading = asyncio.create_task(bodies.read(slow.request, bytes))
        await turns()
        assert bodies.held_by_tenant() == {"a": 50}
        early = asyncio.create_task(bodies.read(other.request, bytes))
        await turns()
        assert (refused(early), other.num_reads) == ((429, "1"), 0)
        slow.send(b"x" * 20)
        slow.send(b"x" * 30, is_last=True)
        content, reserved = await reading
        assert (len(content), bodies.held_by_tenant()) == (50, {"a": 50})
        reserved.release()
        reserved.release()
        assert bodies.held_by_tenant() == {}
        other.send(b"x", is_last=True)
        assert (await bodies.read(other.request, bytes))[0] == b"x"

    asyncio.run(run())


def test_a_chunked_body_is_counted_as_it_grows() -> None:
    async def run() -> None:
        bodies, sender = Bodies(max_held_bytes=100), Sender()
        reading = asyncio.create_task(bodies.read(sender.request, bytes))
        for size in (20, 40, 50):
            sender.send(b"x" * (size - bodies.held_by_tenant().get("a", 0)))
            await turns()
            assert bodies.held_by_tenant() == {"a": size}
        sender.send(b"x")
        await turns()
        assert (refused(reading), bodies.held_by_tenant()) == ((429, "1"), {})

    asyncio.run(run())


def test_the_budget_holds_and_a_newcomer_always_gets_a_part() -> None:
    chance, bodies = random.Random(1), Bodies()
    reserved: dict[str, list[Reserved]] = {}
    for number in range(6):
        tenant = f"tenant-{number}"
        reserved[tenant] = []
        while True:
            one = Reserved(bodies, tenant)
            try:
                one.grow_to(chance.randrange(1, MIB))
            except RequestRefused:
                break
            reserved[tenant].append(one)
        held = bodies.held_by_tenant()
        assert sum(held.values()) + held[tenant] <= MAX_HELD_BYTES
        assert held[tenant] > (MAX_HELD_BYTES >> (number + 1)) - 2 * MIB
    for one in (one for many in reserved.values() for one in many):
        one.release()
    assert bodies.held_by_tenant() == {}
    Reserved(bodies, "a").grow_to(MAX_BODY_BYTES)


def test_a_body_over_the_cap_is_refused_unread() -> None:
    async def run() -> None:
        bodies, declared, chunked = Bodies(), Sender(declared=MAX_BODY_BYTES + 1), Sender()
        with pytest.raises(RequestRefused, match=str(MAX_BODY_BYTES)) as error:
            await bodies.read(declared.request, bytes)
        assert (error.value.status, error.value.response.headers["connection"]) == (413, "close")
        assert (declared.num_reads, bodies.held_by_tenant()) == (0, {})
        for _ in range(65):
            chunked.send(bytes(MIB))
        with pytest.raises(RequestRefused, match=str(MAX_BODY_BYTES)) as error:
            await bodies.read(chunked.request, bytes)
        assert (error.value.status, chunked.num_reads, bodies.held_by_tenant()) == (413, 65, {})

    asyncio.run(run())


@pytest.mark.parametrize(("how", "status"), [("waits", 408), ("leaves", 400)])
def test_a_body_that_does_not_arrive_is_given_up(how: str, status: int) -> None:
    async def run() -> None:
        bodies, sender = Bodies(deadline_s=0.05 if how == "waits" else 60.0), Sender(declared=10)
        sender.send(b"x")
        if how == "leaves":
            sender.parts.put_nowait({"type": "http.disconnect"})
        with pytest.raises(RequestRefused) as error:
            await bodies.read(sender.request, bytes)
        assert (error.value.status, bodies.held_by_tenant()) == (status, {})

    asyncio.run(run())


@pytest.mark.parametrize(("size", "is_large"), [(LARGE_BYTES, False), (LARGE_BYTES + 1, True)])
def test_a_large_body_is_parsed_beside_the_event_loop(size: int, is_large: bool) -> None:
    async def run() -> None:
        loop_went_on = threading.Event()

        def parse(content: bytearray) -> tuple[int, bool]:
            if is_large:
                assert loop_went_on.wait(60)  # on the loop's own thread, this would never be set
            return len(content), threading.current_thread() is threading.main_thread()

        sender = Sender(declared=size)
        sender.send(bytes(size), is_last=True)
        reading = asyncio.create_task(Bodies().read(sender.request, parse))
        await turns()
        assert reading.done() is not is_large
        loop_went_on.set()
        assert (await reading)[0] == (size, not is_large)

    asyncio.run(run())


def test_what_a_refused_body_had_is_given_back() -> None:
    async def run() -> None:
        bodies = Bodies()
        for size in (1, LARGE_BYTES + 1):
            sender = Sender(declared=size)
            sender.send(bytes(size), is_last=True)
            with pytest.raises(ZeroDivisionError):
                await bodies.read(sender.request, lambda content: 1 // 0)
            assert bodies.held_by_tenant() == {}

    asyncio.run(run())


def test_an_early_answer_is_whole_before_the_rest_is_thrown_away() -> None:
    async def run() -> None:
        events: list[str] = []

        async def receive() -> dict[str, Any]:
            events.append("receive")
            return {"type": "http.request", "body": bytes(MIB), "more_body": True}  # for ever

        async def send(message: Any) -> None:
            events.append(f"{message['type']} {message.get('more_body')}")

        refusal = RequestRefused(413, "", "too large", is_unread=True)
        await refusal.response({"type": "http"}, receive, send)
        assert events[:2] == ["http.response.start None", "http.response.body True"]
        assert events[2:-1] == ["receive"] * 128
        assert events[-1] == "http.response.body False"

    asyncio.run(run())


@pytest.fixture(scope="module")
def own(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ServerHandle]:
    handle = start_server(tmp_path_factory.mktemp("root"), workers=1)
    yield handle
    assert handle.stop() == 0


@pytest.fixture
def http(own: ServerHandle) -> Iterator[httpx.Client]:
    with httpx.Client(base_url=own.url, timeout=60.0, trust_env=False) as client:
        yield client


def opened(own: ServerHandle, declared: int, tenant: str) -> socket.socket:
    """A connection on which a body of this length is announced, and not sent."""
    host, port = own.url.removeprefix("http://").split(":")
    connection = socket.create_connection((host, int(port)), timeout=60)
    head = f"POST /task/submit HTTP/1.1\r\nHost: x\r\nDockyard-Tenant: {tenant}\r\nContent-Length: {declared}\r\n\r\n"
    connection.sendall(head.encode())
    return connection


def held(http: httpx.Client, tenant: str) -> int:
    """Six digits of it, as a gauge has."""
    name = f'dockyard_sandbox_body_bytes{{tenant="{tenant}"}} '
    lines = [line for line in http.get("/metrics").text.splitlines() if line.startswith(name)]
    return int(float(lines[0].removeprefix(name))) if lines else 0


def wait_until(condition: Callable[[], bool]) -> None:
    end = time.monotonic() + 60
    while not condition():
        assert time.monotonic() < end
        time.sleep(0.02)


def test_bodies_on_their_way_leave_room_for_other_tenants(
    own: ServerHandle, http: httpx.Client, project: Any, body: Any
) -> None:
    task, greedy = body(project.task(), project.gold()), {"Dockyard-Tenant": "greedy"}
    slow = [opened(own, MAX_BODY_BYTES, "greedy") for _ in range(4)]
    try:
        wait_until(lambda: held(http, "greedy") == pytest.approx(MAX_HELD_BYTES // 2, rel=1e-5))
        reply = http.post("/task/submit", json=task, headers=greedy)
        assert (reply.status_code, reply.headers["retry-after"]) == (429, "1")
        assert http.post("/task/submit", json=task).json()["status"] == "resolved"
        slow.pop().close()
        wait_until(lambda: held(http, "greedy") == pytest.approx(3 * MAX_BODY_BYTES, rel=1e-5))
        assert http.post("/task/submit", json=task, headers=greedy).json()["status"] == "resolved"
    finally:
        for connection in slow:
            connection.close()
    wait_until(lambda: held(http, "greedy") == 0)


def test_what_is_accepted_stays_counted_until_it_has_ended(http: httpx.Client, project: Any, body: Any) -> None:
    task = body(project.task(timeout_s=100.0), project.patch({"calc/ops.py": "import time\n\ntime.sleep(120)\n"}))
    sent = http.build_request("POST", "/task/submit?wait=false", json=task)
    task_id = http.send(sent).json()["task_id"]
    assert held(http, "default") == len(sent.content)
    assert http.delete(f"/task/{task_id}").status_code == 200
    wait_until(lambda: held(http, "default") == 0)
    sent = http.build_request("POST", "/session", json=body(project.task(), ""))
    session_id = http.send(sent).json()["session_id"]
    assert held(http, "default") == len(sent.content)
    assert http.delete(f"/session/{session_id}").status_code == 204
    assert held(http, "default") == 0


def test_a_body_of_100_megabytes_is_refused_before_it_is_sent(own: ServerHandle, http: httpx.Client) -> None:
    with opened(own, 100_000_000, "default") as connection:
        answer = connection.recv(65536)
        assert answer.startswith(b"HTTP/1.1 413 ")
        assert b"connection: close" in answer.lower()
        connection.shutdown(socket.SHUT_WR)
        rest = b"".join(iter(lambda: connection.recv(65536), b""))  # to the end: the server has closed
    assert f"the body must be at most {MAX_BODY_BYTES} bytes".encode() in answer + rest


def peak_mb(pid: int) -> int:
    line = next(line for line in Path(f"/proc/{pid}/status").read_text().splitlines() if line.startswith("VmHWM"))
    return int(line.split()[1]) // 1024


def test_a_patch_of_100_megabytes_is_the_policys_doing_and_costs_the_server_no_memory(
    own: ServerHandle, project: Any
) -> None:
    async def ask() -> VerdictStatus:
        async with SandboxClient(own.url, max_retries=0) as client:
            return (await client.judge(project.task(), "x" * 100_000_000, attempt_id="large")).status

    before = peak_mb(own.pid)
    assert asyncio.run(ask()) is VerdictStatus.POLICY_VIOLATION
    assert peak_mb(own.pid) - before < 32
