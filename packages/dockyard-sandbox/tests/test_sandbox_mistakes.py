"""Mistakes at the start: one line with the rule, the value and the way out, exit code 2, and nothing left behind."""

from __future__ import annotations

import json
import os
import stat
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import httpx
import pytest

from dockyard_core import ConfigError
from dockyard_sandbox import cgroups, preflight, start_server
from dockyard_sandbox.cli import main
from dockyard_sandbox.jail import syscalls
from dockyard_sandbox.serve import ServeConfig, executor_on

CLI = [sys.executable, "-P", "-m", "dockyard_sandbox.cli"]
LONG = "x" * 300
STRANGER = 4243


def run(*arguments: str, cwd: Path, preexec: Callable[[], None] | None = None) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [*CLI, *arguments], capture_output=True, text=True, timeout=60, cwd=cwd, preexec_fn=preexec, check=False
    )


def refusal(*arguments: str, cwd: Path, preexec: Callable[[], None] | None = None) -> str:
    """The one line of a command that refuses to start."""
    done = run(*arguments, cwd=cwd, preexec=preexec)
    assert (done.returncode, done.stdout) == (2, ""), done
    (line,) = done.stderr.splitlines()
    assert line.startswith("dockyard-sandbox"), line
    return line


def everything(directory: Path) -> set[str]:
    return {str(path.relative_to(directory)) for path in directory.rglob("*")}


@pytest.fixture
def place(tmp_path: Path) -> Path:
    """A directory with a file of each kind that is named below."""
    (tmp_path / "file").write_text("x\n")
    (tmp_path / "short").write_text("secret\n")
    (tmp_path / "tokens").write_text("a:b\nno colon\n")
    (tmp_path / "latin").write_bytes(b"caf\xe9" * 8)
    (tmp_path / "empty").write_text("")
    (tmp_path / "loop").symlink_to("loop")
    (tmp_path / "directory").mkdir()
    (tmp_path / "token").write_text("a-token-of-good-length")
    task = {"instance_id": "a", "repo": "/r", "base_commit": "0" * 40, "FAIL_TO_PASS": ["t.py::t"]}
    (tmp_path / "task.json").write_text(json.dumps(task))
    row = {**task, "patch": "x"}
    (tmp_path / "tasks.jsonl").write_text(json.dumps(row))
    (tmp_path / "wrong.jsonl").write_text(json.dumps({**row, "FAIL_TO_PASS": 3}))
    return tmp_path


# arguments, and what the line must say of the rule and of the value
MISTAKES = {
    "a root that is a file": ("serve --root file", "--root", "file'"),
    "a root below a file": ("serve --root file/root", "--root", "file/root'"),
    "a root where nothing can be made": ("serve --root /proc/sandbox", "--root", "/proc/sandbox'"),
    "a root with a name too long": (f"serve --root new/{LONG}", "--root", LONG),
    "a root that is a loop": ("serve --root loop", "--root", "loop'"),
    "a root that mount options cannot name": ("serve --root a:b", "--root", "a:b'"),
    "a root with a line break": ("serve --root a\nb", "--root", "a\\nb'"),
    "no root": ("serve", "--root", "required"),
    "a port past the last": ("serve --root new --port 99999", "--port must be from 0 to 65535", "99999"),
    "a port below the first": ("serve --root new --port -1", "--port must be from 0 to 65535", "-1"),
    "a port in words": ("serve --root new --port http", "--port", "'http'"),
    "a queue below nothing": ("serve --root new --max-queue -5", "--max-queue must be from 0", "-5"),
    "no sessions": ("serve --root new --max-sessions 0", "--max-sessions must be from 1", "got 0"),
    "no workers": ("serve --root new --workers 0", "--workers must be from 1", "got 0"),
    "workers by mistake": ("serve --root new --workers 99999999", "--workers must be", "99999999"),
    "half a worker": ("serve --root new --workers 0.5", "--workers", "'0.5'"),
    "a level that is none": ("serve --root new --min-isolation docker", "--min-isolation", "'docker'"),
    "an unknown option": ("serve --root new --tokens file", "--tokens", "--help"),
    "an unknown command": ("bake", "bake", "--help"),
    "a public address without a token": ("serve --root new --host 0.0.0.0", "--token-file", "0.0.0.0"),
    "an address that is none": ("serve --root new --host 300.1.1.1 --token-file token", "--host", "300.1.1.1"),
    "no token file": ("serve --root new --token-file none", "--token-file", "none"),
    "a token file that is a directory": ("serve --root new --token-file directory", "--token-file", "directory"),
    "a token file that is no text": ("serve --root new --token-file latin", "--token-file", "latin"),
    "an empty token file": ("serve --root new --token-file empty", "at least 16 characters", "got 0"),
    "a short token": ("serve --root new --token-file short", "at least 16 characters", "got 6"),
    "tokens without tenants": ("serve --root new --token-file tokens", "tenant:token", "tokens:2"),
    "a prefix with neighbours": ("serve --root new --repos-from /srv/repos", "--repos-from", "/srv/repos"),
    "a prefix of nothing": ("serve --root new --repos-from srv/", "--repos-from", "srv/"),
    "no task": ("run none.json", "none.json", "cannot be read"),
    "a task that is no JSON": ("run file", "file", "JSON"),
    "a task with a root that is a file": ("run task.json --root file", "--root", "file'"),
    "no tasks": ("certify none.jsonl --out new", "none.jsonl", "cannot be read"),
    "a wrong row": ("certify wrong.jsonl --out new", "wrong.jsonl:1", "FAIL_TO_PASS"),
    "no runs": ("certify tasks.jsonl --out new --runs 0", "--runs", "got 0"),
    "no workers to certify": ("certify tasks.jsonl --out new --workers 0", "--workers", "got 0"),
    "certificates into a file": ("certify tasks.jsonl --out file", "--out", "file'"),
    "certificates where none can be": ("certify tasks.jsonl --out /proc/new", "--out", "/proc/new'"),
    "an image that is not there": ("env import none.tar --root new --name a", "an image archive", "none.tar"),
    "an environment under no name": ("env import none.tar --root new --name a/b", "--name", "a/b"),
    "an environment in a file": ("env import file --root file --name a", "--root", "file'"),
}


