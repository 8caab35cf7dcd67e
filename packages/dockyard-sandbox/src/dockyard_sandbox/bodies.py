"""Request bodies: how many bytes of them the server holds, how long one may take to arrive, who parses it.

read    takes a body's declared length from the budget before its first byte is read, a chunked body's as it
        grows; a large one is parsed on a thread, one at a time     -> what was parsed, and `Reserved`
hold    `Reserved` is kept for as long as what was parsed: to the end of a submission, call or session
refuse  408, 413, 429: said at once, without reading the rest

One budget for what is on its way and for what waits: both are the same memory. A tenant may hold as many
bytes as it leaves free, so a newcomer always finds some, and all together never hold more than the budget:
one tenant alone gets a half of it, two get a third each.
"""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from types import TracebackType
from typing import TypeVar

from starlette.requests import Request

from dockyard_sandbox.refusals import RequestRefused
from dockyard_sandbox.wire import MAX_BODY_BYTES

MAX_HELD_BYTES = 8 * MAX_BODY_BYTES
ARRIVAL_DEADLINE_S = 300.0
LARGE_BYTES = 1024 * 1024
"""A smaller body is parsed sooner than a thread would start on it."""
_RETRY_AFTER_S = 1
T = TypeVar("T")


class Bodies:
    """Reads the bodies of one server.

    Args:
        max_held_bytes: the budget.
        deadline_s: within which a body must have arrived.
    """

    def __init__(self, *, max_held_bytes: int = MAX_HELD_BYTES, deadline_s: float = ARRIVAL_DEADLINE_S) -> None:
        self._max_held_bytes = max_held_bytes
        self._deadline_s = deadline_s
        self._held: Counter[str] = Counter()
        # json and pydantic need several times a body's size, and stop other threads for parts of their work
        self._parsing = ThreadPoolExecutor(max_workers=1, thread_name_prefix="parse")

    def held_by_tenant(self) -> dict[str, int]:
        """Bytes on their way or held, of each tenant that has any."""
        return dict(self._held)

    async def read(self, request: Request, parse: Callable[[bytearray], T]) -> tuple[T, Reserved]:
        """Return the parsed body, and its bytes of the budget: release them when it is no longer held.

        Raises RequestRefused (408, 413, 429, and what ``parse`` raises); nothing is held then.
        """
        reserved = Reserved(self, request.state.tenant)
        try:
            content = await self._content(request, reserved)
            if len(content) <= LARGE_BYTES:
                return parse(content), reserved
            return await asyncio.get_running_loop().run_in_executor(self._parsing, parse, content), reserved
        except BaseException:
            reserved.release()
            raise

    def take(self, tenant: str, num_bytes: int) -> None:
        """Count ``num_bytes`` more for ``tenant``. Raises RequestRefused (429)."""
        free = self._max_held_bytes - self._held.total() - num_bytes
        if self._held[tenant] + num_bytes > free:
            message = (
                f"{self._held[tenant]} bytes of requests of tenant {tenant!r} are held and {num_bytes} more were sent: "
                f"more than it would leave free of {self._max_held_bytes}; ask again later"
            )
            raise RequestRefused(429, "", message, retry_after_s=_RETRY_AFTER_S, is_unread=True)
        self._held[tenant] += num_bytes

    def give_back(self, tenant: str, num_bytes: int) -> None:
        """Undo `take`."""
        self._held[tenant] -= num_bytes
        if self._held[tenant] <= 0:
            del self._held[tenant]

    async def _content(self, request: Request, reserved: Reserved) -> bytearray:
        declared = request.headers.get("content-length", "")
        reserved.grow_to(_capped(int(declared) if declared.isdecimal() else 0))
        content, is_whole = bytearray(), False
        try:
            async with asyncio.timeout(self._deadline_s):
                while not is_whole:
                    message = await request.receive()
                    if message["type"] == "http.disconnect":
                        raise RequestRefused(400, "", "the client went away before the end of the body")
                    chunk, is_whole = message.get("body", b""), not message.get("more_body", False)
                    reserved.grow_to(_capped(len(content) + len(chunk)))
                    content += chunk
        except TimeoutError as error:
            what = f"the body must arrive within {self._deadline_s:g} s, {len(content)} bytes have"
            raise RequestRefused(408, "", what, is_unread=True) from error
        return content


class Reserved:
    """What one body has of the budget. Leaving its ``with`` block gives it back, unless it was kept."""

    def __init__(self, bodies: Bodies, tenant: str) -> None:
        self._bodies = bodies
        self._tenant = tenant
        self._num_bytes = 0
        self._is_kept = False

    def grow_to(self, num_bytes: int) -> None:
        """Have at least ``num_bytes``. Raises RequestRefused (429)."""
        if num_bytes > self._num_bytes:
            self._bodies.take(self._tenant, num_bytes - self._num_bytes)
            self._num_bytes = num_bytes

    def keep(self) -> Reserved:
        """Hold on past the ``with`` block; whoever calls this calls `release`."""
        self._is_kept = True
        return self

    def release(self) -> None:
        """Give everything back; a second time changes nothing."""
        given, self._num_bytes = self._num_bytes, 0
        self._bodies.give_back(self._tenant, given)

    def __enter__(self) -> Reserved:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if not self._is_kept:
            self.release()


def _capped(num_bytes: int) -> int:
    if num_bytes > MAX_BODY_BYTES:
        raise RequestRefused(413, "", f"the body must be at most {MAX_BODY_BYTES} bytes", is_unread=True)
    return num_bytes
