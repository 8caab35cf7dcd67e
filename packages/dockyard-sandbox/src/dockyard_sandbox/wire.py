"""The bytes that enter and leave the server: closed models, SWE-bench's field names."""

from __future__ import annotations

import hashlib
import json
import shlex
from pathlib import PurePosixPath
from typing import Annotated, Any, Literal

from pydantic import (
    AfterValidator,
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Field,
    ValidationInfo,
    field_validator,
    model_validator,
)
from pydantic_core import PydanticCustomError

from dockyard_core import TestStatus, VerdictStatus

MAX_BODY_BYTES = 64 * 1024 * 1024
MAX_PATCH_BYTES = 1024 * 1024
MAX_TEST_PATCH_BYTES = 16 * 1024 * 1024
PATCH_TOO_LARGE = "patch_too_large"
MAX_TASKS = 1024
MAX_FILE_BYTES = 8 * 1024 * 1024
"""Of one read or write of a session."""
MAX_TESTS = 20_000
ENVIRONMENT_NAME = r"^[A-Za-z0-9][A-Za-z0-9_.-]{0,127}$"


def _json_list(value: object) -> object:
    """Some dumps of SWE-bench carry lists as JSON strings."""
    if not isinstance(value, str):
        return value
    try:
        return json.loads(value)
    except ValueError as error:
        raise ValueError(f"must be a list of test ids, or one as a JSON string: {error}") from None


def _test_id(value: str) -> str:
    path, separator, name = value.partition("::")
    parts = PurePosixPath(path).parts
    outside = path.startswith(("/", "-")) or ".." in parts or "\0" in value
    if not separator or not name or not parts or outside or str(PurePosixPath(path)) != path:
        raise ValueError(f"must be a pytest node id 'relative/file.py::name' as pytest writes it, got {value[:200]!r}")
    return value


def _inside(value: str) -> str:
    if value.startswith("/") or ".." in PurePosixPath(value).parts or str(PurePosixPath(value)) != value:
        raise ValueError(f"must be a path relative to the repository, as git writes it, got {value[:200]!r}")
    return value


def _split_command(command: str) -> tuple[str, ...]:
    words = shlex.split(command)
    for prefix in (["pytest"], ["py.test"], ["python", "-m", "pytest"], ["python3", "-m", "pytest"]):
        if words[: len(prefix)] == prefix:
            return tuple(words[len(prefix) :])
    raise ValueError(f"must be a pytest command ('pytest …' or 'python -m pytest …'), got {command[:200]!r}")


TestId = Annotated[str, Field(max_length=4096)]
TestIds = Annotated[tuple[TestId, ...], BeforeValidator(_json_list), Field(max_length=MAX_TESTS)]


PluginName = Annotated[str, Field(max_length=256, pattern=r"^[A-Za-z_]\w*(\.[A-Za-z_]\w*)*$")]
RelativePath = Annotated[str, Field(min_length=1, max_length=4096), AfterValidator(_inside)]
ALL_PLUGINS = "auto"


class _Closed(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True)


class Limits(_Closed):
    """What one run may use."""

    memory_mb: int = Field(default=2048, ge=64, le=1024 * 1024)
    pids: int = Field(default=128, ge=4, le=32768)
    disk_mb: int = Field(default=256, ge=1, le=1024 * 1024)
    output_kb: int = Field(default=1024, ge=1, le=256 * 1024)
    cpus: float | None = Field(default=None, ge=0.05, le=1024)
    """Quota of CPU time; None = an equal share of what runs at once. Needs a writable cpu control group."""


