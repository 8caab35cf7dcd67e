"""What every `Sandbox` must do, as a suite to subclass.

class TestMySandbox(SandboxContract):
    def make_case(self) -> SandboxCase: ...
    def open_sandbox(self) -> AbstractAsyncContextManager[Sandbox]: ...
"""

from __future__ import annotations

import asyncio
import uuid
from collections.abc import Sequence
from contextlib import AbstractAsyncContextManager
from dataclasses import dataclass

from dockyard_core.sandbox import Sandbox
from dockyard_core.task import Task
from dockyard_core.verdict import TestStatus, Verdict, VerdictStatus


@dataclass(frozen=True, kw_only=True)
class SandboxCase:
    """A real task with known answers."""

    task: Task
    gold_patch: str
    """Resolves the task."""
    wrong_patch: str
    """Applies, breaks nothing, and does not resolve the task."""
    breaking_patch: str
    """Resolves FAIL_TO_PASS but makes one PASS_TO_PASS test fail."""


class SandboxContract:
    """Subclass in the wheel of each sandbox."""

    def make_case(self) -> SandboxCase:
        """Return the task; called once per test."""
        raise NotImplementedError

    def open_sandbox(self) -> AbstractAsyncContextManager[Sandbox]:
        """Return a context manager that yields a ready sandbox."""
        raise NotImplementedError

    def _judge(self, patches: Sequence[str], *, task: Task, attempt_ids: Sequence[str] | None = None) -> list[Verdict]:
        async def judge_all() -> list[Verdict]:
            async with self.open_sandbox() as sandbox:
                ids = attempt_ids or [uuid.uuid4().hex for _ in patches]
                calls = (sandbox.judge(task, patch, attempt_id=id_) for patch, id_ in zip(patches, ids, strict=True))
                return list(await asyncio.gather(*calls))

        return asyncio.run(judge_all())

    def test_the_gold_patch_resolves(self) -> None:
        """Every deciding test passes, and every count is complete."""
        case = self.make_case()
        (verdict,) = self._judge([case.gold_patch], task=case.task)
        assert verdict.status is VerdictStatus.RESOLVED, verdict
        assert verdict.is_resolved
        assert verdict.pass_rate == 1.0
        assert verdict.fail_to_pass == (len(case.task.fail_to_pass),) * 2
        assert verdict.pass_to_pass == (len(case.task.pass_to_pass),) * 2

    def test_no_change_does_not_resolve(self) -> None:
        """An empty patch leaves FAIL_TO_PASS failing; nothing raises."""
        case = self.make_case()
        (verdict,) = self._judge([""], task=case.task)
        assert verdict.status.is_scorable, verdict
        assert not verdict.is_resolved
        assert verdict.fail_to_pass[0] < len(case.task.fail_to_pass)

    def test_a_wrong_patch_is_unresolved(self) -> None:
        """It scores, and PASS_TO_PASS is kept."""
        case = self.make_case()
        (verdict,) = self._judge([case.wrong_patch], task=case.task)
        assert verdict.status is VerdictStatus.UNRESOLVED, verdict
        assert verdict.pass_to_pass == (len(case.task.pass_to_pass),) * 2

    def test_a_fix_that_breaks_a_kept_test_is_unresolved(self) -> None:
        """PASS_TO_PASS decides as much as FAIL_TO_PASS."""
        case = self.make_case()
        (verdict,) = self._judge([case.breaking_patch], task=case.task)
        assert verdict.status is VerdictStatus.UNRESOLVED, verdict
        assert verdict.fail_to_pass[0] == len(case.task.fail_to_pass)
        assert verdict.pass_to_pass[0] < len(case.task.pass_to_pass)

    def test_a_malformed_patch_is_a_verdict(self) -> None:
        """Nothing raises; a patch that cannot apply scores 0 and reports every id as missing."""
        case = self.make_case()
        (verdict,) = self._judge(["this is not a diff\n"], task=case.task)
        assert verdict.status is VerdictStatus.APPLY_FAILED, verdict
        assert verdict.status.is_scorable
        assert verdict.pass_rate == 0.0
        assert set(verdict.tests.values()) == {TestStatus.MISSING}

    def test_exactly_the_deciding_ids_are_reported(self) -> None:
        """No more, no less, whatever the patch."""
        case = self.make_case()
        wanted = {*case.task.fail_to_pass, *case.task.pass_to_pass}
        for verdict in self._judge([case.gold_patch, ""], task=case.task):
            assert set(verdict.tests) == wanted

    def test_equal_patches_get_equal_verdicts(self) -> None:
        """In a group, whatever is shared or cached, each attempt gets the same answer."""
        case = self.make_case()
        verdicts = self._judge([case.gold_patch, case.wrong_patch] * 3, task=case.task)
        assert [verdict.is_resolved for verdict in verdicts] == [True, False] * 3
        assert len({tuple(sorted(verdict.tests.items())) for verdict in verdicts}) == 2

    def test_the_same_attempt_asked_twice_gets_the_same_verdict(self) -> None:
        """`attempt_id` names an attempt: asking again is not another attempt."""
        case = self.make_case()
        ids = [uuid.uuid4().hex] * 2
        first, second = self._judge([case.gold_patch] * 2, task=case.task, attempt_ids=ids)
        assert (first.status, dict(first.tests)) == (second.status, dict(second.tests))
