"""Certificates, and the bundled tasks: the known fix resolves, nothing does not, and canaries change neither."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from dockyard_core import Task, TestStatus, Verdict, VerdictStatus
from dockyard_core.data import read_tasks
from dockyard_sandbox.certify import (
    certify,
    certify_tasks,
    read_certificate,
    task_hash,
    write_certificates,
)
from dockyard_sandbox.client import request_body
from dockyard_sandbox.serve import ServeConfig, executor_on
from dockyard_sandbox.trials import Control
from dockyard_sandbox.wire import TaskRequest

BUNDLED = Path(__file__).resolve().parents[3] / "apps" / "grpo" / "src" / "dockyard_grpo" / "quickstart"


def bundled(name: str, cache: Path, limit: int | None = None) -> tuple[Task, ...]:
    return read_tasks(BUNDLED / name, limit=limit, cache_dir=cache)


async def both_ways(executor: Any, task: Task) -> dict[str, Verdict]:
    found = {}
    for with_canaries in (True, False):
        executor.trials.with_canaries = with_canaries
        for what, patch in (("fix", task.gold_patch or ""), ("nothing", "")):
            request = TaskRequest.model_validate(request_body(task, patch))
            found[f"{what} {with_canaries}"] = await executor.judge_afresh(request)
    executor.trials.with_canaries = True
    return found


def certified_and_compared(tasks: Sequence[Task], root: Path, num_runs: int) -> None:
    """Certify each task; then compare the status maps of runs with and without canaries."""

    async def run() -> None:
        with executor_on(ServeConfig(root=root)) as executor:
            try:
                certificates = await certify(executor, tasks, num_runs=num_runs)
                for task, certificate in zip(tasks, certificates, strict=True):
                    assert certificate.is_certified, (task.instance_id, certificate.reasons)
                    assert certificate.num_gold_resolved == certificate.num_base_as_stated == num_runs
                    assert (certificate.num_canaries, certificate.num_proven_canaries) == (2, 1)
                    assert certificate.flake_rate == 0.0
                    found = await both_ways(executor, task)
                    for what in ("fix", "nothing"):
                        assert found[f"{what} True"].tests == found[f"{what} False"].tests
                        assert found[f"{what} True"].status == found[f"{what} False"].status
                    assert found["fix True"].is_resolved
                    assert not found["nothing True"].is_resolved
            finally:
                await executor.close()

    asyncio.run(run())


def test_some_bundled_tasks_are_certified_and_notice_no_canary(tmp_path: Path) -> None:
    tasks = bundled("train.jsonl", tmp_path / "cache", 1) + bundled("heldout.jsonl", tmp_path / "cache", 1)
    certified_and_compared(tasks, tmp_path / "root", num_runs=1)


@pytest.mark.timeout(3600)
@pytest.mark.parametrize(
    ("name", "num_runs"),
    [
        pytest.param("heldout.jsonl", 1, marks=pytest.mark.ci),
        *(pytest.param(name, 5, marks=pytest.mark.nightly) for name in ("train.jsonl", "heldout.jsonl")),
    ],
)
def test_every_bundled_task_resolves_in_every_run_and_nothing_in_none(name: str, num_runs: int, tmp_path: Path) -> None:
    certified_and_compared(bundled(name, tmp_path / "cache"), tmp_path / "root", num_runs=num_runs)


def test_what_is_wrong_with_a_task_is_named(project: Any, tmp_path: Path) -> None:
    good = replace(project.task(), gold_patch=project.gold())
    source = (project.path / "calc" / "ops.py").read_text()
    task_ids = good.fail_to_pass + good.pass_to_pass
    network = f"import socket\n\nsocket.getaddrinfo('example.invalid', 80)\n{source}"
    tasks = {
        "good": good,
        "no fix": project.task(),
        "wrong fix": replace(good, gold_patch=""),
        "fix needs the network": replace(good, gold_patch=project.patch({"calc/ops.py": network})),
        "one passes before": replace(good, fail_to_pass=task_ids, pass_to_pass=()),
        "fails before": replace(good, fail_to_pass=(), pass_to_pass=("tests/test_add.py::test_add",)),
        "tests do not apply": replace(good, test_patch="--- a/x\n+++ b/x\n@@ -1 +1 @@\n-a\n+b\n"),
        "no repository": replace(good, repo="unheard/of"),
    }
    made = certify_tasks(list(tasks.values()), root=tmp_path / "root", num_runs=1)
    found = dict(zip(tasks, made, strict=True))
    assert {name for name, one in found.items() if one.is_certified} == {"good"}
    expected = {
        "no fix": "no known fix",
        "wrong fix": "resolves in 0 of 1 runs: unresolved",
        "fix needs the network": "resolves in 0 of 1 runs: no_tests_ran",
        "one passes before": "tests/test_ops.py::test_mul passes without the fix",
        "fails before": "tests/test_add.py::test_add is failed without the fix",
        "tests do not apply": "test_patch_failed",
        "no repository": "unheard/of",
    }
    for name, reason in expected.items():
        assert reason in " ".join(found[name].reasons), (name, found[name].reasons)
    assert found["good"].reasons == ()
    assert {name: one.network for name, one in found.items() if one.network != "not_needed"} == {
        "fix needs the network": "suspected"
    }


class _Scripted:
    """Stands for an executor whose runs end as a list says."""

    workers = 1
    isolation = "namespaces"
    is_warm = False

    def __init__(self, gold: list[bool]) -> None:
        self.gold = gold
        self.trials = self

    async def control(self, request: TaskRequest) -> Control:
        return Control()

    async def judge_afresh(self, request: TaskRequest) -> Verdict:
        good = self.gold.pop(0) if request.model_patch else False
        tests = {request.deciding_ids[0]: "passed" if good else "failed", request.deciding_ids[1]: "passed"}
        return Verdict(
            status=VerdictStatus.RESOLVED if good else VerdictStatus.UNRESOLVED,
            tests={test: TestStatus(status) for test, status in tests.items()},
            duration_s={"test": 2.0 if good else 4.0},
        )


def test_a_fix_that_fails_now_and_then_is_not_certified(project: Any) -> None:
    task = replace(project.task(), gold_patch=project.gold())
    flaky: Any = _Scripted([True, True, False, True])
    (certificate,) = asyncio.run(certify(flaky, [task], num_runs=4))
    assert not certificate.is_certified
    assert certificate.reasons == ("the known fix resolves in 3 of 4 runs: unresolved, ",)
    assert (certificate.num_gold_resolved, certificate.num_base_as_stated) == (3, 4)
    assert certificate.flake_rate == 1 / 16  # one of two tests in one of four of the fix's runs, none of the base's
    assert certificate.duration_s == {"gold_median": 2.0, "gold_max": 4.0, "base_median": 4.0}
    steady: Any = _Scripted([True] * 4)
    assert asyncio.run(certify(steady, [task], num_runs=4))[0].is_certified


def test_a_certificate_is_named_by_its_content(project: Any, tmp_path: Path) -> None:
    task = replace(project.task(), gold_patch=project.gold())
    made = certify_tasks([task], root=tmp_path / "root", num_runs=1)
    (path,) = write_certificates(made, tmp_path / "certificates")
    assert write_certificates(made, tmp_path / "certificates") == [path]
    assert read_certificate(path) == made[0]
    fields = json.loads(path.read_text())
    assert fields["runs_warm"] is True
    assert fields["executor"].keys() == {"isolation", "python", "pytest", "dockyard-sandbox"}
    path.write_text(json.dumps({**fields, "is_certified": False}))
    with pytest.raises(ValueError, match="must hash to its name"):
        read_certificate(path)


def test_the_hash_of_a_task_is_of_what_decides_it(project: Any) -> None:
    task = project.task()
    assert task_hash(replace(task, instance_id="other", repo="/elsewhere")) == task_hash(task)
    for change in (
        {"test_patch": ""},
        {"timeout_s": 1.0},
        {"pass_to_pass": ()},
        {"base_commit": "1" * 40},
        {"plugins": ("x",)},
    ):
        assert task_hash(replace(task, **change)) != task_hash(task)


def test_certifying_takes_at_least_one_run(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="num_runs"):
        certify_tasks([], root=tmp_path, num_runs=0)
