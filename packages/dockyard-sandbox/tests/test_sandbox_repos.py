"""Where repositories come from, and agreement with pytest run by hand."""

from __future__ import annotations

import os
import re
import shutil
import socket
import subprocess
import sys
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import httpx
import pytest

from dockyard_core import VerdictStatus
from dockyard_sandbox.gitcmd import Git, write_git_config
from dockyard_sandbox.repos import FetchFailed, RepoStore, UnknownRepo


def test_every_kind_of_source_gives_the_same_verdict(project: Any, judge: Any, tmp_path: Path) -> None:
    bare, bundle = tmp_path / "bare.git", tmp_path / "calc.bundle"
    project.git("clone", "--quiet", "--bare", str(project.path), str(bare))
    project.git("bundle", "create", "--quiet", str(bundle), "HEAD", "--all")
    for source in (str(bare), str(bundle), f"file://{project.path}"):
        assert judge(project.task(repo=source), project.gold()).status is VerdictStatus.RESOLVED, source


def test_a_commit_made_after_the_clone_is_fetched(new_project: Any, judge: Any, tmp_path: Path) -> None:
    project = new_project(tmp_path / "growing")
    assert judge(project.task(), project.gold()).status is VerdictStatus.RESOLVED
    fixed = (project.path / "calc" / "ops.py").read_text().replace("a - b", "a + b")
    (project.path / "calc" / "ops.py").write_text(fixed)
    project.git("commit", "--quiet", "--all", "--message", "fix")
    head = project.git("rev-parse", "HEAD").strip()
    project.git("reset", "--quiet", "--hard", "HEAD~1")  # no branch holds it any more
    assert judge(project.task(base_commit=head), "").status is VerdictStatus.RESOLVED


def test_symlinks_and_modes_of_the_base_tree_are_kept(new_project: Any, judge: Any, tmp_path: Path) -> None:
    project = new_project(tmp_path / "linked")
    (project.path / "alias").symlink_to("calc")
    (project.path / "tool.sh").write_text("#!/bin/sh\necho 5\n")
    (project.path / "tool.sh").chmod(0o755)
    project.git("add", "--all")
    project.git("commit", "--quiet", "--message", "links")
    head = project.git("rev-parse", "HEAD").strip()
    held_out = (
        "import os, subprocess\n\n\ndef test_add():\n    assert os.readlink('alias') == 'calc'\n"
        "    assert subprocess.check_output(['./tool.sh']) == b'5\\n'\n"
    )
    task = project.task(base_commit=head, test_patch=project.patch({"tests/test_add.py": held_out}))
    assert judge(task, "").status is VerdictStatus.RESOLVED


def test_only_allowed_sources_may_be_named_by_tasks(project: Any, new_project: Any, tmp_path: Path) -> None:
    open_, closed = new_project(tmp_path / "open" / "a"), new_project(tmp_path / "closed" / "b")
    git = write_git_config(tmp_path / "gitconfig")
    store = RepoStore(tmp_path / "root", git, allowed=(f"{tmp_path}/open/", "https://git.example/team/"))
    assert store.resolve(str(open_.path)) == str(open_.path)
    assert store.resolve("https://git.example/team/x.git") == "https://git.example/team/x.git"
    for refused in (
        str(closed.path),
        f"file://{closed.path}",
        f"{tmp_path}/open/../closed/b",
        f"{tmp_path}/open",
        "https://git.example/team/../other/x.git",
        "https://git.example.evil/team/x.git",
        "https://git.example/teams/x.git",
    ):
        with pytest.raises(UnknownRepo):
            store.resolve(refused)
    store.register({"b": str(closed.path)})
    assert store.resolve("b") == str(closed.path)


def state(judge: Any) -> dict[str, Any]:
    found: dict[str, Any] = httpx.get(f"{judge.server.url}/readyz", trust_env=False).json()
    return found


class Answers(BaseHTTPRequestHandler):
    """The first part of the path is the status of the answer."""

    def do_GET(self) -> None:
        code = int(self.path.split("/")[1])
        self.send_response(code)
        if code == 401:
            self.send_header("WWW-Authenticate", 'Basic realm="x"')
        self.send_header("Content-Length", "0")
        self.end_headers()

    def log_message(self, format: str, *arguments: object) -> None:
        pass


