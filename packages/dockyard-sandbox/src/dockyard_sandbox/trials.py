"""From a prepared tree to a verdict: canaries, the run itself, and the runs that a doubtful one asks for.

control   once per task: the tests on the unpatched tree, with canaries     -> which canaries are proven
          where that is not as the task says, without and with them once    -> equal, or no canaries for this task
          the same run warm                                                 -> equal, or no warm runs of this task
run       the patched tree with new canaries, warm or cold                  -> a verdict
cold      the first fix of a task that resolves warm, once more cold        -> equal, or no warm runs from now on
again     a canary that did not fail, once more with others                 -> tampered, or the second verdict
          a flagged or doubted fix, `num_confirmations` times more, cold    -> resolved only if every run agrees
"""

from __future__ import annotations

import asyncio
import logging
from collections import Counter
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass, replace

from dockyard_core import TestStatus, Verdict, VerdictStatus
from dockyard_sandbox.canaries import Candidate, Flock, choose, find_candidates, make_flock
from dockyard_sandbox.jailer import Workload
from dockyard_sandbox.judge import RunResult, judge
from dockyard_sandbox.prepare import Prepared
from dockyard_sandbox.records import RecordStream, read_records
from dockyard_sandbox.sharing import BoundedCache, SharedCalls
from dockyard_sandbox.wire import TaskRequest

RunWorkload = Callable[[Workload], Awaitable[RunResult]]
Prepare = Callable[[TaskRequest], Awaitable[Prepared | Verdict]]
_LOG = logging.getLogger(__name__)
_MAX_CONTROLS = 4096
_DID_NOT_START = ("launcher_died", "setup_failed")
_OUR_FAULT = (*_DID_NOT_START, "cancelled")


@dataclass(frozen=True, kw_only=True)
class Control:
    """What the unpatched tree showed about one task."""

    candidates: tuple[Candidate, ...] = ()
    proven: frozenset[str] = frozenset()
    """Originals that passed beside their failing canaries."""
    hook_files: frozenset[str] = frozenset()
    """Files that implement hooks there."""
    changed: frozenset[str] = frozenset()
    """Probed functions that the repository replaces by itself, as ``changed:<name>``."""
    is_same_warm: bool = False
    """Whether a warm run said the same as the cold one."""
    is_final: bool = True
    """False = the run did not happen, through a fault of ours: another one may."""


