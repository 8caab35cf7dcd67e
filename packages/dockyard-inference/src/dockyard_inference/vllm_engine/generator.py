"""``VllmGenerator``: one vLLM engine behind core's ``Generator`` protocol."""

from __future__ import annotations

import asyncio
import gc
import time
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager, contextmanager
from dataclasses import asdict
from itertools import pairwise
from typing import TYPE_CHECKING, Any

from dockyard_core.errors import EngineDead, GeneratorError, RefitError, RefitTimeout, WeightMismatch
from dockyard_core.generator import Completion, EngineHealth, GenerateRequest, PauseMode, VersionSpan
from dockyard_core.refit import RefitEndpoint, RefitReport, RefitUpdate
from dockyard_inference.fence import Fence
from dockyard_inference.vllm_engine.config import VllmConfig
from dockyard_inference.vllm_engine.launch import start_engine, stop_engine

if TYPE_CHECKING:
    from collections.abc import Iterator

    from vllm.v1.engine.async_llm import AsyncLLM

_ERRORS: dict[str, type[RefitError]] = {
    "WeightMismatch": WeightMismatch,
    "RefitTimeout": RefitTimeout,
    "RefitError": RefitError,
}

_ANSWER_S = 30.0
"""How long after a refit's own deadline the workers may take to say how it ended."""


