"""Certificates: what is known about a task before a policy is trained on it.

A task is certified when its unpatched tree fails every FAIL_TO_PASS id and passes every PASS_TO_PASS id, and its
known fix resolves it, in every one of `num_runs` fresh runs. A certificate is a JSON document named by its own hash.
"""

from __future__ import annotations

import asyncio
import hashlib
import json
import re
import statistics
import sys
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass, replace
from importlib.metadata import version
from pathlib import Path
from typing import Any

from dockyard_core import Task, TestStatus, Verdict, VerdictStatus
from dockyard_sandbox.client import request_body
from dockyard_sandbox.executor import Executor
from dockyard_sandbox.repos import UnknownRepo
from dockyard_sandbox.wire import TaskRequest

FORMAT = 2
_NETWORK = re.compile(
    r"Name or service not known|Temporary failure in name resolution|Network is unreachable|getaddrinfo"
)


@dataclass(frozen=True, kw_only=True)
class Certificate:
    """What `num_runs` runs of the base and of the known fix showed."""

    instance_id: str
    base_commit: str
    task: str
    """`task_hash` of the task."""
    gold_patch: str
    """SHA-256 of the known fix."""
    is_certified: bool
    reasons: tuple[str, ...]
    """Why it is not; () = it is."""
    num_runs: int
    num_base_as_stated: int
    """Base runs in which every FAIL_TO_PASS id failed and every PASS_TO_PASS id passed."""
    num_gold_resolved: int
    flake_rate: float
    """Share of (test, run) whose status differs from that test's most frequent one, in [0, 1]."""
    duration_s: dict[str, float]
    """Seconds of test time: median and longest run of the fix, median of the base."""
    network: str
    """``not_needed``, or ``suspected``: the fix does not resolve and its log speaks of name resolution."""
    runs_warm: bool
    """Whether a warm run said the same as a cold one, of the base and of the fix; False also where none was tried."""
    num_canaries: int
    num_proven_canaries: int
    gold_flags: tuple[str, ...]
    executor: dict[str, str]
    """Isolation level, and versions of python, pytest and this wheel."""
    format: int = FORMAT

    def to_json(self) -> str:
        """Canonical JSON: sorted keys, one line."""
        return json.dumps(asdict(self), sort_keys=True, ensure_ascii=False)

    @property
    def id(self) -> str:
        """SHA-256 (hex) of the canonical JSON."""
        return hashlib.sha256(self.to_json().encode()).hexdigest()


def task_hash(task: Task) -> str:
    """``sha256:…`` over what decides a task, its name and the place of its repository left out."""
    names = ("base_commit", "test_patch", "fail_to_pass", "pass_to_pass", "environment", "test_command", "timeout_s")
    fields = {name: getattr(task, name) for name in (*names, "apply", "plugins")}
    return f"sha256:{hashlib.sha256(json.dumps(fields, sort_keys=True).encode()).hexdigest()}"


def certify_tasks(
    tasks: Sequence[Task],
    *,
    root: Path,
    num_runs: int = 5,
    min_isolation: str | None = None,
    workers: int | None = None,
) -> list[Certificate]:
    """Certify tasks on an executor of its own under ``root``; one certificate per task, in order.

    Raises:
        ConfigError: the machine gives less than ``min_isolation``, or has no git or pytest.
        ValueError: ``num_runs`` < 1.
    """
    from dockyard_sandbox.serve import ServeConfig, executor_on

    _check(num_runs)
    config = ServeConfig(root=root, min_isolation=min_isolation)
    if workers is not None:
        config = replace(config, workers=workers)

    async def run() -> list[Certificate]:
        with executor_on(config) as executor:
            try:
                return await certify(executor, tasks, num_runs=num_runs)
            finally:
                await executor.close()

    return asyncio.run(run())


async def certify(executor: Executor, tasks: Sequence[Task], *, num_runs: int = 5) -> list[Certificate]:
    """Certify tasks on a running executor; its caches are neither asked nor filled. Raises as `certify_tasks` does."""
    _check(num_runs)
    at_once = asyncio.Semaphore(executor.workers)

    async def one(task: Task) -> Certificate:
        async with at_once:
            return await _certify(executor, task, num_runs)

    return list(await asyncio.gather(*(one(task) for task in tasks)))


def _check(num_runs: int) -> None:
    if num_runs < 1:
        raise ValueError(f"num_runs must be >= 1, got {num_runs}")


def write_certificates(certificates: Iterable[Certificate], directory: Path) -> list[Path]:
    """Write each to ``directory/<id>.json``; an equal one is there already and is left alone."""
    directory.mkdir(parents=True, exist_ok=True)
    paths = []
    for certificate in certificates:
        path = directory / f"{certificate.id}.json"
        if not path.exists():
            temporary = path.with_suffix(".new")
            temporary.write_text(certificate.to_json())
            temporary.replace(path)
        paths.append(path)
    return paths


def read_certificate(path: Path) -> Certificate:
    """Read one back. Raises ValueError when its content is not what its name says, or of another format."""
    text = path.read_text()
    if hashlib.sha256(text.encode()).hexdigest() != path.stem:
        raise ValueError(f"{path}: must hash to its name; certify the task again")
    fields: dict[str, Any] = json.loads(text)
    if fields.get("format") != FORMAT:
        raise ValueError(f"{path}: format must be {FORMAT}, got {fields.get('format')!r}; certify the task again")
    lists: dict[str, Any] = {name: tuple(value) for name, value in fields.items() if isinstance(value, list)}
    return Certificate(**{**fields, **lists})


