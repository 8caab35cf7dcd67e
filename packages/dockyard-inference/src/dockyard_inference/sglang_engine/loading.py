"""The receiving side of a refit, for a server that knows nothing of our transports."""

from __future__ import annotations

import asyncio
import tempfile
import time
from collections.abc import AsyncIterator, Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import asynccontextmanager, contextmanager
from pathlib import Path
from typing import TypeVar

from dockyard_core.errors import EngineDead, GeneratorError, RefitError, RefitTimeout
from dockyard_core.refit import RefitEndpoint, RefitUpdate
from dockyard_inference.refit.group import Deadline
from dockyard_inference.refit.receiver import BucketReceiver, LoadCounter
from dockyard_inference.sglang_engine.broadcast import broadcast_weights
from dockyard_inference.sglang_engine.client import NoAnswer, SglangClient
from dockyard_inference.sglang_engine.config import SglangConfig
from dockyard_inference.sglang_engine.requests import disk_payload, make_label
from dockyard_inference.sglang_engine.staging import StagedWeights

_T = TypeVar("_T")


class WeightLoader:
    """One rank of the refit group: takes verified buckets into a folder and lets the server read it.

    A server that does not see the folder is sent what lies there.

    All calls of the receiver block, so they have a thread of their own, one after the other.

    Args:
        config: of the engine.
        client: of its server.
        folder: where the weights lie if they fit.
        held: name -> shape of every tensor of the model.
    """

    def __init__(
        self, config: SglangConfig, client: SglangClient, folder: Path, held: dict[str, tuple[int, ...]]
    ) -> None:
        import torch

        self._config, self._client, self._folder, self._held = config, client, folder, held
        self._fallback = folder if config.weights_directory is not None else Path(tempfile.gettempdir())
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="dockyard-sglang")
        self._receiver = BucketReceiver(torch.device(config.device))
        self._staged: StagedWeights | None = None
        self._deadline = Deadline(0.0)

    @property
    def seconds(self) -> dict[str, float]:
        """By stage, of the last update."""
        return dict(self._receiver.seconds)

    async def connect(self, endpoint: RefitEndpoint) -> None:
        """Join the sender's group."""
        await self._blocking(lambda: self._receiver.connect(endpoint, endpoint.rank_offset))

    async def prepare(self, update: RefitUpdate) -> None:
        """Accept or refuse the manifest; see ``BucketReceiver.prepare``."""
        self._deadline = Deadline(update.timeout_s)
        await self._blocking(lambda: self._receiver.prepare(update, self._held))

    @asynccontextmanager
    async def attesting(self, update: RefitUpdate) -> AsyncIterator[None]:
        """Tell the sender how the body ended, and remove the weights, however it ends."""
        failure: RefitError | None = self._receiver.unfinished(update.policy_version)
        try:
            yield
            failure = None
        except RefitError as error:
            failure = error
            raise
        finally:
            ended = failure
            await self._blocking(lambda: self._end(ended))

    async def receive(self, update: RefitUpdate) -> LoadCounter:
        """Take every bucket into the folder; the server goes on with what it holds."""
        return await self._blocking(lambda: self._receive(update))

    async def load(self, update: RefitUpdate, held_version: int) -> None:
        """Let the paused server take the weights, and check that it says so.

        Raises:
            RefitTimeout: it did not answer before the deadline.
            RefitError: it refused; what it holds is not known.
            EngineDead: it is gone.
        """
        assert self._staged is not None, "receive() comes first"
        started, limit_s = time.perf_counter(), self._deadline.left_s + self._config.answer_timeout_s
        label = make_label(update.incarnation, update.policy_version)
        with refit_errors(update, held_version):
            await self._client.tell("/update_weights_from_disk", disk_payload(str(self._staged.path), label), limit_s)
            said = (await self._client.ask("/model_info", self._config.answer_timeout_s)).get("weight_version")
            if said != label:
                raise GeneratorError(f"the server took {label} and says that it holds {said}")
        self._receiver.seconds["load"] += time.perf_counter() - started

    async def _hand_over(self, staged: StagedWeights, label: str, limit_s: float) -> None:
        if self._config.sees_folder:
            await self._client.tell("/update_weights_from_disk", disk_payload(str(staged.path), label), limit_s)
            return
        url, key = self._client.url, self._client.api_key
        await self._blocking(lambda: broadcast_weights(url, key, staged, label, limit_s))

    async def close(self) -> None:
        """Leave the group."""
        await self._blocking(self._receiver.close)
        await asyncio.to_thread(self._thread.shutdown)

    def _receive(self, update: RefitUpdate) -> LoadCounter:
        self._staged = StagedWeights(self._folder, self._fallback, update)
        return self._staged.receive(self._receiver, update)

    def _end(self, failure: RefitError | None) -> None:
        staged, self._staged = self._staged, None
        if staged is not None:
            staged.remove()
        self._receiver.report(failure)

    async def _blocking(self, function: Callable[[], _T]) -> _T:
        return await asyncio.get_running_loop().run_in_executor(self._thread, function)


@contextmanager
def refit_errors(update: RefitUpdate, held_version: int) -> Iterator[None]:
    """Turn what goes wrong while the server changes its weights into a refit's errors."""
    versions = {"wanted_version": update.policy_version, "held_version": held_version}
    try:
        yield
    except EngineDead:
        raise
    except NoAnswer as error:
        raise RefitTimeout(f"the engine is late: {error}", **versions) from error
    except GeneratorError as error:
        raise RefitError(f"the engine could not load the weights: {error}", **versions) from error
