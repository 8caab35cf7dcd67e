"""HTTP over sessions: open, exec, read, write, finish, close."""

from __future__ import annotations

import base64
import binascii
from collections.abc import Awaitable, Callable
from typing import Any

from starlette.requests import Request
from starlette.responses import JSONResponse, Response

from dockyard_sandbox.bodies import Bodies
from dockyard_sandbox.gitcmd import GitFailed
from dockyard_sandbox.live_session import CallFailed, SessionEnded
from dockyard_sandbox.queueing import Admission, QueueFull
from dockyard_sandbox.refusals import RequestRefused, parser_of, refusing_what_is_not_there
from dockyard_sandbox.repos import FetchFailed
from dockyard_sandbox.sessions import Session, SessionStore, UnknownSession
from dockyard_sandbox.wire import ExecRequest, ReadRequest, SessionRequest, WriteRequest

Handler = Callable[[Request], Awaitable[Response]]
UnlessEnded = Callable[[Request, Awaitable[Any]], Awaitable[Any]]


class SessionRoutes:
    """Handlers over one session store.

    Args:
        sessions: the store.
        admission: counts the tasks that finished sessions become.
        bodies: reads requests.
        unless_ended: awaits work until the client goes away or the server stops.
    """

    def __init__(self, sessions: SessionStore, admission: Admission, bodies: Bodies, unless_ended: UnlessEnded) -> None:
        self._sessions = sessions
        self._admission = admission
        self._bodies = bodies
        self._unless_ended = unless_ended

    def table(self) -> list[tuple[str, str, Handler]]:
        """(path, method, handler) of each route."""
        one = "/session/{session_id}"
        return [
            ("/session", "POST", self._refusing(self._open)),
            (f"{one}/exec", "POST", self._refusing(self._exec)),
            (f"{one}/read", "POST", self._refusing(self._read)),
            (f"{one}/write", "POST", self._refusing(self._write)),
            (f"{one}/finish", "POST", self._refusing(self._finish)),
            (one, "DELETE", self._refusing(self._close)),
        ]

    def _refusing(self, handler: Handler) -> Handler:
        async def refusing(request: Request) -> Response:
            try:
                with refusing_what_is_not_there():
                    return await handler(request)
            except UnknownSession as error:
                rule = "names no open session; an idle one is closed after its idle_ttl_s"
                raise RequestRefused(404, "session_id", rule) from error
            except SessionEnded as error:
                raise RequestRefused(410, "session_id", f"the session has ended: {error}") from error
            except CallFailed as error:
                raise RequestRefused(422, "path", str(error)) from error
            except QueueFull as error:
                raise RequestRefused(429, "", str(error), retry_after_s=error.retry_after_s) from error
            except (FetchFailed, GitFailed, OSError) as error:
                raise RequestRefused(503, "", f"{type(error).__name__}: {error}", retry_after_s=1) from error

        return refusing

    def _session(self, request: Request) -> Session:
        return self._sessions.find(request.path_params["session_id"], request.state.tenant)

    async def _open(self, request: Request) -> Response:
        wanted, reserved = await self._bodies.read(request, parser_of(SessionRequest))
        with reserved:
            opening = self._sessions.open(wanted, request.state.tenant, reserved)
            session: Session = await self._unless_ended(request, opening)
        return JSONResponse({"session_id": session.session_id, "idle_ttl_s": wanted.idle_ttl_s}, status_code=201)

    async def _exec(self, request: Request) -> Response:
        session = self._session(request)
        wanted, reserved = await self._bodies.read(request, parser_of(ExecRequest))
        with reserved:
            running = self._sessions.exec(session, wanted.command, timeout_s=wanted.timeout_s)
            result = await self._unless_ended(request, running)
        return JSONResponse(
            {
                "exit_code": result.exit_code,
                "timed_out": result.end == "deadline",
                "output": result.output.decode(errors="replace"),
                "num_dropped_bytes": result.num_dropped_bytes,
                "duration_s": result.duration_s,
            }
        )

    async def _read(self, request: Request) -> Response:
        session = self._session(request)
        wanted, reserved = await self._bodies.read(request, parser_of(ReadRequest))
        with reserved:
            reading = self._sessions.read(session, wanted.path, offset=wanted.offset, max_bytes=wanted.max_bytes)
            content, size = await self._unless_ended(request, reading)
        return JSONResponse({**_encoded(content), "size": size})

    async def _write(self, request: Request) -> Response:
        session = self._session(request)
        wanted, reserved = await self._bodies.read(request, parser_of(WriteRequest))
        with reserved:
            content = _decoded(wanted)
            await self._unless_ended(request, self._sessions.write(session, wanted.path, content))
        return JSONResponse({"size": len(content)})

    async def _finish(self, request: Request) -> Response:
        session = self._session(request)
        response = await self._unless_ended(request, self._sessions.finish(session, self._admission))
        return JSONResponse({"verdict": response.model_dump(mode="json"), "patch": session.patch})

    async def _close(self, request: Request) -> Response:
        self._sessions.close(self._session(request))
        return Response(status_code=204)


def _encoded(content: bytes) -> dict[str, str]:
    try:
        return {"content": content.decode(), "encoding": "utf-8"}
    except UnicodeDecodeError:
        return {"content": base64.b64encode(content).decode(), "encoding": "base64"}


def _decoded(wanted: WriteRequest) -> bytes:
    try:
        if wanted.encoding == "base64":
            return base64.b64decode(wanted.content, validate=True)
        return wanted.content.encode()
    except (binascii.Error, ValueError) as error:
        raise RequestRefused(422, "content", f"must be {wanted.encoding}: {error}") from error
