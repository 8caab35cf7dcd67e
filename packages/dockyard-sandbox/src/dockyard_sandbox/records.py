"""From the bytes of the record pipe to the status of every test."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Literal

from pydantic import BaseModel, ConfigDict, ValidationError, model_validator

from dockyard_core import TestStatus

_PHASES = ("setup", "call", "teardown")
_BADNESS = {"passed": 0, "skipped": 1, "failed": 2}


class _Record(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True)

    n: int
    collected: list[str] | None = None
    marked: list[str] = []
    expecting: list[str] = []
    origins: dict[str, str] = {}
    collect_error: str | None = None
    id: str | None = None
    when: Literal["setup", "call", "teardown"] | None = None
    outcome: Literal["passed", "failed", "skipped"] | None = None
    raised: str | None = None
    xfail: bool = False
    imperative: bool = False
    end: int | None = None
    changed: list[str] = []
    hooks: list[str] = []

    @model_validator(mode="after")
    def _one_kind(self) -> _Record:
        kinds = (self.collected, self.collect_error, self.id, self.end)
        if sum(kind is not None for kind in kinds) != 1 or (self.id is None) != (self.when is None):
            raise ValueError("must be one kind of record")
        if (self.id is None) != (self.outcome is None):
            raise ValueError("must have an outcome if, and only if, it is about a phase")
        return self


@dataclass(frozen=True, kw_only=True)
class RecordStream:
    """What a run said about itself."""

    tests: dict[str, TestStatus]
    exit_code: int | None
    """pytest's exit code; None when the end record is missing."""
    collect_errors: tuple[str, ...] = ()
    num_memory_errors: int = 0
    contradictions: tuple[str, ...] = field(default=())
    """Findings that an honest runner cannot produce."""
    hook_files: frozenset[str] = frozenset()
    """Files of the tree, other than conftest.py, that implement hooks of pytest."""


def read_records(stream: bytes, *, xfail_files: Iterable[str]) -> RecordStream:
    """Parse the record pipe.

    Args:
        stream: everything that was written to the pipe.
        xfail_files: test files whose own text expects failures; no other test can be ``xfailed``.
    """
    records: list[_Record] = []
    contradictions: list[str] = []
    for number, line in enumerate(stream.splitlines()):
        try:
            record = _Record.model_validate_json(line)
        except ValidationError:
            contradictions.append("malformed_record")
            break
        if record.n != number:
            contradictions.append("record_sequence")
            break
        records.append(record)
    ends = [index for index, record in enumerate(records) if record.end is not None]
    if ends and ends[0] != len(records) - 1:
        contradictions.append("record_after_end")
    tests, found = _statuses(records, frozenset(xfail_files))
    changed = [f"changed:{name}" for record in records for name in record.changed]
    return RecordStream(
        tests=tests,
        exit_code=records[ends[0]].end if ends else None,
        collect_errors=tuple(r.collect_error for r in records if r.collect_error is not None),
        num_memory_errors=sum(r.raised == "MemoryError" for r in records),
        contradictions=tuple(dict.fromkeys([*contradictions, *_disorder(records), *found, *changed])),
        hook_files=frozenset(path for record in records for path in record.hooks),
    )


def _disorder(records: list[_Record]) -> list[str]:
    """pytest collects once, then runs test after test: setup, call (or its subtests' calls), teardown."""
    found = []
    collections = [index for index, record in enumerate(records) if record.collected is not None]
    phases = [index for index, record in enumerate(records) if record.id is not None]
    if len(collections) > 1:
        found.append("collected_twice")
    if phases and not (collections and collections[0] < phases[0]):
        found.append("run_before_collection")
    current, last = None, "teardown"
    for index in phases:
        record = records[index]
        starts = record.when == "setup"
        if starts != (last == "teardown") or (not starts and record.id != current):
            found.append("phase_out_of_order")
        current, last = record.id, record.when or ""
    for record in records:
        if any(origin != path for path, origin in record.origins.items()):
            found.append("test_module_from_elsewhere")
    return found


def _statuses(records: list[_Record], xfail_files: frozenset[str]) -> tuple[dict[str, TestStatus], list[str]]:
    collected = {test for record in records for test in record.collected or ()}
    marked = {test for record in records for test in record.marked if _file(test) in xfail_files}
    expecting = {test for record in records for test in record.expecting if _file(test) in xfail_files}
    phases: dict[str, dict[str, _Record]] = {}
    contradictions = []
    for record in records:
        if record.id is None or record.when is None or record.outcome is None:
            continue
        if record.id not in collected:
            contradictions.append("uncollected_test_reported")
        seen = phases.setdefault(record.id, {})
        earlier = seen.get(record.when)
        if earlier is not None and record.when != "call":
            contradictions.append("phase_reported_twice")
        if record.raised is not None and record.outcome == "passed":
            contradictions.append("passed_although_raised")
        if record.raised is None and record.outcome == "skipped":
            contradictions.append("skipped_without_cause")
        # subtests report a call each, then the test reports its own: the worst one counts
        if earlier is None or _BADNESS[record.outcome] > _BADNESS[earlier.outcome or "failed"]:
            seen[record.when] = record
    return {test: _combine(test, seen, marked, expecting) for test, seen in phases.items()}, contradictions


def _file(test: str) -> str:
    return test.split("::", 1)[0]


def _combine(test: str, phases: dict[str, _Record], marked: set[str], expecting: set[str]) -> TestStatus:
    """Fold setup, call and teardown into one status, the worst phase winning."""
    setup, call, teardown = (phases.get(when) for when in _PHASES)
    if setup is None or teardown is None:
        return TestStatus.ERROR  # pytest always reports both
    if "failed" in (setup.outcome, teardown.outcome):
        return TestStatus.ERROR
    decisive = setup if setup.outcome == "skipped" or call is None else call
    if decisive.outcome == "skipped" and decisive.xfail:
        # pytest.xfail() called by the code under test would turn any failure into an expected one;
        # unittest's expectedFailure is reported by the same exception, so its mark is asked for
        expected = test in expecting or (test in marked and not decisive.imperative)
        return TestStatus.XFAILED if expected else TestStatus.SKIPPED
    if decisive is setup and setup.outcome != "skipped":
        return TestStatus.ERROR  # the call never happened
    if decisive.raised is not None and decisive.outcome == "passed":
        return TestStatus.FAILED
    return {"passed": TestStatus.PASSED, "failed": TestStatus.FAILED, "skipped": TestStatus.SKIPPED}[
        decisive.outcome or "failed"
    ]