class Trials:
    """Runs prepared trees. Knows tasks by their specification, and controls each once."""

    def __init__(
        self,
        run: RunWorkload,
        prepare: Prepare,
        *,
        isolation: str,
        with_canaries: bool = True,
        num_confirmations: int = 2,
        has_warm_path: Callable[[str | None], bool] = lambda environment: False,
    ) -> None:
        if num_confirmations < 0:
            raise ValueError(f"num_confirmations must be >= 0, got {num_confirmations}")
        self._run = run
        self._prepare = prepare
        self._isolation = isolation
        self.with_canaries = with_canaries
        """Whether tasks are controlled and canaries run."""
        self._num_confirmations = num_confirmations
        self._has_warm_path = has_warm_path
        self._is_fix_same: BoundedCache[bool] = BoundedCache(_MAX_CONTROLS)
        """Whether the first fix that resolved warm did so cold as well; tasks without one are not in it."""
        self.num_runs: Counter[str] = Counter()
        """Runs since the start, by path: ``cold``, ``warm``, and warm ones that ``failed`` or that ``differed``."""
        self._controls: BoundedCache[Control] = BoundedCache(_MAX_CONTROLS)
        self._controlling: SharedCalls[Control] = SharedCalls()

    async def verdict(self, request: TaskRequest, prepared: Prepared, *, may_be_warm: bool = True) -> Verdict:
        """Return the verdict on one tree, after as many runs as it takes."""
        control = await self._control_of(request)
        is_fix_same = self._is_fix_same.get(request.spec_hash())
        is_warm = may_be_warm and control.is_same_warm and is_fix_same is not False
        verdict = await self._once(request, prepared, control, is_warm=is_warm)
        if is_warm and verdict.is_resolved and is_fix_same is None:
            verdict = await self._compare(request, prepared, control, verdict)
        is_doubtful = any(flag.startswith(("scan:", "hook:")) for flag in verdict.flags)
        if _tells_by_canary(verdict):
            # a value that changes by itself can meet one canary honestly, hardly two drawn anew
            verdict, is_doubtful = await self._once(request, prepared, control), True
            _log(request, verdict, "a canary did not fail; run again with others")
        if verdict.is_resolved and is_doubtful:
            verdict = await self._confirm(request, prepared, control, verdict)
        return verdict

    def runs_warm(self, request: TaskRequest) -> bool:
        """Whether warm and cold runs have said the same about a task, without a fix and with one."""
        control, key = self._controls.get(request.spec_hash()), request.spec_hash()
        return control is not None and control.is_same_warm and self._is_fix_same.get(key) is True

    async def control(self, request: TaskRequest) -> Control:
        """Run the tests of a task on its unpatched tree, with canaries."""
        prepared = await self._prepare(request.model_copy(update={"model_patch": ""}))
        if isinstance(prepared, Verdict):
            return Control()
        sources = _sources(prepared)
        candidates = await asyncio.to_thread(_choose, request, sources)
        everything = frozenset(one.original for one in candidates)
        flock = await asyncio.to_thread(make_flock, candidates, sources, everything)
        run, stream = await self._look(prepared, flock)
        if run.end != "exited":
            return Control(candidates=candidates, is_final=run.end not in _OUR_FAULT)
        is_same_warm = await self._is_same_warm(request, prepared, flock, (run.exit_code, stream))
        kept = all(stream.tests.get(test) is TestStatus.PASSED for test in request.pass_to_pass)
        if not kept or stream.exit_code not in (0, 1) or _own_changes(stream) != set(stream.contradictions):
            unproven = await self._control_unproven(request, prepared, candidates)
            return replace(unproven, is_same_warm=is_same_warm)
        seen = {canary.original: stream.tests.get(canary.test) for canary in flock.canaries}
        passing = {test for test in everything if stream.tests.get(test) is TestStatus.PASSED}
        proven = {test for test in passing if seen.get(test) is TestStatus.FAILED}
        # beside a test that fails here, all that a canary can show is that it is collected
        usable = {test for test in everything - passing if seen.get(test) is not None or test not in stream.tests}
        return Control(
            candidates=tuple(one for one in candidates if one.original in proven | usable),
            proven=frozenset(proven),
            hook_files=stream.hook_files,
            changed=_own_changes(stream),
            is_same_warm=is_same_warm,
        )

    async def _is_same_warm(
        self, request: TaskRequest, prepared: Prepared, flock: Flock, cold: tuple[int | None, RecordStream]
    ) -> bool:
        """Whether a warm run of the unpatched tree says what the cold one did, about every test and itself."""
        if not self._has_warm_path(request.environment):
            return False
        run, stream = await self._look(prepared, flock, is_warm=True)
        is_same = run.end == "exited" and (run.exit_code, stream) == cold
        if not is_same:
            self._refuse_warm(request, f"the unpatched tree: {run.end}, exit code {run.exit_code}, cold {cold[0]}")
        return is_same

    async def _compare(self, request: TaskRequest, prepared: Prepared, control: Control, warm: Verdict) -> Verdict:
        """Judge a tree cold that resolved warm, and remember whether that was the same; the cold verdict counts."""
        cold = await self._once(request, prepared, control)
        if cold.status is VerdictStatus.INFRA_ERROR:
            return cold
        is_same = (cold.status, cold.tests) == (warm.status, warm.tests)
        self._is_fix_same.put(request.spec_hash(), is_same)
        if not is_same:
            self._refuse_warm(request, f"a fix: {warm.status}, cold {cold.status}, {cold.detail}")
        return cold

    def _refuse_warm(self, request: TaskRequest, what: str) -> None:
        self.num_runs["differed"] += 1
        _LOG.warning("%r runs cold from now on: warm and cold differ on %s", request.instance_id, what)

    async def _control_unproven(
        self, request: TaskRequest, prepared: Prepared, candidates: tuple[Candidate, ...]
    ) -> Control:
        """Where a run among canaries is not as it should be: compare one without with one that has them last."""
        flock = await asyncio.to_thread(make_flock, candidates, _sources(prepared), frozenset[str]())
        run, plain = await self._look(prepared, Flock(files={}))
        run_with, with_last = await self._look(prepared, flock)
        is_same = run.end == run_with.end and _outcome(request, plain) == _outcome(request, with_last)
        return Control(
            candidates=candidates if is_same else (),
            hook_files=plain.hook_files,
            changed=_own_changes(plain),
            is_final=run.end not in _OUR_FAULT and run_with.end not in _OUR_FAULT,
        )

    async def _control_of(self, request: TaskRequest) -> Control:
        if not self.with_canaries:
            return Control()
        key = request.spec_hash()
        control = self._controls.get(key)
        if control is None:
            control, _ = await self._controlling.get(key, lambda: self.control(request))
            if control.is_final:
                self._controls.put(key, control)
        return control

    async def _once(
        self, request: TaskRequest, prepared: Prepared, control: Control, *, is_warm: bool = False
    ) -> Verdict:
        flock = await asyncio.to_thread(make_flock, control.candidates, _sources(prepared), control.proven)
        run, stream = await self._look(prepared, flock, is_warm=is_warm)
        stream = replace(stream, contradictions=tuple(x for x in stream.contradictions if x not in control.changed))
        hooks = sorted(stream.hook_files - control.hook_files)
        return judge(
            request,
            run,
            stream,
            isolation=self._isolation,
            flags=prepared.flags + tuple(f"hook:{path}" for path in hooks),
            tree_key=prepared.tree_key,
            canaries=flock.canaries,
        )

    async def _look(self, prepared: Prepared, flock: Flock, *, is_warm: bool = False) -> tuple[RunResult, RecordStream]:
        with_canaries = {path: (prepared.test_files[path][0], content) for path, content in flock.files.items()}
        workload = replace(prepared.workload, files={**prepared.workload.files, **with_canaries}, is_warm=is_warm)
        self.num_runs["warm" if is_warm else "cold"] += 1
        run = await (self._run_warm(workload) if is_warm else self._run(workload))
        return run, read_records(run.records, xfail_files=prepared.xfail_files)

    async def _run_warm(self, workload: Workload) -> RunResult:
        """Run warm, and cold what did not start so: a broken launcher costs time, never a verdict."""
        try:
            run = await self._run(workload)
            failure = run.error if run.end in _DID_NOT_START else None
        except OSError as error:
            failure = str(error)
        if failure is None:
            return run
        self.num_runs["failed"] += 1
        self.num_runs["cold"] += 1
        _LOG.warning("a warm run did not start and is run cold: %s", failure)
        return await self._run(replace(workload, is_warm=False))

    async def _confirm(self, request: TaskRequest, prepared: Prepared, control: Control, first: Verdict) -> Verdict:
        for number in range(self._num_confirmations):
            again = await self._once(request, prepared, control)
            if again.status is VerdictStatus.INFRA_ERROR:
                return again
            if not again.is_resolved:
                _log(request, again, "a flagged fix did not resolve again")
                detail = f"a flagged fix resolved {number + 1} times, then not: {again.status}, {again.detail}"
                return replace(
                    again,
                    status=VerdictStatus.TAMPERED,
                    detail=detail,
                    pass_rate=0.0,
                    fail_to_pass=(0, again.fail_to_pass[1]),
                    pass_to_pass=(0, again.pass_to_pass[1]),
                )
        _log(request, first, f"a flagged fix resolved {self._num_confirmations + 1} times")
        return first


def _own_changes(stream: RecordStream) -> frozenset[str]:
    return frozenset(one for one in stream.contradictions if one.startswith("changed:"))


def _outcome(request: TaskRequest, stream: RecordStream) -> tuple[object, ...]:
    return [stream.tests.get(test) for test in request.deciding_ids], stream.collect_errors, stream.contradictions


def _sources(prepared: Prepared) -> dict[str, bytes]:
    return {path: content for path, (_, content) in prepared.test_files.items()}


def _choose(request: TaskRequest, sources: Mapping[str, bytes]) -> tuple[Candidate, ...]:
    found: list[Candidate] = []
    for path, source in sources.items():
        found += find_candidates(path, source, [test for test in request.deciding_ids if test.startswith(f"{path}::")])
    return choose(found, request.fail_to_pass)


def _tells_by_canary(verdict: Verdict) -> bool:
    return any(flag.startswith("canary_") for flag in verdict.flags)


def _log(request: TaskRequest, verdict: Verdict, what: str) -> None:
    _LOG.warning(
        "audit: %s: %r %s evidence=%s flags=%s",
        what,
        request.instance_id,
        verdict.status,
        verdict.evidence,
        list(verdict.flags),
    )
