"""The HTTP surface: routes, authentication, caps, idempotency. No judgement is made here."""

from __future__ import annotations

import asyncio
import hashlib
import hmac
import json
from collections.abc import Awaitable, Callable
from contextlib import AbstractAsyncContextManager
from dataclasses import dataclass
from importlib.metadata import version
from typing import Any

from pydantic import ValidationError
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route

from dockyard_sandbox.executor import Executor, QueueFull
from dockyard_sandbox.repos import UnknownRepo
from dockyard_sandbox.sharing import BoundedCache, SharedCalls
from dockyard_sandbox.wire import MAX_BODY_BYTES, PATCH_TOO_LARGE, ReposRequest, TaskRequest, parse_submission

_MAX_KEYS = 4096
Lifespan = Callable[[Starlette], AbstractAsyncContextManager[None]]
Handler = Callable[[Request], Awaitable[Response]]


class RequestRefused(Exception):
    """A request that gets a 4xx; carries what the client needs to correct it."""

    def __init__(self, status: int, field: str, message: str, *, retry_after_s: int | None = None) -> None:
        super().__init__(message)
        self.response = JSONResponse(
            {"error": {"field": field, "message": message}},
            status_code=status,
            headers={} if retry_after_s is None else {"Retry-After": str(retry_after_s)},
        )


@dataclass(frozen=True)
class _Stored:
    body_hash: str
    reply: dict[str, Any]


class Api:
    """Handlers over one executor."""

    def __init__(self, executor: Executor, token: str | None) -> None:
        self._executor = executor
        self._token = token
        self._stopping = asyncio.Event()
        self._stored: BoundedCache[_Stored] = BoundedCache(_MAX_KEYS)
        self._bodies: dict[str, str] = {}  # Idempotency-Key in flight -> hash of its body
        self._in_flight: SharedCalls[dict[str, Any]] = SharedCalls()

    def stop(self) -> None:
        """Answer what is still in flight with 503 and cancel its runs."""
        self._stopping.set()

    def application(self, lifespan: Lifespan) -> Starlette:
        """Return the ASGI application."""
        routes = [
            Route("/task/submit", self._guarded(self._submit), methods=["POST"]),
            Route("/repos", self._guarded(self._put_repos), methods=["PUT"]),
            Route("/readyz", self._guarded(self._ready), methods=["GET"]),
            Route("/version", self._guarded(self._version), methods=["GET"]),
            Route("/healthz", self._healthy, methods=["GET"]),
        ]
        return Starlette(routes=routes, lifespan=lifespan)

    def _guarded(self, handler: Handler) -> Handler:
        async def guarded(request: Request) -> Response:
            try:
                self._authenticate(request)
                return await handler(request)
            except RequestRefused as refused:
                return refused.response

        return guarded

    def _authenticate(self, request: Request) -> None:
        if self._token is not None:
            given = request.headers.get("authorization", "")
            if not hmac.compare_digest(given.encode(), f"Bearer {self._token}".encode()):
                raise RequestRefused(401, "Authorization", "must be 'Bearer ' and the server's token")

    async def _healthy(self, request: Request) -> Response:
        return JSONResponse({"status": "ok"})

    async def _ready(self, request: Request) -> Response:
        executor = self._executor
        state = {"status": "ready", "isolation": executor.isolation, "workers": executor.workers}
        return JSONResponse({**state, "num_executions": executor.num_executions})

    async def _version(self, request: Request) -> Response:
        return JSONResponse({"name": "dockyard-sandbox", "version": version("dockyard-sandbox")})

    async def _put_repos(self, request: Request) -> Response:
        try:
            repos = ReposRequest.model_validate(_json_object(await _read_body(request))).repos
            await asyncio.to_thread(self._executor.repos.register, repos)
        except ValidationError as error:
            raise _refusal(error) from error
        except UnknownRepo as error:
            raise RequestRefused(422, "repos", str(error)) from error
        return JSONResponse({"repos": self._executor.repos.names()})

    async def _submit(self, request: Request) -> Response:
        for name in request.query_params:
            raise RequestRefused(422, name, "is not a query parameter of this route")
        body = await _read_body(request)
        try:
            tasks, is_batch = parse_submission(_json_object(body))
        except ValidationError as error:
            raise _refusal(error) from error
        work = self._judge_keyed(request.headers.get("idempotency-key"), body, tasks, is_batch)
        return JSONResponse(await self._unless_ended(request, work))

    async def _unless_ended(self, request: Request, work: Awaitable[dict[str, Any]]) -> dict[str, Any]:
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

    async def _judge_keyed(
        self, key: str | None, body: bytes, tasks: list[TaskRequest], is_batch: bool
    ) -> dict[str, Any]:
        if key is None:
            return await self._judge(tasks, is_batch)
        body_hash = hashlib.sha256(body).hexdigest()
        stored = self._stored.get(key)
        if stored is None and key in self._in_flight:
            stored = _Stored(self._bodies[key], {})
        if stored is not None and stored.body_hash != body_hash:
            raise RequestRefused(409, "Idempotency-Key", f"{key!r} was used with another body; use a new key")
        if stored is not None and stored.reply:
            return stored.reply
        self._bodies[key] = body_hash
        try:
            reply, _ = await self._in_flight.get(key, lambda: self._judge(tasks, is_batch))
        finally:
            if key not in self._in_flight:
                self._bodies.pop(key, None)
        verdicts = reply["tasks"] if is_batch else [reply]
        if not any(verdict["retryable"] for verdict in verdicts):
            self._stored.put(key, _Stored(body_hash, reply))
        return reply

    async def _judge(self, tasks: list[TaskRequest], is_batch: bool) -> dict[str, Any]:
        results = await asyncio.gather(*(self._executor.submit(task) for task in tasks), return_exceptions=True)
        replies = []
        for index, result in enumerate(results):
            if isinstance(result, UnknownRepo):
                raise RequestRefused(422, f"tasks.{index}.repo" if is_batch else "repo", str(result))
            if isinstance(result, QueueFull):
                raise RequestRefused(429, "", str(result), retry_after_s=1)
            if isinstance(result, BaseException):
                raise result
            replies.append(result.model_dump(mode="json"))
        return {"tasks": replies} if is_batch else replies[0]


async def _read_body(request: Request) -> bytes:
    chunks, size = [], 0
    async for chunk in request.stream():
        size += len(chunk)
        if size > MAX_BODY_BYTES:
            raise RequestRefused(413, "", f"the body must be at most {MAX_BODY_BYTES} bytes")
        chunks.append(chunk)
    return b"".join(chunks)


def _json_object(body: bytes) -> dict[str, Any]:
    try:
        value = json.loads(body)
    except (ValueError, RecursionError) as error:
        raise RequestRefused(400, "", f"the body must be JSON: {error}") from error
    if not isinstance(value, dict):
        raise RequestRefused(400, "", f"the body must be a JSON object, got {type(value).__name__}")
    return value


def _refusal(error: ValidationError) -> RequestRefused:
    first = error.errors(include_url=False, include_context=False)[0]
    status = 413 if first["type"] == PATCH_TOO_LARGE else 422
    return RequestRefused(status, ".".join(str(part) for part in first["loc"]), first["msg"])
