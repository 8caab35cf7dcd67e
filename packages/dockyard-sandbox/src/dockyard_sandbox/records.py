"""From the bytes of the record pipe to the status of every test."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Literal

from pydantic import BaseModel, ConfigDict, ValidationError

from dockyard_core import TestStatus

_PHASES = ("setup", "call", "teardown")
_IMPERATIVE_XFAIL = "XFailed"  # the exception that pytest.xfail() raises


class _Record(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True)

    n: int
    collected: list[str] | None = None
    collect_error: str | None = None
    id: str | None = None
    when: Literal["setup", "call", "teardown"] | None = None
    outcome: Literal["passed", "failed", "skipped"] | None = None
    raised: str | None = None
    xfail: bool = False
    raised_in: str | None = None
    end: int | None = None


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


def read_records(stream: bytes, *, trusted_files: Iterable[str]) -> RecordStream:
    """Parse the record pipe.

    Args:
        stream: everything that was written to the pipe.
        trusted_files: files restored from the task; only an ``xfail`` raised there counts as one.
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
    tests, found = _statuses(records, frozenset(trusted_files))
    return RecordStream(
        tests=tests,
        exit_code=records[ends[0]].end if ends else None,
        collect_errors=tuple(r.collect_error for r in records if r.collect_error is not None),
        num_memory_errors=sum(r.raised == "MemoryError" for r in records),
        contradictions=tuple(dict.fromkeys([*contradictions, *found])),
    )


def _statuses(records: list[_Record], trusted: frozenset[str]) -> tuple[dict[str, TestStatus], list[str]]:
    collected = {test for record in records for test in record.collected or ()}
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
        if earlier is None or earlier.outcome != "failed":  # subtests report a call each, then the test's own
            seen[record.when] = record
    return {test: _combine(seen, trusted) for test, seen in phases.items()}, contradictions


def _combine(phases: dict[str, _Record], trusted: frozenset[str]) -> TestStatus:
    """Fold setup, call and teardown into one status, the worst phase winning."""
    setup, call, teardown = (phases.get(when) for when in _PHASES)
    if setup is None or teardown is None:
        return TestStatus.ERROR  # pytest always reports both
    if "failed" in (setup.outcome, teardown.outcome):
        return TestStatus.ERROR
    decisive = setup if setup.outcome == "skipped" or call is None else call
    if decisive.outcome == "skipped" and decisive.xfail:
        # pytest.xfail() called by the code under test would turn any failure into an expected one
        untrusted = decisive.raised_in is not None and decisive.raised_in not in trusted
        return TestStatus.SKIPPED if decisive.raised == _IMPERATIVE_XFAIL and untrusted else TestStatus.XFAILED
    if decisive is setup and setup.outcome != "skipped":
        return TestStatus.ERROR  # the call never happened
    if decisive.raised is not None and decisive.outcome == "passed":
        return TestStatus.FAILED
    return {"passed": TestStatus.PASSED, "failed": TestStatus.FAILED, "skipped": TestStatus.SKIPPED}[
        decisive.outcome or "failed"
    ]
