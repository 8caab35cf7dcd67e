"""Identical work in flight is done once: the first caller starts it, the others wait for it."""

from __future__ import annotations

import asyncio
from collections import OrderedDict
from collections.abc import Awaitable, Callable, Hashable
from dataclasses import dataclass
from typing import Generic, TypeVar

T = TypeVar("T")


@dataclass
class _Call(Generic[T]):
    task: asyncio.Task[T]
    waiters: int = 0


class SharedCalls(Generic[T]):
    """Calls by key. A call is cancelled when its last waiter is."""

    def __init__(self) -> None:
        self._calls: dict[Hashable, _Call[T]] = {}

    def __contains__(self, key: Hashable) -> bool:
        return key in self._calls

    def __len__(self) -> int:
        return len(self._calls)

    async def get(self, key: Hashable, start: Callable[[], Awaitable[T]]) -> tuple[T, bool]:
        """Return (result, whether another caller had started it)."""
        call = self._calls.get(key)
        joined = call is not None
        if call is None:

            async def work() -> T:
                return await start()

            call = self._calls[key] = _Call(asyncio.create_task(work()))
        call.waiters += 1
        try:
            return await asyncio.shield(call.task), joined
        finally:
            call.waiters -= 1
            if self._calls.get(key) is call and (call.task.done() or call.waiters == 0):
                del self._calls[key]
            if call.waiters == 0 and not call.task.done():
                call.task.cancel()


class BoundedCache(Generic[T]):
    """Least recently used entries leave first."""

    def __init__(self, capacity: int) -> None:
        if capacity < 1:
            raise ValueError(f"capacity must be >= 1, got {capacity}")
        self._capacity = capacity
        self._entries: OrderedDict[Hashable, T] = OrderedDict()

    def get(self, key: Hashable) -> T | None:
        """Return the entry, or None."""
        if key not in self._entries:
            return None
        self._entries.move_to_end(key)
        return self._entries[key]

    def put(self, key: Hashable, value: T) -> None:
        """Store an entry, dropping the least recently used one when full."""
        self._entries[key] = value
        self._entries.move_to_end(key)
        if len(self._entries) > self._capacity:
            self._entries.popitem(last=False)
