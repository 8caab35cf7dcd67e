"""Submissions from their acceptance to their replies: joined by key, waited for, polled, cancelled.

submit -> accepted (a place in the queue; written down if anyone can ask again) -> each task judged
       -> replies written down -> given to whoever waits, polls, or sends the same key again

A submission that nobody waits for any more is cancelled, unless it was sent with ``wait=false``.
"""

from __future__ import annotations

import asyncio
import logging
import uuid
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import Any

from dockyard_core import TestStatus, VerdictStatus
from dockyard_sandbox.bodies import Reserved
from dockyard_sandbox.executor import Executor
from dockyard_sandbox.journal import Entry, Journal
from dockyard_sandbox.metrics import Metrics
from dockyard_sandbox.queueing import TENANT, Admission, Ticket
from dockyard_sandbox.wire import MAX_TASKS, Count, TaskRequest, TaskResponse

Reply = dict[str, Any]
_LOG = logging.getLogger(__name__)


class KeyReused(Exception):
    """An Idempotency-Key came with another body than before."""


@dataclass(kw_only=True)
class Submission:
    """One accepted request: a task, or a batch."""

    entry: Entry
    requests: Sequence[TaskRequest]
    deadline_s: float | None
    ticket: Ticket
    reserved: Reserved
    """What ``requests`` have of the budget of bodies."""
    is_journaled: bool
    is_held: bool = False
    """Whether the server owes replies although nobody waits."""
    num_waiters: int = 0
    works: list[asyncio.Task[Reply]] = field(default_factory=list)
    closing: asyncio.Task[list[Reply]] | None = None
    """Ends with the replies, once they are written down."""

    @property
    def ended(self) -> asyncio.Task[list[Reply]]:
        """See ``closing``; every submission that others can see has it."""
        assert self.closing is not None
        return self.closing

    @property
    def task_ids(self) -> list[str]:
        """One id per task."""
        return task_ids(self.entry, len(self.requests))


def task_ids(entry: Entry, count: int) -> list[str]:
    """The submission's own id, or one per task of a batch."""
    name = entry.submission_id
    return [f"{name}-{index}" for index in range(count)] if entry.is_batch else [name]


