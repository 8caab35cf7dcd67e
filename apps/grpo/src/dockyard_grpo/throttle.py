"""Adaptive concurrency toward engines and sandboxes: `AdaptiveLimit` driven by asyncio."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Awaitable, Callable, Sequence
from typing import TypeVar

from dockyard_core import (
    Completion,
    EngineBusy,
    EngineHealth,
    GenerateRequest,
    Generator,
    Sandbox,
    SandboxBusy,
    SandboxTimeout,
    Task,
    Verdict,
)
from dockyard_core.loop import AdaptiveLimit
from dockyard_core.refit import PauseMode, RefitEndpoint, RefitReport, RefitUpdate
from dockyard_grpo.usage import BusyClock

_T = TypeVar("_T")


class Throttle:
    """Lets as many calls through at once as the server can take; the others wait, first come first served.

    The limit is its own: only this queue knows whom to wake when a call ends.

    Args:
        initial: calls at once, to begin with.
        maximum: never more than this.
    """

    def __init__(self, initial: int, *, maximum: int) -> None:
        self.limit = AdaptiveLimit(initial, maximum=maximum)
        self._waiting: deque[asyncio.Future[None]] = deque()
        self._num_called = 0  # whose turn it is, and who have not sent yet

    async def run(self, call: Callable[[], Awaitable[_T]]) -> _T:
        """Await ``call()`` when it is its turn, and again when it was too busy; the deadline is the caller's."""
        while True:
            await self._turn()
            ticket = self.limit.send()
            is_refused, retry_after_s = False, 0.0
            try:
                return await call()
            except (SandboxBusy, EngineBusy) as busy:
                is_refused, retry_after_s = True, busy.retry_after_s
            finally:
                if is_refused:
                    self.limit.refused(ticket)
                else:
                    self.limit.answered()
                self._wake()
            await asyncio.sleep(retry_after_s)

    async def _turn(self) -> None:
        if not self._waiting and self._num_free > 0:
            return
        enqueue = self._waiting.append
        while True:
            mine: asyncio.Future[None] = asyncio.get_running_loop().create_future()
            enqueue(mine)
            try:
                await mine
            except asyncio.CancelledError:
                if mine.done() and not mine.cancelled():
                    self._num_called -= 1
                    self._wake()  # it was this one's turn: it is somebody else's now
                raise
            self._num_called -= 1
            if self.limit.may_send:
                return
            enqueue = self._waiting.appendleft  # the limit fell meanwhile: this one stays the first

    @property
    def _num_free(self) -> int:
        return self.limit.limit - self.limit.num_under_way - self._num_called

    def _wake(self) -> None:
        while self._num_free > 0 and self._waiting:
            future = self._waiting.popleft()
            if not future.done():
                future.set_result(None)
                self._num_called += 1


class ThrottledSandbox:
    """A sandbox server that is asked no more at once than it can take.

    Args:
        sandbox: raises SandboxBusy when the server has too much to do.
        throttle: of requests to it.
        timeout_s: deadline of one verdict, waiting for its turn included.
    """

    def __init__(self, sandbox: Sandbox, throttle: Throttle, *, timeout_s: float) -> None:
        self._sandbox = sandbox
        self._timeout_s = timeout_s
        self.throttle = throttle

    async def judge(self, task: Task, patch: str, *, attempt_id: str) -> Verdict:
        """See `dockyard_core.Sandbox.judge`."""
        try:
            async with asyncio.timeout(self._timeout_s):
                return await self.throttle.run(lambda: self._sandbox.judge(task, patch, attempt_id=attempt_id))
        except TimeoutError as error:
            raise SandboxTimeout(
                f"no verdict on {task.instance_id!r} within {self._timeout_s} s; raise sandbox.timeout_s or add workers"
            ) from error


class ThrottledGenerator:
    """An engine whose `generate` is asked no more at once than it can take.

    Args:
        generator: raises EngineBusy when it has too much to do.
        throttle: of requests to it.
        clock: counts the time during which any is under way.
    """

    def __init__(self, generator: Generator, throttle: Throttle, clock: BusyClock) -> None:
        self._generator = generator
        self._clock = clock
        self.throttle = throttle

    @property
    def version(self) -> int:
        """The policy version that samples the next token."""
        return self._generator.version

    async def generate(self, request: GenerateRequest) -> Completion:
        """Sample one completion."""
        with self._clock.busy():
            return await self.throttle.run(lambda: self._generator.generate(request))

    async def score(self, token_ids: Sequence[int]) -> tuple[float, ...]:
        """Logprobs at temperature 1 of tokens 1..T-1."""
        return await self._generator.score(token_ids)

    async def pause(self, mode: PauseMode = "keep") -> None:
        """Stop sampling."""
        await self._generator.pause(mode)

    async def resume(self) -> None:
        """Go on sampling."""
        await self._generator.resume()

    async def connect_refit(self, endpoint: RefitEndpoint) -> None:
        """Join the sender's group."""
        await self._generator.connect_refit(endpoint)

    async def refit(self, update: RefitUpdate) -> RefitReport:
        """Take new weights."""
        return await self._generator.refit(update)

    async def health(self) -> EngineHealth:
        """Whether the engine lives."""
        return await self._generator.health()