@pytest.fixture
def git_of_the_web(tmp_path: Path) -> Iterator[Git]:
    """git for which https://git.example/ is a server of this test."""
    with ThreadingHTTPServer(("127.0.0.1", 0), Answers) as server:
        serving = threading.Thread(target=server.serve_forever)
        serving.start()
        git = write_git_config(tmp_path / "gitconfig")
        with (tmp_path / "gitconfig").open("a") as file:
            file.write(f'[url "http://127.0.0.1:{server.server_address[1]}/"]\n\tinsteadOf = https://git.example/\n')
        yield git
        server.shutdown()
        serving.join()


@pytest.mark.parametrize("code", [401, 404, 410])
def test_an_address_where_no_repository_is_is_the_tasks_defect(code: int, git_of_the_web: Git, tmp_path: Path) -> None:
    store, url = RepoStore(tmp_path, git_of_the_web), f"https://git.example/{code}/x.git"
    for _ in range(2):  # the same answer each time: nothing of it is kept
        with pytest.raises(UnknownRepo, match=re.escape(url)):
            store.tree_of(url, "0" * 40)
    assert {path.suffix for path in (tmp_path / "repos").iterdir()} == {".lock"}


@pytest.mark.parametrize("code", [403, 429, 500, 502, 503])
def test_an_address_with_trouble_may_be_asked_again(code: int, git_of_the_web: Git, tmp_path: Path) -> None:
    with pytest.raises(FetchFailed, match=str(code)):
        RepoStore(tmp_path, git_of_the_web).tree_of(f"https://git.example/{code}/x.git", "0" * 40)


def test_an_address_that_refuses_connections_is_no_verdict_and_may_be_asked_again(
    project: Any, judge: Any, body: Any
) -> None:
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    reply = judge.post(body(project.task(repo=f"https://127.0.0.1:{port}/x.git"), project.gold()))
    assert (reply.status_code, reply.json()["status"], reply.json()["retryable"]) == (200, "infra_error", True)


def test_a_path_that_is_no_repository_is_refused_and_nothing_starts(
    project: Any, judge: Any, body: Any, tmp_path: Path
) -> None:
    plain, file = tmp_path / "plain", tmp_path / "file"
    plain.mkdir()
    file.write_text("no bundle\n")
    before = state(judge)
    for source in (str(plain), f"file://{plain}", str(file)):
        task = body(project.task(repo=source), project.gold())
        for path in ("/task/submit", "/session"):
            reply = judge.post({**task, "model_patch": ""}, path=path)
            assert (reply.status_code, reply.json()["error"]["field"]) == (422, "repo"), source
    assert state(judge) == before
    shutil.copytree(project.path / ".git", plain / ".git")  # it is looked at anew
    assert judge(project.task(repo=str(plain)), project.gold()).status is VerdictStatus.RESOLVED


def test_hooks_and_configuration_of_a_source_are_not_run(new_project: Any, judge: Any, tmp_path: Path) -> None:
    project = new_project(tmp_path / "hooked")
    marker = tmp_path / "ran"
    for name in ("post-checkout", "reference-transaction", "post-index-change"):
        hook = project.path / ".git" / "hooks" / name
        hook.write_text(f"#!/bin/sh\ntouch {marker}\n")
        hook.chmod(0o755)
    task = project.task()
    gold = project.gold()
    marker.unlink(missing_ok=True)  # writing the patches ran the hooks: they do work
    assert judge(task, gold).status is VerdictStatus.RESOLVED
    assert not marker.exists()


