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
    return read_records(stream(records), trusted_files={"tests/t.py"})


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
    ],
)
def test_phases_fold_into_the_worst(phases: list[dict[str, Any]], status: TestStatus) -> None:
    assert read([{"collected": [ID]}, *phases, {"end": 1}]).tests == {ID: status}


@pytest.mark.parametrize(
    ("raised_in", "status"),
    [("tests/t.py", TestStatus.XFAILED), ("src/m.py", TestStatus.SKIPPED), (None, TestStatus.XFAILED)],
)
def test_an_xfail_counts_only_where_tests_raise_it(raised_in: str | None, status: TestStatus) -> None:
    call = phase("call", "skipped", raised="XFailed", xfail=True, raised_in=raised_in)
    assert read([HONEST[0], phase("setup"), call, phase("teardown"), {"end": 0}]).tests == {ID: status}


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
    ],
)
def test_the_control_plane_is_exactly_this(path: str, is_new: bool, protected: bool) -> None:
    plane = control_plane(BASE, ["pkg/tests/t.py::a"], {"held_out.py": None})
    assert plane.protects(path, is_new=is_new) is protected


def test_only_the_pytest_tables_of_pyproject_count() -> None:
    before = b'[project]\nname = "a"\n[tool.pytest.ini_options]\nx = "1"\n'
    assert not pytest_tables_differ(before, before.replace(b'"a"', b'"b"'))
    assert pytest_tables_differ(before, before.replace(b'"1"', b'"2"'))
    assert pytest_tables_differ(before, None)
    assert pytest_tables_differ(before, b"not toml [")
    assert not pytest_tables_differ(None, b"[project]\n")


@pytest.mark.parametrize("machine", ["x86_64", "aarch64"])
def test_the_filter_is_whole_instructions_and_ends_in_a_return(machine: str) -> None:
    program = build_filter(machine)
    assert len(program) % 8 == 0
    assert program[-8:-6] == b"\x06\x00"
