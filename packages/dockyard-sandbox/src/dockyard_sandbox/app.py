"""The HTTP surface: routes, authentication, caps, idempotency. No judgement is made here."""

from __future__ import annotations

import asyncio
import hashlib
from collections.abc import Awaitable, Callable, Sequence
from contextlib import AbstractAsyncContextManager, suppress
from typing import Any, TypeVar

from pydantic import ValidationError
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route

from dockyard_sandbox.environments import BadEnvironment
from dockyard_sandbox.gitcmd import GitFailed
from dockyard_sandbox.journal import Entry
from dockyard_sandbox.queueing import QueueFull
from dockyard_sandbox.refusals import (
    RequestRefused,
    json_object,
    parser_of,
    read_query,
    refusal_of,
    refusing_what_is_not_there,
)
from dockyard_sandbox.repos import FetchFailed, UnknownRepo
from dockyard_sandbox.service import Service as Service
from dockyard_sandbox.session_routes import SessionRoutes
from dockyard_sandbox.status_routes import StatusRoutes
from dockyard_sandbox.tasks import KeyReused, Submission, task_ids
from dockyard_sandbox.tokens import Tokens, tenant_name
from dockyard_sandbox.wire import EnvironmentsRequest, ReposRequest, TaskRequest, parse_submission

MAX_DEADLINE_S = 7 * 86_400.0
_MAX_POLL_S = 60.0
_MAX_KEY_LENGTH = 1024
T = TypeVar("T")
Lifespan = Callable[[Starlette], AbstractAsyncContextManager[None]]
Handler = Callable[[Request], Awaitable[Response]]


class Api:
    """Handlers over one service."""

    def __init__(self, service: Service, tokens: Tokens | None) -> None:
        self._service = service
        self._tokens = tokens
        self._stopping = asyncio.Event()

    def stop(self) -> None:
        """Answer what is still in flight with 503 and cancel its runs."""
        self._stopping.set()

    def application(self, lifespan: Lifespan) -> Starlette:
        """Return the ASGI application."""
        service, status = self._service, StatusRoutes(self._service)
        routes = [
            ("/task/submit", "POST", self._submit),
            ("/task/{task_id}", "GET", self._task),
            ("/task/{task_id}", "DELETE", self._cancel),
            ("/repos", "PUT", self._put_repos),
            ("/environments", "PUT", self._put_environments),
            *status.table(),
            *SessionRoutes(service.sessions, service.admission, service.bodies, self._unless_ended).table(),
        ]
        guarded = [Route(path, self._guarded(handler), methods=[method]) for path, method, handler in routes]
        return Starlette(
            routes=[*guarded, Route("/healthz", status.healthy, methods=["GET"])],
            lifespan=lifespan,
            exception_handlers={404: _no_route, 405: _no_route, 500: _defect},
        )

    def _guarded(self, handler: Handler) -> Handler:
        async def guarded(request: Request) -> Response:
            try:
                request.state.tenant = self._authenticate(request)
                return await handler(request)
            except RequestRefused as refused:
                self._service.metrics.count("refused_total", "Requests refused.", code=str(refused.status))
                return refused.response

        return guarded

    def _authenticate(self, request: Request) -> str:
        named = tenant_name(request.headers.get("dockyard-tenant"))
        if named is None:
            raise RequestRefused(422, "Dockyard-Tenant", "must be 1 to 64 letters, digits, '_', '.' or '-'")
        if self._tokens is None:
            return named
        tenant = self._tokens.tenant_of(request.headers.get("authorization", ""), named)
        if tenant is None:
            raise RequestRefused(401, "Authorization", "must be 'Bearer ' and the server's token")
        return tenant

    async def _put_repos(self, request: Request) -> Response:
        wanted, reserved = await self._service.bodies.read(request, parser_of(ReposRequest))
        with reserved:
            try:
                await asyncio.to_thread(self._service.executor.repos.register, wanted.repos)
            except UnknownRepo as error:
                raise RequestRefused(422, "repos", str(error)) from error
        return JSONResponse({"repos": self._service.executor.repos.names()})

    async def _put_environments(self, request: Request) -> Response:
        wanted, reserved = await self._service.bodies.read(request, parser_of(EnvironmentsRequest))
        with reserved:
            for name, source in wanted.environments.items():
                try:
                    await self._service.environments.register_soon(name, source)
                except BadEnvironment as error:
                    raise RequestRefused(422, f"environments.{name}", str(error)) from error
        return JSONResponse({"environments": self._service.environments.names()})

    async def _submit(self, request: Request) -> Response:
        query = read_query(request, wait=(0, 1), deadline_s=(0.001, MAX_DEADLINE_S))
        is_held, key = query.get("wait") == 0, _read_key(request)
        (tasks, is_batch, body_hash), reserved = await self._service.bodies.read(request, _parse_submission)
        board, tenant = self._service.board, request.state.tenant
        with reserved:
            try:
                found = board.known(tenant, key, body_hash)
                if found is None:
                    await self._check(tasks, is_batch)
                    found = board.known(tenant, key, body_hash) or board.accept(
                        tasks,
                        tenant=tenant,
                        key=key,
                        body_hash=body_hash,
                        is_batch=is_batch,
                        is_held=is_held,
                        deadline_s=query.get("deadline_s"),
                        reserved=reserved,
                    )
            except KeyReused as error:
                raise RequestRefused(409, "Idempotency-Key", str(error)) from error
            except QueueFull as error:
                raise RequestRefused(429, "", str(error), retry_after_s=error.retry_after_s) from error
            except OSError as error:
                raise RequestRefused(503, "", f"cannot write the task down: {error}", retry_after_s=1) from error
        num_tasks = len(tasks)
        del tasks  # those of a repeated key are another submission's by now
        if is_held:
            if isinstance(found, Submission):
                board.hold(found)
            return _accepted(found, num_tasks)
        return _answer(await self._replies(request, found), is_batch)

    async def _replies(self, request: Request, found: Submission | Entry) -> list[dict[str, Any]]:
        board = self._service.board
        if isinstance(found, Submission):
            return await self._unless_ended(request, board.wait(found))
        replies = await board.answered(found)
        if replies is None:
            raise RequestRefused(404, "task_id", "its verdict was dropped: the server keeps the latest ones only")
        return replies

    async def _check(self, tasks: Sequence[TaskRequest], is_batch: bool) -> None:
        """Refuse what names something that is not there, before anything starts."""
        for index, task in enumerate(tasks):
            prefix = f"tasks.{index}." if is_batch else ""
            with refusing_what_is_not_there(prefix), suppress(FetchFailed, GitFailed):
                # the last two are not the task's fault: its run tries again and says what is wrong
                self._service.environments.check(task.environment)
                await self._service.executor.check(task)

    async def _task(self, request: Request) -> Response:
        wait_s = read_query(request, wait_s=(0, _MAX_POLL_S)).get("wait_s", 0.0)
        found, index = self._find(request)
        if isinstance(found, Submission):
            work = found.works[index] if index < len(found.works) else None
            if work is None:
                raise _unknown_task(request)
            if wait_s and not found.ended.done():
                await self._unless_ended(request, asyncio.wait([found.ended], timeout=wait_s))
            if not found.ended.done():
                state = {"task_id": request.path_params["task_id"], "state": "pending"}
                return JSONResponse(state, status_code=202, headers={"Retry-After": "1"})
            replies = found.ended.result()
        else:
            replies = await self._replies(request, found)
        if index >= len(replies):
            raise _unknown_task(request)
        return JSONResponse(replies[index])

    async def _cancel(self, request: Request) -> Response:
        read_query(request)
        found, index = self._find(request)
        if isinstance(found, Submission):
            if index >= len(found.works):
                raise _unknown_task(request)
            self._service.board.cancel(found, index)
            await self._unless_ended(request, asyncio.wait([found.works[index]]))
        return JSONResponse({"task_id": request.path_params["task_id"], "state": "ended"})

    def _find(self, request: Request) -> tuple[Submission | Entry, int]:
        found = self._service.board.find(request.state.tenant, request.path_params["task_id"])
        if found is None:
            raise _unknown_task(request)
        return found

    async def _unless_ended(self, request: Request, work: Awaitable[T]) -> T:
        """Await ``work``; cancel it when the client goes away or the server stops."""

        async def gone() -> None:
            while (await request.receive())["type"] != "http.disconnect":
                pass

        working = asyncio.ensure_future(work)
        ends = [asyncio.ensure_future(gone()), asyncio.ensure_future(self._stopping.wait())]
        try:
            await asyncio.wait({working, *ends}, return_when=asyncio.FIRST_COMPLETED)
            if not working.done():
                working.cancel()
                await asyncio.wait([working])
                raise RequestRefused(503, "", "the server is stopping" if ends[1].done() else "the client went away")
            return working.result()
        finally:
            for future in (working, *ends):
                future.cancel()