class TaskBoard:
    """Every submission that the server holds, and the replies that it has given."""

    def __init__(self, executor: Executor, admission: Admission, journal: Journal, metrics: Metrics) -> None:
        self._executor = executor
        self._admission = admission
        self._journal = journal
        self._metrics = metrics
        self._held: dict[str, Submission] = {}
        self._by_key: dict[tuple[str, str], Submission] = {}
        # of its own: answers must not wait for whatever else threads are used for
        self._writing = ThreadPoolExecutor(max_workers=1, thread_name_prefix="journal")
        self._closers: set[asyncio.Task[list[Reply]]] = set()

    def known(self, tenant: str, key: str | None, body_hash: str) -> Submission | Entry | None:
        """What was sent under ``key`` before, in flight or answered. Raises KeyReused."""
        if key is None:
            return None
        found: Submission | Entry | None = self._by_key.get((tenant, key)) or self._journal.find_key(tenant, key)
        entry = found.entry if isinstance(found, Submission) else found
        if entry is not None and entry.body_hash != body_hash:
            raise KeyReused(f"{key!r} was used with another body; use a new key")
        return found

    def accept(
        self,
        requests: Sequence[TaskRequest],
        *,
        tenant: str,
        key: str | None,
        body_hash: str,
        is_batch: bool,
        is_held: bool,
        deadline_s: float | None,
        reserved: Reserved,
    ) -> Submission:
        """Take a submission and start it; ``reserved`` is kept until it has ended.

        Raises QueueFull, OSError; nothing has started, nothing is kept then.
        """
        ticket = self._admission.admit(tenant, len(requests), deadline_s=deadline_s)
        entry = Entry(
            submission_id=uuid.uuid4().hex, tenant=tenant, key=key, body_hash=body_hash, is_batch=is_batch, num_bytes=0
        )
        submission = Submission(
            entry=entry,
            requests=requests,
            deadline_s=deadline_s,
            ticket=ticket,
            reserved=reserved,
            is_journaled=is_held or key is not None,
            is_held=is_held,
        )
        if submission.is_journaled:
            ids = submission.task_ids
            try:
                self._journal.accept(entry, [describe(*pair) for pair in zip(ids, requests, strict=True)])
            except OSError:
                ticket.release()
                raise
        reserved.keep()
        self._held[entry.submission_id] = submission
        if key is not None:
            self._by_key[tenant, key] = submission
        TENANT.set(tenant)
        for task_id, request in zip(submission.task_ids, requests, strict=True):
            submission.works.append(asyncio.create_task(self._judge(submission, task_id, request)))
        submission.closing = asyncio.create_task(self._close_when_done(submission))
        self._closers.add(submission.closing)
        submission.closing.add_done_callback(self._closers.discard)
        return submission

    async def wait(self, submission: Submission) -> list[Reply]:
        """Return the replies; the last waiter who leaves cancels what nobody else is owed."""
        submission.num_waiters += 1
        try:
            return await asyncio.shield(submission.ended)
        finally:
            submission.num_waiters -= 1
            if not submission.num_waiters and not submission.is_held and not submission.ended.done():
                self._abandon(submission)

    async def answered(self, entry: Entry) -> list[Reply] | None:
        """The replies of an answered submission; None = dropped meanwhile."""
        return await asyncio.get_running_loop().run_in_executor(self._writing, self._journal.replies, entry)

    def hold(self, submission: Submission) -> None:
        """Owe the replies even when nobody waits; for a key that is sent again with ``wait=false``."""
        submission.is_held = True

    def find(self, tenant: str, task_id: str) -> tuple[Submission | Entry, int] | None:
        """The submission that has the task, in flight or answered, and the task's place in it."""
        name, _, number = task_id.partition("-")
        found: Submission | Entry | None = self._held.get(name) or self._journal.find(name)
        entry = found.entry if isinstance(found, Submission) else found
        if found is None or entry is None or entry.tenant != tenant or entry.is_batch != bool(number):
            return None
        if number and (not number.isdecimal() or len(number) > len(str(MAX_TASKS))):
            return None
        return found, int(number or 0)

    def cancel(self, submission: Submission, index: int) -> None:
        """Stop one task; its reply is an ``infra_error`` that says so."""
        submission.works[index].cancel()

    async def close(self) -> None:
        """Cancel what is held; held submissions stay written down as owed."""
        for submission in list(self._held.values()):
            self._abandon(submission, keep=submission.is_held)
        if self._closers:
            await asyncio.wait(self._closers)

    def _abandon(self, submission: Submission, *, keep: bool = False) -> None:
        self._leave(submission)
        if submission.is_journaled and not keep:
            self._journal.forget(submission.entry.submission_id)
        submission.is_journaled = False
        for work in submission.works:
            work.cancel()

    def _leave(self, submission: Submission) -> None:
        entry = submission.entry
        self._held.pop(entry.submission_id, None)
        if entry.key is not None and self._by_key.get((entry.tenant, entry.key)) is submission:
            del self._by_key[entry.tenant, entry.key]

    async def _close_when_done(self, submission: Submission) -> list[Reply]:
        replies: list[Reply] = []
        for task_id, request, work in zip(submission.task_ids, submission.requests, submission.works, strict=True):
            await asyncio.wait([work])
            error = None if work.cancelled() else work.exception()
            if work.cancelled():
                replies.append(infra_reply(describe(task_id, request), "the task was cancelled", retryable=False))
            elif error is not None:  # the repository was there when the task was accepted
                _LOG.error("judging %r failed", request.instance_id, exc_info=error)
                detail = f"{type(error).__name__}: {error}"
                replies.append(infra_reply(describe(task_id, request), detail, retryable=False))
            else:
                replies.append(work.result())
        submission.ticket.release()
        submission.reserved.release()
        try:
            if submission.is_journaled:
                loop = asyncio.get_running_loop()
                await loop.run_in_executor(self._writing, self._journal.finish, submission.entry, replies)
        finally:
            self._leave(submission)
        return replies

    async def _judge(self, submission: Submission, task_id: str, request: TaskRequest) -> Reply:
        try:
            async with asyncio.timeout(submission.deadline_s):
                response = await self._executor.submit(request)
        except TimeoutError:
            detail = f"no verdict within deadline_s={submission.deadline_s:g}; the work was stopped"
            response = TaskResponse.model_validate(infra_reply(describe(task_id, request), detail, retryable=True))
        self._record(response)
        submission.ticket.release(1)
        return response.model_copy(update={"task_id": task_id}).model_dump(mode="json")

    def _record(self, response: TaskResponse) -> None:
        self._metrics.count("verdicts_total", "Tasks answered.", status=str(response.status))
        if response.cached:
            self._metrics.count("verdicts_reused_total", "Tasks answered by the verdict on an equal tree.")
        for stage, seconds in response.duration_s.items():
            self._metrics.observe(stage, seconds)
        if not response.cached and "test" in response.duration_s:
            self._admission.observe(sum(response.duration_s.get(stage, 0.0) for stage in ("apply", "start", "test")))


def describe(task_id: str, request: TaskRequest) -> dict[str, Any]:
    """What is written down of a task: enough to answer that it was not judged."""
    return {"task_id": task_id, "fail_to_pass": request.fail_to_pass, "pass_to_pass": request.pass_to_pass}


def interrupted_reply(task: dict[str, Any]) -> Reply:
    """The reply on a task that a killed server had accepted."""
    detail = "the server was killed while it held this task; send it again under a new Idempotency-Key"
    return infra_reply(task, detail, retryable=True)


def infra_reply(task: dict[str, Any], detail: str, *, retryable: bool) -> Reply:
    """A reply that is no verdict on the patch, for a task as `describe` describes it."""
    fail_to_pass, pass_to_pass = task["fail_to_pass"], task["pass_to_pass"]
    return TaskResponse(
        task_id=task["task_id"],
        status=VerdictStatus.INFRA_ERROR,
        resolved=False,
        pass_rate=0.0,
        fail_to_pass=Count(passed=0, total=len(fail_to_pass)),
        pass_to_pass=Count(passed=0, total=len(pass_to_pass)),
        tests=dict.fromkeys([*fail_to_pass, *pass_to_pass], TestStatus.MISSING),
        flags=(),
        isolation="unknown",
        duration_s={},
        log="",
        evidence="",
        retryable=retryable,
        cached=False,
        detail=detail,
    ).model_dump(mode="json")
