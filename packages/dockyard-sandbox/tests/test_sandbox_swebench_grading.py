"""Our verdicts beside the public `swebench` package's grading, which `data/record_swebench_grading.py` recorded."""

from __future__ import annotations

import json
from functools import cache
from pathlib import Path
from typing import Any

import pytest

from dockyard_core import TestStatus
from dockyard_sandbox.judge import RunResult, judge
from dockyard_sandbox.records import RecordStream
from dockyard_sandbox.wire import TaskRequest

RECORDED = json.loads((Path(__file__).parent / "data" / "swebench_grading.json").read_text())
LOGS = {case["name"]: case for case in RECORDED["logs"]}
NAMES = {"PASSED": "passed", "FAILED": "failed", "SKIPPED": "skipped", "ERROR": "error", "XFAIL": "xfailed"}
# What a log does not say and our records do: pytest's summary names no skipped test, and its parser knows no XPASS.
# And what we mean to see otherwise: any code can call pytest.xfail() while a test runs.
DIFFERENT = {
    "expected failure called": {"t/test_x.py::test_called": "skipped"},
    "skipped fix": {"t/test_s.py::test_add": "skipped"},
    "skipped test kept": {"t/test_s.py::test_mul": "skipped"},
    "unexpected pass": {"t/test_x.py::test_passes": "passed"},
}
RESOLVED_HERE_ONLY = {"skipped test kept", "unexpected pass"}
RESOLVED_THERE_ONLY = {"expected failure called"}


def is_resolved(case: dict[str, Any], preset: str) -> bool:
    given = {"t.py::f": case["fail_to_pass"], "t.py::p": case["pass_to_pass"], "t.py::g": "PASSED", "t.py::q": "PASSED"}
    statuses = {test: TestStatus(NAMES[status]) for test, status in given.items() if status is not None}
    code = int(any(status in (TestStatus.FAILED, TestStatus.ERROR) for status in statuses.values()))
    run = RunResult(end="exited", exit_code=code, output=b"", records=b"", start_s=0, test_s=0, cpu_s=0, max_rss_kb=0)
    request = TaskRequest.model_validate(
        {
            "instance_id": "i",
            "repo": "r",
            "base_commit": "0" * 40,
            "FAIL_TO_PASS": ["t.py::f", "t.py::g"],
            "PASS_TO_PASS": ["t.py::p", "t.py::q"],
            "apply": preset,
        }
    )
    stream = RecordStream(tests=statuses, exit_code=code)
    return judge(request, run, stream, isolation="namespaces", flags=(), tree_key="").is_resolved


@pytest.mark.parametrize("case", RECORDED["rule"], ids=lambda case: f"{case['fail_to_pass']}-{case['pass_to_pass']}")
def test_the_swebench_preset_grades_a_status_map_as_swebench_does(case: dict[str, Any]) -> None:
    assert is_resolved(case, "swebench") is case["resolved"]
    assert is_resolved(case, "strict") is (case["resolved"] and case["pass_to_pass"] == "PASSED")


@pytest.fixture(scope="module")
def verdict_of(new_project: Any, judge: Any, tmp_path_factory: pytest.TempPathFactory) -> Any:
    """Run a recorded project on the server: its source is the base or the patch, its tests are the test patch."""
    right = LOGS["right fix"]["files"]["calc.py"]
    made = new_project(tmp_path_factory.mktemp("swebench") / "p", {"calc.py": right})

    @cache
    def run(name: str) -> Any:
        case = LOGS[name]
        tests = {path: text for path, text in case["files"].items() if path != "calc.py"}
        source = case["files"]["calc.py"]
        task = made.task(
            test_patch=made.patch(tests),
            fail_to_pass=tuple(case["fail_to_pass"]),
            pass_to_pass=tuple(case["pass_to_pass"]),
            apply="swebench",
        )
        return judge(task, "" if source == right else made.patch({"calc.py": source}))

    return run


FEW = ("wrong fix", "parameters", "errors of setup and teardown", "expected failures", "skipped test kept")
EVERY_LOG = [name if name in FEW else pytest.param(name, marks=pytest.mark.ci) for name in LOGS]


@pytest.mark.parametrize("name", EVERY_LOG)
def test_status_maps_equal_those_of_swebenchs_parser(name: str, verdict_of: Any) -> None:
    case = LOGS[name]
    expected = dict.fromkeys(case["fail_to_pass"] + case["pass_to_pass"], "missing")
    expected |= {test: NAMES[status] for test, status in case["statuses"].items() if test in expected}
    assert dict(verdict_of(name).tests) == expected | DIFFERENT.get(name, {})


@pytest.mark.parametrize("name", EVERY_LOG)
def test_resolved_flags_equal_those_of_swebench(name: str, verdict_of: Any) -> None:
    assert LOGS[name]["resolved"] or name not in RESOLVED_THERE_ONLY
    expected = (LOGS[name]["resolved"] or name in RESOLVED_HERE_ONLY) and name not in RESOLVED_THERE_ONLY
    assert verdict_of(name).is_resolved is expected, verdict_of(name)
