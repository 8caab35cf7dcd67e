"""What happens when a part of the run dies: recover or stop, each death an event of the ledger.

engine    lost: admission stops, its groups run anew elsewhere; a new one starts in its place and serves
          once it has attested the trainer's version
sandbox   lost: clients ask again while the server is started again
trainer   lost: nothing here can save it; the run goes on from its last checkpoint (see `train`)
"""

from __future__ import annotations

import asyncio
import time
from collections import Counter, deque
from collections.abc import Callable, Iterable
from typing import Any

from dockyard_core import DockyardError, EngineDead, GeneratorError, GroupId, SandboxUnavailable
from dockyard_core.loop import LoopMachine
from dockyard_grpo.config import Config
from dockyard_grpo.config.sections import RecoverySection
from dockyard_grpo.fleets import Fleets

_HOUR_S = 3600.0


class TrainerLost(DockyardError):
    """A trainer rank is gone, and with it the weights since the last checkpoint."""


class Budget:
    """How many deaths a run survives within an hour."""

    def __init__(self, section: RecoverySection, clock: Callable[[], float] = time.monotonic) -> None:
        self._max_per_hour = section.max_per_hour
        self._clock = clock
        self._deaths: deque[float] = deque()

    def spend(self) -> bool:
        """Count one more death; False when they are too many."""
        now = self._clock()
        self._deaths.append(now)
        while self._deaths[0] <= now - _HOUR_S:
            self._deaths.popleft()
        return len(self._deaths) <= self._max_per_hour


