"""The append-only account of every group and rollout: admitted = trained + dropped + alive.

The ledger keeps identities of what is alive and counters of what has left. The law is checked at
every event against sums that are kept apart from each other, so that a double or a lost booking
shows at once and stops the run with the ids.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from types import MappingProxyType
from typing import Any

from dockyard_core.errors import LedgerViolation
from dockyard_core.rollout import GroupId

EventSink = Callable[[Mapping[str, Any]], None]
"""Takes one event, a flat JSON-able mapping with the key ``event``."""

EMPTY_LEDGER: Mapping[str, Any] = MappingProxyType(
    {
        "frontier": 0,
        "admitted": [0, 0],
        "trained": [0, 0],
        "dropped_groups": {},
        "dropped_rollouts": {},
        "alive": [],
    }
)
"""Snapshot of a ledger before its first event: a run that is taken up without a checkpoint."""


class Ledger:
    """Books the life of groups and their rollouts and checks the conservation law at every event."""

    def __init__(self, sink: EventSink, *, next_seq: int = 0) -> None:
        self._sink = sink
        self._next_seq = next_seq
        self._alive: dict[GroupId, int] = {}
        self.admitted_groups = 0
        self.admitted_rollouts = 0
        self.trained_groups = 0
        self.trained_rollouts = 0
        self.dropped_groups: Counter[str] = Counter()
        self.dropped_rollouts: Counter[str] = Counter()

    @property
    def next_seq(self) -> int:
        """Number of the next event; with `snapshot`, a checkpoint's frontier."""
        return self._next_seq

    def snapshot(self) -> dict[str, Any]:
        """JSON-able counters, to be given to `restore`."""
        return {
            "frontier": self._next_seq,
            "admitted": [self.admitted_groups, self.admitted_rollouts],
            "trained": [self.trained_groups, self.trained_rollouts],
            "dropped_groups": dict(self.dropped_groups),
            "dropped_rollouts": dict(self.dropped_rollouts),
            "alive": [[*group_id, count] for group_id, count in self._alive.items()],
        }

    def restore(self, snapshot: Mapping[str, Any], *, incarnation: int) -> tuple[GroupId, ...]:
        """Go back to a snapshot; every event since its frontier is rolled back.

        Returns the groups that were alive then, in admission order: they are admitted again under
        the same identity, which the ledger does not count twice.
        """
        self.admitted_groups, self.admitted_rollouts = snapshot["admitted"]
        self.trained_groups, self.trained_rollouts = snapshot["trained"]
        self.dropped_groups = Counter(snapshot["dropped_groups"])
        self.dropped_rollouts = Counter(snapshot["dropped_rollouts"])
        self._alive = {GroupId(task, repetition): count for task, repetition, count in snapshot["alive"]}
        rolled_back = self._next_seq - snapshot["frontier"]
        self._record("restored", incarnation=incarnation, frontier=snapshot["frontier"], rolled_back=rolled_back)
        return tuple(self._alive)

    @property
    def alive(self) -> Mapping[GroupId, int]:
        """Groups admitted and neither trained nor dropped, with their number of rollouts."""
        return self._alive

    def admit(self, group_id: GroupId, *, num_rollouts: int, policy_version: int) -> None:
        """Book a new group. Raises LedgerViolation if it is alive already."""
        if group_id in self._alive:
            raise LedgerViolation(f"group {group_id} was admitted twice while alive")
        self._alive[group_id] = num_rollouts
        self.admitted_groups += 1
        self.admitted_rollouts += num_rollouts
        self._record("admitted", group=str(group_id), num_rollouts=num_rollouts, policy_version=policy_version)

    def finish(self, group_id: GroupId, *, num_valid: int) -> None:
        """Note that every rollout of an alive group has ended; changes no count."""
        self._require_alive(group_id, "finished")
        self._record("finished", group=str(group_id), num_valid=num_valid)

    def train(self, group_id: GroupId, *, policy_version: int, invalid: Mapping[str, int], staleness: int) -> None:
        """Book a group as trained; its invalid rollouts are dropped, each by its cause.

        Args:
            group_id: an alive group.
            policy_version: the version that the step made.
            invalid: cause -> number of the group's rollouts that left by it.
            staleness: of the group's oldest token at consumption.
        """
        num_rollouts = self._leave(group_id, "trained")
        num_invalid = sum(invalid.values())
        if num_invalid > num_rollouts:
            raise LedgerViolation(f"group {group_id} has {num_rollouts} rollouts but {num_invalid} invalid ones")
        self.trained_groups += 1
        self.trained_rollouts += num_rollouts - num_invalid
        self.dropped_rollouts.update(dict(invalid))
        self._record(
            "trained",
            group=str(group_id),
            policy_version=policy_version,
            num_rollouts=num_rollouts - num_invalid,
            invalid=dict(invalid),
            staleness=staleness,
        )

    def drop(self, group_id: GroupId, cause: str, *, invalid: Mapping[str, int] | None = None) -> None:
        """Book a group as dropped by ``cause``; its still valid rollouts leave by the same cause."""
        invalid = invalid or {}
        num_rollouts = self._leave(group_id, "dropped")
        self.dropped_groups[cause] += 1
        self.dropped_rollouts.update(dict(invalid))
        self.dropped_rollouts[cause] += num_rollouts - sum(invalid.values())
        self._record("dropped", group=str(group_id), cause=cause, num_rollouts=num_rollouts, invalid=dict(invalid))

    def note(self, event: str, **fields: Any) -> None:
        """Append an event that moves no group (refit_begun, attested, checkpoint, …)."""
        self._record(event, **fields)

    def check(self) -> None:
        """Raise LedgerViolation unless admitted = trained + dropped + alive, for groups and rollouts."""
        groups = self.trained_groups + self.dropped_groups.total() + len(self._alive)
        rollouts = self.trained_rollouts + self.dropped_rollouts.total() + sum(self._alive.values())
        if groups != self.admitted_groups or rollouts != self.admitted_rollouts:
            alive = ", ".join(str(group_id) for group_id in list(self._alive)[:8])
            raise LedgerViolation(
                f"admitted {self.admitted_groups} groups / {self.admitted_rollouts} rollouts, but trained + dropped "
                f"+ alive = {groups} / {rollouts}; alive: {alive or 'none'}"
            )

    def _record(self, event: str, **fields: Any) -> None:
        self._sink({"seq": self._next_seq, "event": event, **fields})
        self._next_seq += 1
        self.check()

    def _require_alive(self, group_id: GroupId, what: str) -> None:
        if group_id not in self._alive:
            raise LedgerViolation(f"group {group_id} is to be {what} but is not alive")

    def _leave(self, group_id: GroupId, what: str) -> int:
        self._require_alive(group_id, what)
        return self._alive.pop(group_id)


