"""Task files of ``dockyard-sandbox certify``: JSON lines with SWE-bench's columns."""

from __future__ import annotations

import json
from pathlib import Path

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from dockyard_core import DataError, Task
from dockyard_sandbox.wire import TestIds


class _Row(BaseModel):
    """Columns that a certificate needs; others are ignored, as dumps carry many."""

    model_config = ConfigDict(frozen=True, extra="ignore")

    instance_id: str = Field(min_length=1)
    repo: str = Field(min_length=1)
    base_commit: str = Field(min_length=7)
    patch: str = Field(min_length=1)
    test_patch: str = ""
    fail_to_pass: TestIds = Field(alias="FAIL_TO_PASS")
    pass_to_pass: TestIds = Field(default=(), alias="PASS_TO_PASS")
    environment: str | None = None
    test_command: str | None = None
    plugins: tuple[str, ...] = ()
    timeout_s: float = Field(default=60.0, gt=0)
    apply: str = Field(default="strict", pattern="^(strict|swebench)$")


def read_tasks(path: Path) -> list[Task]:
    """Read a task file; a repository that is a relative path is looked for beside the file.

    Raises DataError ``file:line: field: rule``, also for a file that holds no task.
    """
    try:
        lines = path.read_bytes().splitlines()
    except OSError as error:
        raise DataError(f"{path}: cannot be read: {error.strerror}") from error
    tasks = [_task(line, f"{path}:{number}", path.parent) for number, line in enumerate(lines, 1) if line.strip()]
    if not tasks:
        raise DataError(f"{path}: must hold a task, one JSON object per line")
    return tasks


def _task(line: bytes, where: str, directory: Path) -> Task:
    try:
        row = _Row.model_validate(json.loads(line))
    except ValidationError as error:
        first = error.errors(include_url=False, include_context=False)[0]
        raise DataError(f"{where}: {'.'.join(map(str, first['loc']))}: {first['msg']}") from error
    except (ValueError, RecursionError) as error:
        raise DataError(f"{where}: must be JSON: {error}") from error
    beside = directory / row.repo
    return Task(
        instance_id=row.instance_id,
        repo=str(beside.resolve()) if beside.exists() else row.repo,
        base_commit=row.base_commit,
        problem_statement="",
        test_patch=row.test_patch,
        fail_to_pass=row.fail_to_pass,
        pass_to_pass=row.pass_to_pass,
        gold_patch=row.patch,
        environment=row.environment,
        test_command=row.test_command,
        plugins=row.plugins,
        timeout_s=row.timeout_s,
        apply="swebench" if row.apply == "swebench" else "strict",
    )
