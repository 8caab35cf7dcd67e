"""Drives the machine in a simulation with the moves, in the order, of the app's pipeline."""

from __future__ import annotations

import json
from collections.abc import Callable

from dockyard_core.data import TaskSampler
from dockyard_core.errors import RefitError
from dockyard_core.loop.config import EMPTY_LOOP, ZERO_SIGNAL, Member
from dockyard_core.loop.ledger import Ledger
from dockyard_core.loop.machine import LoopMachine
from dockyard_core.loop.simulate_fleet import Fleet, Rollouts
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
        self._fleet = Fleet(world, watch, self._life)
        ledger = Ledger(world.book, next_seq=len(world.events))
        self.machine = LoopMachine(schedule.loop, ledger, self._fleet.engines)
        self._sampler = TaskSampler(schedule.num_tasks, schedule.sampler_seed)
        self._batch: tuple[GroupId, ...] = ()
        self._unanswered: set[str] = set()
        self._is_saving = False
        self._waiting: dict[str, Callable[[], None]] = {}  # what the end of "pins" or of "save" lets go on
        self._after_refit: Callable[[], None] = self._end_step
        self.is_idle = False
        """The trainer waits for a batch."""
        self.done = 0
        self.step_ends: dict[int, int] = {}
        """Step -> tick at which its refit was over."""

    @property
    def is_done(self) -> bool:
        """Whether the last step is done, evaluated and saved."""
        is_last = self.done == self._schedule.max_steps
        return is_last and not self._is_saving and not self.machine.evaluations and "save" not in self._waiting

    def start(self) -> None:
        """Start a new run, or go on with the one that left its files."""
        if self._incarnation == 0:
            self._watch.begin(self._fleet.engines)
            for engine in self._fleet.engines:
                self._fleet.commit(engine, 0)
            self._await_batch()
            return
        self.done, loop_state = self._world.restore_point()
        if loop_state is not None:
            self._sampler = TaskSampler.from_state(loop_state["sampler"])
        state = loop_state["machine"] if loop_state is not None else EMPTY_LOOP
        anew = self.machine.restore(state, incarnation=self._incarnation)
        self._world.sync()
        self._watch.restored(self._fleet.engines, self.done, anew)
        self._watch.recounts()

        def go_on() -> None:
            for step, is_pinned in self.machine.interrupted_evaluations:
                self._evaluate(step, is_pinned=is_pinned)
            for group_id in anew:
                self._fleet.start(group_id)
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
                self._lose_group(*event.subject)
            case "stepped":
                self._stepped()
            case "answered":
                self._answer(*event.subject)
            case "attested_again":
                self._refuse(lambda: self.machine.attest(*event.subject[:2], try_number=event.subject[2]))
            case "engine_died":
                self._lose_engine(*event.subject)
            case "engine_back":
                self._take_engine_back(*event.subject)
            case "evaluated":
                self._end_evaluation(*event.subject)
            case "saved":
                self._saved(*event.subject)
        self._watch.after_event(self.machine, is_idle=self.is_idle)
        return event

    def _admit(self) -> None:
        while self.machine.num_admissible > 0:
            index, repetition = self._sampler.next()
            group_id = GroupId(f"task-{index}", repetition)
            self.machine.admit(group_id)
            self._watch.admitted(group_id)
            self._fleet.start(group_id)

    def _end_group(self, group_id: GroupId, run: int, engine: str, rollouts: Rollouts, is_equal: bool) -> None:
        if not self._watch.is_under_way(group_id):
            self._refuse(lambda: self.machine.finish(group_id, [Member(cause, 0) for cause, _ in rollouts]))
            return
        if not self._fleet.is_current(group_id, run):
            return
        members = self._fleet.end(group_id, rollouts, is_equal=is_equal)
        versions = [m.oldest_version for m in members if m.invalid_cause is None and m.oldest_version is not None]
        for version in versions:
            self._watch.sampled(group_id, version)
        cause = self.machine.finish(group_id, members)
        is_whole = len(versions) >= 2
        self._watch.check("conservation", (cause in (None, ZERO_SIGNAL)) == is_whole, f"{group_id} left by {cause}")
        self._watch.signal(group_id, cause, is_equal=is_equal and is_whole)
        if cause is None:
            self._watch.ended(group_id, min(versions))
        else:
            self._watch.dropped(group_id)
            self._admit()
        self._changed()

    def _lose_group(self, group_id: GroupId, run: int) -> None:
        if not self._fleet.is_current(group_id, run):
            return
        self._fleet.forget(group_id)
        self.machine.drop(group_id, "infra_error")
        self._watch.dropped(group_id)
        self._admit()
        self._changed()

    def _changed(self) -> None:
        if self.is_idle:
            self._await_batch()

    def _await_batch(self) -> None:
        """The head of the app's loop: freshen the engines that can be, admit, take a batch if there is one."""
        self._admit()
        late = [engine for engine in self.machine.refit.late_engines if engine in self._fleet.available]
        if late and not self.machine.is_pinned:
            self._refit(self._await_batch)
            return
        batch = self.machine.next_batch()
        self.is_idle = batch is None
        if batch is not None:
            self._batch = batch
            self.machine.begin_step(batch)
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
        self._refit(self._end_step)

    def _refit(self, then: Callable[[], None]) -> None:
        """Bring every engine that is alive to the trainer's version; evaluations that pin them come first."""
        self.is_idle = False
        if self.machine.refit.is_fresh or not set(self.machine.refit.late_engines) & set(self._fleet.available):
            then()
            return
        if self.machine.is_pinned:
            self._waiting["pins"] = lambda: self._refit(then)
            return
        self._after_refit = then
        late = self.machine.begin_refit(self._fleet.available)
        self._watch.refit_begins(late)
        self._unanswered = set(late)
        for engine in late:
            ticks = self._schedule.refit.draw(self._world.rng)
            self._world.after(ticks, self._life, "answered", (engine, self.machine.refit.try_number))

    def _answer(self, engine: str, try_number: int) -> None:
        """An engine committed the version, or failed in one of two ways; a try ends with its last answer."""
        world, version = self._world, self.machine.policy_version
        if try_number != self.machine.refit.try_number or engine not in self._unanswered:
            return  # it died meanwhile
        self._unanswered.discard(engine)
        if not world.chance(self._schedule.faults.not_attested):
            self._fleet.commit(engine, version)
            self.machine.attest(engine, version, try_number=try_number)
            if world.chance(self._schedule.faults.duplicated):
                again = (engine, version, try_number)
                world.after(world.rng.randint(0, 5), self._life, "attested_again", again)
        elif world.rng.random() < 0.5:
            self._refuse(lambda: self.machine.attest(engine, version - 1))
        if not self._unanswered:
            self._end_refit()

    def _end_refit(self) -> None:
        is_fresh = self.machine.end_refit()
        self._watch.refit_ended(is_fresh)
        self._fleet.go_on()
        self._refit(self._after_refit)

    def _lose_engine(self, engine: str) -> None:
        if engine in self._fleet.lost:
            return
        self.machine.lose_engine(engine, "died")
        self._fleet.die(engine)
        self._world.after(self._world.rng.randint(1, 30), self._life, "engine_back", (engine,))
        if engine in self._unanswered:
            self._unanswered.discard(engine)
            if not self._unanswered:
                self._end_refit()

    def _take_engine_back(self, engine: str) -> None:
        self._fleet.lost.discard(engine)
        self._changed()

    def _end_step(self) -> None:
        """The tail of the app's step: evaluate, save, go on."""
        step = self.done + 1
        self.step_ends[step] = self._world.now
        self._watch.recounts()
        self._admit()
        if step in self._schedule.evaluations:
            self._evaluate(step, is_pinned=self._schedule.is_pinned)
        every = self._schedule.checkpoint_every
        if step == self._schedule.max_steps or (every is not None and step % every == 0):
            self._save(step)
        else:
            self._next_step(step)

    def _next_step(self, step: int) -> None:
        self.done = step
        if step < self._schedule.max_steps:
            self._await_batch()

    def _evaluate(self, step: int, *, is_pinned: bool) -> None:
        self.machine.begin_evaluation(step, is_pinned=is_pinned)
        self._watch.evaluation_begins(step)
        ticks = self._schedule.evaluate.draw(self._world.rng)
        self._world.after(ticks, self._life, "evaluated", (step, is_pinned))

    def _end_evaluation(self, step: int, is_pinned: bool) -> None:
        self._watch.evaluation_ends(step, is_pinned=is_pinned)
        self.machine.end_evaluation(step)
        if (then := self._waiting.pop("pins", None)) is not None:
            then()  # which waits again if it must
        else:
            self._changed()

    def _save(self, step: int) -> None:
        """Take a snapshot and let it be written while the loop goes on; one save at a time.

        A pinned evaluation is waited for, so that its row is on disk before the checkpoint is; and the
        last checkpoint waits for every evaluation: a run that has it is done.
        """
        if self.machine.is_pinned or (step == self._schedule.max_steps and self.machine.evaluations):
            self._waiting["pins"] = lambda: self._save(step)
            return
        if self._is_saving:
            self._waiting["save"] = lambda: self._save(step)
            return
        state = {"step": step, "machine": self.machine.snapshot(), "sampler": self._sampler.state()}
        self._world.sync()
        self._is_saving = True
        ticks = self._schedule.save.draw(self._world.rng)
        self._world.after(ticks, self._life, "saved", (step, json.dumps(state)))
        self._next_step(step)

    def _saved(self, step: int, state: str) -> None:
        self._is_saving = False
        if self._world.chance(self._schedule.faults.disk_full):
            self.machine.ledger.note("checkpoint_failed", step=step)
            if step == self._schedule.max_steps:
                self._waiting["save"] = lambda: self._save(step)
        else:
            self._world.save(step, state)
            self.machine.ledger.note("checkpoint", step=step)
        self._world.sync()
        if (then := self._waiting.pop("save", None)) is not None:
            then()

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