class VllmGenerator:
    """One vLLM engine. All methods belong to the event loop that called ``start``."""

    def __init__(self, config: VllmConfig) -> None:
        self.config = config
        self._engine: AsyncLLM | None = None
        self._fence = Fence()
        self._version, self._incarnation = config.policy_version, config.incarnation
        self._live: set[str] = set()
        self._num_scores = 0
        self._is_paused = False

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
        if self._live and not self._engine.errored:
            await self._engine.abort(list(self._live))
        await asyncio.to_thread(self._halt)
        gc.collect()  # vLLM's finalizer fails once the interpreter has begun to exit

    def _launch(self) -> None:
        # No reference to the engine may stay in the thread's future: see shutdown.
        self._engine = start_engine(self.config)

    def _halt(self) -> None:
        engine, self._engine = self._engine, None
        if engine is not None:
            stop_engine(engine)

    async def generate(self, request: GenerateRequest) -> Completion:
        """Sample one completion."""
        from vllm.inputs import tokens_input
        from vllm.sampling_params import RequestOutputKind, SamplingParams

        sampling = request.sampling
        params = SamplingParams(
            temperature=sampling.temperature,
            max_tokens=sampling.max_new_tokens,
            stop_token_ids=list(sampling.stop_token_ids),
            seed=sampling.seed,
            ignore_eos=True,  # only the request's own stop tokens stop it
            detokenize=False,
            logprobs=0,
            flat_logprobs=True,
            output_kind=RequestOutputKind.FINAL_ONLY,
            skip_clone=True,
        )
        async with self._admitted(request.request_id):
            prompt = tokens_input(list(request.prompt_token_ids), cache_salt=self._salt())
            output = (await self._run(prompt, params, request.request_id)).outputs[0]
        flat = output.logprobs
        logprobs = () if flat is None else tuple(flat.logprobs[start] for start in flat.start_indices)
        spans = tuple(
            VersionSpan(_version_of(span.version), span.start, span.end) for span in output.weight_versions or ()
        )
        return Completion(
            token_ids=tuple(output.token_ids),
            logprobs=logprobs,
            version_spans=spans,
            finish_reason=output.finish_reason,
        )

    async def score(self, token_ids: Sequence[int]) -> tuple[float, ...]:
        """Logprobs at temperature 1 of tokens 1..T-1; T < ``max_model_len``."""
        from vllm.inputs import tokens_input
        from vllm.sampling_params import RequestOutputKind, SamplingParams

        if len(token_ids) < 2:
            return ()
        params = SamplingParams(
            temperature=0.0,
            max_tokens=1,
            ignore_eos=True,
            detokenize=False,
            prompt_logprobs=0,
            flat_logprobs=True,
            output_kind=RequestOutputKind.FINAL_ONLY,
            skip_clone=True,
        )
        self._num_scores += 1
        request_id = f"score-{self._num_scores}"
        async with self._admitted(request_id):
            prompt = tokens_input(list(token_ids), cache_salt=self._salt())
            flat = (await self._run(prompt, params, request_id)).prompt_logprobs
        if flat is None:
            raise GeneratorError(f"{request_id} was aborted")
        return tuple(flat.logprobs[start] for start in flat.start_indices[1:])

    async def pause(self, mode: PauseMode = "keep") -> None:
        """Stop sampling and drop cached keys and values."""
        with _engine_errors():
            await self._running().pause_generation(mode=mode, clear_cache=True)
        self._is_paused = True

    async def resume(self) -> None:
        """Go on sampling. Raises GeneratorError while a failed refit fences the engine."""
        self._fence.check()
        with _engine_errors():
            await self._running().resume_generation()
        self._is_paused = False

    async def connect_refit(self, endpoint: RefitEndpoint) -> None:
        """Join the sender's group with every worker; the sender's ``connect`` must run meanwhile."""
        self._raise_failure(await self._rpc("dockyard_connect", asdict(endpoint)), -1)

    async def refit(self, update: RefitUpdate) -> RefitReport:
        """Take the announced weights in one transaction; see ``Generator.refit``.

        A refused manifest changes nothing: the engine goes on with the version it holds. After any
        later failure it is fenced until another refit succeeds.
        """
        info = asdict(update) | {"manifest": [list(spec) for spec in update.manifest]}
        async with self._fence.transaction(f"refit to policy version {update.policy_version}") as transaction:
            started = time.perf_counter()
            self._raise_failure(await self._rpc("dockyard_prepare", info), update.policy_version)
            transaction.begin()
            try:
                async with asyncio.timeout(update.timeout_s + _ANSWER_S):
                    reports, seconds = await self._transfer(info, update)
            except TimeoutError as error:
                raise RefitTimeout(
                    f"the engine's workers did not answer within {update.timeout_s + _ANSWER_S} s",
                    wanted_version=update.policy_version,
                    held_version=self._version,
                ) from error
            report = self._attested(reports, update)
            transaction.commit()
        seconds["total"] = time.perf_counter() - started
        return RefitReport(
            policy_version=update.policy_version,
            num_tensors=report["num_tensors"],
            num_elements=sum(report["elements_per_layer"].values()),
            num_bytes=report["num_bytes"],
            elements_per_layer=report["elements_per_layer"],
            seconds=report["seconds"] | seconds,
        )

    async def health(self) -> EngineHealth:
        """Whether the engine lives, and at which version."""
        engine = self._engine
        is_alive = engine is not None and not engine.errored
        detail = self._fence.reason or ("" if is_alive else "the engine is not running")
        return EngineHealth(is_alive, self._version, len(self._live), detail)

    async def _transfer(self, info: dict[str, Any], update: RefitUpdate) -> tuple[list[Any], dict[str, float]]:
        from vllm.distributed.weight_transfer.base import WeightTransferUpdateRequest

        engine, marks = self._running(), [time.perf_counter()]
        with _engine_errors():
            await engine.pause_generation(mode="keep", clear_cache=True)
            marks.append(time.perf_counter())
            await engine.start_weight_update()
            await engine.update_weights(WeightTransferUpdateRequest(update_info=info))
            await engine.finish_weight_update()
            reports = await engine.collective_rpc("dockyard_report")
            marks.append(time.perf_counter())
            self._raise_failure([report["failure"] for report in reports], update.policy_version)
            self._attested(reports, update)
            await engine.update_weight_version(self._label(update.incarnation, update.policy_version))
            self._version, self._incarnation = update.policy_version, update.incarnation
            marks.append(time.perf_counter())
            if not self._is_paused:
                await engine.resume_generation()
            marks.append(time.perf_counter())
        pause, _, commit, resume = (b - a for a, b in pairwise(marks))
        return reports, {"pause": pause, "commit": commit, "resume": resume}

    def _attested(self, reports: list[Any], update: RefitUpdate) -> dict[str, Any]:
        """The report of the slowest rank, after checking that all ranks took the same."""
        for report in reports:
            if report["num_tensors"] != len(update.manifest):
                raise WeightMismatch(
                    f"a worker attests {report['num_tensors']} tensors of {len(update.manifest)}",
                    wanted_version=update.policy_version,
                    held_version=self._version,
                )
        return dict(max(reports, key=lambda report: sum(report["seconds"].values())))

    async def _run(self, prompt: Any, params: Any, request_id: str) -> Any:
        with _engine_errors():
            outputs = [output async for output in self._running().generate(prompt, params, request_id)]
        if not outputs:
            raise GeneratorError(f"{request_id} ended without an output")
        return outputs[-1]

    @asynccontextmanager
    async def _admitted(self, request_id: str) -> AsyncIterator[None]:
        await self._fence.passed()
        if request_id in self._live:
            raise GeneratorError(f"request_id must be unique among live requests, {request_id} is not")
        self._live.add(request_id)
        try:
            yield
        finally:
            self._live.discard(request_id)

    async def _rpc(self, method: str, argument: dict[str, Any]) -> list[Any]:
        with _engine_errors():
            return list(await self._running().collective_rpc(method, args=(argument,)))

    def _raise_failure(self, failures: list[Any], version: int) -> None:
        for failure in failures:
            if failure is not None:
                name, message = failure
                raise _ERRORS[name](message, wanted_version=version, held_version=self._version)

    def _running(self) -> AsyncLLM:
        if self._engine is None:
            raise EngineDead("the engine is not running: call start() first")
        return self._engine

    def _salt(self) -> str:
        return self._label(self._incarnation, self._version)

    @staticmethod
    def _label(incarnation: int, version: int) -> str:
        return f"{incarnation}.{version}"


def _version_of(label: str) -> int:
    return int(label.rpartition(".")[2])


@contextmanager
def _engine_errors() -> Iterator[None]:
    """Turn vLLM's exceptions into ours."""
    from vllm.exceptions import VLLMValidationError
    from vllm.v1.engine.exceptions import EngineDeadError, EngineGenerateError

    try:
        yield
    except EngineDeadError as error:
        raise EngineDead("vLLM's engine process is gone: restart the engine") from error
    except (EngineGenerateError, VLLMValidationError, ValueError) as error:
        raise GeneratorError(f"vLLM refused: {error}") from error