def _parse_submission(body: bytearray) -> tuple[list[TaskRequest], bool, str]:
    """Return the tasks, whether they are a batch, and the body's hash. Raises RequestRefused (400, 413, 422)."""
    try:
        tasks, is_batch = parse_submission(json_object(body))
    except ValidationError as error:
        raise refusal_of(error) from error
    return tasks, is_batch, hashlib.sha256(body).hexdigest()


def _read_key(request: Request) -> str | None:
    key = request.headers.get("idempotency-key")
    if key is not None and not 1 <= len(key) <= _MAX_KEY_LENGTH:
        raise RequestRefused(422, "Idempotency-Key", f"must have 1 to {_MAX_KEY_LENGTH} characters, got {len(key)}")
    return key


def _accepted(found: Submission | Entry, count: int) -> Response:
    entry = found.entry if isinstance(found, Submission) else found
    ids = [{"task_id": task_id, "state": "accepted"} for task_id in task_ids(entry, count)]
    return JSONResponse({"tasks": ids} if entry.is_batch else ids[0], status_code=202)


def _answer(replies: list[dict[str, Any]], is_batch: bool) -> Response:
    return JSONResponse({"tasks": replies} if is_batch else replies[0])


def _unknown_task(request: Request) -> RequestRefused:
    return RequestRefused(404, "task_id", f"no task {request.path_params['task_id'][:80]!r} is held or remembered")


async def _no_route(request: Request, error: Exception) -> Response:
    status = getattr(error, "status_code", 404)
    what = f"{request.method} {request.url.path[:200]} is not a route of this server"
    return JSONResponse({"error": {"field": "", "message": what}}, status_code=status)


async def _defect(request: Request, error: Exception) -> Response:
    message = f"a defect of the server: {type(error).__name__}; its log has more"
    return JSONResponse({"error": {"field": "", "message": message}}, status_code=500)
