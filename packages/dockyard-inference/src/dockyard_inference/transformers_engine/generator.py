"""``TransformersGenerator``: a Hugging Face model behind core's ``Generator`` protocol.

One thread computes; between two tokens the event loop admits, pauses and refits. It is exact and
small, not fast: for tests, tiny policies and machines that vLLM has no wheel for.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any, TypeVar

from dockyard_core.errors import EngineBusy, EngineDead, GeneratorError, RefitError, RefitTimeout
from dockyard_core.generator import Completion, EngineHealth, GenerateRequest
from dockyard_core.refit import PauseMode, RefitEndpoint, RefitReport, RefitUpdate
from dockyard_inference.fence import Fence, Transaction, unable_to_drain
from dockyard_inference.refit.load_counter import LoadCounter
from dockyard_inference.refit.staging import rolled_back
from dockyard_inference.transformers_engine.cohort import Cohort, LiveSequence
from dockyard_inference.transformers_engine.config import TransformersConfig
from dockyard_inference.transformers_engine.model import score_tokens
from dockyard_inference.transformers_engine.weights import WeightTaker

_T = TypeVar("_T")


class TransformersGenerator:
    """One Hugging Face model. All methods belong to the event loop that called ``start``."""

    def __init__(self, config: TransformersConfig) -> None:
        self.config = config
        self._version, self._incarnation = config.policy_version, config.incarnation
        self._model: Any = None
        self._taker: WeightTaker | None = None
        self._rng: Any = None
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="dockyard-transformers")
        self._server: asyncio.Task[None] | None = None
        self._fence = Fence()
        self._between_tokens = asyncio.Lock()
        self._work = asyncio.Event()
        self._unpaused = asyncio.Event()
        self._unpaused.set()
        self._waiting: list[LiveSequence] = []
        self._cohorts: list[Cohort] = []
        self._results: dict[str, asyncio.Future[Completion]] = {}

    @property
    def version(self) -> int:
        """The last policy version that was committed."""
        return self._version

    async def start(self) -> None:
        """Load the checkpoint. Raises GeneratorError if it cannot be read."""
        await self._compute(self._load)
        self._server = asyncio.create_task(self._serve())
        self._server.add_done_callback(self._fail_live)

    async def shutdown(self) -> None:
        """Stop sampling; live requests return with ``finish_reason="abort"``."""
        self._fence.break_("the engine was shut down")
        server, self._server = self._server, None
        if server is not None:
            async with self._between_tokens:
                server.cancel()
            await asyncio.gather(server, return_exceptions=True)
        self._abort_all()
        if self._taker is not None:
            await self._taker.close()
        self._thread.shutdown(wait=True)

    async def generate(self, request: GenerateRequest) -> Completion:
        """Sample one completion. Raises EngineBusy when ``max_queued`` requests wait already."""
        await self._fence.passed()
        self._check_running()
        if self.config.max_queued is not None and len(self._waiting) >= self.config.max_queued + self._num_free:
            raise EngineBusy(f"{len(self._waiting)} requests wait already, max_queued is {self.config.max_queued}")
        room = self.config.max_model_len - len(request.prompt_token_ids)
        if not request.prompt_token_ids or room < 1:
            raise GeneratorError(
                f"a prompt must have 1 to max_model_len - 1 = {self.config.max_model_len - 1} tokens, "
                f"{request.request_id} has {len(request.prompt_token_ids)}"
            )
        if request.request_id in self._results:
            raise GeneratorError(f"request_id must be unique among live requests, {request.request_id} is not")
        future: asyncio.Future[Completion] = asyncio.get_running_loop().create_future()
        sequence = LiveSequence(request, min(request.sampling.max_new_tokens, room), self._own_rng(request))
        self._results[request.request_id] = future
        self._waiting.append(sequence)
        self._work.set()
        try:
            return await future
        finally:
            self._results.pop(request.request_id, None)
            sequence.is_cancelled = True

    async def score(self, token_ids: Sequence[int]) -> tuple[float, ...]:
        """Logprobs at temperature 1 of tokens 1..T-1; T <= ``max_model_len``."""
        await self._fence.passed()
        self._check_running()
        if len(token_ids) > self.config.max_model_len:
            raise GeneratorError(f"score takes at most {self.config.max_model_len} tokens, got {len(token_ids)}")
        async with self._between_tokens:
            self._fence.check()
            return await self._compute(lambda: score_tokens(self._model, token_ids))

    async def pause(self, mode: PauseMode = "keep") -> None:
        """Stop sampling and drop cached keys and values. Raises GeneratorError for ``wait`` while paused."""
        if mode == "wait" and self._results:
            if not self._unpaused.is_set():
                raise GeneratorError(f"a paused engine does not drain its {len(self._results)} requests: resume() it")
            await asyncio.wait(list(self._results.values()))
        self._unpaused.clear()
        async with self._between_tokens:
            self._drop_caches()
            if mode == "abort":
                self._abort_all()

    async def resume(self) -> None:
        """Go on sampling. Raises GeneratorError while a failed refit fences the engine."""
        self._fence.check()
        self._unpaused.set()

    async def connect_refit(self, endpoint: RefitEndpoint) -> None:
        """Join the sender's group; the sender's ``connect`` must run meanwhile."""
        self._check_running()
        await self._joined().connect(endpoint)

    async def refit(self, update: RefitUpdate) -> RefitReport:
        """Take the announced weights in one transaction; see ``Generator.refit``.

        A manifest that this or another engine refused changes nothing: the engine goes on with the
        version it holds. After any later failure it is fenced until another refit succeeds, and its
        live requests return with ``finish_reason="abort"``.
        """
        self._check_running()
        taker, started, stopped = self._joined(), time.perf_counter(), 0.0
        try:
            async with self._fence.transaction(f"refit to policy version {update.policy_version}") as transaction:
                with transaction.staging(taker.is_staging):
                    is_paused = not self._unpaused.is_set()
                    await taker.prepare(update, unable_to_drain(update, len(self._results), is_paused=is_paused))
                transaction.begin()
                stopped = time.perf_counter()
                await self._drain(update, taker, transaction, update.timeout_s - (stopped - started))
                async with self._between_tokens:
                    loading = time.perf_counter()
                    counter = await self._load_update(update, taker, transaction)
        finally:
            if self._fence.reason:
                async with self._between_tokens:
                    self._abort_all()
        self._work.set()
        ended = time.perf_counter()
        return counter.report(update, {**taker.seconds, "pause": loading - stopped, "total": ended - started})

    async def _load_update(self, update: RefitUpdate, taker: WeightTaker, transaction: Transaction) -> LoadCounter:
        """Between two tokens: new weights, or what was there before, or a fenced engine."""
        if update.mode == "abort":
            self._abort_all()
        try:
            counter = await self._compute(lambda: taker.load(update))
        except RefitError as error:
            if not await self._compute(taker.go_back):
                raise
            transaction.roll_back()
            raise rolled_back(error, self._version) from error
        finally:
            self._drop_caches()
        self._version, self._incarnation = update.policy_version, update.incarnation
        transaction.commit()
        return counter

    async def _drain(self, update: RefitUpdate, taker: WeightTaker, transaction: Transaction, limit_s: float) -> None:
        live = list(self._results.values()) if update.mode == "wait" else []
        try:
            await transaction.drain((asyncio.wait([request]) for request in live), limit_s, update)
        except RefitTimeout:
            await taker.give_up(update)
            raise

    async def health(self) -> EngineHealth:
        """Whether the engine lives, and at which version."""
        is_alive = self._server is not None and not self._server.done()
        return EngineHealth(is_alive, self._version, len(self._results), self._fence.reason)

    async def _serve(self) -> None:
        """One token for every cohort, again and again; admits between two rounds."""
        while True:
            await self._work.wait()
            await self._unpaused.wait()
            await asyncio.sleep(self.config.batch_window_s if self._waiting else 0)
            async with self._between_tokens:
                if self._fence.reason:
                    self._work.clear()
                if self._fence.reason or not self._unpaused.is_set():
                    continue
                self._admit()
                for cohort in list(self._cohorts):
                    await self._step(cohort)
                if not self._cohorts and not self._waiting:
                    self._work.clear()

    async def _step(self, cohort: Cohort) -> None:
        cohort.drop_cancelled()
        if cohort.sequences:
            version = self._version
            for sequence in await self._compute(lambda: cohort.step(version, self._rng)):
                self._deliver(sequence)
        if not cohort.sequences:
            self._cohorts.remove(cohort)

    def _admit(self) -> None:
        ready = [sequence for sequence in self._waiting if not sequence.is_cancelled]
        admitted, self._waiting = ready[: self._num_free], ready[self._num_free :]
        if admitted:
            self._cohorts.append(Cohort(self._model, admitted))

    @property
    def _num_free(self) -> int:
        return max(0, self.config.max_num_seqs - sum(len(cohort.sequences) for cohort in self._cohorts))

    def _deliver(self, sequence: LiveSequence) -> None:
        if sequence.is_cancelled:
            return  # its id may be another request's by now
        future = self._results.get(sequence.request.request_id)
        if future is not None and not future.done():
            future.set_result(sequence.to_completion())

    def _abort_all(self) -> None:
        for sequence in [*self._waiting, *(s for cohort in self._cohorts for s in cohort.sequences)]:
            self._deliver(sequence)
        self._waiting, self._cohorts = [], []

    def _fail_live(self, server: asyncio.Task[None]) -> None:
        """A server that ended by itself takes its requests along."""
        if not server.cancelled() and (error := server.exception()) is not None:
            for future in self._results.values():
                if not future.done():
                    future.set_exception(EngineDead(f"the engine stopped: {error!r}"))

    def _drop_caches(self) -> None:
        for cohort in self._cohorts:
            cohort.drop_cache()

    def _load(self) -> None:
        import torch
        from transformers import AutoModelForCausalLM
        from transformers.utils import logging

        had_bar = logging.is_progress_bar_enabled()
        logging.disable_progress_bar()
        try:
            model = AutoModelForCausalLM.from_pretrained(
                self.config.model,
                dtype=getattr(torch, self.config.dtype),
                trust_remote_code=self.config.trust_remote_code,
            )
        except OSError as error:
            raise GeneratorError(f"cannot load {self.config.model}: {error}") from error
        finally:
            if had_bar:
                logging.enable_progress_bar()
        self._model = model.to(self.config.device).eval()
        self._taker = WeightTaker(self._model)
        self._rng = torch.Generator(device=self._model.device)
        self._rng.manual_seed(self.config.seed)

    def _own_rng(self, request: GenerateRequest) -> Any:
        import torch

        seed = request.sampling.seed
        return None if seed is None else torch.Generator(device=self._model.device).manual_seed(seed)

    def _joined(self) -> WeightTaker:
        if self._taker is None:
            raise EngineDead("the engine is not running: call start() first")
        return self._taker

    def _check_running(self) -> None:
        if self._server is None or self._server.done():
            raise EngineDead("the engine is not running: call start() first")

    async def _compute(self, function: Callable[[], _T]) -> _T:
        return await asyncio.get_running_loop().run_in_executor(self._thread, function)
