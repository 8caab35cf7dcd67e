"""One dataset row as it arrives: SWE-bench's column names, validated."""

from __future__ import annotations

import json
from typing import Annotated, Literal

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, ValidationError

from dockyard_core.errors import DataError

_MAX_SHOWN = 60


def _parse_json_string(value: object) -> object:
    """Some dumps carry their lists as JSON strings. Never evaluated."""
    if not isinstance(value, str):
        return value
    try:
        return json.loads(value)
    except (ValueError, RecursionError) as error:
        raise ValueError("must be a list of test ids or a JSON string of one") from error


TestIds = Annotated[tuple[Annotated[str, Field(min_length=1)], ...], BeforeValidator(_parse_json_string)]


class TaskRow(BaseModel):
    """A row. Columns that dumps carry and training does not need (hints_text, version, …) are ignored."""

    model_config = ConfigDict(frozen=True, extra="ignore")

    instance_id: Annotated[str, Field(pattern=r"^[^\s#]+$", max_length=200)]
    repo: Annotated[str, Field(min_length=1)]
    base_commit: Annotated[str, Field(pattern=r"^(?:[0-9a-f]{40}|[0-9a-f]{64})$")]
    problem_statement: Annotated[str, Field(min_length=1)]
    patch: str | None = None
    test_patch: str
    FAIL_TO_PASS: Annotated[TestIds, Field(min_length=1)]
    PASS_TO_PASS: TestIds = ()
    environment: str | None = None
    test_command: str | None = None
    plugins: tuple[str, ...] = ()
    timeout_s: Annotated[float, Field(gt=0, allow_inf_nan=False)] = 60.0
    apply: Literal["strict", "swebench"] = "strict"
    labels: dict[str, str | int | float | bool] = Field(default_factory=dict)


_WAYS_OUT = {
    "instance_id": "give the task a short unique name without white space or '#'",
    "repo": "name a repository, a path or a URL",
    "base_commit": "write the full commit id (40 or 64 hex digits), not a branch or a short id",
    "problem_statement": "write what has to be changed",
    "patch": "write the known fix as a unified diff, or leave the column out",
    "test_patch": "write the held-out tests as a unified diff, or an empty string when the repository has them",
    "FAIL_TO_PASS": "list the pytest node ids that the fix makes pass",
    "PASS_TO_PASS": "list the pytest node ids that must go on passing",
    "plugins": "list the names of pytest plug-ins as its -p takes them, such as pytest_cov.plugin",
    "timeout_s": "give seconds > 0",
    "apply": "use strict or swebench",
    "labels": "give an object of names and plain values",
}


def parse_row(line: bytes, where: str) -> TaskRow:
    """Validate one JSON line.

    Args:
        line: UTF-8 JSON.
        where: ``file:line``, the start of every message.

    Raises:
        DataError: ``file:line: field: rule, value, way out``.
    """
    try:
        value = json.loads(line.decode("utf-8"))
    except UnicodeDecodeError as error:
        raise DataError(f"{where}: json: must be UTF-8, got byte {error.start}; convert the file to UTF-8") from error
    except (ValueError, RecursionError) as error:
        raise DataError(f"{where}: json: must be one JSON object, got {error}; write one object per line") from error
    if not isinstance(value, dict):
        raise DataError(f"{where}: json: must be one JSON object, got {_shown(value)}; write one object per line")
    try:
        return TaskRow.model_validate(value)
    except ValidationError as error:
        first = error.errors(include_url=False)[0]
        field = str(first["loc"][0])
        found = "nothing" if first["type"] == "missing" else _shown(first["input"])
        way_out = _WAYS_OUT.get(field, "see the documentation of the dataset format")
        rule = str(first["msg"]).removeprefix("Value error, ")
        raise DataError(f"{where}: {field}: {rule}, got {found}; {way_out}") from error


def _shown(value: object) -> str:
    text = repr(value)
    return text if len(text) <= _MAX_SHOWN else f"{text[:_MAX_SHOWN]}…"
