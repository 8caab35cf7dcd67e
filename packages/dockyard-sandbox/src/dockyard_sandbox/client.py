"""The client: core's `Sandbox` over HTTP."""

from __future__ import annotations

import asyncio
import hashlib
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from types import TracebackType

import httpx
from pydantic import ValidationError

from dockyard_core import (
    SandboxBusy,
    SandboxError,
    SandboxSession,
    SandboxTimeout,
    SandboxUnavailable,
    Task,
    Verdict,
    VerdictStatus,
)
from dockyard_core.patch import touched_paths
from dockyard_sandbox.http_session import Caller, HttpSession, message_of, to_verdict
from dockyard_sandbox.wire import MAX_PATCH_BYTES, TaskResponse

_FIRST_DELAY_S = 0.2
_MAX_DELAY_S = 10.0
_CONNECT_TIMEOUT_S = 10.0
_MAX_KEY_LENGTH = 1000


class SandboxClient:
    """Judges patches on a sandbox server. Implements `dockyard_core.SessionSandbox`.

    Args:
        base_url: what the server's ready line says.
        token: the server's bearer token; None = it has none.
        timeout_s: deadline of one `judge`, from its call to its verdict, retries and queueing included.
        max_retries: how often one `judge` asks again; only after an ``infra_error``, a 429 or a lost connection.
        raises_busy: a 429 is raised as SandboxBusy at once, for a caller that adapts, instead of being retried.
        max_connections: requests on their way at once; more wait here. The connection pool looks at every
            connection for every request, so hundreds at once cost more than they carry.
        transport: stands in for the network in tests.
    """

    def __init__(
        self,
        base_url: str,
        token: str | None = None,
        *,
        timeout_s: float = 600.0,
        max_retries: int = 8,
        raises_busy: bool = False,
        max_connections: int = 48,
        transport: httpx.AsyncBaseTransport | None = None,
    ) -> None:
        if timeout_s <= 0:
            raise ValueError(f"timeout_s must be > 0, got {timeout_s}")
        self._timeout_s = timeout_s
        self._max_retries = max_retries
        self._raises_busy = raises_busy
        self._free = asyncio.Semaphore(max_connections)
        self._http = httpx.AsyncClient(
            base_url=base_url,
            headers={} if token is None else {"Authorization": f"Bearer {token}"},
            timeout=httpx.Timeout(None, connect=_CONNECT_TIMEOUT_S),
            limits=httpx.Limits(max_connections=None, max_keepalive_connections=max_connections),
            transport=transport,
            trust_env=False,
            verify=base_url.startswith("https"),  # loading certificates costs more than a request
        )

    async def judge(self, task: Task, patch: str, *, attempt_id: str) -> Verdict:
        """Return the verdict on ``patch``; see `dockyard_core.Sandbox.judge`."""
        try:
            async with asyncio.timeout(self._timeout_s):
                return await self._judge(task, patch, attempt_id)
        except TimeoutError as error:
            raise SandboxTimeout(
                f"no verdict on {task.instance_id!r} within {self._timeout_s} s; raise timeout_s or add workers"
            ) from error

    async def register(self, repos: dict[str, str]) -> None:
        """Give repositories names on the server. Raises SandboxError, SandboxUnavailable."""
        try:
            response = await self._http.put("/repos", json={"repos": repos})
        except httpx.TransportError as error:
            raise SandboxUnavailable(f"no sandbox server at {self._http.base_url}: {error}") from error
        if response.status_code != 200:
            raise SandboxError(f"the sandbox refused the repositories: {message_of(response)}")

    @asynccontextmanager
    async def session(self, task: Task, *, idle_ttl_s: float = 600.0) -> AsyncIterator[SandboxSession]:
        """Open a session on ``task``; see `dockyard_core.SessionSandbox.session`.

        ``idle_ttl_s`` seconds after its last call the server closes it.
        """
        body = {**request_body(task, ""), "idle_ttl_s": idle_ttl_s}
        caller = Caller(self._http, timeout_s=self._timeout_s, max_retries=self._max_retries)
        session = HttpSession(caller, str((await caller.call("POST", "/session", body))["session_id"]))
        try:
            yield session
        finally:
            await session.close()

    async def aclose(self) -> None:
        """Close the connections."""
        await self._http.aclose()

    async def __aenter__(self) -> SandboxClient:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.aclose()

    async def _judge(self, task: Task, patch: str, attempt_id: str) -> Verdict:
        body = request_body(task, patch)
        delay_s, last = _FIRST_DELAY_S, ""
        verdict: Verdict | None = None
        key = attempt_id
        for attempt in range(self._max_retries + 1):
            if attempt:
                await asyncio.sleep(delay_s)
                delay_s = min(2 * delay_s, _MAX_DELAY_S)
            try:
                async with self._free:
                    response = await self._http.post(
                        "/task/submit", json=body, headers={"Idempotency-Key": _header_value(key)}
                    )
            except httpx.TransportError as error:
                last, verdict = f"{type(error).__name__}: {error}", None
                continue
            if response.status_code == 429:
                last, verdict = message_of(response), None
                retry_after_s = float(response.headers.get("Retry-After", "0"))
                if self._raises_busy:
                    raise SandboxBusy(last, retry_after_s=retry_after_s)
                delay_s = max(delay_s, retry_after_s)
                continue
            reply = _read_reply(task, patch, response)
            if isinstance(reply, Verdict):
                return reply
            verdict = to_verdict(reply)
            if not reply.retryable:
                return verdict
            key = f"{attempt_id}/retry-{attempt + 1}"  # under the old one, the server repeats its answer
        if verdict is not None:
            return verdict  # still an infra_error: it says so and is never scored
        raise SandboxUnavailable(
            f"sandbox server {self._http.base_url} gave no verdict in {self._max_retries + 1} tries, last: {last}"
        )


