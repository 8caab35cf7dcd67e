"""The typed outcome of running the tests. It precedes the reward and is never a float."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import StrEnum
from types import MappingProxyType


class VerdictStatus(StrEnum):
    """Why a verdict is what it is. Only the last two are not the policy's doing."""

    RESOLVED = "resolved"
    UNRESOLVED = "unresolved"
    APPLY_FAILED = "apply_failed"
    NO_TESTS_RAN = "no_tests_ran"
    TIMEOUT = "timeout"
    OUTPUT_LIMIT = "output_limit"
    OUT_OF_MEMORY = "out_of_memory"
    INCOMPLETE = "incomplete"
    TAMPERED = "tampered"
    POLICY_VIOLATION = "policy_violation"
    TEST_PATCH_FAILED = "test_patch_failed"  # a defect of the task
    INFRA_ERROR = "infra_error"  # a fault of ours: the only retryable one

    @property
    def is_scorable(self) -> bool:
        """Whether the status says something about the policy and may become a reward."""
        return self not in (VerdictStatus.INFRA_ERROR, VerdictStatus.TEST_PATCH_FAILED)


class TestStatus(StrEnum):
    """Status of one pytest node id."""

    __test__ = False  # not a test class, whatever pytest thinks of the name

    PASSED = "passed"
    FAILED = "failed"
    ERROR = "error"
    SKIPPED = "skipped"
    XFAILED = "xfailed"
    MISSING = "missing"


_NO_TESTS: Mapping[str, TestStatus] = MappingProxyType({})
_NO_DURATIONS: Mapping[str, float] = MappingProxyType({})


@dataclass(frozen=True, kw_only=True)
class Verdict:
    """What the sandbox found for one (task, patch)."""

    status: VerdictStatus
    pass_rate: float = 0.0
    """Share of the deciding ids that passed, in [0, 1]; 0 when the patch did not apply."""
    fail_to_pass: tuple[int, int] = (0, 0)
    """(passed, total) over the task's FAIL_TO_PASS ids."""
    pass_to_pass: tuple[int, int] = (0, 0)
    """(passed, total) over the task's PASS_TO_PASS ids."""
    tests: Mapping[str, TestStatus] = field(default_factory=lambda: _NO_TESTS)
    """Status of every deciding id."""
    flags: tuple[str, ...] = ()
    """Names of suspicious findings; they never change the status by themselves."""
    isolation: str = "unknown"
    """Isolation level under which the tests ran: namespaces, bwrap, landlock or unsafe."""
    duration_s: Mapping[str, float] = field(default_factory=lambda: _NO_DURATIONS)
    """Seconds per stage: queue, apply, start, test, total."""
    log: str = ""
    """Tail of the test output."""
    evidence: str = ""
    """``sha256:…`` over the inputs and the record stream."""
    cached: bool = False
    """True when an identical (spec, tree) was judged before and its verdict reused."""
    detail: str = ""
    """One sentence on what happened."""

    @property
    def is_resolved(self) -> bool:
        """Whether every deciding test had the status that its set demands."""
        return self.status is VerdictStatus.RESOLVED
