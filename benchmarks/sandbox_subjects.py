"""The ways to a verdict that `benchmarks.sandbox_throughput` compares, and the repository that they judge.

bare        pytest alone, in a checkout that has both patches already and keeps its bytecode
bare+tree   what a short script does: git worktree add, git apply, pytest, git worktree remove
cold        a sandbox server without its warm path
warm        a sandbox server as it is by default
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import os
import queue
import re
import subprocess
import sys
import time
import uuid
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

import httpx

from benchmarks.sandbox_figures import Sample
from dockyard_core import Task
from dockyard_sandbox import SandboxClient, start_server

FILES = {
    "calc/__init__.py": "",
    "calc/ops.py": "def mul(a, b):\n    return a * b\n\n\ndef add(a, b):\n    return a - b\n",
    "tests/conftest.py": "import pytest\n\n\n@pytest.fixture\ndef two():\n    return 2\n",
    "tests/test_ops.py": "from calc.ops import mul\n\n\ndef test_mul(two):\n    assert mul(two, 3) == 6\n",
    "pyproject.toml": '[project]\nname = "calc"\nversion = "0"\n\n[tool.pytest.ini_options]\ntestpaths = ["tests"]\n',
}
FIX = """\
diff --git a/calc/ops.py b/calc/ops.py
--- a/calc/ops.py
+++ b/calc/ops.py
@@ -5,2 +5,2 @@
 def add(a, b):
-    return a - b
+    return a + b
"""
HELD_OUT = "from calc.ops import add\n\n\ndef test_add(two):\n    assert add(two, 3) == 5\n"
PYTEST = [sys.executable, "-m", "pytest", "-q", "tests/test_add.py", "tests/test_ops.py"]
_RUNS = re.compile(r'^dockyard_sandbox_runs\{path="(\w+)"\} (\S+)$', re.M)
_IDENTITY = {f"GIT_{who}_{what}": "t@example.org" for who in ("AUTHOR", "COMMITTER") for what in ("NAME", "EMAIL")}


@dataclass(frozen=True)
class Project:
    """A git repository with one bug, and the task of fixing it."""

    path: Path
    commit: str

    @property
    def task(self) -> Task:
        return Task(
            instance_id="calc-1",
            repo=str(self.path),
            base_commit=self.commit,
            problem_statement="add subtracts",
            test_patch=_new_file("tests/test_add.py", HELD_OUT),
            fail_to_pass=("tests/test_add.py::test_add",),
            pass_to_pass=("tests/test_ops.py::test_mul",),
            timeout_s=60.0,
        )


class Subject(Protocol):
    """One way to a verdict."""

    def judge_all(self, project: Project, patches: Sequence[str], clients: int) -> list[Sample]:
        """Judge every patch, ``clients`` at a time. Raises RuntimeError unless each resolves by a run of its own."""

    def counters(self) -> dict[str, float]:
        """CPU seconds so far, by stage, of what no sample speaks of."""


def make_project(path: Path, num_files: int = len(FILES)) -> Project:
    """Commit the repository to ``path``, with text files beside it until it has ``num_files``."""
    fill = {f"data/{number // 100:03}/{number:05}.txt": f"{number}\n" for number in range(num_files - len(FILES))}
    for name, content in {**FILES, **fill}.items():
        (path / name).parent.mkdir(parents=True, exist_ok=True)
        (path / name).write_text(content)
    for arguments in (["init", "--quiet"], ["add", "--all"], ["commit", "--quiet", "--message", "base"]):
        run(["git", *arguments], path)
    commit = subprocess.run(["git", "rev-parse", "HEAD"], cwd=path, check=True, capture_output=True, text=True).stdout
    return Project(path, commit.strip())


def new_patches(count: int) -> list[str]:
    """The fix with a file that no other patch has: no two of them make the same tree, so no cache can answer."""
    marks = [uuid.uuid4().hex for _ in range(count)]
    return [FIX + _new_file(f"calc/mark_{mark}.py", f"MARK = {mark!r}\n") for mark in marks]


def _new_file(name: str, content: str) -> str:
    lines = content.splitlines(keepends=True)
    head = f"diff --git a/{name} b/{name}\nnew file mode 100644\n--- /dev/null\n+++ b/{name}\n"
    return f"{head}@@ -0,0 +1,{len(lines)} @@\n" + "".join(f"+{line}" for line in lines)


def run(command: Sequence[str], directory: Path) -> float:
    """Run a command as a user's shell would and return its CPU seconds. Raises RuntimeError when it fails."""
    kept = {name: value for name, value in os.environ.items() if not name.startswith(("PYTHON", "PYTEST_", "GIT_"))}
    process = subprocess.Popen(
        command,
        cwd=directory,
        env={**kept, **_IDENTITY, "PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1"},
        stdin=subprocess.DEVNULL,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
    )
    _, status, usage = os.wait4(process.pid, 0)  # the only call that says what this one process has used
    process.returncode = os.waitstatus_to_exitcode(status)
    if process.returncode != 0:
        raise RuntimeError(f"{' '.join(command)} in {directory} ended with {process.returncode}")
    return usage.ru_utime + usage.ru_stime


