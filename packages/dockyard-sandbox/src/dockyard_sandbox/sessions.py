"""Sessions: live trees for multi-turn agents, and their end in a verdict on a fresh tree.

open -> exec, read, write, one at a time -> finish: the diff is taken, the live tree is dropped, and the
     diff is judged like any patch; what the session's processes do to their own tree decides nothing
"""

from __future__ import annotations

import asyncio
import time
import uuid
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import TypeVar

from dockyard_core import VerdictStatus
from dockyard_sandbox.bodies import Reserved
from dockyard_sandbox.cancellation import Cancellation
from dockyard_sandbox.executor import Executor
from dockyard_sandbox.gitcmd import Git
from dockyard_sandbox.jailer import Jailer
from dockyard_sandbox.judge import early_verdict
from dockyard_sandbox.live_session import CallResult, LiveSession, SessionEnded
from dockyard_sandbox.queueing import TENANT, Admission, QueueFull
from dockyard_sandbox.session_diff import session_patch
from dockyard_sandbox.trees import BaseTree, TreeStore
from dockyard_sandbox.wire import MAX_PATCH_BYTES, SessionRequest, TaskResponse

_SWEEP_S = 1.0
T = TypeVar("T")


class UnknownSession(KeyError):
    """No session of this tenant has the id; it may have been closed for being idle."""


@dataclass(kw_only=True)
class Session:
    """One agent's tree."""

    session_id: str
    tenant: str
    request: SessionRequest
    base: BaseTree
    reserved: Reserved
    """What ``request`` has of the budget of bodies."""
    live: LiveSession | None
    """None = the tree is gone; only the patch is left."""
    patch: str | None = None
    """The changes, once they have been taken."""
    response: TaskResponse | None = None
    last_used: float = field(default_factory=time.monotonic)
    lock: asyncio.Lock = field(default_factory=asyncio.Lock)
    """Held by the one call that is on the live tree."""
    finishing: asyncio.Lock = field(default_factory=asyncio.Lock)
    """Held by the one call that finishes: a client that lost its connection may ask again before that is noticed."""

    @property
    def is_busy(self) -> bool:
        """Whether a call is under way."""
        return self.lock.locked() or self.finishing.locked()