def request_body(task: Task, patch: str) -> dict[str, object]:
    """The JSON body of one submission. Lone surrogates, which JSON text cannot carry, become U+FFFD."""
    return {
        "instance_id": task.instance_id,
        "repo": task.repo,
        "base_commit": task.base_commit,
        "model_patch": patch.encode("utf-16", "surrogatepass").decode("utf-16", "replace"),
        "test_patch": task.test_patch,
        "FAIL_TO_PASS": list(task.fail_to_pass),
        "PASS_TO_PASS": list(task.pass_to_pass),
        "environment": task.environment,
        "test_command": task.test_command,
        "plugins": list(task.plugins),
        "exempt_paths": list(touched_paths(task.gold_patch or "")),
        "timeout_s": task.timeout_s,
        "apply": task.apply,
    }


def _read_reply(task: Task, patch: str, response: httpx.Response) -> TaskResponse | Verdict:
    # the model's patch is the only part that a policy can make too large; the rest is the task's
    if response.status_code == 413 and len(patch.encode(errors="replace")) > MAX_PATCH_BYTES:
        return Verdict(
            status=VerdictStatus.POLICY_VIOLATION,
            fail_to_pass=(0, len(task.fail_to_pass)),
            pass_to_pass=(0, len(task.pass_to_pass)),
            detail=message_of(response),
        )
    if response.status_code >= 500 or response.status_code in (401, 403):
        raise SandboxUnavailable(f"the sandbox server answered {response.status_code}: {message_of(response)}")
    if response.status_code != 200:
        raise SandboxError(f"the sandbox refused {task.instance_id!r} ({response.status_code}): {message_of(response)}")
    try:
        return TaskResponse.model_validate_json(response.content)
    except ValidationError as error:
        raise SandboxError(f"the sandbox server's reply is not a verdict: {error}") from error


def _header_value(attempt_id: str) -> str:
    """Attempt ids may hold anything; a header may not."""
    return (
        attempt_id
        if attempt_id.isascii() and attempt_id.isprintable() and 0 < len(attempt_id) <= _MAX_KEY_LENGTH
        else hashlib.sha256(attempt_id.encode()).hexdigest()
    )
