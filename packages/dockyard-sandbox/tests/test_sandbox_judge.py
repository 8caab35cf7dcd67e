"""The pure parts: record stream, control plane, filter."""

from __future__ import annotations

import json
from typing import Any

import pytest

from dockyard_core import TestStatus
from dockyard_sandbox.control_plane import control_plane, pytest_tables_differ
from dockyard_sandbox.jail.seccomp import build_filter
from dockyard_sandbox.records import read_records
from dockyard_sandbox.trees import Entry

ID = "tests/t.py::a"


def phase(when: str, outcome: str = "passed", **more: Any) -> dict[str, Any]:
    return {"id": ID, "when": when, "outcome": outcome, **more}


HONEST = [{"collected": [ID]}, phase("setup"), phase("call"), phase("teardown"), {"end": 0}]


def stream(records: list[dict[str, Any]], *, numbered: bool = True) -> bytes:
    lines = [json.dumps({"n": n, **record} if numbered else record) for n, record in enumerate(records)]
    return "".join(f"{line}\n" for line in lines).encode()


def read(records: list[dict[str, Any]]) -> Any:
    return read_records(stream(records), xfail_files={"tests/t.py"})


def test_an_honest_stream_has_no_contradiction() -> None:
    result = read(HONEST)
    assert (result.tests, result.exit_code, result.contradictions) == ({ID: TestStatus.PASSED}, 0, ())


def test_a_missing_end_is_seen() -> None:
    assert read(HONEST[:-1]).exit_code is None


@pytest.mark.parametrize(
    ("records", "finding"),
    [
        ([*HONEST, phase("call")], "record_after_end"),
        ([phase("setup"), *HONEST[1:]], "uncollected_test_reported"),
        ([*HONEST[:2], phase("setup"), *HONEST[2:]], "phase_reported_twice"),
        ([HONEST[0], phase("setup"), phase("call", raised="AssertionError"), *HONEST[3:]], "passed_although_raised"),
        ([HONEST[0], phase("setup"), phase("call", "skipped"), *HONEST[3:]], "skipped_without_cause"),
        ([{**HONEST[0], "n": 7}, *HONEST[1:]], "record_sequence"),
        ([{**HONEST[0], "extra": 1}, *HONEST[1:]], "malformed_record"),
        ([{}, *HONEST], "malformed_record"),
        ([{**HONEST[0], "end": 0}, *HONEST[1:]], "malformed_record"),
        ([HONEST[0], {"id": ID, "when": "setup"}, *HONEST[2:]], "malformed_record"),
        ([*HONEST[:1], *HONEST], "collected_twice"),
        ([*HONEST[1:4], HONEST[0], HONEST[4]], "run_before_collection"),
        ([HONEST[0], *HONEST[3:0:-1], HONEST[4]], "phase_out_of_order"),
        ([HONEST[0], phase("setup"), {**phase("call"), "id": "tests/t.py::b"}, *HONEST[3:]], "phase_out_of_order"),
        ([{**HONEST[0], "origins": {"tests/t.py": "tests/t/__init__.py"}}, *HONEST[1:]], "test_module_from_elsewhere"),
        ([*HONEST[:4], {"end": 0, "changed": ["m.f"]}], "changed:m.f"),
    ],
)
def test_what_an_honest_runner_cannot_say_is_found(records: list[dict[str, Any]], finding: str) -> None:
    assert finding in read(records).contradictions


@pytest.mark.parametrize(
    ("phases", "status"),
    [
        ([phase("setup", "failed"), phase("teardown")], TestStatus.ERROR),
        ([phase("setup"), phase("call"), phase("teardown", "failed")], TestStatus.ERROR),
        ([phase("setup"), phase("call", "failed"), phase("teardown")], TestStatus.FAILED),
        ([phase("setup"), phase("call", "failed"), phase("call"), phase("teardown")], TestStatus.FAILED),
        ([phase("setup", "skipped", raised="Skipped"), phase("teardown")], TestStatus.SKIPPED),
        ([phase("setup"), phase("call")], TestStatus.ERROR),
        ([phase("setup"), phase("teardown")], TestStatus.ERROR),
        ([phase("setup"), phase("call", "skipped", raised="X", xfail=True), phase("teardown")], TestStatus.XFAILED),
        ([phase("setup"), phase("call", "skipped", raised="X"), phase("call"), phase("teardown")], TestStatus.SKIPPED),
    ],
)
def test_phases_fold_into_the_worst(phases: list[dict[str, Any]], status: TestStatus) -> None:
    assert read([{"collected": [ID], "marked": [ID]}, *phases, {"end": 1}]).tests == {ID: status}


