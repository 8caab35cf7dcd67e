from __future__ import annotations

import json
import os
import subprocess
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from dockyard_core import DataError
from dockyard_core.data import dataset_fingerprint, read_tasks

FIX = "--- a/src/core.py\n+++ b/src/core.py\n@@ -1 +1 @@\n-x = {old}\n+x = {new}\n"
MISSING_COMMIT = "f" * 40


def git(*arguments: str, cwd: Path) -> str:
    identity = ["-c", "user.name=t", "-c", "user.email=t@example.invalid"]
    done = subprocess.run(["git", *identity, *arguments], cwd=cwd, capture_output=True, text=True, check=True)
    return done.stdout.strip()


@pytest.fixture
def repo(tmp_path: Path) -> Path:
    """Two commits: x = 1, then x = 2 with files of every kind beside it."""
    path = tmp_path / "data" / "repo"
    (path / "src").mkdir(parents=True)
    git("init", "-q", "-b", "main", cwd=path)
    (path / "src" / "core.py").write_text("x = 1\n")
    git("add", "-A", cwd=path)
    git("commit", "-qm", "one", cwd=path)
    (path / "src" / "core.py").write_text("x = 2\n")
    (path / "with space.py").write_bytes(b"a\r\n\x0cb")
    (path / "binary.py").write_bytes(b"\0\1")
    (path / "latin.py").write_bytes(b"\xe9\n")
    (path / "é.py").write_text("unusual\n")
    (path / "empty.py").touch()
    git("add", "-A", cwd=path)
    git("commit", "-qm", "two", cwd=path)
    return path


def row(repo: Path, /, **changes: Any) -> dict[str, Any]:
    """A valid row; the value None removes a column."""
    values = {
        "instance_id": "tiny__1",
        "repo": "repo",
        "base_commit": git("rev-parse", "main", cwd=repo),
        "problem_statement": "x should be 3",
        "patch": FIX.format(old=2, new=3),
        "test_patch": "--- /dev/null\n+++ b/test_core.py\n@@ -0,0 +1 @@\n+assert 1\n",
        "FAIL_TO_PASS": ["test_core.py::test_x"],
        "PASS_TO_PASS": ["test_core.py::test_y"],
        **changes,
    }
    return {name: value for name, value in values.items() if value is not None}


def write(repo: Path, *rows: dict[str, Any] | str) -> Path:
    path = repo.parent / "tasks.jsonl"
    path.write_text("".join((line if isinstance(line, str) else json.dumps(line)) + "\n" for line in rows))
    return path


def test_a_row_becomes_a_task_with_its_oracle_file(repo: Path) -> None:
    path = write(
        repo,
        row(repo, environment="py311", test_command="pytest -q", timeout_s=5, labels={"bug": "operator"}, version="1"),
    )
    (task,) = read_tasks(path)
    assert task.instance_id == "tiny__1"
    assert task.repo == str(repo)
    assert task.prompt_files == (("src/core.py", "x = 2\n"),)
    assert (task.fail_to_pass, task.pass_to_pass) == (("test_core.py::test_x",), ("test_core.py::test_y",))
    assert task.gold_patch == FIX.format(old=2, new=3)
    assert (task.environment, task.test_command, task.timeout_s) == ("py311", "pytest -q", 5.0)
    assert task.labels == (("bug", "operator"),)


def test_files_are_read_at_the_base_commit_and_not_from_the_work_tree(repo: Path) -> None:
    (repo / "src" / "core.py").write_text("x = 'dirty'\n")
    first = git("rev-parse", "main~1", cwd=repo)
    tasks = read_tasks(write(repo, row(repo), row(repo, instance_id="tiny__0", base_commit=first)))
    assert [task.prompt_files for task in tasks] == [(("src/core.py", "x = 2\n"),), (("src/core.py", "x = 1\n"),)]


def test_only_text_files_that_exist_at_the_base_are_shown(repo: Path) -> None:
    names = ["with space.py", "binary.py", "latin.py", "é.py", "empty.py", "new.py", "./odd.py", "../up.py", "src"]
    patch = "".join(f"--- a/{name}\n+++ b/{name}\n@@ -1 +1 @@\n-a\n+b\n" for name in names)
    (task,) = read_tasks(write(repo, row(repo, patch=patch)))
    assert task.prompt_files == (("with space.py", "a\r\n\x0cb"), ("é.py", "unusual\n"), ("empty.py", ""))


def test_lists_may_be_json_strings_and_the_patch_may_be_absent(repo: Path) -> None:
    path = write(repo, row(repo, FAIL_TO_PASS='["a.py::t[1-\\"x\\"]"]', PASS_TO_PASS="[]", patch=None))
    (task,) = read_tasks(path)
    assert (task.fail_to_pass, task.pass_to_pass) == (('a.py::t[1-"x"]',), ())
    assert (task.gold_patch, task.prompt_files) == (None, ())


