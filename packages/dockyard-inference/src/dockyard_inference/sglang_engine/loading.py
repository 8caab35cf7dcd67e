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
from dockyard_inference.refit.load_counter import LoadCounter
from dockyard_inference.refit.receiver import BucketReceiver
from dockyard_inference.sglang_engine.broadcast import broadcast_weights
from dockyard_inference.sglang_engine.client import NoAnswer, SglangClient
from dockyard_inference.sglang_engine.config import SglangConfig
from dockyard_inference.sglang_engine.requests import disk_payload, make_label, pause_payload, resume_payload
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
        tensors: name -> shape of every tensor of the model.
    """

    def __init__(
        self, config: SglangConfig, client: SglangClient, folder: Path, tensors: dict[str, tuple[int, ...]]
    ) -> None:
        import torch

        self._config, self._client, self._folder, self._tensors = config, client, folder, tensors
        self._fallback = folder if config.weights_directory is not None else Path(tempfile.gettempdir())
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="dockyard-sglang")
        self._receiver = BucketReceiver(torch.device(config.device))
        self._incoming: StagedWeights | None = None
        self._held: StagedWeights | None = None
        """What the server serves, where the group stages: to go back to."""
        self._deadline = Deadline(0.0)

    @property
    def seconds(self) -> dict[str, float]:
        """By stage, of the last update."""
        return dict(self._receiver.seconds)

    @property
    def is_staging(self) -> bool:
        """Whether the group verifies whole updates before any rank loads."""
        return self._receiver.is_staging

    async def connect(self, endpoint: RefitEndpoint) -> None:
        """Join the sender's group."""
        await self._blocking(lambda: self._receiver.connect(endpoint, endpoint.rank_offset))
        if not self.is_staging:
            await self._blocking(self._forget)

    async def prepare(self, update: RefitUpdate, unable: str) -> None:
        """Accept or refuse the manifest; see ``BucketReceiver.prepare``."""
        self._deadline = Deadline(update.timeout_s)
        await self._blocking(lambda: self._receiver.prepare(update, self._tensors, unable))

    @asynccontextmanager
    async def attesting(self, update: RefitUpdate) -> AsyncIterator[None]:
        """Tell the sender how the body ended, and remove the weights that nobody needs then."""
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
        """Take every bucket into the folder; the server goes on with what it holds.

        Where the group stages, this returns when every rank has the whole update.
        """
        return await self._blocking(lambda: self._receive(update))

    async def pause(self, update: RefitUpdate, held_version: int) -> None:
        """Stop sampling. Raises RefitTimeout or RefitError."""
        with refit_errors(update, held_version):
            await self._client.tell("/pause_generation", pause_payload(), self._config.answer_timeout_s)

    async def resume(self, update: RefitUpdate, held_version: int) -> None:
        """Go on sampling. Raises RefitTimeout or RefitError."""
        with refit_errors(update, held_version):
            await self._client.tell("/continue_generation", resume_payload(), self._config.answer_timeout_s)

    async def load(self, update: RefitUpdate, held_version: int) -> None:
        """Let the paused server take the weights, and check that it says so.

        Raises:
            RefitTimeout: it did not answer before the deadline.
            RefitError: it refused; what it holds is not known.
            EngineDead: it is gone.
        """
        assert self._incoming is not None, "receive() comes first"
        started = time.perf_counter()
        with refit_errors(update, held_version):
            await self._hand_over(self._incoming, make_label(update.incarnation, update.policy_version))
        self._receiver.seconds["load"] += time.perf_counter() - started

    async def go_back(self, update: RefitUpdate, label: str, held_version: int) -> bool:
        """After a load that failed: let the server take the version before, if it was staged and is kept."""
        if self._held is None:
            return False
        with refit_errors(update, held_version):
            await self._hand_over(self._held, label)
        return True

    async def _hand_over(self, staged: StagedWeights, label: str) -> None:
        limit_s = self._deadline.left_s + self._config.answer_timeout_s
        if self._config.sees_folder:
            await self._client.tell("/update_weights_from_disk", disk_payload(str(staged.path), label), limit_s)
        else:
            url, key = self._client.url, self._client.api_key
            await self._blocking(lambda: broadcast_weights(url, key, staged, label, limit_s))
        said = (await self._client.ask("/model_info", self._config.answer_timeout_s)).get("weight_version")
        if said != label:
            raise GeneratorError(f"the server took {label} and says that it holds {said}")

    async def close(self) -> None:
        """Leave the group."""
        await self._blocking(self._leave)
        await asyncio.to_thread(self._thread.shutdown)

    def _receive(self, update: RefitUpdate) -> LoadCounter:
        if not self.is_staging:
            self._incoming = StagedWeights(self._folder, self._fallback, update)
            return self._incoming.receive(self._receiver, update)
        with self._receiver.attesting(update, "staged"):
            self._incoming = StagedWeights(self._folder, self._fallback, update)
            counter = self._incoming.receive(self._receiver, update)
        self._receiver.await_load(update)
        return counter

    def _end(self, failure: RefitError | None) -> None:
        """After a staged load that went well its weights stay, to go back to; those before it go."""
        incoming, self._incoming = self._incoming, None
        if failure is None and self.is_staging:
            incoming, self._held = self._held, incoming
        if incoming is not None:
            incoming.remove()
        self._receiver.report(failure)

    def _leave(self) -> None:
        self._receiver.close()
        self._forget()

    def _forget(self) -> None:
        held, self._held = self._held, None
        if held is not None:
            held.remove()

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
