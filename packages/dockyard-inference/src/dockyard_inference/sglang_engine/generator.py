"""``SglangGenerator``: one SGLang server behind core's ``Generator`` protocol."""

from __future__ import annotations

import asyncio
import time
import uuid
from collections.abc import AsyncIterator, Sequence
from contextlib import AsyncExitStack, asynccontextmanager, suppress
from dataclasses import replace

from dockyard_core.errors import EngineBusy, EngineDead, GeneratorError, RefitError, RefitTimeout
from dockyard_core.generator import Completion, EngineHealth, GenerateRequest
from dockyard_core.refit import PauseMode, RefitEndpoint, RefitReport, RefitUpdate
from dockyard_inference.fence import Fence, Transaction, unable_to_drain
from dockyard_inference.refit.staging import rolled_back
from dockyard_inference.sglang_engine.client import SglangClient
from dockyard_inference.sglang_engine.config import SglangConfig
from dockyard_inference.sglang_engine.loading import WeightLoader
from dockyard_inference.sglang_engine.model_facts import read_facts
from dockyard_inference.sglang_engine.requests import (
    NOTHING_SAMPLED,
    extended,
    is_stopped_by_model,
    label_payload,
    make_label,
    pause_payload,
    resume_payload,
    rollout_payload,
    score_payload,
    to_completion,
    to_scores,
)
from dockyard_inference.sglang_engine.server import ServerProcess, check_interpreter
from dockyard_inference.sglang_engine.session import LiveRequest, Session
from dockyard_inference.sglang_engine.startup import allow_connections, await_server

_ABORT_S = 10.0
_ABORT_AGAIN_S = 0.02
_UNREACHED_S = 1.0
"""A request that answers no abort for so long is one that no abort reaches."""
_FRESH_S = 1.0
"""An answer this young proves that the server lives."""