@pytest.mark.parametrize("mistake", MISTAKES)
def test_a_mistake_is_one_line_and_leaves_nothing(
    mistake: str, place: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    command, rule, value = MISTAKES[mistake]
    before = everything(place)
    monkeypatch.chdir(place)
    try:
        code = main(command.split(" "))
    except SystemExit as ended:  # what argparse refuses
        code = ended.code
    said = capsys.readouterr()
    assert (code, said.out) == (2, "")
    (line,) = said.err.splitlines()
    assert line.startswith("dockyard-sandbox"), line
    assert rule in line
    assert value in line
    assert everything(place) == before


# An interpreter for each takes half a second; they do the same with every line.
IN_A_PROCESS = ("a root that is a file", "a task that is no JSON", "no tasks", "an environment in a file", "no root")


@pytest.mark.parametrize("mistake", IN_A_PROCESS)
def test_a_process_says_it_in_the_same_line(mistake: str, place: Path) -> None:
    command, rule, value = MISTAKES[mistake]
    before = everything(place)
    line = refusal(*command.split(" "), cwd=place)
    assert rule in line
    assert value in line
    assert everything(place) == before


def give_up_root() -> None:
    """Stay user 0 and lose what makes it root, so that modes and owners count."""
    syscalls.drop_capabilities()


@pytest.mark.parametrize(
    "command", ["serve --port 0", "run task.json", "certify tasks.jsonl --out out", "env import file"]
)
def test_a_root_of_another_user_is_one_line(command: str, place: Path) -> None:
    root = place / "theirs"
    root.mkdir(mode=0o755)
    if os.geteuid() == 0:
        os.chown(root, STRANGER, STRANGER)
    else:
        root.chmod(0o555)
    before = everything(place)
    line = refusal(*command.split(), "--root", "theirs", cwd=place, preexec=give_up_root if os.geteuid() == 0 else None)
    assert "--root must be a directory that this user may write" in line
    assert "Permission denied" in line
    assert everything(place) == before


@pytest.mark.parametrize("spoilt", ["scratch", "repos", "trees", "tasks"])
def test_a_root_with_something_else_in_it_is_one_line(spoilt: str, tmp_path: Path) -> None:
    root = tmp_path / "root"
    root.mkdir()
    (root / spoilt).write_text("")
    command = [*CLI, "serve", "--port", "0", "--root", str(root)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as server:
        output, errors = server.communicate(timeout=60)
    assert (server.returncode, output) == (2, "")
    (line,) = errors.splitlines()
    assert f"{root}/{spoilt}" in line
    assert list(root.glob("scratch/*")) == []
    groups = [one.own.glob(f"dockyard-*-{server.pid}-*") for one in cgroups.find_hierarchies()]
    assert [path for found in groups for path in found] == []


def test_missing_parents_of_a_root_are_made_and_of_a_refused_one_are_not(tmp_path: Path) -> None:
    assert preflight.make_root(tmp_path / "a/b/c") == tmp_path / "a/b/c"
    with pytest.raises(ConfigError, match="File name too long"):
        preflight.make_root(tmp_path / "d/e" / LONG)
    assert everything(tmp_path) == {"a", "a/b", "a/b/c"}


@pytest.mark.ci
def test_a_root_has_one_server_and_may_be_used_beside_it(project: Any, body: Any, tmp_path: Path) -> None:
    root = tmp_path / "root"
    handle = start_server(root, workers=1)
    try:
        # a server in another container: its process cannot be seen here, but its lock can
        (foreign,) = (root / "scratch").iterdir()
        foreign = foreign.rename(foreign.with_name("00000000-1-1"))
        line = refusal("serve", "--port", "0", "--root", str(root), cwd=tmp_path)
        assert "--root must be one server's only" in line
        assert str(root) in line
        (tmp_path / "task.json").write_text(json.dumps(body(project.task(), project.gold())))
        done = run("run", str(tmp_path / "task.json"), "--root", str(root), cwd=tmp_path)
        assert json.loads(done.stdout)["status"] == "resolved", done
        assert [path.name for path in (root / "scratch").iterdir()] == [foreign.name]
        assert httpx.get(f"{handle.url}/healthz", trust_env=False).status_code == 200
    finally:
        handle.stop()
    again = start_server(root, workers=1)
    try:
        assert not foreign.exists()
    finally:
        assert again.stop() == 0


@pytest.mark.ci
def test_the_lock_of_a_killed_server_is_free(tmp_path: Path) -> None:
    for _ in range(2):
        handle = start_server(tmp_path / "root", workers=1)
        handle.process.kill()
        handle.stop()
    with preflight.no_server(preflight.make_root(tmp_path / "root")) as is_free:
        assert is_free


FIXED_GITS = [
    "git version 2.39.5",
    "git version 2.43.4.dirty",
    "git version 2.45.1 (Apple Git-154)",
    "git version 3.0.0",
]
OLD_GITS = ["git version 2.34.1", "git version 2.39.3", "git version 2.43.0", "git version 2.44.0"]


@pytest.mark.parametrize("version", FIXED_GITS)
def test_a_fixed_git_has_no_note(version: str) -> None:
    assert preflight.git_notes(version) == ()


@pytest.mark.parametrize("version", OLD_GITS)
def test_a_number_below_the_fixes_is_a_note_and_no_refusal(version: str) -> None:
    """Ubuntu patches 2.34.1 and 2.43.0 under these numbers: a refusal would lock out machines that are up to date."""
    (note,) = preflight.git_notes(version)
    assert version in note
    assert "CVE-2024-32021" in note


@pytest.mark.parametrize("version", [None, "git version 2.25.1", "git version 2.31.8", "no git at all"])
def test_a_git_that_ignores_our_configuration_is_refused(version: str | None) -> None:
    with pytest.raises(ConfigError, match=r"git.* 2\.32 or later"):
        preflight.git_notes(version)


def use_git(directory: Path, monkeypatch: pytest.MonkeyPatch, version: str) -> None:
    directory.mkdir()
    (directory / "git").write_text(f"#!/bin/sh\necho git version {version}\n")
    (directory / "git").chmod(stat.S_IRWXU)
    monkeypatch.setattr(preflight, "GIT_PATH", f"{directory}:{preflight.GIT_PATH}")


def test_the_version_is_asked_of_the_git_that_is_used(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    use_git(tmp_path / "bin", monkeypatch, "2.34.1")
    assert preflight.git_version() == "git version 2.34.1"
    monkeypatch.setattr(preflight, "GIT_PATH", str(tmp_path))
    assert preflight.git_version() is None


def test_an_old_git_is_a_warning_and_a_line_of_doctor(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: Any, capsys: Any
) -> None:
    use_git(tmp_path / "bin", monkeypatch, "2.43.0")
    with executor_on(ServeConfig(root=tmp_path / "root", workers=1, warm=False)):
        pass
    (warning,) = [record.getMessage() for record in caplog.records if "CVE-2024-32021" in record.getMessage()]
    assert main(["doctor"]) == 0
    report = json.loads(capsys.readouterr().out)
    assert (report["git"], report["git_lacks"]) == ("git version 2.43.0", [warning])


@pytest.mark.ci
def test_a_public_server_that_takes_any_repository_says_so(tmp_path: Path) -> None:
    (tmp_path / "token").write_text("a-token-of-good-length")
    serve = ["serve", "--port", "0", "--root", str(tmp_path / "root"), "--token-file", str(tmp_path / "token")]
    lines = {}
    for name, options in {"any": [], "some": ["--repos-from", "/srv/"]}.items():
        command = [*CLI, *serve, "--host", "0.0.0.0", *options]
        server = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
        try:
            assert server.stdout is not None
            assert server.stdout.readline().startswith("dockyard-sandbox ready http://0.0.0.0:")
            server.terminate()
            lines[name] = [line for line in server.communicate(timeout=60)[1].splitlines() if "--repos-from" in line]
        finally:
            server.kill()
            server.communicate()
    assert (len(lines["any"]), lines["some"]) == (1, [])


def test_workers_are_the_cpus_that_a_quota_pays_for(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    all_cpus = len(os.sched_getaffinity(0))
    for version, files, expected in [
        (2, {"cpu.max": "max 100000\n"}, all_cpus),
        (2, {"cpu.max": "100000 100000\n"}, 1),
        (2, {"cpu.max": "20000 100000\n"}, 1),
        (2, {}, all_cpus),
        (1, {"cpu.cfs_quota_us": "-1\n", "cpu.cfs_period_us": "100000\n"}, all_cpus),
        (1, {"cpu.cfs_quota_us": "150000\n", "cpu.cfs_period_us": "100000\n"}, 1),
    ]:
        for path in tmp_path.iterdir():
            path.unlink()
        for name, text in files.items():
            (tmp_path / name).write_text(text)
        hierarchy = cgroups.Hierarchy(version=version, controllers=("cpu",), own=tmp_path)
        monkeypatch.setattr(cgroups, "find_hierarchies", lambda found=hierarchy: [found])
        assert preflight.num_cpus() == expected, (version, files)
