"""Finished groups on their way to the trainer: FIFO by admission version.

Inside one admission version any finished order will do; a younger version is never consumed while
an older one still has a group under way. That, with the bound on what is alive, is what keeps
staleness <= max_staleness without discarding slow work. Which groups a batch takes depends on who
finished first; the order inside the batch does not, so that equal work gives equal sums.
"""

from __future__ import annotations

from dockyard_core.rollout import GroupId


class ReplayBuffer:
    """Knows every group under way and every finished one, by the version that admitted it."""

    def __init__(self) -> None:
        self._pending: dict[int, set[GroupId]] = {}
        self._finished: dict[int, list[GroupId]] = {}
        self._version_of: dict[GroupId, int] = {}  # in the order of admission

    def __len__(self) -> int:
        return len(self._version_of)

    def __contains__(self, group_id: GroupId) -> bool:
        return group_id in self._version_of

    @property
    def num_finished(self) -> int:
        """Groups that wait to be trained."""
        return sum(len(groups) for groups in self._finished.values())

    @property
    def finished(self) -> tuple[GroupId, ...]:
        """Groups that wait to be trained, by admission version and then in the order they finished."""
        return tuple(group_id for version in sorted(self._finished) for group_id in self._finished[version])

    def admission_version(self, group_id: GroupId) -> int:
        """The version that admitted a group under way or finished."""
        return self._version_of[group_id]

    def admit(self, group_id: GroupId, policy_version: int) -> None:
        """Take a group under way. Raises ValueError if it is here already."""
        if group_id in self._version_of:
            raise ValueError(f"group {group_id} is in the buffer already")
        self._version_of[group_id] = policy_version
        self._pending.setdefault(policy_version, set()).add(group_id)

    def finish(self, group_id: GroupId) -> None:
        """Move a group from under way to finished. Raises ValueError if it is not under way."""
        version = self._version_of.get(group_id)
        if version is None or group_id not in self._pending.get(version, ()):
            raise ValueError(f"group {group_id} is not under way")
        self._pending[version].discard(group_id)
        self._finished.setdefault(version, []).append(group_id)

    def discard(self, group_id: GroupId) -> None:
        """Forget a group, under way or finished. Raises KeyError if it is unknown."""
        version = self._version_of.pop(group_id)
        self._pending.get(version, set()).discard(group_id)
        finished = self._finished.get(version, [])
        if group_id in finished:
            finished.remove(group_id)
        self._forget_empty(version)

    def peek(self, count: int) -> tuple[GroupId, ...] | None:
        """The next ``count`` groups, in the order of admission; None while they are not all finished."""
        batch: list[GroupId] = []
        for version in sorted(self._pending.keys() | self._finished.keys()):
            batch.extend(self._finished.get(version, ()))
            if self._pending.get(version):
                break
        if len(batch) < count:
            return None
        chosen = set(batch[:count])
        return tuple(group_id for group_id in self._version_of if group_id in chosen)

    def _forget_empty(self, version: int) -> None:
        if not self._pending.get(version) and not self._finished.get(version):
            self._pending.pop(version, None)
            self._finished.pop(version, None)