class SglangGenerator:
    """One SGLang server. All methods belong to the event loop that called ``start``."""

    def __init__(self, config: SglangConfig) -> None:
        self.config = config
        self._session: Session | None = None
        self._fence = Fence()
        self._version, self._incarnation = config.policy_version, config.incarnation
        self._live: dict[str, LiveRequest] = {}
        self._name = uuid.uuid4().hex[:12]
        self._num_requests = self._num_scores = 0
        self._is_paused = False
        self._aborts: set[asyncio.Task[None]] = set()

    @property
    def version(self) -> int:
        """The last policy version that was committed."""
        return self._version

    async def start(self) -> None:
        """Start the server, or find the one at ``url``, and let it sample a token.

        The server's processes end with ``shutdown``, and also when this process dies, however it dies.

        Raises:
            GeneratorError: it did not start; the message has its last lines.
        """
        if (config := self.config).python is not None:
            check_interpreter(config.python)
        allow_connections()
        facts = await asyncio.to_thread(read_facts, config.model)
        key = None if config.api_key_file is None else config.api_key_file.read_text().strip()
        async with AsyncExitStack() as stack:
            server = await asyncio.to_thread(ServerProcess, config)
            stack.push_async_callback(asyncio.to_thread, server.stop)
            client = SglangClient(server.url, server.api_key or key, server.last_words)
            stack.push_async_callback(client.close)
            await await_server(config, server, client)
            await client.tell("/update_weight_version", label_payload(self._label()), config.answer_timeout_s)
            loader = WeightLoader(config, client, server.weights, facts.held)
            stack.pop_all()
        self._session = Session(server, client, loader, facts)

    async def shutdown(self) -> None:
        """End the server's processes; live requests return with ``finish_reason="abort"``.

        A server at ``url`` goes on with the weights it holds, unpaused.
        """
        session = self._session
        if session is None:
            return
        self._fence.break_("the engine was shut down")
        await self._abort_live()
        if self.config.url is not None:
            with suppress(GeneratorError):
                await session.client.tell("/continue_generation", resume_payload(), self.config.answer_timeout_s)
        self._session = None
        await session.loader.close()
        await asyncio.gather(*self._aborts, return_exceptions=True)
        await asyncio.to_thread(session.server.stop)
        await session.client.close()

    async def generate(self, request: GenerateRequest) -> Completion:
        """Sample one completion.

        Raises:
            EngineBusy: ``max_queued`` requests wait already.
            GeneratorError: among others for a seed, which SGLang on a CPU would ignore without a word.
        """
        if len(self._live) >= self.config.max_live:
            raise EngineBusy(f"{len(self._live)} requests are under way, max_queued is {self.config.max_queued}")
        sampling, prompt = request.sampling, request.prompt_token_ids
        if sampling.seed is not None and not self.config.takes_seeds:
            raise GeneratorError("SGLang would ignore a request's seed: leave it out (see SglangConfig.takes_seeds)")
        most = self.config.max_model_len - 1
        if not 1 <= len(prompt) <= most:
            raise GeneratorError(f"a prompt has 1 to {most} tokens, {request.request_id} has {len(prompt)}")
        whole: Completion | None = None
        async with self._admitted(request.request_id, prompt) as (session, live):
            limit = min(sampling.max_new_tokens, self.config.max_model_len - len(prompt))
            while whole is None or (is_stopped_by_model(whole, request) and len(whole.token_ids) < limit):
                done = () if whole is None else whole.token_ids
                payload = rollout_payload((*prompt, *done), sampling, limit - len(done), self._label())
                reply = await live.unless_given_up(session.client.generate(payload, live.new_rid))
                whole = extended(whole, NOTHING_SAMPLED if reply is None else to_completion(reply))
        return replace(whole, finish_reason="length") if is_stopped_by_model(whole, request) else whole

    async def score(self, token_ids: Sequence[int]) -> tuple[float, ...]:
        """Logprobs at temperature 1 of tokens 1..T-1; T <= ``max_model_len``. Goes before waiting rollouts."""
        if len(token_ids) > self.config.max_model_len:
            raise GeneratorError(f"score takes at most {self.config.max_model_len} tokens, got {len(token_ids)}")
        if len(token_ids) < 2:
            return ()
        self._num_scores += 1
        async with self._admitted(f"score-{self._num_scores}", token_ids) as (session, live):
            payload = score_payload(token_ids, self._label())
            reply = await live.unless_given_up(session.client.generate(payload, live.new_rid))
        if reply is None:
            raise GeneratorError(f"score-{self._num_scores} was aborted")
        return to_scores(reply, len(token_ids))

    async def pause(self, mode: PauseMode = "keep") -> None:
        """Stop sampling and drop the cached keys and values of live requests.

        ``wait`` lasts as long as the live requests; the other modes have ``answer_timeout_s``.

        Raises:
            GeneratorError: the server does not answer, or ``wait`` while it is paused.
        """
        session = self._running()
        if mode == "wait" and self._live:
            if self._is_paused:
                raise GeneratorError(f"a paused engine does not drain its {len(self._live)} requests: resume() it")
            await asyncio.gather(*(live.ended.wait() for live in self._live.values()))
        await session.client.tell("/pause_generation", pause_payload(), self.config.answer_timeout_s)
        self._is_paused = True
        if mode == "abort":
            await self._abort_live()

    async def resume(self) -> None:
        """Go on sampling.

        Raises:
            GeneratorError: a failed refit fences the engine, or the server does not answer.
        """
        self._fence.check()
        await self._running().client.tell("/continue_generation", resume_payload(), self.config.answer_timeout_s)
        self._is_paused = False

    async def connect_refit(self, endpoint: RefitEndpoint) -> None:
        """Join the sender's group; the sender's ``connect`` must run meanwhile."""
        await self._running().loader.connect(endpoint)

    async def refit(self, update: RefitUpdate) -> RefitReport:
        """Take the announced weights in one transaction; see ``Generator.refit``.

        The server samples until the new weights are whole and verified. A refused manifest changes nothing; after
        a later failure the engine is fenced until another refit succeeds, and live requests return as aborted.
        """
        try:
            async with self._fence.transaction(f"refit to policy version {update.policy_version}") as transaction:
                return await self._refit(update, transaction)
        finally:
            if self._fence.reason:
                await self._abort_live()

    async def _refit(self, update: RefitUpdate, transaction: Transaction) -> RefitReport:
        loader, started = self._running().loader, time.perf_counter()
        with transaction.staging(loader.is_staging):
            await loader.prepare(update, unable_to_drain(update, len(self._live), is_paused=self._is_paused))
        try:
            async with loader.attesting(update):
                try:
                    with transaction.staging(loader.is_staging):
                        counter = await loader.receive(update)
                finally:
                    if not transaction.is_harmless:
                        transaction.begin()
                paused = time.perf_counter()
                await self._stop(loader, update, transaction, update.timeout_s - (paused - started))
                loading = time.perf_counter()
                await loader.load(update, self._version)
        except RefitError as error:
            await self._go_back(update, error, transaction)
            raise
        self._version, self._incarnation = update.policy_version, update.incarnation
        committed = time.perf_counter()
        if not self._is_paused:
            await loader.resume(update, self._version)
        transaction.commit()
        ended = time.perf_counter()
        stages = {"pause": loading - paused, "resume": ended - committed, "total": ended - started}
        return counter.report(update, loader.seconds | stages)

    async def _stop(self, loader: WeightLoader, update: RefitUpdate, transaction: Transaction, limit_s: float) -> None:
        """Stop sampling, and do with the live requests what the update's mode says."""
        live = list(self._live.values()) if update.mode == "wait" else []
        await transaction.drain((request.ended.wait() for request in live), limit_s, update)
        await loader.pause(update, self._version)
        if update.mode == "abort":
            await self._abort_live()

    async def _go_back(self, update: RefitUpdate, error: RefitError, transaction: Transaction) -> None:
        """Serve the version before, if it was staged; raises the error that says so then."""
        loader = self._running().loader
        # What a server that is late does, nobody knows.
        is_open = transaction.has_begun and not isinstance(error, RefitTimeout)
        if is_open and await loader.go_back(update, self._label(), self._version):
            if not self._is_paused:
                await loader.resume(update, self._version)
            transaction.roll_back()
            raise rolled_back(error, self._version) from error

    async def health(self) -> EngineHealth:
        """Whether the server's scheduler answers within ``answer_timeout_s``, and at which version it is."""
        session, why = self._session, ""
        if session is None or not session.server.is_running:
            why = "the engine is not running"
        elif time.monotonic() - session.client.heard_at > _FRESH_S:
            try:
                await session.client.ask("/server_info", self.config.answer_timeout_s)
            except GeneratorError as error:
                why = str(error)
        return EngineHealth(not why, self._version, len(self._live), self._fence.reason or why)

    @asynccontextmanager
    async def _admitted(self, request_id: str, token_ids: Sequence[int]) -> AsyncIterator[tuple[Session, LiveRequest]]:
        """Lets in what the server survives; aborts it there when the caller goes away."""
        await self._fence.passed()
        session = self._running()
        size = session.facts.vocab_size
        if unknown := [token for token in token_ids if not 0 <= token < size]:
            raise GeneratorError(f"token ids are 0 to {size - 1}, {request_id} has {unknown[0]}")
        if request_id in self._live:
            raise GeneratorError(f"request_id must be unique among live requests, {request_id} is not")
        self._num_requests += 1
        live = self._live[request_id] = LiveRequest(f"{self._name}.{self._num_requests}")
        try:
            yield session, live
        except asyncio.CancelledError:
            task = asyncio.create_task(self._abort(session, live.rid))
            self._aborts.add(task)
            task.add_done_callback(self._aborts.discard)
            raise
        finally:
            del self._live[request_id]
            live.ended.set()

    async def _abort_live(self) -> None:
        """Return live requests partial; asks again, since one may still be on its way to the server."""
        started = time.monotonic()
        with suppress(TimeoutError):
            async with asyncio.timeout(_ABORT_S):
                while self._live and (session := self._session) is not None and session.server.is_running:
                    is_ours = self.config.url is None
                    rids = [None] if is_ours else [live.rid for live in self._live.values()]
                    await asyncio.gather(*(self._abort(session, rid) for rid in rids))
                    await asyncio.sleep(_ABORT_AGAIN_S)
                    if time.monotonic() - started > _UNREACHED_S:
                        for live in self._live.values():
                            live.given_up.set()

    async def _abort(self, session: Session, rid: str | None) -> None:
        with suppress(GeneratorError):  # a server that is gone has nothing to abort
            await session.client.abort(rid, _ABORT_S)

    def _running(self) -> Session:
        if self._session is None:
            raise EngineDead("the engine is not running: call start() first")
        if not self._session.server.is_running:
            raise EngineDead(f"SGLang's server is gone: restart the engine; {self._session.server.last_words()}")
        return self._session

    def _label(self) -> str:
        return make_label(self._incarnation, self._version)