@pytest.mark.parametrize("kind", ["absolute", "bare", "file url", "bundle", "linked work tree"])
def test_every_kind_of_local_repository_gives_the_same_files(repo: Path, tmp_path: Path, kind: str) -> None:
    home = repo.parent
    if kind == "bare":
        git("clone", "-q", "--bare", str(repo), "bare.git", cwd=home)
    elif kind == "bundle":
        git("bundle", "create", "-q", str(home / "tasks.bundle"), "--all", cwd=repo)
    elif kind == "linked work tree":
        git("worktree", "add", "-q", "--detach", str(home / "linked"), cwd=repo)
    written = {
        "absolute": str(repo),
        "bare": "bare.git",
        "file url": repo.as_uri(),
        "bundle": "tasks.bundle",
        "linked work tree": "linked",
    }[kind]
    (task,) = read_tasks(write(repo, row(repo, repo=written)), cache_dir=tmp_path / "cache")
    assert task.prompt_files == (("src/core.py", "x = 2\n"),)
    assert task.repo == str(home / Path(written).name)


def test_a_bundle_is_cloned_once_and_again_when_its_bytes_change(repo: Path, tmp_path: Path) -> None:
    cache, bundle = tmp_path / "cache", repo.parent / "tasks.bundle"
    # A ref outside refs/heads: a bundle may name its commits as it likes.
    git("update-ref", "refs/tasks/1", "main", cwd=repo)
    git("bundle", "create", "-q", str(bundle), "refs/tasks/1", cwd=repo)
    path = write(repo, row(repo, repo="tasks.bundle"))
    tasks = read_tasks(path, cache_dir=cache)
    (clone,) = cache.iterdir()
    stamp = clone.stat().st_mtime_ns
    assert read_tasks(path, cache_dir=cache) == tasks
    assert [entry.stat().st_mtime_ns for entry in cache.iterdir()] == [stamp]
    (repo / "src" / "core.py").write_text("x = 7\n")
    git("commit", "-qam", "three", cwd=repo)
    git("bundle", "create", "-q", str(bundle), "main", cwd=repo)
    (task,) = read_tasks(write(repo, row(repo, repo="tasks.bundle")), cache_dir=cache)
    assert task.prompt_files == (("src/core.py", "x = 7\n"),)
    assert len(list(cache.iterdir())) == 2


def test_the_default_cache_is_under_the_xdg_folder(repo: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "xdg"))
    git("bundle", "create", "-q", str(repo.parent / "tasks.bundle"), "main", cwd=repo)
    read_tasks(write(repo, row(repo, repo="tasks.bundle")))
    assert len(list((tmp_path / "xdg" / "dockyard" / "repos").iterdir())) == 1


