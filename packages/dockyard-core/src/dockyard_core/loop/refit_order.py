"""The weight-staleness handshake: after a step the generators are stale until every one attests."""

from __future__ import annotations

from collections.abc import Collection, Iterable

from dockyard_core.errors import RefitError


class RefitOrder:
    """Which version each engine holds, and whether all hold the trainer's."""

    def __init__(self, engines: Iterable[str], *, policy_version: int = 0, are_fresh: bool = True) -> None:
        """``are_fresh=False``: the engines hold other weights than the trainer's (after a restore)."""
        held = policy_version if are_fresh else None
        self._held: dict[str, int | None] = dict.fromkeys(engines, held)
        if not self._held:
            raise ValueError("a run needs at least 1 engine, got 0")
        self._wanted = policy_version
        self._is_under_way = False
        self._asked: set[str] = set()  # engines whose answer to the try under way is still wanted
        self.try_number = 0
        """Tries begun so far; an attestation counts in its own try only."""

    @property
    def engines(self) -> tuple[str, ...]:
        """Every engine."""
        return tuple(self._held)

    @property
    def wanted_version(self) -> int:
        """The version the engines must hold to be fresh."""
        return self._wanted

    @property
    def is_fresh(self) -> bool:
        """Whether every engine attested the wanted version and none is fenced."""
        return not self._is_under_way and all(held == self._wanted for held in self._held.values())

    @property
    def late_engines(self) -> tuple[str, ...]:
        """Engines that do not hold the wanted version."""
        return tuple(engine for engine, held in self._held.items() if held != self._wanted)

    def trained(self, policy_version: int) -> None:
        """The trainer made a version: the engines are stale from now on."""
        if policy_version != self._wanted + 1:
            raise ValueError(f"versions grow by 1 per step: {policy_version} cannot follow {self._wanted}")
        if self._is_under_way:
            raise ValueError(f"version {policy_version} was made while the refit to {self._wanted} was under way")
        self._wanted = policy_version

    def begin(self, available: Collection[str] | None = None) -> tuple[str, ...]:
        """Fence the engines that are late and return them; they serve nothing until they attest.

        Args:
            available: engines that can take weights now; None = all. The others stay late.
        """
        if self._is_under_way:
            raise ValueError(f"a refit to version {self._wanted} is under way already")
        self._is_under_way = True
        self.try_number += 1
        late = tuple(engine for engine in self.late_engines if available is None or engine in available)
        for engine in late:
            self._held[engine] = None
        self._asked = set(late)
        return late

    def lose(self, engine: str) -> None:
        """The engine is gone: it is late, and what it said in this try no longer counts."""
        self._held[engine] = None
        self._asked.discard(engine)

    def attest(self, engine: str, policy_version: int, *, try_number: int | None = None) -> None:
        """An engine committed a version.

        Args:
            engine: which.
            policy_version: what it holds now.
            try_number: the try that it answers to; None = the one under way.

        Raises:
            ValueError: outside a refit, or in answer to an earlier try.
            RefitError: it is not the wanted version.
        """
        is_late = try_number is not None and try_number != self.try_number
        if not self._is_under_way or is_late or engine not in self._asked:
            raise ValueError(f"engine {engine} attests version {policy_version} outside a refit")
        if policy_version != self._wanted:
            raise RefitError(
                f"engine {engine} attested another version than it was sent",
                wanted_version=self._wanted,
                held_version=policy_version,
            )
        self._asked.discard(engine)
        self._held[engine] = policy_version

    def end(self) -> bool:
        """Close this try; returns ``is_fresh``. Late engines stay fenced for the next try."""
        self._is_under_way = False
        return self.is_fresh
