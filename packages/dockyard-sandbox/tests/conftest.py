"""A real repository, a real server, and a way to write patches as git writes them."""

from __future__ import annotations

import asyncio
import json
import os
import subprocess
import uuid
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path
from typing import Any

import httpx
import pytest

from dockyard_core import Task, Verdict
from dockyard_core.testing.sandbox_contract import SandboxCase
from dockyard_sandbox import SandboxClient, ServerHandle, start_server
from dockyard_sandbox.client import request_body

OPS = """def add(a, b):
    return a - b


def mul(a, b):
    return a * b
"""
FIXED = OPS.replace("a - b", "a + b")
FILES = {
    "calc/__init__.py": "",
    "calc/ops.py": OPS,
    "tests/conftest.py": "import pytest\n\n\n@pytest.fixture\ndef two():\n    return 2\n",
    "tests/test_ops.py": "from calc.ops import mul\n\n\ndef test_mul(two):\n    assert mul(two, 3) == 6\n",
    "pyproject.toml": '[project]\nname = "calc"\nversion = "0"\n\n[tool.pytest.ini_options]\ntestpaths = ["tests"]\n',
}
HELD_OUT = "from calc.ops import add\n\n\ndef test_add(two):\n    assert add(two, 3) == 5\n"


@dataclass(frozen=True)
class Project:
    """A git repository with one bug, and the task of fixing it."""

    path: Path
    commit: str

    def git(self, *arguments: str) -> str:
        environment = {
            "PATH": os.environ["PATH"],
            "HOME": str(self.path),
            "GIT_CONFIG_NOSYSTEM": "1",
            **{f"GIT_{who}_{what}": "t@example.org" for who in ("AUTHOR", "COMMITTER") for what in ("NAME", "EMAIL")},
        }
        return subprocess.run(
            ["git", *arguments], cwd=self.path, env=environment, check=True, capture_output=True, text=True
        ).stdout

    def patch(self, files: Mapping[str, str | bytes | None]) -> str:
        """The diff that writes ``files`` (None deletes, 'symlink:x' links) over the base commit."""
        for name, content in files.items():
            target = self.path / name
            target.unlink(missing_ok=True)
            if content is None:
                continue
            target.parent.mkdir(parents=True, exist_ok=True)
            if isinstance(content, bytes):
                target.write_bytes(content)
            elif content.startswith("symlink:"):
                target.symlink_to(content.removeprefix("symlink:"))
            else:
                target.write_text(content)
        self.git("add", "--all", "--force")
        diff = self.git("diff", "--cached", "--binary", "--no-renames", "HEAD")
        self.git("reset", "--quiet", "--hard", "HEAD")
        self.git("clean", "--quiet", "-ffdx")
        return diff

    def task(self, **changes: Any) -> Task:
        task = Task(
            instance_id="calc-1",
            repo=str(self.path),
            base_commit=self.commit,
            problem_statement="add subtracts",
            test_patch=_held_out_patch(self),
            fail_to_pass=("tests/test_add.py::test_add",),
            pass_to_pass=("tests/test_ops.py::test_mul",),
            timeout_s=30.0,
        )
        return replace(task, **changes)

    def gold(self) -> str:
        return self.patch({"calc/ops.py": FIXED})

    def case(self) -> SandboxCase:
        return SandboxCase(
            task=self.task(),
            gold_patch=self.gold(),
            wrong_patch=self.patch({"calc/ops.py": OPS.replace("a - b", "a * b")}),
            breaking_patch=self.patch({"calc/ops.py": FIXED.replace("a * b", "a + b")}),
        )


@cache
def _held_out_patch(project: Project) -> str:
    return project.patch({"tests/test_add.py": HELD_OUT})


def make_project(path: Path, files: Mapping[str, str] = FILES) -> Project:
    path.mkdir(parents=True)
    draft = Project(path, "")
    draft.git("init", "--quiet")
    for name, content in files.items():
        (path / name).parent.mkdir(parents=True, exist_ok=True)
        (path / name).write_text(content)
    draft.git("add", "--all")
    draft.git("commit", "--quiet", "--message", "base")
    return Project(path, draft.git("rev-parse", "HEAD").strip())


@dataclass(frozen=True)
class Judge:
    """Asks one server."""

    server: ServerHandle

    def __call__(self, task: Task, patch: str, *, attempt_id: str | None = None) -> Verdict:
        return self.all(task, [patch], attempt_id=attempt_id)[0]

    def post(self, content: Any, *, path: str = "/task/submit", **headers: str) -> httpx.Response:
        """Send JSON, or bytes as they are."""
        data = content if isinstance(content, bytes) else json.dumps(content).encode()
        method = "PUT" if path == "/repos" else "POST"
        named = {name.replace("_", "-"): value for name, value in headers.items()}
        return httpx.request(
            method, self.server.url + path, content=data, headers=named, timeout=120.0, trust_env=False
        )

    def all(self, task: Task, patches: list[str], *, attempt_id: str | None = None) -> list[Verdict]:
        async def ask() -> list[Verdict]:
            async with SandboxClient(self.server.url, timeout_s=120.0) as client:
                calls = [client.judge(task, patch, attempt_id=attempt_id or uuid.uuid4().hex) for patch in patches]
                return list(await asyncio.gather(*calls))

        return asyncio.run(ask())


@pytest.fixture(scope="session")
def project(tmp_path_factory: pytest.TempPathFactory) -> Project:
    return make_project(tmp_path_factory.mktemp("project") / "calc")


@pytest.fixture(scope="session")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ServerHandle]:
    handle = start_server(tmp_path_factory.mktemp("root"), workers=2)
    yield handle
    assert handle.stop() == 0


@pytest.fixture(scope="session")
def judge(server: ServerHandle) -> Judge:
    return Judge(server)


@pytest.fixture(scope="session")
def new_project() -> Any:
    return make_project


@pytest.fixture(scope="session")
def body() -> Any:
    return request_body
