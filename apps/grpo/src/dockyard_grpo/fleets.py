"""Starts the three fleets and the recorder, and ends them in order."""

from __future__ import annotations

import asyncio
import contextlib
import os
import secrets
import uuid
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from dockyard_core import ConfigError, GroupId, Task
from dockyard_core.refit import TensorSpec
from dockyard_grpo import compose
from dockyard_grpo.actors.inference import InferenceWorker
from dockyard_grpo.actors.recorder import Recorder
from dockyard_grpo.actors.sandbox import SandboxWorker
from dockyard_grpo.actors.trainer import TrainerWorker
from dockyard_grpo.cluster import kill, place, places, plan_fleets, spawn, spawn_beside_driver
from dockyard_grpo.config import Config
from dockyard_grpo.placement import Fleet
from dockyard_grpo.progress import Reporter
from dockyard_grpo.run_directory import RunDirectory
from dockyard_grpo.summary import GroupRun
from dockyard_grpo.survey import needs_of, survey
from dockyard_grpo.usage import EngineUsage

_STOP_S = 20.0
_USAGE_S = 5.0


@dataclass
class Fleets:
    """Handles of every actor of the run."""

    trainers: list[Any] = field(default_factory=list)
    engines: dict[str, Any] = field(default_factory=dict)
    sandboxes: list[Any] = field(default_factory=list)
    recorder: Any = None
    manifest: tuple[TensorSpec, ...] = ()
    run_path: Path = field(default_factory=Path)
    ranks_per_engine: int = 1
    num_sandbox_workers: int | None = None
    """Verdicts that the run's own servers work on at once; None = the servers are somebody else's."""
    _new_engine: Callable[[str, Sequence[str]], Any] | None = None
    _new_sandbox: Callable[[int], Any] | None = None
    _sandbox_urls: list[str] = field(default_factory=list)

    async def start(
        self,
        config: Config,
        num_gpus: int,
        train: Sequence[Task],
        validation: Sequence[Task],
        reporter: Reporter,
    ) -> None:
        """Place and start everything; returns when the engines have joined the refit group.

        What was started before a failure is ended by `stop`.
        """
        trainer, inference, sandbox = plan_fleets(config, num_gpus)
        needs = needs_of(config, (*train, *validation), self.run_path)
        placement = await survey(config, (trainer, inference, sandbox), needs, reporter.say)
        groups = await place(placement)
        if len(placement.nodes) > 1:
            reporter.say(f"placed: {places(placement, groups)}")
        urls, token = await self._start_sandboxes(config, sandbox, groups)
        reporter.say(f"fleets: {_describe(trainer)}, {_describe(inference)}, sandbox at {', '.join(urls)}")
        self.trainers = [
            spawn(TrainerWorker, trainer, groups["trainer"], rank, config, rank, trainer.count)
            for rank in range(trainer.count)
        ]
        # A sandbox server may outlive a run and know its ids: a new life asks anew.
        attempt = f"{config.run.name}-{uuid.uuid4().hex[:12]}"
        names = {f"engine-{index}": index for index in range(inference.count)}

        def new_engine(name: str, sandbox_urls: Sequence[str]) -> Any:
            return spawn(
                InferenceWorker,
                inference,
                groups["inference"],
                names[name],
                config,
                train,
                validation,
                engine_index=names[name],
                sandbox_urls=sandbox_urls,
                sandbox_token=token,
                attempt=attempt,
            )

        self._new_engine, self._sandbox_urls = new_engine, urls
        self.engines = {name: new_engine(name, urls) for name in names}
        _, ranks = await asyncio.gather(
            self._build_trainers(),
            asyncio.gather(*(worker.start.remote() for worker in self.engines.values())),
        )
        self.ranks_per_engine = ranks[0]
        await self.connect_refit(tuple(self.engines))

    async def check_trainers(self) -> None:
        """Raise Ray's own error of a trainer rank that is gone; a rank that is only busy answers."""
        await asyncio.gather(*(trainer.ping.remote() for trainer in self.trainers))

    async def usage(self, names: Sequence[str]) -> dict[str, EngineUsage]:
        """Growing counts of the engines that answer."""
        answers = await asyncio.gather(*(_settled(self.engines[name].usage.remote(), _USAGE_S) for name in names))
        return {name: answer for name, answer in zip(names, answers, strict=True) if answer is not None}

    async def load_groups(self, checkpoint: Path, finished: Sequence[Sequence[Any]]) -> dict[GroupId, GroupRun]:
        """The finished groups of a checkpoint; ``finished``: the machine's entries, in the order of groups.jsonl."""
        load = self.recorder.load_group.options(num_returns=2)
        groups = {}
        for index, (task_id, repetition, *_) in enumerate(finished):
            summary, payload = load.remote(checkpoint / "groups.jsonl", index)
            groups[GroupId(task_id, repetition)] = GroupRun("checkpoint", await summary, payload)
        return groups

    async def restart_engine(self, name: str) -> None:
        """Put a new engine, with the weights of policy.model, in the place of one that died."""
        assert self._new_engine is not None, "start() comes first"
        kill(self.engines[name])
        engine = self._new_engine(name, self._sandbox_urls)
        self.engines[name] = engine
        await engine.start.remote()

    async def restart_sandbox(self, index: int, *, is_actor_alive: bool) -> str:
        """Start a server again, or, when its node is gone, another one elsewhere; returns its base URL."""
        assert self._new_sandbox is not None, "start() comes first"
        if is_actor_alive:
            url: str = await self.sandboxes[index].restart.remote()
        else:
            self.sandboxes[index] = self._new_sandbox(index)
            url = await self.sandboxes[index].start.remote()
        self._sandbox_urls[index] = url
        await asyncio.gather(*(_settled(e.use_sandboxes.remote(self._sandbox_urls)) for e in self.engines.values()))
        return url

    async def connect_refit(self, names: Sequence[str]) -> None:
        """Open a refit group of the trainer and these engines; the one before is closed.

        Raises RefitTimeout naming the late rank.
        """
        count = self.ranks_per_engine
        endpoints = await asyncio.gather(*(t.open_refit.remote(count * len(names)) for t in self.trainers))
        endpoint = endpoints[0]
        if endpoint is None:
            raise ConfigError("the trainer fleet has no rank 0; policy.num_ranks must be >= 1")
        joins = [
            self.engines[name].connect_refit.remote(replace(endpoint, rank_offset=1 + count * index))
            for index, name in enumerate(names)
        ]
        await asyncio.gather(*joins, *(trainer.connect_refit.remote() for trainer in self.trainers))

    async def restore(self, checkpoint: Path) -> None:
        """Bring every trainer rank to a checkpoint."""
        await asyncio.gather(*(worker.restore.remote(checkpoint) for worker in self.trainers))

    async def flush(self) -> None:
        """Wait until every rollout handed to the recorder is on disk."""
        await self.recorder.flush.remote()

    async def stop(self) -> None:
        """End engines, servers and trainers; what does not answer ends with Ray."""
        orderly = [worker.stop.remote() for worker in [*self.engines.values(), *self.sandboxes]]
        orderly += [worker.close.remote() for worker in self.trainers]
        if orderly:
            await asyncio.wait([asyncio.ensure_future(_settled(reference)) for reference in orderly], timeout=_STOP_S)

    def start_recorder(self, run: RunDirectory) -> None:
        """Start the writer of rollouts.jsonl on the driver's node."""
        self.recorder = spawn_beside_driver(Recorder, run.rollouts_path)
        self.run_path = run.path

    async def _start_sandboxes(
        self, config: Config, fleet: Fleet, groups: Mapping[str, Any]
    ) -> tuple[list[str], str | None]:
        """Base URLs, and the token that clients need there."""
        if config.sandbox.url is not None:
            return [config.sandbox.url], compose.read_token(config)
        token = secrets.token_urlsafe(32)

        def new_sandbox(index: int) -> Any:
            return spawn(SandboxWorker, fleet, groups["sandbox"], index, config, token)

        self.num_sandbox_workers = fleet.count * (config.sandbox.num_workers or os.cpu_count() or 1)
        self._new_sandbox = new_sandbox
        self.sandboxes = [new_sandbox(index) for index in range(fleet.count)]
        urls: list[str] = await asyncio.gather(*(worker.start.remote() for worker in self.sandboxes))
        return urls, token

    async def _build_trainers(self) -> None:
        rendezvous = await self.trainers[0].rendezvous.remote()
        await asyncio.gather(*(worker.build.remote(rendezvous) for worker in self.trainers))
        self.manifest = await self.trainers[0].manifest.remote()


async def _settled(reference: Any, limit_s: float | None = None) -> Any:
    from ray.exceptions import RayError

    with contextlib.suppress(RayError, TimeoutError):  # an actor that is gone already is no obstacle
        async with asyncio.timeout(limit_s):
            return await reference
    return None


def _describe(fleet: Fleet) -> str:
    device = f"{fleet.gpus} GPU" if fleet.gpus else f"{fleet.cpus} CPU"
    return f"{fleet.role} {fleet.count} x {device} ({fleet.strategy})"
