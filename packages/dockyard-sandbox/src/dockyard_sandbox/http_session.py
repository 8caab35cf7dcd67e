"""One session over HTTP, as `dockyard_core.SandboxSession`."""

from __future__ import annotations

import asyncio
import base64
from typing import Any

import httpx
from pydantic import ValidationError

from dockyard_core import (
    ExecResult,
    SandboxError,
    SandboxTimeout,
    SandboxUnavailable,
    SessionResult,
    Verdict,
)
from dockyard_sandbox.wire import MAX_FILE_BYTES, TaskResponse

_FIRST_DELAY_S = 0.2
_MAX_DELAY_S = 10.0


class Caller:
    """Calls that are not judgements: one deadline, and retries only where nothing can have happened.

    Args:
        http: the connection.
        timeout_s: of one call, retries included.
        max_retries: after a 429 or 503, or when no connection could be made.
    """

    def __init__(self, http: httpx.AsyncClient, *, timeout_s: float, max_retries: int) -> None:
        self._http = http
        self._timeout_s = timeout_s
        self._max_retries = max_retries

    async def call(
        self,
        method: str,
        path: str,
        body: dict[str, Any] | None = None,
        *,
        extra_s: float = 0.0,
        is_repeatable: bool = False,
    ) -> dict[str, Any]:
        """Return the reply's JSON; a repeatable call is made again when its connection is lost.

        Raises SandboxError, SandboxTimeout, SandboxUnavailable.
        """
        try:
            async with asyncio.timeout(self._timeout_s + extra_s):
                return await self._call(method, path, body, is_repeatable)
        except TimeoutError as error:
            raise SandboxTimeout(f"{method} {path}: no answer within {self._timeout_s + extra_s} s") from error

    async def _call(self, method: str, path: str, body: dict[str, Any] | None, is_repeatable: bool) -> dict[str, Any]:
        delay_s, last = _FIRST_DELAY_S, ""
        for attempt in range(self._max_retries + 1):
            if attempt:
                await asyncio.sleep(delay_s)
                delay_s = min(2 * delay_s, _MAX_DELAY_S)
            try:
                response = await self._http.request(method, path, json=body)
            except httpx.TransportError as error:
                if is_repeatable or isinstance(error, httpx.ConnectError):
                    last = f"{type(error).__name__}: {error}"
                    continue
                raise SandboxUnavailable(f"{method} {path}: the connection was lost: {error}") from error
            if response.status_code in (429, 503):
                last = message_of(response)
                delay_s = max(delay_s, float(response.headers.get("Retry-After", "0")))
                continue
            if response.status_code in (401, 403) or response.status_code >= 500:
                raise SandboxUnavailable(f"the sandbox answered {response.status_code}: {message_of(response)}")
            if response.status_code >= 400:
                raise SandboxError(f"{method} {path} was refused ({response.status_code}): {message_of(response)}")
            reply: dict[str, Any] = response.json() if response.content else {}
            return reply
        raise SandboxUnavailable(f"{method} {path}: no answer in {self._max_retries + 1} tries, last: {last}")


class HttpSession:
    """A session of a sandbox server; see `dockyard_core.SandboxSession`."""

    def __init__(self, caller: Caller, session_id: str) -> None:
        self._caller = caller
        self._path = f"/session/{session_id}"

    async def exec(self, command: str, *, timeout_s: float = 60.0) -> ExecResult:
        """Run a shell command; see `dockyard_core.SandboxSession.exec`."""
        body = {"command": command, "timeout_s": timeout_s}
        return ExecResult(**await self._caller.call("POST", f"{self._path}/exec", body, extra_s=timeout_s))

    async def read(self, path: str) -> bytes:
        """Return a file; see `dockyard_core.SandboxSession.read`."""
        content, size = b"", 1
        while len(content) < size:
            body = {"path": path, "offset": len(content), "max_bytes": MAX_FILE_BYTES}
            reply = await self._caller.call("POST", f"{self._path}/read", body)
            chunk, size = _decoded(reply), reply["size"]
            content += chunk
            if not chunk:
                break  # it became shorter meanwhile
        return content

    async def write(self, path: str, content: bytes) -> None:
        """Write a file; see `dockyard_core.SandboxSession.write`."""
        if len(content) > MAX_FILE_BYTES:
            raise SandboxError(f"content must be at most {MAX_FILE_BYTES} bytes, got {len(content)}")
        body = {"path": path, "content": base64.b64encode(content).decode(), "encoding": "base64"}
        await self._caller.call("POST", f"{self._path}/write", body)

    async def finish(self) -> SessionResult:
        """Judge what was changed; see `dockyard_core.SandboxSession.finish`."""
        reply = await self._caller.call("POST", f"{self._path}/finish", {}, is_repeatable=True)
        try:
            verdict = to_verdict(TaskResponse.model_validate(reply["verdict"]))
        except (KeyError, ValidationError) as error:
            raise SandboxError(f"the sandbox server's reply is not a verdict: {error}") from error
        return SessionResult(verdict=verdict, patch=str(reply["patch"]))

    async def close(self) -> None:
        """Drop the session; one that has ended already is fine."""
        try:
            await self._caller.call("DELETE", self._path)
        except SandboxError:
            pass  # it is gone, or goes when it has been idle


def _decoded(reply: dict[str, Any]) -> bytes:
    text = str(reply["content"])
    return base64.b64decode(text) if reply["encoding"] == "base64" else text.encode()


def to_verdict(reply: TaskResponse) -> Verdict:
    """The wire's verdict as core's."""
    return Verdict(
        status=reply.status,
        pass_rate=reply.pass_rate,
        fail_to_pass=(reply.fail_to_pass.passed, reply.fail_to_pass.total),
        pass_to_pass=(reply.pass_to_pass.passed, reply.pass_to_pass.total),
        tests=reply.tests,
        flags=reply.flags,
        isolation=reply.isolation,
        duration_s=reply.duration_s,
        log=reply.log,
        evidence=reply.evidence,
        cached=reply.cached,
        detail=reply.detail,
    )


def message_of(response: httpx.Response) -> str:
    """What a refusing server says, in a line."""
    try:
        error = response.json()["error"]
        return f"{error['field']}: {error['message']}" if error["field"] else str(error["message"])
    except (ValueError, KeyError, TypeError):
        return response.text[:200]
