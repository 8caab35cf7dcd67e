"""Keeps requests out of an engine whose weights are in doubt."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Coroutine, Iterable, Iterator
from contextlib import asynccontextmanager, contextmanager
from typing import Any

from dockyard_core.errors import GeneratorError, RefitTimeout
from dockyard_core.refit import RefitUpdate


class Transaction:
    """One refit: nothing has changed before ``begin``; only ``commit`` and ``roll_back`` end it whole."""

    def __init__(self, gate: asyncio.Event) -> None:
        self._gate = gate
        self.has_begun = False
        self.is_whole = False
        self.is_harmless = False
        """However it fails now, nothing has changed."""

    @contextmanager
    def staging(self, is_staging: bool) -> Iterator[None]:
        """If so, the weights go elsewhere than into the engine: however this fails, nothing has changed."""
        self.is_harmless = is_staging
        yield
        self.is_harmless = False

    def begin(self) -> None:
        """From now on new requests wait."""
        self.has_begun = True
        self._gate.clear()

    async def drain(self, ends: Iterable[Coroutine[Any, Any, object]], limit_s: float, update: RefitUpdate) -> None:
        """Let live requests end, each of which a coroutine waits for; new ones wait already.

        Raises:
            RefitTimeout: some did not. Nothing has changed then, so the engine serves on.
        """
        tasks = [asyncio.ensure_future(end) for end in ends]
        _, late = await asyncio.wait(tasks, timeout=limit_s) if tasks else ((), ())
        for task in late:
            task.cancel()
        if late:
            self.has_begun, self.is_harmless = False, True
            raise RefitTimeout(
                f"{len(late)} requests did not end within {update.timeout_s} s, and refit mode wait waits for them",
                wanted_version=update.policy_version,
            )

    def commit(self) -> None:
        """The engine holds the new version, whole."""
        self.is_whole = True

    def roll_back(self) -> None:
        """The engine holds the version that it had before, whole again."""
        self.is_whole = True


class Fence:
    """New requests wait while a refit is under way and fail after one that did not commit."""

    def __init__(self) -> None:
        self.reason = ""
        """Why the engine serves nothing; empty while it serves."""
        self._gate = asyncio.Event()
        self._gate.set()
        self._one_refit = asyncio.Lock()

    @asynccontextmanager
    async def transaction(self, what: str) -> AsyncIterator[Transaction]:
        """Fence the engine from ``begin`` until it is whole; otherwise it stays fenced.

        An error before ``begin`` leaves the engine as it was, except a RefitTimeout outside of staging:
        nobody knows what a rank that did not answer has done.
        """
        async with self._one_refit:
            transaction = Transaction(self._gate)
            try:
                yield transaction
            except RefitTimeout:
                if not transaction.is_harmless:
                    transaction.begin()
                raise
            finally:
                if transaction.is_whole:
                    self.reason = ""
                elif transaction.has_begun:
                    self.break_(f"{what} did not commit")
                self._gate.set()

    def break_(self, reason: str) -> None:
        """Let every request fail from now on."""
        self.reason = reason
        self._gate.set()

    def check(self) -> None:
        """Raise GeneratorError if the engine serves nothing."""
        if self.reason:
            raise GeneratorError(f"the engine is fenced: {self.reason}; refit it again or restart it")

    async def passed(self) -> None:
        """Wait for the refit under way, if any; raise GeneratorError if the engine is fenced."""
        await self._gate.wait()
        self.check()


def unable_to_drain(update: RefitUpdate, num_live: int, *, is_paused: bool) -> str:
    """Why requests could never end that the update's mode waits for; empty if they can."""
    is_stuck = update.mode == "wait" and is_paused and num_live > 0
    return f"a paused engine does not drain its {num_live} requests: resume() it" if is_stuck else ""
