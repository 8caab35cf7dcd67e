"""``VllmGenerator``: one vLLM engine behind core's ``Generator`` protocol."""

from __future__ import annotations

import asyncio
import gc
import time
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager, suppress
from itertools import pairwise
from typing import TYPE_CHECKING, Any

from dockyard_core.errors import EngineBusy, EngineDead, GeneratorError, RefitError, RefitTimeout
from dockyard_core.generator import Completion, EngineHealth, GenerateRequest
from dockyard_core.refit import PauseMode, RefitEndpoint, RefitReport, RefitUpdate
from dockyard_inference.fence import Fence, Transaction, unable_to_drain
from dockyard_inference.vllm_engine.config import VllmConfig
from dockyard_inference.vllm_engine.errors import engine_errors
from dockyard_inference.vllm_engine.launch import engine_pids, has_ended, start_engine, stop_engine, watching
from dockyard_inference.vllm_engine.requests import rollout_params, score_params, to_completion
from dockyard_inference.vllm_engine.weight_session import WeightSession, slowest

if TYPE_CHECKING:
    from vllm.v1.engine.async_llm import AsyncLLM

_SCORE_FIRST = -1
"""Priority of ``score`` (rollouts have 0): a refit's caller waits for a probe of a few tokens."""
_ABORT_S = 10.0


