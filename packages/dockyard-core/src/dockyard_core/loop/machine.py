"""The loop as a sans-IO state machine: what may be admitted, what may be trained, what is freed.

admit ──> under way ──> finished ──> step ──> trained ──(refit attested)──> slot freed
             └────────────┴────────────┴─ dropped(cause) ───────────────────^ at once

The app drives it with asyncio; tests drive it directly. It never waits and never reads a clock.

Staleness bound. At most (S+1)·P groups hold a slot. A group g is admitted at the trainer's version
v; at most (S+1)·P − 1 others were admitted at or before v, none can be added to them later (a
replacement of a dropped one either takes its place at v or is admitted later than v), and each
step consumes P of them before anything admitted after v. So g is consumed at version v + S at the
latest, and since its first token was sampled at v or later, its staleness is at most S.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Mapping, Sequence
from typing import Any, NamedTuple

from dockyard_core.loop.buffer import ReplayBuffer
from dockyard_core.loop.config import INVALID_CAUSES, ZERO_SIGNAL, LoopConfig, Member
from dockyard_core.loop.ledger import Ledger
from dockyard_core.loop.refit_order import RefitOrder
from dockyard_core.rollout import GroupId


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
        self._num_replaced = 0
        self.num_drops_in_a_row = 0
        """Groups lost since one was whole; grows without bound only if all is broken."""
        self.evaluations: dict[int, bool] = {}
        """Evaluations under way: the step after which each began -> whether it pins the engines."""
        self.interrupted_evaluations: tuple[tuple[int, bool], ...] = ()
        """After a restore: those that were under way, as (step, is_pinned); they begin anew."""

    def snapshot(self) -> dict[str, Any]:
        """JSON-able state of the loop, to be given to `restore`."""
        finished = [
            [*group_id, dict(self._finished[group_id].invalid), self._finished[group_id].oldest_version]
            for group_id in self._buffer.finished
        ]
        return {
            "policy_version": self.policy_version,
            "num_replaced": self._num_replaced,
            "admission_versions": [self._buffer.admission_version(group_id) for group_id in self.ledger.alive],
            "finished": finished,
            "evaluations": list(self.evaluations.items()),
            "ledger": self.ledger.snapshot(),
        }

    def restore(self, snapshot: Mapping[str, Any], *, incarnation: int) -> tuple[GroupId, ...]:
        """Go back to a snapshot on a machine that has done nothing yet.

        Groups that were finished wait to be trained, as they did. Those that were under way are
        under way again, in their old places; they are returned in admission order and must be run
        anew, by no older version than before. The engines are stale until a refit.
        """
        version = int(snapshot["policy_version"])
        self.refit = RefitOrder(self.refit.engines, policy_version=version, are_fresh=False)
        self._num_replaced = int(snapshot["num_replaced"])
        self.interrupted_evaluations = tuple((int(step), bool(pins)) for step, pins in snapshot["evaluations"])
        alive = self.ledger.restore(snapshot["ledger"], incarnation=incarnation)
        for group_id, admission_version in zip(alive, snapshot["admission_versions"], strict=True):
            self._buffer.admit(group_id, admission_version)
        for task_id, repetition, invalid, oldest_version in snapshot["finished"]:
            group_id = GroupId(task_id, repetition)
            self._buffer.finish(group_id)
            self._finished[group_id] = _Finished(Counter(invalid), oldest_version)
        return tuple(group_id for group_id in alive if group_id not in self._finished)

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

        Returns None when the group waits to be trained, or the cause for which it was dropped: fewer
        than two of its members are valid, or they are all worth the same (``zero_signal``) and the
        group may be replaced. Raises ValueError for a cause that makes no rollout invalid.
        """
        if len(members) != self.config.num_generations_per_prompt:
            raise ValueError(
                f"group {group_id} needs {self.config.num_generations_per_prompt} members, got {len(members)}"
            )
        invalid = Counter(member.invalid_cause for member in members if member.invalid_cause is not None)
        if unknown := sorted(invalid.keys() - INVALID_CAUSES):
            raise ValueError(f"group {group_id}: a rollout is invalid by {sorted(INVALID_CAUSES)}, got {unknown}")
        whole = [m for m in members if m.invalid_cause is None and m.oldest_version is not None]
        self._buffer.finish(group_id)
        self.ledger.finish(group_id, num_valid=len(members) - invalid.total())
        if len(whole) < 2:
            cause = invalid.most_common(1)[0][0] if invalid else "nothing_sampled"
            self.num_drops_in_a_row += 1
            self._discard(group_id, cause, invalid)
            return cause
        self.num_drops_in_a_row = 0
        if len({member.unshaped_reward for member in whole}) == 1 and self._may_replace:
            self._num_replaced += 1
            self._discard(group_id, ZERO_SIGNAL, invalid)
            return ZERO_SIGNAL
        self._finished[group_id] = _Finished(invalid, min(m.oldest_version or 0 for m in whole))
        return None

    def drop(self, group_id: GroupId, cause: str) -> None:
        """Give up a group under way or finished; its slot is free at once."""
        self.num_drops_in_a_row += 1
        self._discard(group_id, cause, self._finished.pop(group_id, _Finished(Counter(), 0)).invalid)

    def next_batch(self) -> tuple[GroupId, ...] | None:
        """The groups of the next step, or None while they are not all finished."""
        return self._buffer.peek(self.config.num_prompts_per_step)

    @property
    def is_blocked_by_head(self) -> bool:
        """Whether enough groups for a step are finished, but one of an older version is still under way."""
        return self._buffer.num_finished >= self.config.num_prompts_per_step and self.next_batch() is None

    def begin_step(self, batch: Sequence[GroupId]) -> None:
        """Note that a step on ``batch`` begins; `trained` or `skipped` ends it."""
        self.ledger.note("step_begun", policy_version=self.policy_version, groups=[str(group) for group in batch])

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
        self._num_replaced = 0
        self.refit.trained(version)
        return version

    def skipped(self, batch: Sequence[GroupId]) -> None:
        """Book a step whose gradient was not finite: the batch is dropped, the version stays."""
        for group_id in batch:
            self._discard(group_id, "nonfinite", self._finished.pop(group_id).invalid)
        self._num_replaced = 0

    def begin_refit(self, available: Collection[str] | None = None) -> tuple[str, ...]:
        """Fence the late engines, of those that are available; returns them.

        Raises ValueError while an evaluation pins the engines to the version that they hold.
        """
        if self.is_pinned:
            raise ValueError(f"evaluations {sorted(self.evaluations)} pin the engines; the refit has to wait")
        engines = self.refit.begin(available)
        self.ledger.note("refit_begun", policy_version=self.policy_version, engines=list(engines))
        return engines

    def attest(self, engine: str, policy_version: int, *, try_number: int | None = None) -> None:
        """An engine holds a version; see `RefitOrder.attest`."""
        self.refit.attest(engine, policy_version, try_number=try_number)
        self.ledger.note("attested", engine=engine, policy_version=policy_version)

    def lose_engine(self, engine: str, reason: str) -> None:
        """An engine died: nothing is admitted until what takes its place attests the trainer's version."""
        self.refit.lose(engine)
        self.ledger.note("engine_lost", engine=engine, reason=reason)

    def end_refit(self) -> bool:
        """Close the refit; when every engine attested, the trained groups' slots are freed."""
        is_fresh = self.refit.end()
        if is_fresh:
            self.ledger.note("refit_committed", policy_version=self.policy_version, freed=self._awaiting_refit)
            self._awaiting_refit = 0
        return is_fresh

    @property
    def is_pinned(self) -> bool:
        """Whether an evaluation keeps the engines at the version that they hold."""
        return any(self.evaluations.values())

    def begin_evaluation(self, step: int, *, is_pinned: bool) -> None:
        """An evaluation after ``step`` begins; it takes no slot. Raises ValueError if it is under way."""
        if step in self.evaluations:
            raise ValueError(f"the evaluation after step {step} is under way already")
        self.evaluations[step] = is_pinned
        self.ledger.note("evaluation_begun", step=step, policy_version=self.policy_version, is_pinned=is_pinned)

    def end_evaluation(self, step: int, **fields: Any) -> None:
        """Book the answers of an evaluation under way, with ``fields`` for the ledger."""
        if step not in self.evaluations:
            raise ValueError(f"no evaluation after step {step} is under way")
        del self.evaluations[step]
        self.ledger.note("evaluated", step=step, **fields)

    @property
    def _may_replace(self) -> bool:
        return self._num_replaced < self.config.max_replaced_per_step

    def _discard(self, group_id: GroupId, cause: str, invalid: Counter[str]) -> None:
        self._buffer.discard(group_id)
        self.ledger.drop(group_id, cause, invalid=invalid)
