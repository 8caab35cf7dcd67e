"""HTTP to one SGLang server; whatever goes wrong is a ``GeneratorError``."""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import Callable, Mapping
from typing import Any

import httpx

from dockyard_core.errors import EngineDead, GeneratorError
from dockyard_inference.sglang_engine.requests import abort_payload

_CONNECT_S = 10.0
_KEEP_ALIVE_S = 2.0
"""Less than the 5 s after which a server closes idle connections, unless it is told otherwise."""
_WORDS = 500


class SglangClient:
    """Belongs to the event loop that uses it.

    Args:
        url: of the server.
        api_key: sent as a bearer token.
        why_dead: says more when the server is gone, such as its last words.
    """

    def __init__(self, url: str, api_key: str | None = None, why_dead: Callable[[], str] = lambda: "") -> None:
        self.url, self.api_key = url.rstrip("/"), api_key
        self._why_dead = why_dead
        self.heard_at = 0.0
        """When the server answered last, by the monotonic clock."""
        is_local = httpx.URL(self.url).host in ("127.0.0.1", "localhost", "::1")
        self._http = httpx.AsyncClient(
            base_url=self.url,
            headers={"Authorization": f"Bearer {api_key}"} if api_key else {},
            timeout=httpx.Timeout(None, connect=_CONNECT_S),
            limits=httpx.Limits(max_connections=None, max_keepalive_connections=512, keepalive_expiry=_KEEP_ALIVE_S),
            trust_env=not is_local,  # a proxy of the environment would not know a server on this machine
        )

    async def generate(self, payload: Mapping[str, Any], new_rid: Callable[[], str]) -> dict[str, Any]:
        """One request of ``/generate``; takes as long as the completion. Cancelling it aborts the request there.

        A connection that breaks while the server lives is tried again, under a new rid: the server may still
        be busy with the old one.

        Raises:
            EngineDead: no server is left.
            GeneratorError: the server refuses the request, or answers something else.
        """
        for is_last in (False, False, True):
            try:
                return _object(await self._send("POST", "/generate", {**payload, "rid": new_rid()}), "/generate")
            except BrokenConnection:
                if is_last:
                    raise
                await self.ask("/model_info", _CONNECT_S)
        raise AssertionError("the last try returns or raises")

    async def ask(self, path: str, limit_s: float) -> dict[str, Any]:
        """The JSON object of a GET. Raises as ``tell``."""
        return _object(await self._answered("GET", path, None, limit_s), path)

    async def tell(self, path: str, payload: Mapping[str, Any], limit_s: float) -> dict[str, Any]:
        """The answer to a POST that steers the server.

        Raises:
            EngineDead: as ``generate``.
            GeneratorError: no answer within ``limit_s``, or a refusal.
        """
        reply = _object(await self._answered("POST", path, payload, limit_s), path)
        if reply.get("success") is False:
            raise GeneratorError(f"SGLang refused {path}: {str(reply.get('message'))[:_WORDS]}")
        return reply

    async def abort(self, rid: str | None, limit_s: float) -> None:
        """Let a request come back with what it has; None = all. Says nothing when there is none such."""
        await self._answered("POST", "/abort_request", abort_payload(rid), limit_s)

    async def close(self) -> None:
        """Give the connections back."""
        await self._http.aclose()

    async def _answered(
        self, method: str, path: str, payload: Mapping[str, Any] | None, limit_s: float
    ) -> httpx.Response:
        try:
            async with asyncio.timeout(limit_s):
                try:
                    return await self._send(method, path, payload)
                except BrokenConnection:  # all that steers the server may be said twice
                    return await self._send(method, path, payload)
        except TimeoutError as error:
            raise NoAnswer(f"SGLang at {self.url} did not answer {path} within {limit_s:g} s") from error

    async def _send(self, method: str, path: str, payload: Mapping[str, Any] | None) -> httpx.Response:
        try:
            response = await self._http.request(method, path, json=payload)
        except httpx.TransportError as error:
            more = self._why_dead()
            kind = EngineDead if isinstance(error, httpx.ConnectError | httpx.ConnectTimeout) else BrokenConnection
            raise kind(
                f"SGLang's server at {self.url} is gone ({type(error).__name__}{f': {error}' if str(error) else ''}): "
                f"restart the engine{f'; {more}' if more else ''}"
            ) from error
        except httpx.InvalidURL as error:
            raise GeneratorError(f"{self.url}{path} is no address: {error}") from error
        if response.status_code != 200:
            raise GeneratorError(f"SGLang refused {path} with {response.status_code}: {_reason(response)}")
        if path != "/model_info":  # which needs no scheduler
            self.heard_at = time.monotonic()
        return response


class BrokenConnection(EngineDead):
    """The server closed a connection without an answer: it died, or it had just given up an idle one."""


class NoAnswer(GeneratorError):
    """The server did not answer in time; whether it did what it was asked is not known."""


def _object(response: httpx.Response, path: str) -> dict[str, Any]:
    try:
        found = response.json()
    except (json.JSONDecodeError, UnicodeDecodeError) as error:
        raise GeneratorError(f"SGLang answered {path} with what is no JSON: {response.text[:80]!r}") from error
    if not isinstance(found, dict):
        raise GeneratorError(f"SGLang answered {path} with a {type(found).__name__}, not an object")
    return found


def _reason(response: httpx.Response) -> str:
    """Refusals are ``{"error": {"message": TEXT}}``, ``{"error": TEXT}``, ``{"message": TEXT}``, or text."""
    try:
        found = response.json()
    except (json.JSONDecodeError, UnicodeDecodeError):
        found = response.text
    for key in ("error", "message"):
        if isinstance(found, dict) and key in found:
            found = found[key]
    return " ".join(str(found).split())[:_WORDS]