class Bare:
    """pytest in checkouts that are ready: one per client, kept, with the bytecode of their tests."""

    def __init__(self, project: Project, folder: Path, clients: int) -> None:
        self._checkouts: queue.SimpleQueue[Path] = queue.SimpleQueue()
        for number in range(clients):
            tree = Tree(project, folder / f"checkout-{number}")
            tree.add()
            tree.apply(FIX)
            self._checkouts.put(tree.directory)

    def judge_all(self, project: Project, patches: Sequence[str], clients: int) -> list[Sample]:
        with ThreadPoolExecutor(clients) as pool:
            return list(pool.map(self._judge, patches))

    def counters(self) -> dict[str, float]:
        return {}

    def _judge(self, patch: str) -> Sample:
        began = time.monotonic()
        checkout = self._checkouts.get()
        cpu_s = run(PYTEST, checkout)
        self._checkouts.put(checkout)
        seconds = time.monotonic() - began
        return Sample(seconds, {"test": seconds}, {"test": cpu_s})


class BareTree:
    """A fresh tree per verdict, made and removed by git."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._numbers = itertools.count()

    def judge_all(self, project: Project, patches: Sequence[str], clients: int) -> list[Sample]:
        with ThreadPoolExecutor(clients) as pool:
            return list(pool.map(lambda patch: self._judge(project, patch), patches))

    def counters(self) -> dict[str, float]:
        return {}

    def _judge(self, project: Project, patch: str) -> Sample:
        tree = Tree(project, self._folder / f"tree-{next(self._numbers)}")
        wall_s: dict[str, float] = {}
        cpu_s = {"git": 0.0, "test": 0.0}
        began = time.monotonic()
        for stage, step in (
            ("tree", tree.add),
            ("apply", lambda: tree.apply(patch)),
            ("test", lambda: run(PYTEST, tree.directory)),
            ("remove", tree.remove),
        ):
            started = time.monotonic()
            cpu_s["test" if stage == "test" else "git"] += step()
            wall_s[stage] = time.monotonic() - started
        return Sample(time.monotonic() - began, wall_s, cpu_s)


class Tree:
    """One worktree of a project; every step returns the CPU seconds of git."""

    def __init__(self, project: Project, directory: Path) -> None:
        self._project = project
        self.directory = directory

    def add(self) -> float:
        arguments = ["worktree", "add", "--quiet", "--detach", str(self.directory), self._project.commit]
        return run(["git", *arguments], self._project.path)

    def apply(self, patch: str) -> float:
        path = self.directory.with_suffix(".patch")
        path.write_text(patch + self._project.task.test_patch)
        cpu_s = run(["git", "apply", str(path)], self.directory)
        path.unlink()
        return cpu_s

    def remove(self) -> float:
        return run(["git", "worktree", "remove", "--force", str(self.directory)], self._project.path)


class Server:
    """A sandbox server of our own, asked by the client that a trainer uses."""

    def __init__(self, name: str, root: Path, *, workers: int, is_warm: bool) -> None:
        self.name = name
        self.is_warm = is_warm
        self._handle = start_server(root, workers=workers, warm=is_warm)
        self.isolation = self._handle.isolation
        self._loop = asyncio.Runner()
        self._client = SandboxClient(self._handle.url, timeout_s=300.0, max_retries=0, max_connections=4 * workers)
        found = httpx.get(f"{self._handle.url}/readyz", trust_env=False).json()["warm"]
        if found is not is_warm:
            self.close()
            raise RuntimeError(f"{name}: /readyz must say warm {is_warm}, it says {found}; see serve.log in {root}")

    def judge_all(self, project: Project, patches: Sequence[str], clients: int) -> list[Sample]:
        return self._loop.run(self._judge_all(project.task, patches, clients))

    def counters(self) -> dict[str, float]:
        own, reaped = _cpu_of(self._handle.pid)
        launcher = sum(_cpu_of(pid)[0] for pid in _children_of(self._handle.pid))
        return {"server": own, "git": reaped, "launcher": launcher}

    def runs(self) -> dict[str, int]:
        """Test runs so far, by path: cold or warm."""
        text = httpx.get(f"{self._handle.url}/metrics", trust_env=False).text
        return {path: int(float(count)) for path, count in _RUNS.findall(text)}

    def close(self) -> None:
        self._loop.run(self._client.aclose())
        self._loop.close()
        self._handle.stop()

    async def _judge_all(self, task: Task, patches: Sequence[str], clients: int) -> list[Sample]:
        waiting, samples = iter(patches), list[Sample]()

        async def client() -> None:
            for patch in waiting:
                samples.append(await self._judge(task, patch))

        async with asyncio.TaskGroup() as group:
            for _ in range(clients):
                group.create_task(client())
        return samples

    async def _judge(self, task: Task, patch: str) -> Sample:
        began = time.monotonic()
        verdict = await self._client.judge(task, patch, attempt_id=uuid.uuid4().hex)
        seconds = time.monotonic() - began
        if not verdict.is_resolved or verdict.cached or verdict.flags:  # a flagged fix would be run three times
            raise RuntimeError(f"{self.name}: every patch must resolve by one run of its own, got {verdict}")
        wall_s = {stage: value for stage, value in verdict.duration_s.items() if stage != "cpu"}
        http_s = seconds - verdict.duration_s["total"]
        return Sample(seconds, {**wall_s, "http": http_s}, {"test": verdict.duration_s["cpu"]})


def _cpu_of(pid: int) -> tuple[float, float]:
    """CPU seconds of a process, and of the children that it has waited for."""
    ticks, fields = os.sysconf("SC_CLK_TCK"), _stat(pid)
    return (int(fields[11]) + int(fields[12])) / ticks, (int(fields[13]) + int(fields[14])) / ticks


def _children_of(parent: int) -> Iterator[int]:
    for path in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(FileNotFoundError, ProcessLookupError):  # it has ended meanwhile
            if int(_stat(int(path.name))[1]) == parent:
                yield int(path.name)


def _stat(pid: int) -> list[str]:
    return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
