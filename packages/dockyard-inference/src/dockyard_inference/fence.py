"""Keeps requests out of an engine whose weights are in doubt."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

from dockyard_core.errors import GeneratorError, RefitTimeout


class Transaction:
    """One refit: nothing has changed before ``begin``; only ``commit`` ends it well."""

    def __init__(self, gate: asyncio.Event) -> None:
        self._gate = gate
        self.has_begun = False
        self.is_committed = False

    def begin(self) -> None:
        """From now on new requests wait."""
        self.has_begun = True
        self._gate.clear()

    def commit(self) -> None:
        """The engine holds the new version, whole."""
        self.is_committed = True


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
        """Fence the engine from ``begin`` until ``commit``; without a commit it stays fenced.

        An error before ``begin`` leaves the engine as it was, except a RefitTimeout: nobody knows
        what a rank that did not answer has done.
        """
        async with self._one_refit:
            transaction = Transaction(self._gate)
            try:
                yield transaction
            except RefitTimeout:
                transaction.begin()
                raise
            finally:
                if transaction.is_committed:
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