VARIED = {
    "calc/__init__.py": "",
    "tests/conftest.py": "import pytest\n\n\n@pytest.fixture\ndef broken():\n    raise ValueError\n",
    "tests/test_varied.py": """import unittest

import pytest

def test_passes():
    pass

def test_fails():
    assert 1 == 2

@pytest.mark.skip(reason="why")
def test_skipped():
    pass

def test_skips_itself():
    pytest.skip("why")

@pytest.mark.xfail
def test_xfails():
    assert 0

def test_xfails_itself():
    pytest.xfail("why")

@pytest.mark.xfail(strict=True)
def test_strict():
    pass

def test_setup_error(broken):
    pass

@pytest.fixture
def late():
    yield
    raise ValueError

def test_teardown_error(late):
    pass

@pytest.mark.parametrize("x", [1, 2, "a::b", "sp ace"])
def test_many(x):
    assert x != 2

class TestGroup:
    def test_inner(self):
        pass

class TestUnit(unittest.TestCase):
    def test_unit(self):
        self.assertEqual(1, 1)

    @unittest.skip("why")
    def test_unit_skipped(self):
        pass

    @unittest.expectedFailure
    def test_unit_expected(self):
        self.assertEqual(1, 2)

    def test_sub(self):
        for i in range(3):
            with self.subTest(i=i):
                self.assertNotEqual(i, 1)

def test_subtests(subtests):
    for i in range(2):
        with subtests.test(i=i):
            assert i < 2
""",
}
STATUS = {
    "PASSED": "passed",
    "FAILED": "failed",
    "ERROR": "error",
    "SKIPPED": "skipped",
    "XFAIL": "xfailed",
}


def test_statuses_agree_with_pytest_run_by_hand(new_project: Any, judge: Any, tmp_path: Path) -> None:
    project = new_project(tmp_path / "varied", VARIED)
    env = {"PATH": os.defpath, "PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1", "PYTHONDONTWRITEBYTECODE": "1"}
    bare = subprocess.run(
        [sys.executable, "-m", "pytest", "-v", "--color=no", "tests/test_varied.py"],
        cwd=project.path,
        env=env,
        capture_output=True,
        text=True,
    ).stdout
    expected: dict[str, str] = {}
    for test, word in re.findall(r"^(tests/\S+::.*?) (PASSED|FAILED|ERROR|SKIPPED|XFAIL)\b", bare, re.MULTILINE):
        expected[test] = STATUS[word]  # a test that passes and then fails to tear down is listed twice
    # any code can call pytest.xfail(), so a call is not an expected failure; only a mark is
    expected["tests/test_varied.py::test_xfails_itself"] = "skipped"
    # pytest prints PASSED for a unittest whose subtest failed, and counts a failure; here it is one
    expected["tests/test_varied.py::TestUnit::test_sub"] = "failed"
    assert len(expected) == 19
    assert set(expected.values()) == set(STATUS.values())
    task = project.task(test_patch="", fail_to_pass=(), pass_to_pass=tuple(expected))
    verdict = judge(task, "")
    assert dict(verdict.tests) == expected
    assert verdict.status is VerdictStatus.UNRESOLVED
    assert verdict.flags == ()


@pytest.mark.parametrize(
    ("test", "set_name", "status"),
    [
        ("test_xfails", "fail_to_pass", VerdictStatus.RESOLVED),
        ("test_xfails", "pass_to_pass", VerdictStatus.UNRESOLVED),
        ("TestUnit::test_unit_expected", "fail_to_pass", VerdictStatus.RESOLVED),
        ("test_xfails_itself", "fail_to_pass", VerdictStatus.UNRESOLVED),
        ("test_skipped", "fail_to_pass", VerdictStatus.UNRESOLVED),
        ("test_skipped", "pass_to_pass", VerdictStatus.UNRESOLVED),
        ("test_that_is_absent", "pass_to_pass", VerdictStatus.UNRESOLVED),
        ("test_many[2]", "fail_to_pass", VerdictStatus.UNRESOLVED),
        ("test_many[1]", "fail_to_pass", VerdictStatus.RESOLVED),
    ],
)
def test_each_set_demands_its_status(test: str, set_name: str, status: VerdictStatus, varied: Any, judge: Any) -> None:
    sets = {"fail_to_pass": (), "pass_to_pass": (), set_name: (f"tests/test_varied.py::{test}",)}
    assert judge(varied.task(test_patch="", **sets), "").status is status


@pytest.fixture(scope="module")
def varied(new_project: Any, tmp_path_factory: pytest.TempPathFactory) -> Any:
    return new_project(tmp_path_factory.mktemp("varied") / "p", VARIED)
