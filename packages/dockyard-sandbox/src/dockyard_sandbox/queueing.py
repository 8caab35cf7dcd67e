"""Who may enter, and who goes next: a bounded queue with fair shares per tenant.

Admission  counts tasks from their acceptance to their verdict; past a bound the next one is refused
           at once, with the time after which asking again makes sense
FairSlots  bounds what runs at once; waiting tenants take turns, first come first served inside one
"""

from __future__ import annotations

import asyncio
import math
from collections import Counter, OrderedDict, deque
from contextvars import ContextVar
from types import TracebackType

DEFAULT_TENANT = "default"
TENANT: ContextVar[str] = ContextVar("tenant", default=DEFAULT_TENANT)
"""Whose work the current asyncio task does."""

_MAX_RETRY_AFTER_S = 60
_FIRST_GUESS_S = 1.0  # of one task's time on a worker, until one has been measured
_SMOOTHING = 0.1


class QueueFull(Exception):
    """The server holds as much work as it may, or could not do this work in time."""

    def __init__(self, message: str, *, retry_after_s: int = 1) -> None:
        super().__init__(message)
        self.retry_after_s = retry_after_s


class Ticket:
    """The right of one submission to be held; given back once."""

    def __init__(self, admission: Admission, tenant: str, count: int) -> None:
        self._admission = admission
        self._tenant = tenant
        self._left = count

    def release(self, count: int | None = None) -> None:
        """Give back ``count`` places; None = those that are left."""
        given = self._left if count is None else min(count, self._left)
        self._left -= given
        self._admission.leave(self._tenant, given)


class Admission:
    """Bounds the tasks that the server holds.

    With T tenants at work, each may hold 1/T of the places. One that joins late gets its share at once,
    although the others still hold theirs: so at most about ln(T) + 1 times the places are held together.
    """

    def __init__(self, *, workers: int, max_queue: int) -> None:
        self._workers = workers
        self.capacity = workers + max_queue
        self._held: Counter[str] = Counter()
        self._mean_s = _FIRST_GUESS_S

    @property
    def num_held(self) -> int:
        """Tasks accepted and not answered."""
        return self._held.total()

    def held_by_tenant(self) -> dict[str, int]:
        """Tasks accepted and not answered, of each tenant that has any."""
        return dict(self._held)

    def admit(self, tenant: str, count: int, *, deadline_s: float | None = None) -> Ticket:
        """Take ``count`` places. Raises QueueFull."""
        own = self._held[tenant]
        num_tenants = len(self._held) if own else len(self._held) + 1
        if not own:
            del self._held[tenant]
        share = max(1, math.ceil(self.capacity / num_tenants))
        if own + count > share:
            raise QueueFull(
                f"{own} tasks of tenant {tenant!r} are held and {count} more were sent, its share is {share} "
                f"(places {self.capacity}, tenants {num_tenants}); ask again later, or in smaller batches",
                retry_after_s=_retry_after(self._wait_s(count, 1)),
            )
        wait_s = self._wait_s(own + count, num_tenants)
        if deadline_s is not None and wait_s > deadline_s:
            raise QueueFull(
                f"deadline_s={deadline_s:g} cannot be kept: {self.num_held} tasks are held, about {wait_s:.0f} s",
                retry_after_s=_retry_after(wait_s - deadline_s),
            )
        self._held[tenant] += count
        return Ticket(self, tenant, count)

    def let_through(self, tenant: str) -> Ticket:
        """Take a place for a task that another bound has let in: it is counted like any, and never refused."""
        self._held[tenant] += 1
        return Ticket(self, tenant, 1)

    def leave(self, tenant: str, count: int) -> None:
        """Give places back; see `Ticket.release`."""
        self._held[tenant] -= count
        if self._held[tenant] <= 0:
            del self._held[tenant]

    def observe(self, seconds: float) -> None:
        """Learn how long one task kept a worker."""
        self._mean_s += _SMOOTHING * (seconds - self._mean_s)

    def _wait_s(self, count: int, num_tenants: int) -> float:
        """Seconds until ``count`` tasks of one tenant are done, when ``num_tenants`` take turns."""
        return min(count * num_tenants, self.num_held + count) * self._mean_s / self._workers


def _retry_after(seconds: float) -> int:
    return min(_MAX_RETRY_AFTER_S, max(1, math.ceil(seconds)))


class FairSlots:
    """An asynchronous context manager that holds one of ``num_slots``; the tenant is `TENANT`'s."""

    def __init__(self, num_slots: int) -> None:
        if num_slots < 1:
            raise ValueError(f"num_slots must be >= 1, got {num_slots}")
        self._free = num_slots
        self._waiting: OrderedDict[str, deque[asyncio.Future[None]]] = OrderedDict()

    @property
    def num_waiting(self) -> int:
        """How many wait for a slot."""
        return sum(map(len, self._waiting.values()))

    async def __aenter__(self) -> None:
        if self._free and not self._waiting:
            self._free -= 1
            return
        tenant = TENANT.get()
        turn: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._waiting.setdefault(tenant, deque()).append(turn)
        try:
            await turn
        except asyncio.CancelledError:
            if turn.done() and not turn.cancelled():
                self._pass_on()  # it was granted in the same turn of the loop as the cancellation
            else:
                queue = self._waiting.get(tenant, deque())
                if turn in queue:
                    queue.remove(turn)
                    if not queue:
                        del self._waiting[tenant]
            raise

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._pass_on()

    def _pass_on(self) -> None:
        while self._waiting:
            tenant, queue = self._waiting.popitem(last=False)
            turn = queue.popleft()
            if queue:
                self._waiting[tenant] = queue  # behind every other tenant
            if not turn.done():
                turn.set_result(None)
                return
        self._free += 1
