"""Drives the machine in a simulation with the moves, in the order, of the app's pipeline."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence

from dockyard_core.data import TaskSampler
from dockyard_core.errors import RefitError
from dockyard_core.loop.ledger import EMPTY_LEDGER, Ledger
from dockyard_core.loop.machine import LoopMachine, Member
from dockyard_core.loop.simulate_watch import InvariantBroken, Watch
from dockyard_core.loop.simulate_world import Event, World
from dockyard_core.rollout import GroupId


class Driver:
    """One life of the driver: from a start or a restore to the last step or a crash."""

    def __init__(self, world: World, watch: Watch) -> None:
        self._world = world
        self._watch = watch
        self._schedule = schedule = world.schedule
        self._incarnation = world.incarnation
        self._life = world.num_crashes
        self._engines = [f"engine-{index}" for index in range(schedule.num_engines)]
        self.machine = LoopMachine(schedule.loop, Ledger(world.book, next_seq=len(world.events)), self._engines)
        self._sampler = TaskSampler(schedule.num_tasks, schedule.sampler_seed)
        self._load = dict.fromkeys(self._engines, 0)
        self._commits: dict[str, list[tuple[int, int]]] = {engine: [] for engine in self._engines}
        self._batch: tuple[GroupId, ...] = ()
        self._num_unanswered = 0
        self._num_started = 0
        self._after_refit: Callable[[], None] = self._end_step
        self.is_idle = False
        """The trainer waits for a batch."""
        self.done = 0
        self.step_ends: dict[int, int] = {}
        """Step -> tick at which its refit was over."""

    @property
    def is_done(self) -> bool:
        """Whether the last step is done and saved."""
        return self.done == self._schedule.max_steps

    def start(self) -> None:
        """Start a new run, or go on with the one that left its files."""
        if self._incarnation == 0:
            self._watch.begin(self._engines)
            for commits in self._commits.values():
                commits.append((self._world.now, 0))
            self._await_batch()
            return
        self.done, loop_state = self._world.restore_point()
        state = loop_state or {"machine": self.machine.snapshot() | {"ledger": EMPTY_LEDGER}}
        if loop_state is not None:
            self._sampler = TaskSampler.from_state(loop_state["sampler"])
        readmitted = self.machine.restore(state["machine"], incarnation=self._incarnation)
        self._world.sync()
        self._watch.restored(self._engines, self.done, readmitted)
        self._watch.recounts()

        def go_on() -> None:
            for group_id in readmitted:
                self._start_group(group_id)
            self._await_batch()

        self._refit(go_on)

    def step(self) -> Event:
        """Let the next event happen. Raises InvariantBroken if there is none."""
        event = self._world.next_event(self._life)
        if event is None:
            raise InvariantBroken("progress", f"nothing will happen any more; {self.done} steps are done")
        self._world.moment()
        match event.kind:
            case "group_ended":
                self._end_group(*event.subject)
            case "group_lost":
                self._lose_group(event.subject)
            case "stepped":
                self._stepped()
            case "answered":
                self._answer(*event.subject)
            case "attested_again":
                self._refuse(lambda: self.machine.attest(*event.subject))
            case "saved":
                self._saved(event.subject)
        self._watch.after_event(self.machine, is_idle=self.is_idle)
        return event

    def _admit(self) -> None:
        while self.machine.num_admissible > 0:
            index, repetition = self._sampler.next()
            group_id = GroupId(f"task-{index}", repetition)
            self.machine.admit(group_id)
            self._watch.admitted(group_id)
            self._start_group(group_id)

    def _start_group(self, group_id: GroupId) -> None:
        schedule, world, rng = self._schedule, self._world, self._world.rng
        faults = schedule.faults
        factor = schedule.slow_factor if self._num_started in schedule.slow_groups else 1
        self._num_started += 1
        engine = min(self._load, key=lambda name: self._load[name])
        self._load[engine] += 1
        rollouts, longest = [], 0
        for _ in range(schedule.num_generations_per_prompt):
            ticks, cause = factor * schedule.generate.draw(rng), None
            if schedule.deadline is not None and ticks > schedule.deadline:
                ticks, cause = schedule.deadline, "deadline" if world.strike() else None
            elif world.chance(faults.infra_error):
                ticks, cause = rng.randint(0, ticks), "infra_error"
            longest = max(longest, ticks)
            rollouts.append((cause, world.now + rng.randint(0, ticks)))
        ended = (group_id, engine, rollouts)
        late = rng.randint(1, 2 * longest + 1) if world.chance(faults.late) else 0
        if world.chance(faults.lost):
            world.after(longest + late, self._life, "group_lost", (group_id, engine))
            if rng.random() < 0.5:
                world.after(longest + late + rng.randint(0, 20), self._life, "group_ended", ended)
            return
        world.after(longest + late, self._life, "group_ended", ended)
        if world.chance(faults.duplicated):
            world.after(longest + late + rng.randint(0, 40), self._life, "group_ended", ended)

    def _end_group(self, group_id: GroupId, engine: str, rollouts: Sequence[tuple[str | None, int]]) -> None:
        members = [Member(cause, self._version_at(engine, first_token)) for cause, first_token in rollouts]
        if not self._watch.is_under_way(group_id):
            self._refuse(lambda: self.machine.finish(group_id, members))
            return
        self._load[engine] -= 1
        versions = [m.oldest_version for m in members if m.invalid_cause is None and m.oldest_version is not None]
        for version in versions:
            self._watch.sampled(group_id, version)
        cause = self.machine.finish(group_id, members)
        self._watch.check("conservation", (cause is None) == (len(versions) >= 2), f"{group_id} left by {cause}")
        if cause is None:
            self._watch.ended(group_id, min(versions, default=0))
        else:
            self._watch.dropped(group_id)
            self._admit()
        self._changed()

    def _version_at(self, engine: str, tick: int) -> int:
        # A token due while the engine was fenced counts for the version before: the oldest it can be of.
        commits = self._commits[engine]
        return next((version for time, version in reversed(commits) if time <= tick), commits[0][1])

    def _lose_group(self, subject: tuple[GroupId, str]) -> None:
        group_id, engine = subject
        if not self._watch.is_under_way(group_id):
            return
        self._load[engine] -= 1
        self.machine.drop(group_id, "infra_error")
        self._watch.dropped(group_id)
        self._admit()
        self._changed()

    def _changed(self) -> None:
        if self.is_idle:
            self._await_batch()

    def _await_batch(self) -> None:
        self._admit()
        batch = self.machine.next_batch()
        self.is_idle = batch is None
        if batch is not None:
            self._batch = batch
            self._watch.step_begins(batch)
            self._world.after(self._schedule.train.draw(self._world.rng), self._life, "stepped")

    def _stepped(self) -> None:
        is_skipped = self._world.chance(self._schedule.faults.nonfinite)
        if is_skipped:
            self.machine.skipped(self._batch)
        else:
            self.machine.trained(self._batch)
        self._watch.step_ends(self._batch, is_skipped=is_skipped)
        self._world.sync()
        if self.machine.refit.is_fresh:
            self._end_step()
        else:
            self._refit(self._end_step)

    def _refit(self, then: Callable[[], None]) -> None:
        self._after_refit = then
        late = self.machine.begin_refit()
        self._num_unanswered = len(late)
        for engine in late:
            self._watch.held[engine] = None
            self._world.after(self._schedule.refit.draw(self._world.rng), self._life, "answered", (engine,))
        if not late:
            self._end_refit()

    def _answer(self, engine: str) -> None:
        """An engine committed the version, or failed in one of two ways; a try ends with its last answer."""
        world, version = self._world, self.machine.policy_version
        self._num_unanswered -= 1
        if not world.chance(self._schedule.faults.not_attested):
            self._watch.held[engine] = version
            self._commits[engine].append((world.now, version))
            self.machine.attest(engine, version)
            if world.chance(self._schedule.faults.duplicated):
                world.after(world.rng.randint(0, 5), self._life, "attested_again", (engine, version))
        elif world.rng.random() < 0.5:
            self._refuse(lambda: self.machine.attest(engine, version - 1))
        if self._num_unanswered == 0:
            self._end_refit()

    def _end_refit(self) -> None:
        is_fresh = self.machine.end_refit()
        self._watch.refit_ended(is_fresh)
        if is_fresh:
            self._after_refit()
        else:
            self._refit(self._after_refit)

    def _end_step(self) -> None:
        step = self.done + 1
        self.step_ends[step] = self._world.now
        self._watch.recounts()
        self._admit()
        every = self._schedule.checkpoint_every
        if step == self._schedule.max_steps or (every is not None and step % every == 0):
            state = {"step": step, "machine": self.machine.snapshot(), "sampler": self._sampler.state()}
            self._world.sync()
            ticks = self._schedule.save.draw(self._world.rng)
            self._world.after(ticks, self._life, "saved", (step, json.dumps(state)))
        else:
            self.done = step
            self._await_batch()

    def _saved(self, subject: tuple[int, str]) -> None:
        self._world.save(*subject)
        self.machine.ledger.note("checkpoint", step=subject[0])
        self._world.sync()
        self.done = subject[0]
        if not self.is_done:
            self._await_batch()

    def _refuse(self, move: Callable[[], object]) -> None:
        """A message that must be refused, and must leave no trace."""
        before = self.machine.snapshot(), self.machine.num_slots_taken, self.machine.next_batch()
        try:
            move()
        except (ValueError, RefitError):
            is_refused = True
        else:
            is_refused = False
        after = self.machine.snapshot(), self.machine.num_slots_taken, self.machine.next_batch()
        self._watch.check("exactly_once", is_refused and after == before, f"a message was taken twice: {after}")
