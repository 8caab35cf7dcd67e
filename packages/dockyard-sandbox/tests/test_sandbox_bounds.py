"""Patches that cost the trusted side: what git and the server spend on one is bounded, and never our fault."""

from __future__ import annotations

import asyncio
import hashlib
import os
import signal
import subprocess
import time
import zlib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import httpx
import pytest

from dockyard_core import VerdictStatus as S
from dockyard_sandbox import start_server
from dockyard_sandbox.cancellation import Cancellation
from dockyard_sandbox.executor import Executor
from dockyard_sandbox.gitcmd import Bounds, Git, GitFailed, write_git_config
from dockyard_sandbox.repos import RepoStore
from dockyard_sandbox.wire import TaskRequest, TaskResponse

_DIGITS = "0123456789ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz!#$%&()*+-;<=>?@^_`{|}~"


def base85(data: bytes) -> str:
    """git's lines: a length character, then five digits for every four bytes."""
    lines = []
    for start in range(0, len(data), 52):
        chunk = data[start : start + 52]
        padded, length = chunk + bytes(-len(chunk) % 4), len(chunk)
        text = ""
        for word in range(0, len(padded), 4):
            value = int.from_bytes(padded[word : word + 4], "big")
            text += "".join(_DIGITS[value // 85**power % 85] for power in (4, 3, 2, 1, 0))
        lines.append((chr(64 + length) if length <= 26 else chr(70 + length)) + text)
    return "\n".join(lines)


def literal(path: str, chunk: bytes, count: int) -> str:
    """A binary patch that makes ``path`` of ``count`` times ``chunk``."""
    size = len(chunk) * count
    compressor, digest, data = zlib.compressobj(9), hashlib.sha1(b"blob %d\0" % size), b""
    for _ in range(count):
        data += compressor.compress(chunk)
        digest.update(chunk)
    data += compressor.flush()
    return (
        f"diff --git a/{path} b/{path}\nnew file mode 100644\nindex {'0' * 40}..{digest.hexdigest()}\n"
        f"GIT binary patch\nliteral {size}\n{base85(data)}\n\nliteral 0\nHcmV?d00001\n\n"
    )


def slow_patch() -> str:
    """A hunk of 100,000 empty lines that matches everywhere but in its last line: git tries each place."""
    body = " \n" * 99_998 + "-z\n+y\n \n"
    head = "diff --git a/big b/big\n--- a/big\n+++ b/big\n@@ -1500000,100000 +1500000,100000 @@\n"
    return literal("big", b"\n" * 1_000_000, 3) + head + body


def peak_mb(pid: int) -> int:
    line = next(line for line in Path(f"/proc/{pid}/status").read_text().splitlines() if line.startswith("VmHWM"))
    return int(line.split()[1]) // 1024


@pytest.mark.parametrize(
    ("mib", "status"), [(70, S.POLICY_VIOLATION), pytest.param(600, S.APPLY_FAILED, marks=pytest.mark.ci)]
)
def test_a_small_patch_of_a_large_file_does_not_fill_the_server(mib: int, status: S, project: Any, judge: Any) -> None:
    patch = project.gold() + literal("calc/zeros.bin", bytes(1 << 20), mib)
    assert len(patch) < 1 << 20
    assert judge(project.task(), patch).status is status
    assert peak_mb(judge.server.pid) < 300


@pytest.mark.ci
def test_a_patch_that_git_cannot_finish_is_the_policys_doing(project: Any, judge: Any) -> None:
    assert judge(project.task(), slow_patch()).status is S.APPLY_FAILED


def eventually(condition: Callable[[], bool], deadline_s: float = 15.0) -> bool:
    end = time.monotonic() + deadline_s
    while not condition():
        if time.monotonic() > end:
            return False
        time.sleep(0.05)
    return True


def git_children(pid: int) -> list[int]:
    """Processes ``git apply`` below the server, or orphaned by it."""
    found = []
    for path in Path("/proc").glob("[0-9]*"):
        try:
            command = (path / "cmdline").read_bytes().split(b"\0")
            parent = int((path / "stat").read_text().rsplit(")", 1)[1].split()[1])
        except OSError:
            continue
        if command[:2] == [b"git", b"apply"] and parent in (pid, 1):
            found.append(int(path.name))
    return found


@pytest.mark.parametrize("how", ["the client goes away", "the server is killed"])
def test_git_ends_with_whoever_asked_for_it(how: str, project: Any, tmp_path: Path, body: Any) -> None:
    handle = start_server(tmp_path / "root", workers=1)
    task = body(project.task(), slow_patch())

    async def ask() -> int:
        async with httpx.AsyncClient(timeout=60.0, trust_env=False) as http:
            call = asyncio.create_task(http.post(handle.url + "/task/submit", json=task))
            found: list[int] = []  # kept as it was seen: git may be run again, and be between two runs at a second look

            def has_begun() -> bool:
                found.extend(git_children(handle.pid))
                return bool(found)

            assert await asyncio.to_thread(eventually, has_begun)
            (git,) = found
            if how == "the client goes away":
                call.cancel()
            else:
                os.kill(handle.pid, signal.SIGKILL)
            with pytest.raises((httpx.TransportError, asyncio.CancelledError)):
                await call
            return git

    try:
        git = asyncio.run(ask())
        assert eventually(lambda: is_gone(git) and not git_children(handle.pid), 5.0)
    finally:
        handle.stop()


def is_gone(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[0] == "Z"
    except OSError:
        return True


def new_file(path: str) -> str:
    return f"diff --git a/{path} b/{path}\nnew file mode 100644\n--- /dev/null\n+++ b/{path}\n@@ -0,0 +1 @@\n+x\n"


NO_PLACE = {
    "name of 300 bytes": lambda p: new_file("calc/" + "a" * 300),
    "path of 5000 bytes": lambda p: new_file("calc/" + "/".join(["d" * 200] * 25) + "/x"),
    "file above a file": lambda p: new_file("zz") + new_file("zz/y"),
    "file in place of the tests": lambda p: (
        p.patch({"tests/conftest.py": None, "tests/test_ops.py": None}) + new_file("tests")
    ),
}


@pytest.mark.parametrize("name", NO_PLACE)
def test_a_tree_that_no_file_system_holds_is_a_violation(name: str, project: Any, judge: Any, body: Any) -> None:
    reply = judge.post(body(project.task(), NO_PLACE[name](project))).json()
    assert (reply["status"], reply["retryable"]) == ("policy_violation", False)


@pytest.mark.parametrize("content", ["tool = 1\n", f"a = {'[' * 3000}{']' * 3000}\n", f"x = {'9' * 5000}\n"])
def test_an_odd_pyproject_is_put_back(content: str, project: Any, judge: Any) -> None:
    fixed = (project.path / "calc" / "ops.py").read_text().replace("a - b", "a + b")
    verdict = judge(project.task(), project.patch({"pyproject.toml": content, "calc/ops.py": fixed}))
    assert (verdict.status, verdict.flags) == (S.RESOLVED, ("restored:pyproject.toml",))


def test_a_large_test_patch_is_no_fault_of_the_policy(project: Any, judge: Any) -> None:
    held_out = "from calc.ops import add\n\n\ndef test_add():\n    assert add(2, 3) == 5\n"
    files = {"tests/data.txt": "x" * 1_100_000 + "\n", "tests/test_add.py": held_out}
    assert judge(project.task(test_patch=project.patch(files)), project.gold()).status is S.RESOLVED


@pytest.fixture
def git(tmp_path: Path) -> Git:
    return write_git_config(tmp_path / "gitconfig")


def test_a_mirror_whose_making_was_cut_short_is_made_again(project: Any, git: Git, tmp_path: Path) -> None:
    store = RepoStore(tmp_path, git)
    bare = tmp_path / "repos" / f"{hashlib.sha256(str(project.path).encode()).hexdigest()[:24]}"
    (bare / "objects").mkdir(parents=True)
    assert store.tree_of(str(project.path), project.commit)[1] == project.git("rev-parse", "HEAD^{tree}").strip()


def test_locks_of_a_killed_fetch_are_removed(project: Any, git: Git, tmp_path: Path) -> None:
    store = RepoStore(tmp_path, git)
    bare = tmp_path / "repos" / f"{hashlib.sha256(str(project.path).encode()).hexdigest()[:24]}"
    subprocess.run(["git", "init", "--quiet", "--bare", str(bare)], check=True)
    branch = project.git("rev-parse", "--abbrev-ref", "HEAD").strip()
    (bare / "refs" / "heads" / f"{branch}.lock").write_text("")
    assert store.tree_of(str(project.path), project.commit)[0] == bare


def test_a_cancelled_call_ends_at_once(git: Git) -> None:
    cancellation = Cancellation()
    cancellation.cancel()
    with pytest.raises(GitFailed, match="-9"):
        git.run("hash-object", "--stdin", stdin=b"x", cancellation=cancellation)


def test_bounds_hold_from_the_first_byte(git: Git) -> None:
    tight = Bounds(memory_mb=64, cpu_s=1, file_mb=1)
    assert git.run("hash-object", "--stdin", stdin=b"x", bounds=tight)
    with pytest.raises(GitFailed):
        git.run("hash-object", "--stdin", stdin=bytes(128 << 20), bounds=tight)


class _Broken:
    """Stands in for the parts of an executor; the preparer's defect is what the test is about."""

    def resolve(self, repo: str) -> str:
        return repo

    def has_warm_path(self, environment: str | None) -> bool:
        return False

    def prepare(self, request: Any, cancellation: Any) -> Any:
        raise ZeroDivisionError("a defect of ours")

    def close(self) -> None:
        pass


def test_a_defect_of_ours_is_logged_and_never_scored(project: Any, body: Any, caplog: pytest.LogCaptureFixture) -> None:
    broken: Any = _Broken()

    async def ask() -> TaskResponse:
        executor = Executor(
            repos=broken, preparer=broken, jailer=broken, deciding_files=broken, isolation="unsafe", workers=1
        )
        try:
            return await executor.submit(TaskRequest.model_validate(body(project.task(), "")))
        finally:
            await executor.close()

    reply = asyncio.run(ask())
    assert (reply.status, reply.retryable) == (S.INFRA_ERROR, False)
    assert "ZeroDivisionError: a defect of ours" in reply.detail
    assert "Traceback" in caplog.text
