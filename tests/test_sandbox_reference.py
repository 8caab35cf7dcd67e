"""The reference of requests and replies says of every field what the models say: its type, default and bounds."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import pytest
from pydantic import BaseModel
from pydantic.fields import FieldInfo

from dockyard_core import Task, TestStatus, VerdictStatus
from dockyard_sandbox import wire
from dockyard_sandbox.app import MAX_DEADLINE_S
from dockyard_sandbox.client import request_body

PAGE = Path(__file__).resolve().parent.parent / "docs/deployment/sandbox-requests.md"
TEXT = PAGE.read_text()
REQUESTS: dict[str, type[BaseModel]] = {
    "A task": wire.TaskRequest,
    "Limits": wire.Limits,
    "A batch": wire.BatchRequest,
    "Opening a session": wire.SessionRequest,
    "exec": wire.ExecRequest,
    "read": wire.ReadRequest,
    "write": wire.WriteRequest,
    "Repositories": wire.ReposRequest,
    "Environments": wire.EnvironmentsRequest,
}
CAPS = {"model_patch": wire.MAX_PATCH_BYTES, "test_patch": wire.MAX_TEST_PATCH_BYTES}


class Row(NamedTuple):
    """One field, as the page describes it."""

    type: str
    default: str
    bounds: str
    meaning: str


def section(heading: str) -> str:
    found = re.search(rf"^#+ {re.escape(heading)}\n(.*?)(?=^#|\Z)", TEXT, flags=re.M | re.S)
    assert found is not None, f"no section {heading!r}"
    return found[1]


def table(heading: str) -> dict[str, list[str]]:
    """First cell, without its quotes, to the other ones."""
    lines = [line for line in section(heading).splitlines() if line.startswith("| `")]
    cells = [[cell.strip() for cell in line.strip("|").split("|")] for line in lines]
    return {first.strip("`"): rest for first, *rest in cells}


def fields(model: type[BaseModel]) -> Iterator[tuple[str, FieldInfo]]:
    """The fields that a table lists: a session's own ones only."""
    inherited = wire.TaskRequest.model_fields if model is wire.SessionRequest else {}
    for name, field in model.model_fields.items():
        if name not in inherited:
            yield field.alias or name, field


def type_of(name: str, model: type[BaseModel]) -> str:
    schema = model.model_json_schema(by_alias=True)
    field = schema["properties"][name]
    if "$ref" in field:
        field = schema["$defs"][field["$ref"].rsplit("/", 1)[-1]]
    options = [one["type"] for one in field.get("anyOf", [field])]
    names = {"array": "list"}
    return " or ".join(names.get(option, option) for option in options)


def numbers_of(name: str, field: FieldInfo) -> set[float]:
    """Every bound of a field's value or length."""
    found = {getattr(one, key) for one in field.metadata for key in ("ge", "gt", "le", "lt") if hasattr(one, key)}
    found |= {one.min_length for one in field.metadata if getattr(one, "min_length", 0)}
    found |= {one.max_length for one in field.metadata if getattr(one, "max_length", None) is not None}
    return {float(one) for one in found | ({CAPS[name]} if name in CAPS else set())}


def default_of(field: FieldInfo) -> str:
    if field.is_required():
        return "required"
    value: Any = field.get_default(call_default_factory=True)
    if isinstance(value, BaseModel):
        return "`{}`"
    whole = isinstance(value, float) and value.is_integer()
    return f"`{json.dumps(int(value) if whole else value)}`"


@pytest.mark.parametrize("heading", REQUESTS)
def test_every_field_of_a_request_is_described_as_it_is(heading: str) -> None:
    model = REQUESTS[heading]
    rows = {name: Row(*cells) for name, cells in table(heading).items()}
    assert list(rows) == [name for name, _ in fields(model)]
    for name, field in fields(model):
        row = rows[name]
        assert (row.type, row.default) == (type_of(name, model), default_of(field)), name
        assert {float(text) for text in re.findall(r"\d+(?:\.\d+)?", row.bounds)} == numbers_of(name, field), name
        assert len(row.meaning) > 10, name


def test_the_values_that_a_field_may_have_are_named() -> None:
    for heading, model in REQUESTS.items():
        for name, field in model.model_json_schema(by_alias=True)["properties"].items():
            if name in table(heading):
                missing = [
                    value for value in field.get("enum", []) if f"`{value}`" not in " ".join(table(heading)[name])
                ]
                assert missing == [], name


def test_every_field_of_a_reply_is_described() -> None:
    assert list(table("The reply")) == list(wire.TaskResponse.model_fields)
    for name, (kind, meaning) in table("The reply").items():
        assert kind.split()[0] == type_of(name, wire.TaskResponse), name
        assert len(meaning) > 10


def test_every_status_is_described_with_what_becomes_of_it() -> None:
    rows = table("Statuses")
    assert list(rows) == [status.value for status in VerdictStatus]
    for status in VerdictStatus:
        reward = "masked" if not status.is_scorable else "1" if status is VerdictStatus.RESOLVED else "0"
        assert rows[status][0] == reward, status
    assert list(table("Statuses of a test")) == [status.value for status in TestStatus]


def test_the_client_sends_fields_of_the_reference() -> None:
    task = Task(
        instance_id="a", repo="/r", base_commit="0" * 40, problem_statement="", test_patch="", fail_to_pass=("t.py::t",)
    )
    assert set(request_body(task, "")) <= set(table("A task"))


def test_the_readme_names_every_field_of_a_task() -> None:
    text = (PAGE.parent.parent.parent / "packages/dockyard-sandbox/README.md").read_text()
    names = [*fields(wire.TaskRequest), *fields(wire.Limits)]
    assert [name for name, _ in names if f"`{name}`" not in text] == []
    required = [name for name, field in fields(wire.TaskRequest) if field.is_required()]
    listed = ", ".join(f"`{name}`" for name in required[:-1])
    assert f"{listed} and `{required[-1]}` are required" in text


def test_caps_are_named() -> None:
    for number in (wire.MAX_BODY_BYTES, wire.MAX_PATCH_BYTES, wire.MAX_TEST_PATCH_BYTES):
        assert f"{number >> 20} MiB" in TEXT
    assert f"{MAX_DEADLINE_S:g}" in TEXT