class SessionStore:
    """Every open session of the server."""

    def __init__(
        self, executor: Executor, jailer: Jailer, trees: TreeStore, git: Git, scratch: Path, *, max_sessions: int
    ) -> None:
        self._executor = executor
        self._jailer = jailer
        self._trees = trees
        self._git = git
        self._scratch = scratch
        self._max_sessions = max_sessions
        self._num_opening = 0
        self._sessions: dict[str, Session] = {}

    def __len__(self) -> int:
        return len(self._sessions)

    async def open(self, request: SessionRequest, tenant: str, reserved: Reserved) -> Session:
        """Start a session on a tree of its own; ``reserved`` is kept until it is closed.

        Raises: QueueFull, what `Executor.check` raises, UnknownEnvironment, SessionEnded, OSError.
        """
        if len(self._sessions) + self._num_opening >= self._max_sessions:
            raise QueueFull(f"{len(self._sessions)} sessions are open, the limit is {self._max_sessions}")
        self._num_opening += 1
        try:

            def start() -> tuple[BaseTree, LiveSession]:
                base = self._trees.get(*self._executor.repos.tree_of(request.repo, request.base_commit.lower()))
                return base, LiveSession(
                    self._jailer, lower=base.directory, limits=request.limits, environment=request.environment
                )

            await self._executor.check(request)
            starting = asyncio.ensure_future(asyncio.to_thread(start))
            try:
                base, live = await asyncio.shield(starting)
            except asyncio.CancelledError:
                starting.add_done_callback(_close_unwanted)
                raise
        finally:
            self._num_opening -= 1
        session = Session(
            session_id=uuid.uuid4().hex,
            tenant=tenant,
            request=request,
            reserved=reserved.keep(),
            base=base,
            live=live,
        )
        self._sessions[session.session_id] = session
        return session

    def find(self, session_id: str, tenant: str) -> Session:
        """The session of ``tenant`` with this id. Raises UnknownSession."""
        session = self._sessions.get(session_id)
        if session is None or session.tenant != tenant:
            raise UnknownSession(session_id)
        return session

    async def exec(self, session: Session, command: str, *, timeout_s: float) -> CallResult:
        """Run a command. Raises SessionEnded."""
        limit = session.request.limits.output_kb * 1024
        return await self._call(
            session,
            lambda live, cancellation: live.exec(
                command, timeout_s=timeout_s, max_output_bytes=limit, cancellation=cancellation
            ),
        )

    async def read(self, session: Session, path: str, *, offset: int, max_bytes: int) -> tuple[bytes, int]:
        """Part of a file, and its size. Raises SessionEnded, CallFailed."""
        return await self._call(
            session,
            lambda live, cancellation: live.read(path, offset=offset, max_bytes=max_bytes, cancellation=cancellation),
        )

    async def write(self, session: Session, path: str, content: bytes) -> None:
        """Write a file. Raises SessionEnded, CallFailed."""
        await self._call(session, lambda live, cancellation: live.write(path, content, cancellation=cancellation))

    async def finish(self, session: Session, admission: Admission) -> TaskResponse:
        """Take the changes, drop the live tree, judge the changes on a fresh one; asking again is free.

        An agent's work was let in when its session was opened: it is counted now, and never refused.

        Raises: SessionEnded, CallFailed, GitFailed, UnknownRepo.
        """
        async with session.finishing:
            if session.response is None:
                ticket = admission.let_through(session.tenant)
                try:
                    session.response = await self._finish(session)
                finally:
                    ticket.release()
            session.last_used = time.monotonic()
            return session.response

    async def _finish(self, session: Session) -> TaskResponse:
        if session.patch is None:
            session.patch = await self._call(
                session,
                lambda live, cancellation: session_patch(self._git, self._scratch, session.base, live, cancellation),
            )
            self._drop_tree(session)
        return await self._judge(session, session.patch)

    def close(self, session: Session) -> None:
        """End a session and everything in it."""
        self._sessions.pop(session.session_id, None)
        session.reserved.release()
        self._drop_tree(session)

    def close_all(self) -> None:
        """End every session."""
        for session in list(self._sessions.values()):
            self.close(session)

    async def sweep_forever(self) -> None:
        """Close sessions that nobody has used for their ``idle_ttl_s``."""
        while True:
            await asyncio.sleep(_SWEEP_S)
            now = time.monotonic()
            for session in list(self._sessions.values()):
                if now - session.last_used > session.request.idle_ttl_s and not session.is_busy:
                    self.close(session)

    async def _judge(self, session: Session, patch: str) -> TaskResponse:
        if len(patch.encode()) > MAX_PATCH_BYTES:
            detail = f"the session's diff must be at most {MAX_PATCH_BYTES} bytes, got {len(patch.encode())}"
            verdict = early_verdict(
                session.request, VerdictStatus.POLICY_VIOLATION, detail, isolation=self._executor.isolation
            )
            return self._executor.respond(verdict)
        TENANT.set(session.tenant)
        return await self._executor.submit(session.request.task(patch))

    async def _call(self, session: Session, work: Callable[[LiveSession, Cancellation], T]) -> T:
        async with session.lock:
            live = session.live
            if live is None:
                raise SessionEnded("the session is finished")
            session.last_used = time.monotonic()
            TENANT.set(session.tenant)
            cancellation = Cancellation()
            try:
                return await self._executor.in_slot(lambda: work(live, cancellation), cancellation)
            except SessionEnded:
                self._drop_tree(session)
                raise
            finally:
                session.last_used = time.monotonic()

    def _drop_tree(self, session: Session) -> None:
        live, session.live = session.live, None
        if live is not None:
            live.close()


def _close_unwanted(starting: asyncio.Future[tuple[BaseTree, LiveSession]]) -> None:
    if not starting.cancelled() and starting.exception() is None:
        starting.result()[1].close()
