"""Starts the three fleets and the recorder, and ends them in order."""

from __future__ import annotations

import asyncio
import contextlib
import uuid
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from dockyard_core import ConfigError, Task
from dockyard_core.refit import TensorSpec
from dockyard_grpo.actors.inference import InferenceWorker
from dockyard_grpo.actors.recorder import Recorder
from dockyard_grpo.actors.sandbox import SandboxWorker
from dockyard_grpo.actors.trainer import TrainerWorker
from dockyard_grpo.cluster import Fleet, place, plan_fleets, spawn, spawn_beside_driver
from dockyard_grpo.config import Config
from dockyard_grpo.progress import Reporter
from dockyard_grpo.run_directory import RunDirectory

_STOP_S = 20.0


@dataclass
class Fleets:
    """Handles of every actor of the run."""

    trainers: list[Any] = field(default_factory=list)
    engines: dict[str, Any] = field(default_factory=dict)
    sandboxes: list[Any] = field(default_factory=list)
    recorder: Any = None
    manifest: tuple[TensorSpec, ...] = ()

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
        urls = await self._start_sandboxes(config, sandbox)
        reporter.say(f"fleets: {_describe(trainer)}, {_describe(inference)}, sandbox at {', '.join(urls)}")
        trainer_group, inference_group = await asyncio.gather(place(trainer), place(inference))
        self.trainers = [
            spawn(TrainerWorker, trainer, trainer_group, rank, config, rank, trainer.count)
            for rank in range(trainer.count)
        ]
        # A sandbox server may outlive a run and know its ids: a new life asks anew.
        attempt = f"{config.run.name}-{uuid.uuid4().hex[:12]}"
        self.engines = {
            f"engine-{index}": spawn(
                InferenceWorker,
                inference,
                inference_group,
                index,
                config,
                train,
                validation,
                engine_index=index,
                sandbox_urls=urls,
                attempt=attempt,
            )
            for index in range(inference.count)
        }
        _, ranks = await asyncio.gather(
            self._build_trainers(),
            asyncio.gather(*(worker.start.remote() for worker in self.engines.values())),
        )
        await self._connect_refit(ranks)

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

    async def _start_sandboxes(self, config: Config, fleet: Fleet) -> list[str]:
        if config.sandbox.url is not None:
            return [config.sandbox.url]
        group = await place(fleet)
        self.sandboxes = [spawn(SandboxWorker, fleet, group, index, config) for index in range(fleet.count)]
        urls: list[str] = await asyncio.gather(*(worker.start.remote() for worker in self.sandboxes))
        return urls

    async def _build_trainers(self) -> None:
        rendezvous = await self.trainers[0].rendezvous.remote()
        await asyncio.gather(*(worker.build.remote(rendezvous) for worker in self.trainers))
        self.manifest = await self.trainers[0].manifest.remote()

    async def _connect_refit(self, ranks: Sequence[int]) -> None:
        endpoints = await asyncio.gather(*(t.open_refit.remote(sum(ranks)) for t in self.trainers))
        endpoint = endpoints[0]
        if endpoint is None:
            raise ConfigError("the trainer fleet has no rank 0; policy.num_ranks must be >= 1")
        joins, offset = [], 1
        for engine, count in zip(self.engines.values(), ranks, strict=True):
            joins.append(engine.connect_refit.remote(replace(endpoint, rank_offset=offset)))
            offset += count
        await asyncio.gather(*joins, *(t.connect_refit.remote() for t in self.trainers))


async def _settled(reference: Any) -> None:
    from ray.exceptions import RayError

    with contextlib.suppress(RayError):  # an actor that is gone already is no obstacle
        await reference


def _describe(fleet: Fleet) -> str:
    device = f"{fleet.gpus} GPU" if fleet.gpus else f"{fleet.cpus} CPU"
    return f"{fleet.role} {fleet.count} x {device} ({fleet.strategy})"