class VllmGenerator:
    """One vLLM engine. All methods belong to the event loop that called ``start``."""

    def __init__(self, config: VllmConfig) -> None:
        self.config = config
        self._engine: AsyncLLM | None = None
        self._fence = Fence()
        self._version, self._incarnation = config.policy_version, config.incarnation
        self._live: dict[str, asyncio.Event] = {}
        """Request id -> set when the request ends."""
        self._num_scores = 0
        self._is_paused = False
        self._session: WeightSession | None = None

    @property
    def version(self) -> int:
        """The last policy version that was committed."""
        return self._version

    async def start(self) -> None:
        """Start the engine's processes and load the checkpoint.

        The processes end with ``shutdown``, and also when this process dies, however it dies.

        Raises:
            ConfigError: vLLM is not installed.
            GeneratorError: the engine did not start.
        """
        try:
            await asyncio.to_thread(self._launch)
        except RuntimeError as error:
            raise GeneratorError(f"vLLM did not start for {self.config.model}: {error}") from error
        await self._running().update_weight_version(self._label(self._incarnation, self._version))

    async def shutdown(self) -> None:
        """End the engine's processes; live requests return with ``finish_reason="abort"``."""
        if self._engine is None:
            return
        self._fence.break_("the engine was shut down")
        await self._abort_live()
        await asyncio.to_thread(self._halt)
        gc.collect()  # vLLM's finalizer fails once the interpreter has begun to exit

    def _launch(self) -> None:
        # No reference to the engine may stay in the thread's future: see shutdown.
        self._engine = start_engine(self.config)
        self._session = WeightSession(self._engine)

    def _halt(self) -> None:
        engine, self._engine, self._session = self._engine, None, None
        if engine is not None:
            stop_engine(engine)

    async def generate(self, request: GenerateRequest) -> Completion:
        """Sample one completion. Raises EngineBusy when ``max_queued`` requests wait already."""
        if len(self._live) >= self.config.max_live:
            raise EngineBusy(f"{len(self._live)} requests are under way, max_queued is {self.config.max_queued}")
        from vllm.inputs import tokens_input

        async with self._admitted(request.request_id):
            prompt = tokens_input(list(request.prompt_token_ids), cache_salt=self._salt())
            output = await self._run(prompt, rollout_params(request.sampling), request.request_id)
        return to_completion(output.outputs[0])

    async def score(self, token_ids: Sequence[int]) -> tuple[float, ...]:
        """Logprobs at temperature 1 of tokens 1..T-1; T < ``max_model_len``. Goes before waiting rollouts."""
        from vllm.inputs import tokens_input

        if len(token_ids) < 2:
            return ()
        self._num_scores += 1
        request_id = f"score-{self._num_scores}"
        async with self._admitted(request_id):
            prompt = tokens_input(list(token_ids), cache_salt=self._salt())
            flat = (await self._run(prompt, score_params(), request_id, _SCORE_FIRST)).prompt_logprobs
        if flat is None:
            raise GeneratorError(f"{request_id} was aborted")
        return tuple(flat.logprobs[start] for start in flat.start_indices[1:])

    async def pause(self, mode: PauseMode = "keep") -> None:
        """Stop sampling and drop cached keys and values.

        ``wait`` lasts as long as the live requests; the other modes have ``answer_timeout_s``.

        Raises:
            GeneratorError: the engine's process does not answer, or ``wait`` while it is paused.
        """
        if mode == "wait" and self._is_paused and self._live:
            raise GeneratorError(f"a paused engine does not drain its {len(self._live)} requests: resume() it")
        with engine_errors():
            async with self._answered("pause", None if mode == "wait" else self.config.answer_timeout_s):
                await self._running().pause_generation(mode=mode, clear_cache=True)
        self._is_paused = True

    async def resume(self) -> None:
        """Go on sampling.

        Raises:
            GeneratorError: a failed refit fences the engine, or its process does not answer.
        """
        self._fence.check()
        with engine_errors():
            async with self._answered("resume", self.config.answer_timeout_s):
                await self._running().resume_generation()
        self._is_paused = False

    async def connect_refit(self, endpoint: RefitEndpoint) -> None:
        """Join the sender's group with every worker; the sender's ``connect`` must run meanwhile."""
        async with self._on_time(endpoint.timeout_s, -1):
            await self._linked().connect(endpoint, self._version)

    async def refit(self, update: RefitUpdate) -> RefitReport:
        """Take the announced weights in one transaction; see ``Generator.refit``.

        A manifest that this or another engine refused changes nothing: the engine goes on with the
        version it holds. After any later failure it is fenced until another refit succeeds, and its
        live requests return with ``finish_reason="abort"``.
        """
        what = f"refit to policy version {update.policy_version}"
        try:
            async with (
                self._fence.transaction(what) as transaction,
                self._on_time(update.timeout_s, update.policy_version),
            ):
                return await self._refit(update, transaction)
        finally:
            if self._fence.reason:
                await self._abort_live()

    async def _refit(self, update: RefitUpdate, transaction: Transaction) -> RefitReport:
        started, session = time.perf_counter(), self._linked()
        with transaction.staging(session.is_staging):
            unable = unable_to_drain(update, len(self._live), is_paused=self._is_paused)
            await session.prepare(update, self._version, unable)
        transaction.begin()
        marks = [time.perf_counter()]
        await self._drain(update, transaction, update.timeout_s - (marks[0] - started))
        await session.stop(update)
        marks.append(time.perf_counter())
        try:
            report = slowest(await session.load(update, self._version), update, self._version)
        except RefitError as error:
            await self._go_back(update, error, transaction)
            raise
        marks.append(time.perf_counter())
        await session.settle(is_committed=True)
        await self._commit(update)
        marks.append(time.perf_counter())
        await self._go_on()
        marks.append(time.perf_counter())
        transaction.commit()
        pause, _, commit, resume = (b - a for a, b in pairwise(marks))
        return RefitReport(
            policy_version=update.policy_version,
            num_tensors=report["num_tensors"],
            num_elements=sum(report["elements_per_layer"].values()),
            num_bytes=report["num_bytes"],
            elements_per_layer=report["elements_per_layer"],
            seconds=report["seconds"]
            | {"pause": pause, "commit": commit, "resume": resume, "total": marks[-1] - started},
        )

    async def _drain(self, update: RefitUpdate, transaction: Transaction, limit_s: float) -> None:
        live = list(self._live.values()) if update.mode == "wait" else []
        try:
            await transaction.drain((ended.wait() for ended in live), limit_s, update)
        except RefitTimeout:
            await self._linked().give_up()
            raise

    async def _commit(self, update: RefitUpdate) -> None:
        with engine_errors():
            await self._running().update_weight_version(self._label(update.incarnation, update.policy_version))
        self._version, self._incarnation = update.policy_version, update.incarnation

    async def _go_on(self) -> None:
        if not self._is_paused:
            self._linked().asked = "resume"
            with engine_errors():
                await self._running().resume_generation()

    async def _go_back(self, update: RefitUpdate, error: RefitError, transaction: Transaction) -> None:
        """Serve the version before, if it is in host memory; raises the error that says so then."""
        gone_back = await self._linked().go_back(update, error, self._version)
        if gone_back is not None:
            await self._go_on()
            transaction.roll_back()
            raise gone_back from error

    async def health(self) -> EngineHealth:
        """Whether the engine lives, and at which version."""
        engine = self._engine
        # vLLM sets its flag some time after its process has ended.
        is_alive = engine is not None and not engine.errored and not any(map(has_ended, engine_pids(engine)))
        why = self._fence.reason or ("" if is_alive else "the engine is not running")
        return EngineHealth(is_alive, self._version, len(self._live), why)

    async def _run(self, prompt: Any, params: Any, request_id: str, priority: int = 0) -> Any:
        with engine_errors():
            answer = self._running().generate(prompt, params, request_id, priority=priority)
            outputs = [output async for output in answer]
        if not outputs:
            raise GeneratorError(f"{request_id} ended without an output")
        return outputs[-1]

    @asynccontextmanager
    async def _admitted(self, request_id: str) -> AsyncIterator[None]:
        await self._fence.passed()
        if request_id in self._live:
            raise GeneratorError(f"request_id must be unique among live requests, {request_id} is not")
        self._live[request_id] = asyncio.Event()
        try:
            yield
        finally:
            self._live.pop(request_id).set()

    @asynccontextmanager
    async def _answered(self, what: str, limit_s: float | None) -> AsyncIterator[None]:
        try:
            async with asyncio.timeout(limit_s):
                yield
        except TimeoutError as error:
            raise GeneratorError(f"{self._name()} did not answer {what} within {limit_s} s") from error

    @asynccontextmanager
    async def _on_time(self, timeout_s: float, version: int) -> AsyncIterator[None]:
        """RefitTimeout naming engine and call if its process does not answer; EngineDead if it ended in a call.

        vLLM itself never answers that call then.
        """
        limit_s, name, gone = timeout_s + self.config.answer_timeout_s, self._name(), list[int]()
        try:
            async with asyncio.timeout(limit_s) as limit:
                with watching(engine_pids(self._running()), gone, lambda: limit.reschedule(0.0)):
                    yield
        except TimeoutError as error:
            if gone:
                raise EngineDead(f"{name} has ended: restart the engine") from error
            raise RefitTimeout(
                f"{name} is late: no answer to {self._linked().asked} within {limit_s} s",
                wanted_version=version,
                held_version=self._version,
            ) from error

    async def _abort_live(self) -> None:
        """Return live requests partial; asks again, since one may still be on its way to the engine."""
        with suppress(TimeoutError):
            async with asyncio.timeout(_ABORT_S):
                while self._live and self._engine is not None and not self._engine.errored:
                    await self._engine.abort(list(self._live))
                    await asyncio.sleep(0.01)

    def _name(self) -> str:
        return f"the engine {', '.join(f'process {pid}' for pid in engine_pids(self._running()))} ({self.config.model})"

    def _running(self) -> AsyncLLM:
        if self._engine is None:
            raise EngineDead("the engine is not running: call start() first")
        return self._engine

    def _linked(self) -> WeightSession:
        if self._session is None:
            raise EngineDead("the engine is not running: call start() first")
        return self._session

    def _salt(self) -> str:
        return self._label(self._incarnation, self._version)

    def _label(self, incarnation: int, version: int) -> str:
        return f"{incarnation}.{version}"