async def _certify(executor: Executor, task: Task, num_runs: int) -> Certificate:
    base: list[Verdict] = []
    gold: list[Verdict] = []
    reasons: list[str] = []
    canaries: tuple[int, int] = (0, 0)
    try:
        if task.gold_patch is None:
            reasons.append("the task has no known fix")
        for _ in range(num_runs):
            base.append(await executor.judge_afresh(_request(task, "")))
            if task.gold_patch is not None:
                gold.append(await executor.judge_afresh(_request(task, task.gold_patch)))
        control = await executor.trials.control(_request(task, ""))
        canaries = (len(control.candidates), len(control.proven))
    except UnknownRepo as error:
        reasons.append(str(error))
    num_stated = sum(_is_as_stated(task, verdict) for verdict in base)
    num_resolved = sum(verdict.is_resolved for verdict in gold)
    if num_stated < num_runs:
        reasons.append(f"the base is as stated in {num_stated} of {num_runs} runs: {_first_fault(task, base)}")
    if task.gold_patch is not None and num_resolved < num_runs:
        bad = next((verdict for verdict in gold if not verdict.is_resolved), None)
        why = "" if bad is None else f": {bad.status}, {bad.detail}"
        reasons.append(f"the known fix resolves in {num_resolved} of {num_runs} runs{why}")
    runs_warm = not reasons and executor.is_warm and await _runs_warm(executor, task)
    return Certificate(
        instance_id=task.instance_id,
        base_commit=task.base_commit,
        task=task_hash(task),
        gold_patch=hashlib.sha256((task.gold_patch or "").encode()).hexdigest(),
        is_certified=not reasons,
        reasons=tuple(reasons),
        num_runs=num_runs,
        num_base_as_stated=num_stated,
        num_gold_resolved=num_resolved,
        flake_rate=round((_flakes(base) + _flakes(gold)) / 2, 6),
        duration_s=_durations(base, gold),
        network=_network(gold),
        runs_warm=runs_warm,
        num_canaries=canaries[0],
        num_proven_canaries=canaries[1],
        gold_flags=tuple(sorted({flag for verdict in gold for flag in verdict.flags})),
        executor={
            "isolation": executor.isolation,
            "python": sys.version.split()[0],
            "pytest": version("pytest"),
            "dockyard-sandbox": version("dockyard-sandbox"),
        },
    )


async def _runs_warm(executor: Executor, task: Task) -> bool:
    """Judge the fix as a server would; the first time that compares warm and cold."""
    request = _request(task, task.gold_patch or "")
    verdict = await executor.judge_afresh(request, may_be_warm=True)
    return verdict.is_resolved and executor.trials.runs_warm(request)


def _request(task: Task, patch: str) -> TaskRequest:
    return TaskRequest.model_validate(request_body(task, patch))


def _is_as_stated(task: Task, verdict: Verdict) -> bool:
    passing = {test for test, status in verdict.tests.items() if status in (TestStatus.PASSED, TestStatus.XFAILED)}
    if verdict.status not in (VerdictStatus.UNRESOLVED, VerdictStatus.NO_TESTS_RAN):
        return False
    return not passing & set(task.fail_to_pass) and passing >= set(task.pass_to_pass)


def _first_fault(task: Task, base: Sequence[Verdict]) -> str:
    for verdict in base:
        for test in task.fail_to_pass:
            if verdict.tests.get(test) in (TestStatus.PASSED, TestStatus.XFAILED):
                return f"{test} passes without the fix"
        for test in task.pass_to_pass:
            if verdict.tests.get(test) is not TestStatus.PASSED:
                return f"{test} is {verdict.tests.get(test, TestStatus.MISSING)} without the fix ({verdict.status})"
        if not _is_as_stated(task, verdict):
            return f"{verdict.status}, {verdict.detail}"
    return "no run was made"


def _flakes(verdicts: Sequence[Verdict]) -> float:
    if not verdicts or not verdicts[0].tests:
        return 0.0
    tests = verdicts[0].tests
    odd = 0
    for test in tests:
        counts = Counter(verdict.tests.get(test, TestStatus.MISSING) for verdict in verdicts)
        odd += len(verdicts) - max(counts.values())
    return odd / (len(tests) * len(verdicts))


def _durations(base: Sequence[Verdict], gold: Sequence[Verdict]) -> dict[str, float]:
    def seconds(verdicts: Sequence[Verdict]) -> list[float]:
        return [verdict.duration_s.get("test", 0.0) for verdict in verdicts] or [0.0]

    found = {
        "gold_median": statistics.median(seconds(gold)),
        "gold_max": max(seconds(gold)),
        "base_median": statistics.median(seconds(base)),
    }
    return {name: round(value, 3) for name, value in found.items()}


def _network(gold: Sequence[Verdict]) -> str:
    """Runs have no network: what resolves needs none."""
    return "suspected" if any(not one.is_resolved and _NETWORK.search(one.log) for one in gold) else "not_needed"
