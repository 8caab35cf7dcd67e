"""The receiving side of a refit for a model in this process."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any, TypeVar

from dockyard_core.refit import RefitEndpoint, RefitUpdate
from dockyard_inference.refit.load_counter import LoadCounter
from dockyard_inference.refit.receiver import BucketReceiver
from dockyard_inference.refit.staging import HostStage
from dockyard_inference.transformers_engine.model import load_buckets

_T = TypeVar("_T")


class WeightTaker:
    """One rank of the refit group.

    What waits for the sender has a thread of its own, so that the model computes meanwhile. The methods
    that are not coroutines change the model: they belong to the thread that computes with it.
    """

    def __init__(self, model: Any) -> None:
        self._model = model
        self._receiver = BucketReceiver(model.device, keeps_views=False)
        self._stage = HostStage()
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="dockyard-refit")

    @property
    def seconds(self) -> dict[str, float]:
        """By stage, of the last update."""
        return self._receiver.seconds

    @property
    def is_staging(self) -> bool:
        """Whether the group verifies whole updates before any rank loads."""
        return self._receiver.is_staging

    async def connect(self, endpoint: RefitEndpoint) -> None:
        """Join the sender's group."""
        await self._blocking(lambda: self._receiver.connect(endpoint, endpoint.rank_offset))
        self._stage.joined(self._receiver)

    async def prepare(self, update: RefitUpdate, unable: str) -> None:
        """Accept or refuse the manifest, and stage the bytes where the group does so."""
        held = {name: tuple(parameter.shape) for name, parameter in self._model.named_parameters()}
        await self._blocking(lambda: self._receiver.prepare(update, held, unable))
        if self.is_staging:
            await self._blocking(lambda: self._stage.fill(self._receiver, update))

    async def give_up(self, update: RefitUpdate) -> None:
        """Tell the sender that what every rank prepared for will not be loaded."""
        self._stage.drop()
        await self._blocking(lambda: self._receiver.report(self._receiver.unfinished(update.policy_version)))

    def load(self, update: RefitUpdate) -> LoadCounter:
        """Take the update's buckets into the model and attest it."""
        with self._receiver.attesting(update):
            buckets = self._stage.incoming or self._receiver.receive(update)
            counter = load_buckets(self._model, buckets, update, self._receiver.seconds)
        self._stage.commit()
        return counter

    def go_back(self) -> bool:
        """After a load that failed: take the version before from host memory, if it is there."""
        self._stage.drop()
        held = self._stage.held
        if held is None:
            return False
        load_buckets(self._model, held, held.update, self._receiver.seconds)
        return True

    async def close(self) -> None:
        """Leave the group."""
        self._receiver.close()
        await asyncio.to_thread(self._thread.shutdown)

    async def _blocking(self, function: Callable[[], _T]) -> _T:
        return await asyncio.get_running_loop().run_in_executor(self._thread, function)