@pytest.mark.parametrize(
    ("collected", "imperative", "files", "status"),
    [
        ({"marked": [ID]}, False, {"tests/t.py"}, TestStatus.XFAILED),
        ({"marked": [ID]}, True, {"tests/t.py"}, TestStatus.SKIPPED),
        ({"marked": [ID]}, False, set(), TestStatus.SKIPPED),  # the mark is not written in the test's file
        ({"expecting": [ID]}, True, {"tests/t.py"}, TestStatus.XFAILED),
        ({"expecting": [ID]}, True, set(), TestStatus.SKIPPED),
        ({}, False, {"tests/t.py"}, TestStatus.SKIPPED),
    ],
)
def test_only_a_written_mark_makes_an_expected_failure(
    collected: dict[str, Any], imperative: bool, files: set[str], status: TestStatus
) -> None:
    call = phase("call", "skipped", raised="XFailed", xfail=True, imperative=imperative)
    records = [{**HONEST[0], **collected}, phase("setup"), call, phase("teardown"), {"end": 0}]
    assert read_records(stream(records), xfail_files=files).tests == {ID: status}


BASE = {path: Entry("100644", "0") for path in ("pkg/__init__.py", "pkg/m.py", "code/tool.py", "pkg/tests/t.py")}


@pytest.mark.parametrize(
    ("path", "is_new", "protected"),
    [
        ("pkg/m.py", False, False),
        ("pkg/new.py", True, False),
        ("new.py", True, False),
        ("pkg/json.py", True, False),
        ("json.py", True, True),
        ("json/__init__.py", True, True),
        ("src/json.py", True, True),
        ("code/other.py", True, False),
        ("pkg/tests/t.py", False, True),
        ("pkg/tests/data/new.txt", True, True),
        ("pkg/conftest.py", True, True),
        ("deep/down/pytest.ini", True, True),
        ("setup.cfg", False, True),
        ("pluggy.py", True, True),
        ("lib/usercustomize/__init__.py", True, True),
        ("a.dist-info/RECORD", True, True),
        ("docs/testing.md", True, False),
        ("held_out.py", False, True),
        ("held_out/__init__.py", True, True),
        ("held_out/deep/x.py", True, True),
        ("held_out.cpython-311-x86_64-linux-gnu.so", True, True),
        ("pkg/test_in/__init__.py", True, True),
        ("pkg/test_input.py", True, True),  # collected beside a deciding test
        ("pkg/test_inputs/data.json", True, False),
        ("__init__.py", True, True),
        ("testsuite/helpers.py", False, True),
        ("hypothesis/__init__.py", True, True),
        ("pkg/hypothesis.py", True, False),
        ("fmt/json.py", True, False),  # a package that the patch makes
        ("fmt/hypothesis.py", True, False),
        ("code/json.py", True, True),  # an old directory, whatever __init__.py the patch puts there
    ],
)
def test_the_control_plane_is_exactly_this(path: str, is_new: bool, protected: bool) -> None:
    plane = control_plane(
        BASE,
        ["pkg/tests/t.py::a", "pkg/test_in.py::a", "testsuite/test_x.py::a"],
        {"held_out.py": None},
        installed=frozenset({"hypothesis"}),
        model_changes=dict.fromkeys(["fmt/__init__.py", "code/__init__.py"], Entry("100644", "1")),
    )
    assert plane.protects(path, is_new=is_new) is protected


def test_only_the_pytest_tables_of_pyproject_count() -> None:
    before = b'[project]\nname = "a"\n[tool.pytest.ini_options]\nx = "1"\n'
    assert not pytest_tables_differ(before, before.replace(b'"a"', b'"b"'))
    assert pytest_tables_differ(before, before.replace(b'"1"', b'"2"'))
    assert pytest_tables_differ(before, None)
    assert pytest_tables_differ(before, b"not toml [")
    assert not pytest_tables_differ(None, b"[project]\n")


@pytest.mark.parametrize(
    "content", [b"tool = 1\n", b"a = " + b"[" * 3000 + b"]" * 3000, b"x = " + b"9" * 5000, b"x = 2020-99-99", b"\xff"]
)
def test_a_pyproject_that_cannot_be_read_is_a_difference(content: bytes) -> None:
    assert pytest_tables_differ(b"[project]\n", content)


@pytest.mark.parametrize("machine", ["x86_64", "aarch64"])
def test_the_filter_is_whole_instructions_and_ends_in_a_return(machine: str) -> None:
    program = build_filter(machine)
    assert len(program) % 8 == 0
    assert program[-8:-6] == b"\x06\x00"