def surviving(events: Iterable[Mapping[str, Any]]) -> Sequence[Mapping[str, Any]]:
    """The events of the surviving lineage: a ``restored`` event takes back all since its frontier."""
    lineage: list[Mapping[str, Any]] = []
    for event in events:
        if event["event"] == "restored":
            lineage = [kept for kept in lineage if kept["seq"] < event["frontier"]]
        lineage.append(event)
    return lineage


def recount(events: Iterable[Mapping[str, Any]], *, start: Mapping[str, Any] = EMPTY_LEDGER) -> dict[str, int]:
    """Count a recorded ledger again, from the surviving events alone.

    Args:
        events: of events.jsonl, in order.
        start: a checkpoint's `Ledger.snapshot`, which stands for every event before its frontier:
            those are not looked at, and need not be there.

    Returns admitted, trained, dropped and alive groups, and the same for rollouts with the suffix
    ``_rollouts``.

    Raises:
        LedgerViolation: an event contradicts an earlier one.
        ValueError: the run went back to before ``start``.
    """
    frontier = start["frontier"]
    tail = [event for event in events if event["seq"] >= frontier]
    gone_back = [event["frontier"] for event in tail if event["event"] == "restored" and event["frontier"] < frontier]
    if gone_back:
        raise ValueError(f"the run went back to event {gone_back[0]}, before the checkpoint's {frontier}")
    alive = {str(GroupId(task, repetition)): count for task, repetition, count in start["alive"]}
    counts = _counts_of(start)
    for event in surviving(tail):
        group = event.get("group", "")
        if event["event"] == "admitted":
            if group in alive:
                raise LedgerViolation(f"group {group} was admitted twice while alive")
            alive[group] = event["num_rollouts"]
            counts["admitted"] += 1
            counts["admitted_rollouts"] += event["num_rollouts"]
        elif event["event"] in ("trained", "dropped"):
            if group not in alive:
                raise LedgerViolation(f"group {group} is {event['event']} but not alive")
            size = alive.pop(group)
            trained = event["num_rollouts"] if event["event"] == "trained" else 0
            counts[event["event"]] += 1
            counts["trained_rollouts"] += trained
            counts["dropped_rollouts"] += size - trained
    counts["alive"] = len(alive)
    counts["alive_rollouts"] = sum(alive.values())
    return _all_kinds(counts)


def _counts_of(snapshot: Mapping[str, Any]) -> Counter[str]:
    counts: Counter[str] = Counter()
    for kind in ("admitted", "trained"):
        counts[kind], counts[f"{kind}_rollouts"] = snapshot[kind]
    for kind in ("groups", "rollouts"):
        counts["dropped" if kind == "groups" else "dropped_rollouts"] = sum(snapshot[f"dropped_{kind}"].values())
    return counts


def _all_kinds(counts: Counter[str]) -> dict[str, int]:
    kinds = ("admitted", "trained", "dropped", "alive")
    return {name: counts[name] for kind in kinds for name in (kind, f"{kind}_rollouts")}
