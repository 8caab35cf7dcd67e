"""The executor: apply -> cache -> run -> judge, shared.

submit    consumes: a TaskRequest
          waits for: identical work in flight, else a worker slot    unblocked by: a run that ends
workers   at most `workers` requests are being applied or run at once; the waiting tenants take turns.
          How many may wait is the matter of `dockyard_sandbox.queueing.Admission`
"""

from __future__ import annotations

import asyncio
import hashlib
import logging
import subprocess
import time
import uuid
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from typing import TypeVar

from dockyard_core import Verdict, VerdictStatus
from dockyard_sandbox.cancellation import Cancellation
from dockyard_sandbox.deciding_files import DecidingFiles
from dockyard_sandbox.gitcmd import GitFailed
from dockyard_sandbox.jailer import Jailer, Workload
from dockyard_sandbox.judge import RunResult, early_verdict
from dockyard_sandbox.prepare import Prepared, Preparer
from dockyard_sandbox.queueing import FairSlots
from dockyard_sandbox.repos import FetchFailed, MissingCommit, RepoStore, UnknownRepo
from dockyard_sandbox.sharing import BoundedCache, SharedCalls
from dockyard_sandbox.trials import Trials
from dockyard_sandbox.wire import Count, TaskRequest, TaskResponse

T = TypeVar("T")
_LOG = logging.getLogger(__name__)
_CACHE_CAPACITY = 4096
# Verdicts that another run of the same tree could change, through no fault of the tree.
_NOT_CACHED = frozenset({VerdictStatus.INFRA_ERROR, VerdictStatus.TIMEOUT, VerdictStatus.INCOMPLETE})


@dataclass(frozen=True, kw_only=True)
class Outcome:
    """A verdict, and whether asking again could help."""

    verdict: Verdict
    is_retryable: bool = False


