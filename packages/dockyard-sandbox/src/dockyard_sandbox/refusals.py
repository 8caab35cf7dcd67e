"""Reading a request, and refusing it: every 4xx names the field, the rule and the value."""

from __future__ import annotations

import json
from typing import Any, TypeVar

from pydantic import BaseModel, ValidationError
from starlette.requests import Request
from starlette.responses import JSONResponse

from dockyard_sandbox.wire import MAX_BODY_BYTES, PATCH_TOO_LARGE

_MAX_DRAINED_BYTES = 4 * MAX_BODY_BYTES
Model = TypeVar("Model", bound=BaseModel)


class RequestRefused(Exception):
    """A request that gets a 4xx or 503; carries what the client needs to correct it."""

    def __init__(self, status: int, field: str, message: str, *, retry_after_s: int | None = None) -> None:
        super().__init__(message)
        self.status = status
        self.response = JSONResponse(
            {"error": {"field": field, "message": message}},
            status_code=status,
            headers={} if retry_after_s is None else {"Retry-After": str(retry_after_s)},
        )


async def read_body(request: Request) -> bytes:
    """Return the body. Raises RequestRefused (413) past `MAX_BODY_BYTES`; no more than that is ever held."""
    chunks, size = [], 0
    async for chunk in request.stream():
        size += len(chunk)
        if size <= MAX_BODY_BYTES:
            chunks.append(chunk)
        else:
            chunks.clear()  # a client that still writes does not read: take the rest, up to a point, and then answer
        if size > _MAX_DRAINED_BYTES:
            break
    if size > MAX_BODY_BYTES:
        raise RequestRefused(413, "", f"the body must be at most {MAX_BODY_BYTES} bytes")
    return b"".join(chunks)


def json_object(body: bytes) -> dict[str, Any]:
    """Return the body as a JSON object. Raises RequestRefused (400)."""
    try:
        value = json.loads(body)
    except (ValueError, RecursionError) as error:
        raise RequestRefused(400, "", f"the body must be JSON: {error}") from error
    if not isinstance(value, dict):
        raise RequestRefused(400, "", f"the body must be a JSON object, got {type(value).__name__}")
    return value


async def read_model(request: Request, model: type[Model]) -> Model:
    """Return the body as ``model``. Raises RequestRefused (400, 413, 422)."""
    try:
        return model.model_validate(json_object(await read_body(request)))
    except ValidationError as error:
        raise refusal_of(error) from error


def refusal_of(error: ValidationError) -> RequestRefused:
    """The refusal that names the first wrong field."""
    first = error.errors(include_url=False, include_context=False)[0]
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
