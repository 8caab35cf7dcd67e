"""The engines of a simulation: which group runs where, which version sampled it, who died."""

from __future__ import annotations

from collections.abc import Sequence

from dockyard_core.loop.config import Member
from dockyard_core.loop.simulate_watch import Watch
from dockyard_core.loop.simulate_world import World
from dockyard_core.rollout import GroupId

Rollouts = Sequence[tuple[str | None, int]]
"""Per rollout of a group: why it is invalid, and the tick of its first token."""


class Fleet:
    """Engines of one life of the driver. A group whose engine dies runs anew on another one."""

    def __init__(self, world: World, watch: Watch, life: int) -> None:
        self._world = world
        self._watch = watch
        self._life = life
        self.engines = tuple(f"engine-{index}" for index in range(world.schedule.num_engines))
        self.lost: set[str] = set()
        self._load = dict.fromkeys(self.engines, 0)
        self._commits: dict[str, list[tuple[int, int]]] = {engine: [] for engine in self.engines}
        self._runs: dict[GroupId, tuple[str, int]] = {}
        self._homeless: list[GroupId] = []
        self._num_runs = 0
        self._num_started = 0
        self._is_slow: dict[GroupId, bool] = {}

    @property
    def available(self) -> tuple[str, ...]:
        """Engines that are alive."""
        return tuple(engine for engine in self.engines if engine not in self.lost)

    def commit(self, engine: str, policy_version: int) -> None:
        """From now on an engine samples by this version."""
        self._watch.held[engine] = policy_version
        self._commits[engine].append((self._world.now, policy_version))

    def start(self, group_id: GroupId) -> None:
        """Run a group on the engine with the least to do that holds weights, or keep it until there is one."""
        self._is_slow.setdefault(group_id, self._num_started in self._world.schedule.slow_groups)
        self._num_started += 1
        self._dispatch(group_id)

    def die(self, engine: str) -> None:
        """An engine is gone, with what ran on it."""
        self.lost.add(engine)
        self._watch.held[engine] = None
        self._commits[engine].clear()
        self._load[engine] = 0
        moved = [group_id for group_id, (where, _) in self._runs.items() if where == engine]
        for group_id in moved:
            del self._runs[group_id]
            self._dispatch(group_id)

    def go_on(self) -> None:
        """Engines hold weights again: run what waited for one."""
        waiting, self._homeless = self._homeless, []
        for group_id in waiting:
            self._dispatch(group_id)

    def is_current(self, group_id: GroupId, run: int) -> bool:
        """Whether this message is of the group's present run, and not of one that died with its engine."""
        return self._runs.get(group_id, ("", -1))[1] == run

    def end(self, group_id: GroupId, rollouts: Rollouts, *, is_equal: bool) -> list[Member]:
        """A group ended; its members, with the versions that sampled their first tokens."""
        engine, _ = self._runs.pop(group_id)
        self._load[engine] -= 1
        return [
            Member(cause, self._version_at(engine, first_token), 0.0 if is_equal else float(index))
            for index, (cause, first_token) in enumerate(rollouts)
        ]

    def forget(self, group_id: GroupId) -> None:
        """A group is given up."""
        engine, _ = self._runs.pop(group_id)
        self._load[engine] -= 1

    def _version_at(self, engine: str, tick: int) -> int:
        # A token due while the engine was fenced counts for the version before: the oldest it can be of.
        commits = self._commits[engine]
        return next((version for time, version in reversed(commits) if time <= tick), commits[0][1])

    def _dispatch(self, group_id: GroupId) -> None:
        able = [engine for engine in self.available if self._commits[engine]]
        if not able:
            self._homeless.append(group_id)
            return
        engine = min(able, key=lambda name: self._load[name])
        self._load[engine] += 1
        self._num_runs += 1
        self._runs[group_id] = engine, self._num_runs
        self._schedule_end(group_id, engine, self._num_runs)

    def _schedule_end(self, group_id: GroupId, engine: str, run: int) -> None:
        world, rng, faults = self._world, self._world.rng, self._world.schedule.faults
        rollouts, longest = self._draw_rollouts(factor=world.schedule.slow_factor if self._is_slow[group_id] else 1)
        ended = (group_id, run, engine, rollouts, world.chance(faults.zero_signal))
        late = rng.randint(1, 2 * longest + 1) if world.chance(faults.late) else 0
        if world.chance(faults.engine_death):
            world.after(rng.randint(0, longest), self._life, "engine_died", (engine,))
        if world.chance(faults.lost):
            world.after(longest + late, self._life, "group_lost", (group_id, run))
            if rng.random() < 0.5:
                world.after(longest + late + rng.randint(0, 20), self._life, "group_ended", ended)
            return
        world.after(longest + late, self._life, "group_ended", ended)
        if world.chance(faults.duplicated):
            world.after(longest + late + rng.randint(0, 40), self._life, "group_ended", ended)

    def _draw_rollouts(self, factor: int) -> tuple[list[tuple[str | None, int]], int]:
        schedule, world, rng = self._world.schedule, self._world, self._world.rng
        rollouts, longest = [], 0
        for _ in range(schedule.num_generations_per_prompt):
            ticks, cause = factor * schedule.generate.draw(rng), None
            if schedule.deadline is not None and ticks > schedule.deadline:
                ticks, cause = schedule.deadline, "deadline" if world.strike() else None
            elif world.chance(schedule.faults.infra_error):
                ticks, cause = rng.randint(0, ticks), "infra_error"
            longest = max(longest, ticks)
            rollouts.append((cause, world.now + rng.randint(0, ticks)))
        return rollouts, longest
