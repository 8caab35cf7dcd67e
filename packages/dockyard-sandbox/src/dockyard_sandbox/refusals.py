"""Parsing a request, and refusing it: every 4xx names the field, the rule and the value."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, TypeVar

from pydantic import BaseModel, ValidationError
from starlette.requests import Request
from starlette.responses import JSONResponse
from starlette.types import Receive, Scope, Send

from dockyard_sandbox.deciding_files import MissingTestFile
from dockyard_sandbox.environments import UnknownEnvironment
from dockyard_sandbox.repos import MissingCommit, UnknownRepo
from dockyard_sandbox.wire import MAX_BODY_BYTES, PATCH_TOO_LARGE

_MAX_DISCARDED_BYTES = 2 * MAX_BODY_BYTES
_MAX_DISCARD_S = 10.0
Model = TypeVar("Model", bound=BaseModel)


class RequestRefused(Exception):
    """A request that gets a 4xx or 503; carries what the client needs to correct it.

    Args:
        status: of HTTP.
        field: what is wrong; "" = no single field.
        message: the rule and the value.
        retry_after_s: after which asking again makes sense.
        is_unread: the body has not been read, or not to its end; the connection is closed then.
    """

    def __init__(
        self, status: int, field: str, message: str, *, retry_after_s: int | None = None, is_unread: bool = False
    ) -> None:
        super().__init__(message)
        self.status = status
        headers = {} if retry_after_s is None else {"Retry-After": str(retry_after_s)}
        if is_unread:
            headers["Connection"] = "close"
        response = _EarlyResponse if is_unread else JSONResponse
        self.response = response({"error": {"field": field, "message": message}}, status_code=status, headers=headers)


@contextmanager
def refusing_what_is_not_there(prefix: str = "") -> Iterator[None]:
    """Turn what a task names and is not there into a 422 on that field, with ``prefix`` before its name."""
    try:
        yield
    except UnknownEnvironment as error:
        raise RequestRefused(422, f"{prefix}environment", str(error)) from error
    except UnknownRepo as error:
        raise RequestRefused(422, f"{prefix}repo", str(error)) from error
    except MissingCommit as error:
        raise RequestRefused(422, f"{prefix}base_commit", str(error)) from error
    except MissingTestFile as error:
        raise RequestRefused(422, f"{prefix}{error.field}", str(error)) from error


class _EarlyResponse(JSONResponse):
    """An answer to a request that is still being sent: whole at once, then the rest of the request is thrown away.

    Closing at once would reset the connection, and a client that writes first and reads then would lose the
    answer. So a part of the rest is read, and nothing of it kept; after that the connection is closed.
    """

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        await send({"type": "http.response.start", "status": self.status_code, "headers": self.raw_headers})
        await send({"type": "http.response.body", "body": self.body, "more_body": True})
        await _discard(receive)
        await send({"type": "http.response.body", "body": b"", "more_body": False})


async def _discard(receive: Receive) -> None:
    left = _MAX_DISCARDED_BYTES
    try:
        async with asyncio.timeout(_MAX_DISCARD_S):
            while left > 0:
                message = await receive()
                if message["type"] == "http.disconnect" or not message.get("more_body", False):
                    return
                left -= len(message.get("body", b""))
    except TimeoutError:
        return


def json_object(body: bytes | bytearray) -> dict[str, Any]:
    """Return the body as a JSON object. Raises RequestRefused (400)."""
    try:
        value = json.loads(body)
    except (ValueError, RecursionError) as error:
        raise RequestRefused(400, "", f"the body must be JSON: {error}") from error
    if not isinstance(value, dict):
        raise RequestRefused(400, "", f"the body must be a JSON object, got {type(value).__name__}")
    return value


def parser_of(model: type[Model]) -> Callable[[bytes | bytearray], Model]:
    """Return what makes ``model`` of a body; it raises RequestRefused (400, 413, 422)."""

    def parse(body: bytes | bytearray) -> Model:
        try:
            return model.model_validate(json_object(body))
        except ValidationError as error:
            raise refusal_of(error) from error

    return parse


def refusal_of(error: ValidationError) -> RequestRefused:
    """The refusal that names the first wrong field."""
    first = error.errors(include_url=False, include_context=False, include_input=False)[0]
    status = 413 if first["type"] == PATCH_TOO_LARGE else 422
    return RequestRefused(status, ".".join(str(part) for part in first["loc"]), first["msg"])


def read_query(request: Request, **known: tuple[float, float]) -> dict[str, float]:
    """Return the numbers of the query, each within its (low, high). Raises RequestRefused (422)."""
    found: dict[str, float] = {}
    for name, text in request.query_params.multi_items():
        if name not in known or name in found:
            what = "is given twice" if name in found else "is not a query parameter of this route"
            raise RequestRefused(422, name, what)
        low, high = known[name]
        try:
            value = float({"true": "1", "false": "0"}.get(text, text))
        except ValueError:
            value = float("nan")
        if not low <= value <= high:
            raise RequestRefused(422, name, f"must be a number from {low:g} to {high:g}, got {text[:80]!r}")
        found[name] = value
    return found