class Recovery:
    """Knows which engines serve, and brings back what died.

    Args:
        config: its section ``recovery`` says what may be recovered.
        fleets: whose parts.
        machine: books every death.
        budget: shared by all lives of the run in this process.
        say: takes one line for the console.
    """

    def __init__(
        self, config: Config, fleets: Fleets, machine: LoopMachine, budget: Budget, say: Callable[[str], None]
    ) -> None:
        self._section = config.recovery
        self._fleets = fleets
        self._machine = machine
        self._budget = budget
        self._say = say
        self._tasks: asyncio.TaskGroup | None = None
        self._started: list[asyncio.Task[None]] = []
        self._lost: set[str] = set()
        self._without_weights: set[str] = set()
        self._in_refit: frozenset[str] = frozenset()
        self._num_interruptions: Counter[str] = Counter()
        self._refit_over = asyncio.Event()
        self._served = asyncio.Event()
        self.changed = asyncio.Event()
        """Set whenever the pipeline has reason to look again."""

    @property
    def serving(self) -> tuple[str, ...]:
        """Engines that are alive and hold weights of this life."""
        return tuple(name for name in self._fleets.engines if name not in self._lost | self._without_weights)

    @property
    def available(self) -> frozenset[str]:
        """Engines that are alive: they can take weights."""
        return frozenset(self._fleets.engines) - self._lost

    async def wait_serving(self) -> tuple[str, ...]:
        """The serving engines, as soon as there is one."""
        while not self.serving:
            self._served.clear()
            await self._served.wait()
        return self.serving

    def start(self, tasks: asyncio.TaskGroup) -> None:
        """Watch the sandbox servers of this run; what fails here for good ends ``tasks``."""
        self._tasks = tasks
        for index in range(len(self._fleets.sandboxes)):
            self._started.append(tasks.create_task(self._watch_sandbox(index), name=f"watch sandbox {index}"))

    def stop(self) -> None:
        """From now on a part that ends has been asked to."""
        self._tasks = None
        for task in self._started:
            task.cancel()

    def begin_refit(self, names: Iterable[str], *, aborts: bool = False) -> None:
        """A try of a refit begins on these engines.

        Args:
            names: of the engines.
            aborts: it takes their requests along, well as it may go.
        """
        self._in_refit = frozenset(names)
        if aborts:
            self._num_interruptions.update(self._in_refit)
        self._refit_over.clear()

    def end_refit(self) -> None:
        """The try is over, and what failed in it is fenced or lost."""
        self._in_refit = frozenset()
        self._refit_over.set()

    def num_interruptions(self, name: str) -> int:
        """How often a refit has taken an engine's requests along."""
        return self._num_interruptions[name]

    def run_anew(self, name: str, group_id: GroupId) -> None:
        """A refit took requests of this group along; it begins again."""
        self._machine.ledger.note("group_run_anew", engine=name, group=str(group_id))

    async def was_well(self, name: str, engine: Any, num_interruptions: int) -> bool:
        """Whether an engine has served since that number was read; waits for the try that it may be in."""
        while name in self._in_refit:
            await self._refit_over.wait()
        is_same = self._fleets.engines[name] is engine and self._num_interruptions[name] == num_interruptions
        return is_same and name in self.serving

    def fence(self, name: str) -> None:
        """An engine is alive but holds no version: it serves nothing until a refit."""
        self._without_weights.add(name)
        self._num_interruptions[name] += 1

    def attested(self, name: str) -> None:
        """An engine holds the trainer's version."""
        self._without_weights.discard(name)
        self._served.set()

    def lose_engine(self, name: str, engine: Any, error: BaseException | str) -> None:
        """An engine died; a new one is started in its place.

        Args:
            name: of the engine.
            engine: the handle that failed; a late message of one that was replaced already counts for nothing.
            error: why.

        Raises EngineDead when recovery is not wanted or the budget is spent.
        """
        if name in self._lost or self._fleets.engines[name] is not engine:
            return
        reason = _one_line(error)
        self._lost.add(name)
        self._machine.lose_engine(name, reason)
        self._spend("engine", EngineDead, f"{name} died: {reason}")
        self._say(f"{name} died ({reason}); a new one is started, its groups run anew")
        assert self._tasks is not None, "start() comes first, and nothing after stop()"
        self._started.append(self._tasks.create_task(self._bring_back(name), name=f"bring {name} back"))

    async def _bring_back(self, name: str) -> None:
        from ray.exceptions import RayActorError

        started, is_back = time.monotonic(), False
        while not is_back:
            try:
                async with asyncio.timeout(self._section.timeout_s):
                    await self._fleets.restart_engine(name)
                is_back = True
            except TimeoutError as error:
                raise EngineDead(
                    f"{name} did not come back within recovery.timeout_s={self._section.timeout_s}"
                ) from error
            except (GeneratorError, RayActorError) as error:
                self._spend("engine", EngineDead, f"{name} died while it started: {_one_line(error)}")
        self._without_weights.add(name)
        self._lost.discard(name)
        self._machine.ledger.note("engine_restarted", engine=name, seconds=round(time.monotonic() - started, 3))
        self.changed.set()

    async def _watch_sandbox(self, index: int) -> None:
        from ray.exceptions import RayActorError

        while True:
            is_actor_alive = True
            try:
                code = await self._fleets.sandboxes[index].wait_dead.remote()
                reason = f"its process ended with {code}"
            except RayActorError as error:
                is_actor_alive, reason = False, _one_line(error)
            if self._tasks is None:
                return
            self._machine.ledger.note("sandbox_lost", sandbox=index, reason=reason)
            self._spend("sandbox", SandboxUnavailable, f"sandbox server {index} died: {reason}")
            self._say(f"sandbox server {index} died ({reason}); it is started again")
            try:
                async with asyncio.timeout(self._section.timeout_s):
                    url = await self._fleets.restart_sandbox(index, is_actor_alive=is_actor_alive)
            except RayActorError:
                continue  # the node went while the server was started on it: once more, elsewhere
            except TimeoutError as error:
                raise SandboxUnavailable(
                    f"sandbox server {index} did not come back within recovery.timeout_s={self._section.timeout_s}"
                ) from error
            self._machine.ledger.note("sandbox_restarted", sandbox=index, url=url)

    def _spend(self, part: str, kind: type[DockyardError], what: str) -> None:
        if getattr(self._section, part) == "stop":
            raise kind(f"{what}; recovery.{part}=stop")
        if not self._budget.spend():
            raise kind(f"{what}; more than recovery.max_per_hour={self._section.max_per_hour} deaths within an hour")


def _one_line(error: BaseException | str) -> str:
    text = str(error).strip() or type(error).__name__
    lines = [line.strip() for line in text.splitlines() if line.strip()]
    # Of a remote traceback the last line says what happened; of Ray's long explanations the first one does.
    return (lines[-1] if lines[0].startswith(("Traceback", "\x1b")) else lines[0])[:300]
