"""What every `Sandbox` must do, as a suite to subclass.

class TestMySandbox(SandboxContract):
    def make_case(self) -> SandboxCase: ...
    def open_sandbox(self) -> AbstractAsyncContextManager[Sandbox]: ...
"""

from __future__ import annotations

import asyncio
import uuid
from collections.abc import Awaitable, Callable, Sequence
from contextlib import AbstractAsyncContextManager
from dataclasses import dataclass
from typing import TypeVar

from dockyard_core.errors import SandboxError
from dockyard_core.sandbox import ExecResult, Sandbox, SandboxSession, SessionResult, SessionSandbox
from dockyard_core.task import Task
from dockyard_core.verdict import TestStatus, Verdict, VerdictStatus

T = TypeVar("T")


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


class SessionContract:
    """For a sandbox that has sessions; subclass beside `SandboxContract`."""

    def make_case(self) -> SandboxCase:
        """Return the task; called once per test."""
        raise NotImplementedError

    def open_session_sandbox(self) -> AbstractAsyncContextManager[SessionSandbox]:
        """Return a context manager that yields a ready sandbox."""
        raise NotImplementedError

    def _in_session(self, work: Callable[[SandboxSession], Awaitable[T]]) -> T:
        async def run() -> T:
            async with self.open_session_sandbox() as sandbox, sandbox.session(self.make_case().task) as session:
                return await work(session)

        return asyncio.run(run())

    async def _apply(self, session: SandboxSession, patch: str) -> ExecResult:
        await session.write("change.patch", patch.encode())
        return await session.exec("git apply change.patch; code=$?; rm change.patch; exit $code")

    def test_a_session_that_changes_nothing_ends_like_an_empty_patch(self) -> None:
        """The diff is empty, and the verdict is a score."""
        result = self._in_session(lambda session: session.finish())
        assert result.patch == ""
        assert result.verdict.status.is_scorable, result
        assert not result.verdict.is_resolved

    def test_a_session_that_makes_the_gold_change_resolves(self) -> None:
        """Files changed by commands are the patch."""

        async def work(session: SandboxSession) -> SessionResult:
            done = await self._apply(session, self.make_case().gold_patch)
            assert done.exit_code == 0, done
            return await session.finish()

        result = self._in_session(work)
        assert result.verdict.status is VerdictStatus.RESOLVED, result
        assert result.patch.strip()

    def test_a_finished_sessions_patch_is_judged_like_any_patch(self) -> None:
        """`judge` on the patch that a session reports gives the session's verdict."""
        case = self.make_case()

        async def run() -> tuple[Verdict, Verdict]:
            async with self.open_session_sandbox() as sandbox:
                async with sandbox.session(case.task) as session:
                    await self._apply(session, case.wrong_patch)
                    result = await session.finish()
                return result.verdict, await sandbox.judge(case.task, result.patch, attempt_id=uuid.uuid4().hex)

        first, second = asyncio.run(run())
        assert (first.status, dict(first.tests)) == (second.status, dict(second.tests))

    def test_what_is_written_is_read_back(self) -> None:
        """Any bytes, under any directory."""
        content = bytes(range(256)) * 10

        async def work(session: SandboxSession) -> bytes:
            await session.write("new/directory/data.bin", content)
            return await session.read("new/directory/data.bin")

        assert self._in_session(work) == content

    def test_commands_share_the_tree_and_report_their_end(self) -> None:
        """Exit codes and output are the command's; files stay from one command to the next."""

        async def work(session: SandboxSession) -> tuple[ExecResult, ExecResult]:
            await session.exec("echo kept > left-behind")
            return await session.exec("cat left-behind; echo oops >&2; exit 3"), await session.exec("kill -9 $$")

        failed, killed = self._in_session(work)
        assert (failed.exit_code, failed.output) == (3, "kept\noops\n")
        assert killed.exit_code == -9

    def test_a_command_past_its_deadline_is_stopped(self) -> None:
        """The session goes on."""

        async def work(session: SandboxSession) -> tuple[ExecResult, ExecResult]:
            return await session.exec("sleep 100", timeout_s=0.5), await session.exec("echo on")

        slow, after = self._in_session(work)
        assert slow.timed_out
        assert (after.output, after.timed_out) == ("on\n", False)

    def test_the_held_out_tests_are_not_in_the_session(self) -> None:
        """Their file names are nowhere in the tree, unless the base has them."""
        case = self.make_case()
        new = [line[6:] for line in case.task.test_patch.splitlines() if line.startswith("+++ b/")]
        old = [line[6:] for line in case.task.test_patch.splitlines() if line.startswith("--- a/")]

        async def work(session: SandboxSession) -> list[str]:
            return (await session.exec("find . -type f")).output.splitlines()

        present = self._in_session(work)
        assert [path for path in new if path not in old and f"./{path}" in present] == []

    def test_a_file_that_is_not_there_is_an_error_and_the_session_goes_on(self) -> None:
        """A mistake of the agent costs it one call."""

        async def work(session: SandboxSession) -> str:
            try:
                await session.read("no/such/file")
            except SandboxError:
                return (await session.exec("echo on")).output
            raise AssertionError("reading a file that is not there must raise SandboxError")

        assert self._in_session(work) == "on\n"