class TaskRequest(_Closed):
    """One patch to judge."""

    instance_id: str = Field(min_length=1, max_length=512)
    repo: str = Field(min_length=1, max_length=4096)
    base_commit: str = Field(pattern=r"^[0-9a-fA-F]{7,64}$")
    model_patch: str = ""
    test_patch: str = ""
    fail_to_pass: TestIds = Field(alias="FAIL_TO_PASS")
    pass_to_pass: TestIds = Field(default=(), alias="PASS_TO_PASS")
    environment: str | None = Field(default=None, pattern=ENVIRONMENT_NAME)
    """None or "default" = the executor's own interpreter."""
    test_command: str | None = Field(default=None, max_length=4096)
    plugins: tuple[PluginName, ...] = Field(default=(), max_length=64)
    """Plug-ins of pytest to load, as its ``-p`` takes them; "auto" = whatever the environment has installed."""
    exempt_paths: tuple[RelativePath, ...] = Field(default=(), max_length=1000)
    """Paths that the known fix changes: a patch may change them where they would be put back. Never deciding tests."""
    timeout_s: float = Field(default=60.0, gt=0, le=86_400)
    limits: Limits = Limits()
    apply: Literal["strict", "swebench"] = "strict"

    @field_validator("fail_to_pass", "pass_to_pass")
    @classmethod
    def _node_ids(cls, ids: tuple[str, ...]) -> tuple[str, ...]:
        if len(set(ids)) != len(ids):
            raise ValueError("must not name a test twice")
        return tuple(_test_id(one) for one in ids)

    @field_validator("model_patch", "test_patch")
    @classmethod
    def _patch_bytes(cls, patch: str, info: ValidationInfo) -> str:
        cap = MAX_PATCH_BYTES if info.field_name == "model_patch" else MAX_TEST_PATCH_BYTES
        if len(patch.encode()) > cap:
            raise PydanticCustomError(PATCH_TOO_LARGE, "must be at most {cap} bytes", {"cap": cap})
        return patch

    @model_validator(mode="after")
    def _sets(self) -> TaskRequest:
        if not self.fail_to_pass and not self.pass_to_pass:
            raise ValueError("FAIL_TO_PASS or PASS_TO_PASS must name a test: nothing would decide")
        both = set(self.fail_to_pass) & set(self.pass_to_pass)
        if both:
            raise ValueError(f"FAIL_TO_PASS and PASS_TO_PASS must not share {sorted(both)[0]!r}")
        return self

    @field_validator("test_command")
    @classmethod
    def _only_pytest(cls, command: str | None) -> str | None:
        if command is not None:
            _split_command(command)
        return command

    @property
    def pytest_arguments(self) -> tuple[str, ...]:
        """Arguments of ``test_command``."""
        return _split_command(self.test_command or "pytest")

    @property
    def plugin_arguments(self) -> tuple[str, ...]:
        """What makes pytest load ``plugins``."""
        return tuple(word for name in self.plugins if name != ALL_PLUGINS for word in ("-p", name))

    @property
    def deciding_ids(self) -> tuple[str, ...]:
        """Every id of the two sets, FAIL_TO_PASS first."""
        return self.fail_to_pass + self.pass_to_pass

    def spec_hash(self) -> str:
        """Hash of everything but the patch and the name: what the verdict depends on besides the tree."""
        fields = self.model_dump(mode="json", exclude={"model_patch", "instance_id"})
        return hashlib.sha256(json.dumps(fields, sort_keys=True).encode()).hexdigest()


class BatchRequest(_Closed):
    """Several tasks in one request; the reply has their verdicts in the same order."""

    tasks: list[TaskRequest] = Field(min_length=1, max_length=MAX_TASKS)


class ReposRequest(_Closed):
    """Names under which tasks may speak of repositories: name to path or URL."""

    repos: dict[Annotated[str, Field(max_length=256, pattern=r"^[A-Za-z0-9][A-Za-z0-9_./-]*$")], str] = Field(
        min_length=1
    )


class EnvironmentsRequest(_Closed):
    """Names under which tasks may speak of environments: name to image archive or unpacked directory."""

    environments: dict[Annotated[str, Field(pattern=ENVIRONMENT_NAME)], str] = Field(min_length=1)


class SessionRequest(TaskRequest):
    """The task that a session works on; its tests stay on the trusted side until it is finished."""

    idle_ttl_s: float = Field(default=600.0, gt=0, le=86_400)
    """Seconds without a call after which the session is closed."""

    @field_validator("model_patch")
    @classmethod
    def _no_patch(cls, patch: str) -> str:
        if patch:
            raise ValueError("must be empty: a session starts at base_commit, and its own changes are the patch")
        return patch

    def task(self, patch: str) -> TaskRequest:
        """The task with the session's changes as its patch."""
        fields = self.model_dump(by_alias=True, exclude={"idle_ttl_s"})
        return TaskRequest.model_validate({**fields, "model_patch": patch})


class ExecRequest(_Closed):
    """One shell command of a session."""

    command: str = Field(min_length=1, max_length=128 * 1024)
    timeout_s: float = Field(default=60.0, gt=0, le=3600)


class ReadRequest(_Closed):
    """Part of one file of a session."""

    path: str = Field(min_length=1, max_length=4096)
    offset: int = Field(default=0, ge=0)
    max_bytes: int = Field(default=256 * 1024, ge=1, le=MAX_FILE_BYTES)


class WriteRequest(_Closed):
    """One file of a session, whole."""

    path: str = Field(min_length=1, max_length=4096)
    content: str = Field(max_length=MAX_FILE_BYTES * 2)
    encoding: Literal["utf-8", "base64"] = "utf-8"


class Count(_Closed):
    """Passed out of total."""

    passed: int
    total: int


class TaskResponse(_Closed):
    """The verdict on one task, as it travels."""

    task_id: str
    status: VerdictStatus
    resolved: bool
    pass_rate: float
    fail_to_pass: Count
    pass_to_pass: Count
    tests: dict[str, TestStatus]
    flags: tuple[str, ...]
    isolation: str
    duration_s: dict[str, float]
    log: str
    evidence: str
    retryable: bool
    cached: bool
    detail: str


def parse_submission(body: dict[str, Any]) -> tuple[list[TaskRequest], bool]:
    """Return the tasks of a submission and whether it was a batch. Raises pydantic.ValidationError."""
    if "tasks" in body:
        return BatchRequest.model_validate(body).tasks, True
    return [TaskRequest.model_validate(body)], False
