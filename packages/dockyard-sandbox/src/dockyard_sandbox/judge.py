"""From what a run left behind to a verdict. Pure functions; no evidence is not a pass."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from dockyard_core import TestStatus, Verdict, VerdictStatus
from dockyard_sandbox.canaries import Canary
from dockyard_sandbox.records import RecordStream
from dockyard_sandbox.wire import TaskRequest

_PASSING = (TestStatus.PASSED, TestStatus.XFAILED)
# An expected failure satisfies FAIL_TO_PASS only: a kept test must pass. SWE-bench is laxer.
_KEPT = {
    "strict": (TestStatus.PASSED,),
    "swebench": (TestStatus.PASSED, TestStatus.XFAILED, TestStatus.SKIPPED),
}
_PYTEST_RAN = (0, 1)
_PYTEST_FOUND_NOTHING = (4, 5)
_PYTEST_INTERRUPTED = 2


@dataclass(frozen=True, kw_only=True)
class RunResult:
    """What the jail says about one run."""

    end: str
    """exited, deadline, memory, cancelled, output_limit or setup_failed."""
    exit_code: int | None
    """Exit code of the test process, negative for a signal; None when it did not end by itself."""
    output: bytes
    records: bytes
    start_s: float
    test_s: float
    cpu_s: float
    max_rss_kb: int
    error: str = ""


def early_verdict(
    request: TaskRequest, status: VerdictStatus, detail: str, *, isolation: str, flags: Iterable[str] = ()
) -> Verdict:
    """A verdict reached without running a test."""
    return Verdict(
        status=status,
        fail_to_pass=(0, len(request.fail_to_pass)),
        pass_to_pass=(0, len(request.pass_to_pass)),
        tests=dict.fromkeys(request.deciding_ids, TestStatus.MISSING),
        flags=tuple(flags),
        isolation=isolation,
        evidence=evidence(request, detail.encode()),
        detail=detail,
    )


def judge(
    request: TaskRequest,
    run: RunResult,
    stream: RecordStream,
    *,
    isolation: str,
    flags: tuple[str, ...],
    tree_key: str,
    canaries: Sequence[Canary] = (),
) -> Verdict:
    """Combine the end of the process, the record stream and the deciding ids into one verdict.

    A canary that tells against the run makes it `tampered`, and names itself in a flag ``canary_…``.
    """
    tests = {test: stream.tests.get(test, TestStatus.MISSING) for test in request.deciding_ids}
    passed = {test for test, status in tests.items() if status in _PASSING}
    kept = {test for test in request.pass_to_pass if tests[test] in _KEPT[request.apply]}
    fail_to_pass = (len(passed & set(request.fail_to_pass)), len(request.fail_to_pass))
    pass_to_pass = (len(kept), len(request.pass_to_pass))
    all_good = fail_to_pass[0] == fail_to_pass[1] and pass_to_pass[0] == pass_to_pass[1]
    status, detail = _status(run, stream, all_good)
    if status is VerdictStatus.UNRESOLVED:
        detail = _what_lacks(request, tests, passed, kept)
    found = canary_findings(stream, canaries, is_resolved=status is VerdictStatus.RESOLVED)
    if found and status in (VerdictStatus.RESOLVED, VerdictStatus.UNRESOLVED):
        status, detail = VerdictStatus.TAMPERED, f"a test that must fail did not: {', '.join(found)}"
    elif canaries and status is VerdictStatus.RESOLVED:
        detail += f"; {len(canaries)} canaries failed as they must"
    scored = status in (VerdictStatus.RESOLVED, VerdictStatus.UNRESOLVED)
    if not scored:
        fail_to_pass, pass_to_pass = (0, fail_to_pass[1]), (0, pass_to_pass[1])
    return Verdict(
        status=status,
        pass_rate=(fail_to_pass[0] + pass_to_pass[0]) / len(tests),
        fail_to_pass=fail_to_pass,
        pass_to_pass=pass_to_pass,
        tests=tests,
        flags=stream.contradictions + found + flags,
        isolation=isolation,
        duration_s={"start": run.start_s, "test": run.test_s, "cpu": run.cpu_s},
        log=run.output[-16_384:].decode(errors="replace"),
        evidence=evidence(request, tree_key.encode(), run.records),
        detail=detail,
    )


def canary_findings(stream: RecordStream, canaries: Iterable[Canary], *, is_resolved: bool) -> tuple[str, ...]:
    """What the canaries say against a run.

    A canary that passed beside its original contradicts it. One that is proven and was not reported
    as failed, beside an original that passed in a run that resolves, was left out by whoever wrote the report.
    """
    found = []
    for canary in canaries:
        if stream.tests.get(canary.original) not in _PASSING:
            continue
        status = stream.tests.get(canary.test, TestStatus.MISSING)
        is_left_out = is_resolved and canary.is_proven and status is not TestStatus.FAILED
        if status is TestStatus.PASSED or is_left_out:
            found.append(f"canary_{status}:{canary.original}")
    return tuple(found)


def _status(run: RunResult, stream: RecordStream, all_good: bool) -> tuple[VerdictStatus, str]:
    ended = _status_of_end(run)
    if ended is not None:
        return ended
    if stream.contradictions:
        return VerdictStatus.TAMPERED, f"the record stream contradicts itself: {', '.join(stream.contradictions)}"
    code = stream.exit_code
    if code is None:
        return VerdictStatus.INCOMPLETE, f"the test process ended (exit code {run.exit_code}) before pytest did"
    if code != run.exit_code:
        return VerdictStatus.TAMPERED, f"pytest recorded exit code {code} but the process left with {run.exit_code}"
    if code == 0 and TestStatus.FAILED in stream.tests.values():
        return VerdictStatus.TAMPERED, "exit code 0 although a test failed"
    if not stream.tests and (code in _PYTEST_FOUND_NOTHING or stream.collect_errors):
        where = f": {', '.join(stream.collect_errors[:3])} cannot be collected" if stream.collect_errors else ""
        return VerdictStatus.NO_TESTS_RAN, f"pytest ran no test (exit code {code}){where}"
    if code not in _PYTEST_RAN and code != _PYTEST_INTERRUPTED:
        return VerdictStatus.INCOMPLETE, f"pytest did not finish its session (exit code {code})"
    if code == _PYTEST_INTERRUPTED:
        return VerdictStatus.INCOMPLETE, "the pytest session was interrupted"
    if all_good:
        return VerdictStatus.RESOLVED, "every deciding test has the status that its set demands"
    if stream.num_memory_errors:
        return VerdictStatus.OUT_OF_MEMORY, "a test ran out of limits.memory_mb"
    return VerdictStatus.UNRESOLVED, ""


def _what_lacks(request: TaskRequest, tests: Mapping[str, TestStatus], passed: set[str], kept: set[str]) -> str:
    """The deciding tests without the status that they need; those that pytest did not report come first."""
    bad = [test for test in request.fail_to_pass if test not in passed]
    bad += [test for test in request.pass_to_pass if test not in kept]
    bad.sort(key=lambda test: tests[test] is not TestStatus.MISSING)
    named = ", ".join(f"{test} {tests[test]}" for test in bad[:3])
    return f"{len(bad)} of {len(tests)} deciding tests did not pass: {named}{', …' if len(bad) > 3 else ''}"


def _status_of_end(run: RunResult) -> tuple[VerdictStatus, str] | None:
    if run.end == "deadline":
        return VerdictStatus.TIMEOUT, f"the tests were still running after {run.test_s:.1f} s"
    if run.end == "memory":
        return VerdictStatus.OUT_OF_MEMORY, "the processes of the run held more than limits.memory_mb together"
    if run.end == "output_limit":
        return VerdictStatus.OUTPUT_LIMIT, "the tests wrote more than limits.output_kb allows"
    if run.end != "exited":
        return VerdictStatus.INFRA_ERROR, f"the run did not start or was stopped ({run.end}): {run.error}"
    return None


def evidence(request: TaskRequest, *parts: bytes) -> str:
    """``sha256:…`` over the task, the patched tree and the record stream."""
    digest = hashlib.sha256(request.spec_hash().encode())
    for part in parts:
        digest.update(len(part).to_bytes(8, "big") + part)
    return f"sha256:{digest.hexdigest()}"