def test_the_callers_git_environment_and_hooks_have_no_effect(
    repo: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    mark = tmp_path / "ran"
    script = tmp_path / "evil"
    script.write_text(f"#!/bin/sh\ntouch '{mark}'\n")
    script.chmod(0o755)
    for key in ("core.fsmonitor", "core.sshCommand"):
        git("config", key, str(script), cwd=repo)
    git("config", "remote.origin.url", "ssh://host.invalid/x", cwd=repo)
    git("config", "remote.origin.promisor", "true", cwd=repo)
    git("config", "extensions.partialClone", "origin", cwd=repo)
    path = write(repo, row(repo))
    absent = repo.parent / "absent.jsonl"
    absent.write_text(json.dumps(row(repo, base_commit=MISSING_COMMIT)) + "\n")
    mark.unlink(missing_ok=True)  # the test's own git may have run it
    monkeypatch.setenv("GIT_DIR", str(tmp_path / "elsewhere"))
    monkeypatch.setenv("GIT_OBJECT_DIRECTORY", str(tmp_path / "elsewhere"))
    (task,) = read_tasks(path)
    assert task.prompt_files == (("src/core.py", "x = 2\n"),)
    with pytest.raises(DataError, match="base_commit"):
        read_tasks(absent)
    assert not mark.exists()


def test_one_git_process_serves_all_rows_of_a_repository(
    repo: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    calls, real = tmp_path / "calls", subprocess.run(["which", "git"], capture_output=True, text=True, check=True)
    path = write(repo, *(row(repo, instance_id=f"t{index}") for index in range(40)))
    wrapper = tmp_path / "bin" / "git"
    wrapper.parent.mkdir()
    wrapper.write_text(f"#!/bin/sh\necho call >> '{calls}'\nexec {real.stdout.strip()} \"$@\"\n")
    wrapper.chmod(0o755)
    monkeypatch.setenv("PATH", f"{wrapper.parent}:{os.environ['PATH']}")
    tasks = read_tasks(path)
    assert {task.prompt_files for task in tasks} == {(("src/core.py", "x = 2\n"),)}
    assert [task.instance_id for task in tasks] == [f"t{index}" for index in range(40)]
    assert calls.read_text() == "call\n"


@pytest.mark.parametrize(
    ("changes", "field", "hint"),
    [
        ({"base_commit": "main"}, "base_commit", "got 'main'; write the full commit id"),
        ({"base_commit": MISSING_COMMIT}, "base_commit", f"must be a commit of 'repo', got {MISSING_COMMIT}"),
        ({"FAIL_TO_PASS": []}, "FAIL_TO_PASS", "at least 1 item"),
        ({"FAIL_TO_PASS": None}, "FAIL_TO_PASS", "got nothing; list the pytest node ids"),
        ({"FAIL_TO_PASS": "['a']"}, "FAIL_TO_PASS", "JSON string of one, got \"['a']\""),
        ({"PASS_TO_PASS": [1]}, "PASS_TO_PASS", "got 1;"),
        ({"instance_id": "a b"}, "instance_id", "got 'a b'"),
        ({"problem_statement": ""}, "problem_statement", "got ''"),
        ({"timeout_s": 0}, "timeout_s", "greater than 0, got 0; give seconds > 0"),
        ({"apply": "loose"}, "apply", "got 'loose'; use strict or swebench"),
        ({"repo": "./nowhere"}, "repo", "must exist, got './nowhere'"),
        ({"repo": "missing.bundle"}, "repo", "must exist, got 'missing.bundle'"),
        ({"repo": "ssh://host/x"}, "repo", "got 'ssh://host/x'; clone it"),
        ({"repo": "plain"}, "repo", "must be a git repository or a bundle file"),
        ({"repo": "notes.txt"}, "repo", "a file must be a git bundle"),
        ({"repo": "broken.bundle"}, "repo", "must be clonable"),
    ],
)
def test_a_bad_row_is_refused_with_file_line_and_field(
    repo: Path, tmp_path: Path, changes: dict[str, Any], field: str, hint: str
) -> None:
    (repo.parent / "plain").mkdir()
    (repo.parent / "notes.txt").write_text("hello\n")
    (repo.parent / "broken.bundle").write_bytes(b"# v2 git bundle\n" + b"0" * 40 + b" refs/heads/main\n\nPACK")
    path = write(repo, row(repo, instance_id="good"), "", row(repo, **changes))
    with pytest.raises(DataError) as caught:
        read_tasks(path, cache_dir=tmp_path / "cache")
    message = str(caught.value)
    assert message.startswith(f"{path}:3: {field}: ")
    assert hint in message
    assert "\n" not in message
    assert not (tmp_path / "cache").exists() or list((tmp_path / "cache").iterdir()) == []  # no half clone


@pytest.mark.parametrize("line", ["{", "[]", "3", "nul", '{"a": 1} {}', "[" * 100_000])
def test_a_line_that_is_no_object_is_refused(repo: Path, line: str) -> None:
    path = write(repo, line)
    with pytest.raises(DataError) as caught:
        read_tasks(path)
    assert str(caught.value).startswith(f"{path}:1: json: must be one JSON object")


def test_files_that_hold_no_rows_are_refused(repo: Path) -> None:
    with pytest.raises(DataError, match="at least one row"):
        read_tasks(write(repo, "", ""))
    with pytest.raises(DataError, match="No such file"):
        read_tasks(repo.parent / "absent.jsonl")
    (repo.parent / "latin.jsonl").write_bytes(b'{"a": "\xe9"}\n')
    with pytest.raises(DataError, match=r"latin\.jsonl:1: json: must be UTF-8"):
        read_tasks(repo.parent / "latin.jsonl")


def test_an_instance_id_may_appear_once(repo: Path) -> None:
    path = write(repo, row(repo), row(repo, instance_id="b"), row(repo))
    with pytest.raises(DataError, match=r"tasks\.jsonl:3: instance_id: must be unique, got 'tiny__1' as on line 1"):
        read_tasks(path)


def test_a_limit_reads_the_first_rows_only(repo: Path) -> None:
    path = write(repo, row(repo), row(repo, instance_id="b"), "not json")
    assert [task.instance_id for task in read_tasks(path, limit=2)] == ["tiny__1", "b"]
    with pytest.raises(ValueError, match="limit must be >= 1"):
        read_tasks(path, limit=0)


def test_a_name_that_only_the_sandbox_knows_passes_without_files(repo: Path, caplog: pytest.LogCaptureFixture) -> None:
    (task,) = read_tasks(write(repo, row(repo, repo="owner/name")))
    assert (task.repo, task.prompt_files) == ("owner/name", ())
    assert "1 tasks name a repository known only to the sandbox" in caplog.text


def test_the_fingerprint_sees_content_and_order_but_not_the_place(repo: Path) -> None:
    tasks = read_tasks(write(repo, row(repo), row(repo, instance_id="b")))
    fingerprint = dataset_fingerprint(tasks)
    assert len(fingerprint) == 64
    moved = tuple(replace(task, repo=f"/elsewhere/{Path(task.repo).name}") for task in tasks)
    assert dataset_fingerprint(moved) == fingerprint
    assert dataset_fingerprint(tasks[::-1]) != fingerprint
    assert dataset_fingerprint((tasks[0], replace(tasks[1], problem_statement="other"))) != fingerprint