class Executor:
    """Judges requests. Owns its threads and its jailer."""

    def __init__(
        self,
        *,
        repos: RepoStore,
        preparer: Preparer,
        jailer: Jailer,
        deciding_files: DecidingFiles,
        isolation: str,
        workers: int,
        with_canaries: bool = True,
    ) -> None:
        if workers < 1:
            raise ValueError(f"workers must be >= 1, got {workers}")
        self.isolation = isolation
        self.repos = repos
        self.workers = workers
        self._preparer = preparer
        self._deciding_files = deciding_files
        self._jailer = jailer
        self._pool = ThreadPoolExecutor(max_workers=workers, thread_name_prefix="run")
        self._slots = FairSlots(workers)
        self._by_text: SharedCalls[Outcome] = SharedCalls()
        self._by_tree: SharedCalls[Verdict] = SharedCalls()
        self._text_cache: BoundedCache[Verdict] = BoundedCache(_CACHE_CAPACITY)
        self._tree_cache: BoundedCache[Verdict] = BoundedCache(_CACHE_CAPACITY)
        self.trials = Trials(
            self._run,
            self._prepare,
            isolation=isolation,
            with_canaries=with_canaries,
            has_warm_path=jailer.has_warm_path,
        )
        self.num_executions = 0
        """Trees run since the server started; cached and shared verdicts do not count, nor runs that check others."""

    @property
    def is_warm(self) -> bool:
        """Whether tasks in the executor's own environment may run warm."""
        return self._jailer.is_warm

    async def check(self, request: TaskRequest) -> None:
        """Make sure that what a task names is there. Raises as `RepoStore.check` does, MissingTestFile, GitFailed."""
        await self.repos.check(request.repo, request.base_commit)
        await self._deciding_files.check(request)

    async def submit(self, request: TaskRequest) -> TaskResponse:
        """Return the verdict on one request. Raises UnknownRepo."""
        began = time.monotonic()
        source = self.repos.resolve(request.repo)  # a name may be registered anew
        key = (source, request.spec_hash(), hashlib.sha256(request.model_patch.encode()).digest())
        known = self._text_cache.get(key)
        if known is not None:
            return _respond(Outcome(verdict=replace(known, cached=True)), began)
        outcome, joined = await self._by_text.get(key, lambda: self._execute(request, began))
        if outcome.verdict.status not in _NOT_CACHED:
            self._text_cache.put(key, outcome.verdict)
        if joined:
            outcome = replace(outcome, verdict=replace(outcome.verdict, cached=True))
        return _respond(outcome, began)

    async def close(self) -> None:
        """Stop the launcher; the runs in flight have been cancelled by then."""
        self._preparer.close()
        await asyncio.to_thread(self._jailer.close)
        self._pool.shutdown(wait=True)

    async def _execute(self, request: TaskRequest, began: float) -> Outcome:
        try:
            return await self._prepare_and_run(request, began)
        except MissingCommit as error:
            return Outcome(verdict=self._infra(request, str(error)))
        except UnknownRepo:
            raise
        except (FetchFailed, GitFailed, OSError, subprocess.TimeoutExpired) as error:
            return Outcome(verdict=self._infra(request, f"{type(error).__name__}: {error}"), is_retryable=True)
        except Exception as error:  # noqa: BLE001  the boundary: a defect of ours is never a score, nor a 500
            _LOG.exception("judging %r failed", request.instance_id)
            return Outcome(verdict=self._infra(request, f"{type(error).__name__}: {str(error)[:500]}"))

    async def _prepare_and_run(self, request: TaskRequest, began: float) -> Outcome:
        async with self._slots:
            queued = time.monotonic()
            prepared = await self._prepare_now(request)
        timings = {"queue": queued - began, "apply": time.monotonic() - queued}
        if isinstance(prepared, Verdict):
            return Outcome(verdict=replace(prepared, duration_s=timings))
        key = (request.spec_hash(), prepared.tree_key)
        known = self._tree_cache.get(key)
        if known is not None:
            verdict, reused = known, True
        else:
            verdict, reused = await self._by_tree.get(key, lambda: self._judge(request, prepared))
        if verdict.status not in _NOT_CACHED:
            self._tree_cache.put(key, verdict)
        verdict = replace(
            verdict,
            cached=reused,
            flags=_merged(verdict.flags, prepared.flags),
            duration_s={**timings, **verdict.duration_s},
        )
        return Outcome(verdict=verdict, is_retryable=verdict.status is VerdictStatus.INFRA_ERROR)

    async def judge_afresh(self, request: TaskRequest, *, may_be_warm: bool = False) -> Verdict:
        """Judge without looking at any cache, or filling one. Raises what `Preparer.prepare` raises, and OSError."""
        prepared = await self._prepare(request)
        if isinstance(prepared, Verdict):
            return prepared
        return await self._judge(request, prepared, may_be_warm=may_be_warm)

    async def _judge(self, request: TaskRequest, prepared: Prepared, *, may_be_warm: bool = True) -> Verdict:
        self.num_executions += 1
        return await self.trials.verdict(request, prepared, may_be_warm=may_be_warm)

    async def _prepare(self, request: TaskRequest) -> Prepared | Verdict:
        async with self._slots:
            return await self._prepare_now(request)

    async def _prepare_now(self, request: TaskRequest) -> Prepared | Verdict:
        cancellation = Cancellation()
        return await self._in_thread(lambda: self._preparer.prepare(request, cancellation), cancellation)

    async def _run(self, workload: Workload) -> RunResult:
        cancellation = Cancellation()
        async with self._slots:
            return await self._in_thread(lambda: self._jailer.run(workload, cancellation), cancellation)

    async def in_slot(self, work: Callable[[], T], cancellation: Cancellation) -> T:
        """Run blocking work on a worker, in its tenant's turn; a cancellation stops it."""
        async with self._slots:
            return await self._in_thread(work, cancellation)

    def respond(self, verdict: Verdict) -> TaskResponse:
        """A verdict that needed no run, as it travels."""
        return _respond(Outcome(verdict=verdict), time.monotonic())

    async def _in_thread(self, work: Callable[[], T], cancellation: Cancellation) -> T:
        """Run blocking work; on cancellation stop it and wait until it has stopped."""
        future = asyncio.get_running_loop().run_in_executor(self._pool, work)
        try:
            return await asyncio.shield(future)
        except asyncio.CancelledError:
            cancellation.cancel()
            await asyncio.wait([future])
            raise

    def _infra(self, request: TaskRequest, detail: str) -> Verdict:
        return early_verdict(request, VerdictStatus.INFRA_ERROR, detail, isolation=self.isolation)


def _merged(flags: tuple[str, ...], prepared: tuple[str, ...]) -> tuple[str, ...]:
    """Flags of a run, with those of this patch in place of those of the patch that was run: trees are shared."""
    return tuple(flag for flag in flags if not flag.startswith(("restored:", "exempt:", "scan:", "rung:"))) + prepared


def _respond(outcome: Outcome, began: float) -> TaskResponse:
    verdict = outcome.verdict
    return TaskResponse(
        task_id=uuid.uuid4().hex,
        status=verdict.status,
        resolved=verdict.is_resolved,
        pass_rate=verdict.pass_rate,
        fail_to_pass=Count(passed=verdict.fail_to_pass[0], total=verdict.fail_to_pass[1]),
        pass_to_pass=Count(passed=verdict.pass_to_pass[0], total=verdict.pass_to_pass[1]),
        tests=dict(verdict.tests),
        flags=verdict.flags,
        isolation=verdict.isolation,
        duration_s={**verdict.duration_s, "total": time.monotonic() - began},
        log=verdict.log,
        evidence=verdict.evidence,
        retryable=outcome.is_retryable,
        cached=verdict.cached,
        detail=verdict.detail,
    )
