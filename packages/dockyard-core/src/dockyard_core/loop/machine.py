"""The loop as a sans-IO state machine: what may be admitted, what may be trained, what is freed.

admit ──> under way ──> finished ──> trained ──(refit attested)──> slot freed
             └────────────┴─ dropped(cause) ───────────────────────^ at once

The app drives it with asyncio; tests drive it directly. It never waits and never reads a clock.

Staleness bound. At most (S+1)·P groups hold a slot. A group g is admitted at the trainer's version
v; at most (S+1)·P − 1 others were admitted at or before v, none can be added to them later (a
replacement of a dropped one either takes its place at v or is admitted later than v), and each
step consumes P of them before anything admitted after v. So g is consumed at version v + S at the
latest, and since its first token was sampled at v or later, its staleness is at most S.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

from dockyard_core.loop.buffer import ReplayBuffer
from dockyard_core.loop.ledger import Ledger
from dockyard_core.loop.refit_order import RefitOrder
from dockyard_core.rollout import GroupId


@dataclass(frozen=True, kw_only=True)
class LoopConfig:
    """The numbers that bound the loop."""

    num_prompts_per_step: int
    num_generations_per_prompt: int
    max_staleness: int
    max_steps: int | None = None
    """None = endless; else no group is admitted that no step could train."""

    def __post_init__(self) -> None:
        if self.num_prompts_per_step < 1:
            raise ValueError(f"num_prompts_per_step must be >= 1, got {self.num_prompts_per_step}")
        if self.num_generations_per_prompt < 2:
            raise ValueError(f"a group needs >= 2 rollouts, got {self.num_generations_per_prompt}")
        if self.max_staleness < 0:
            raise ValueError(f"max_staleness must be >= 0, got {self.max_staleness}")

    @property
    def num_slots(self) -> int:
        """Groups that may hold a slot at once."""
        return (self.max_staleness + 1) * self.num_prompts_per_step


class Member(NamedTuple):
    """What the loop needs to know of one rollout of a finished group."""

    invalid_cause: str | None
    oldest_version: int | None
    """Version that sampled its oldest token; None when nothing was sampled."""


class _Finished(NamedTuple):
    invalid: Counter[str]
    oldest_version: int


class LoopMachine:
    """Slots, replay buffer, ledger and refit order behind the few moves that keep them consistent."""

    def __init__(self, config: LoopConfig, ledger: Ledger, engines: Sequence[str]) -> None:
        self.config = config
        self.ledger = ledger
        self.refit = RefitOrder(engines)
        self._buffer = ReplayBuffer()
        self._finished: dict[GroupId, _Finished] = {}
        self._awaiting_refit = 0
        self.num_drops_in_a_row = 0
        """Groups dropped since one was finished for training; grows without bound only if all is broken."""

    def snapshot(self) -> dict[str, Any]:
        """JSON-able state of the loop, to be given to `restore`."""
        return {"policy_version": self.policy_version, "ledger": self.ledger.snapshot()}

    def restore(self, snapshot: Mapping[str, Any], *, incarnation: int) -> tuple[GroupId, ...]:
        """Go back to a snapshot on a machine that has done nothing yet.

        The groups alive at the snapshot are under way again, at the snapshot's version; they are
        returned in admission order and must be run anew. The engines are stale until a refit.
        """
        version = int(snapshot["policy_version"])
        self.refit = RefitOrder(self.refit.engines, policy_version=version, are_fresh=False)
        alive = self.ledger.restore(snapshot["ledger"], incarnation=incarnation)
        for group_id in alive:
            self._buffer.admit(group_id, version)
        return alive

    @property
    def policy_version(self) -> int:
        """The trainer's version."""
        return self.refit.wanted_version

    @property
    def num_slots_taken(self) -> int:
        """Groups alive, and groups trained whose weights the engines do not hold yet."""
        return len(self._buffer) + self._awaiting_refit

    @property
    def num_admissible(self) -> int:
        """How many groups may be admitted now; 0 while any engine is stale."""
        if not self.refit.is_fresh:
            return 0
        free = self.config.num_slots - self.num_slots_taken
        if self.config.max_steps is None:
            return free
        needed = self.config.max_steps * self.config.num_prompts_per_step
        return min(free, needed - self.ledger.trained_groups - len(self._buffer) - self._nonfinite_groups)

    @property
    def _nonfinite_groups(self) -> int:
        # A skipped step consumed its batch: it counts as a step, so its groups are not replaced.
        return self.ledger.dropped_groups["nonfinite"]

    def admit(self, group_id: GroupId) -> int:
        """Take a slot for a group; returns the version it is admitted at."""
        if self.num_admissible < 1:
            raise ValueError(f"group {group_id} has no slot: {self.num_slots_taken} of {self.config.num_slots} taken")
        self._buffer.admit(group_id, self.policy_version)
        self.ledger.admit(
            group_id,
            num_rollouts=self.config.num_generations_per_prompt,
            policy_version=self.policy_version,
        )
        return self.policy_version

    def finish(self, group_id: GroupId, members: Sequence[Member]) -> str | None:
        """Note the end of a group's last rollout.

        Returns None when the group waits to be trained, or the cause for which it was dropped:
        fewer than two of its members are valid.
        """
        if len(members) != self.config.num_generations_per_prompt:
            raise ValueError(
                f"group {group_id} needs {self.config.num_generations_per_prompt} members, got {len(members)}"
            )
        invalid = Counter(member.invalid_cause for member in members if member.invalid_cause is not None)
        versions = [m.oldest_version for m in members if m.invalid_cause is None and m.oldest_version is not None]
        self._buffer.finish(group_id)
        self.ledger.finish(group_id, num_valid=len(members) - invalid.total())
        if len(versions) < 2:
            cause = invalid.most_common(1)[0][0] if invalid else "nothing_sampled"
            self._discard(group_id, cause, invalid)
            return cause
        self._finished[group_id] = _Finished(invalid, min(versions))
        self.num_drops_in_a_row = 0
        return None

    def drop(self, group_id: GroupId, cause: str) -> None:
        """Give up a group under way or finished; its slot is free at once."""
        self._discard(group_id, cause, self._finished.pop(group_id, _Finished(Counter(), 0)).invalid)

    def next_batch(self) -> tuple[GroupId, ...] | None:
        """The groups of the next step, or None while they are not all finished."""
        return self._buffer.peek(self.config.num_prompts_per_step)

    def staleness(self, group_id: GroupId) -> int:
        """Trainer version now minus the version of the group's oldest token."""
        return self.policy_version - self._finished[group_id].oldest_version

    def trained(self, batch: Sequence[GroupId]) -> int:
        """Book a step on ``batch``; its slots stay taken until the refit. Returns the new version."""
        version = self.policy_version + 1
        for group_id in batch:
            staleness = self.staleness(group_id)
            if staleness > self.config.max_staleness:
                raise AssertionError(f"group {group_id} is {staleness} versions old, bound {self.config.max_staleness}")
            invalid = self._finished.pop(group_id).invalid
            self._buffer.discard(group_id)
            self.ledger.train(group_id, policy_version=version, invalid=invalid, staleness=staleness)
        self._awaiting_refit += len(batch)
        self.refit.trained(version)
        return version

    def skipped(self, batch: Sequence[GroupId]) -> None:
        """Book a step whose gradient was not finite: the batch is dropped, the version stays."""
        in_a_row = self.num_drops_in_a_row
        for group_id in batch:
            self.drop(group_id, "nonfinite")
        self.num_drops_in_a_row = in_a_row  # these were finished: the infrastructure works

    def begin_refit(self) -> tuple[str, ...]:
        """Fence the late engines; returns them."""
        engines = self.refit.begin()
        self.ledger.note("refit_begun", policy_version=self.policy_version, engines=list(engines))
        return engines

    def attest(self, engine: str, policy_version: int) -> None:
        """An engine holds a version."""
        self.refit.attest(engine, policy_version)
        self.ledger.note("attested", engine=engine, policy_version=policy_version)

    def end_refit(self) -> bool:
        """Close the refit; when every engine attested, the trained groups' slots are freed."""
        is_fresh = self.refit.end()
        if is_fresh:
            self.ledger.note("refit_committed", policy_version=self.policy_version, freed=self._awaiting_refit)
            self._awaiting_refit = 0
        return is_fresh

    def _discard(self, group_id: GroupId, cause: str, invalid: Counter[str]) -> None:
        self._buffer.discard(group_id)
        self.num_drops_in_a_row += 1
        self.ledger.drop(group_id, cause, invalid=invalid)
