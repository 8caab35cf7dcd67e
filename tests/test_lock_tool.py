"""The lock that is committed names no host, whatever a person does with git."""

from __future__ import annotations

import shutil
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
COMPLETED = """\
version = 1

[manifest]
members = ["a"]

[[package]]
name = "a"
version = "1.0"
source = { registry = "https://index.invalid/root" }
wheels = [
    { url = "https://files.invalid/x/a-1.0-py3-none-any.whl", hash = "sha256:00", size = 1 },
]
"""


def git(repo: Path, *arguments: str, check: bool = True) -> subprocess.CompletedProcess[str]:
    identity = ["-c", "user.name=Someone", "-c", "user.email=someone@example.invalid"]
    return subprocess.run(["git", *identity, *arguments], cwd=repo, capture_output=True, text=True, check=check)


@pytest.fixture
def repo(tmp_path: Path) -> Path:
    git(tmp_path, "init", "-q")
    (tmp_path / "tools").mkdir()
    shutil.copy(ROOT / "tools" / "lock.py", tmp_path / "tools")
    shutil.copy(ROOT / ".gitattributes", tmp_path)
    (tmp_path / "uv.lock").write_text(COMPLETED)
    return tmp_path


def install(repo: Path) -> str:
    command = [sys.executable, "tools/lock.py", "--install"]
    return subprocess.run(command, cwd=repo, check=True, capture_output=True, text=True).stdout


def test_an_installed_clone_commits_no_host_and_keeps_names_and_hashes(repo: Path) -> None:
    install(repo)
    git(repo, "add", "-A")
    git(repo, "commit", "-qm", "lock")
    committed = git(repo, "show", "HEAD:uv.lock").stdout
    assert "://" not in committed
    assert 'path = "a-1.0-py3-none-any.whl", hash = "sha256:00"' in committed
    assert git(repo, "status", "--porcelain").stdout == ""


def test_the_hook_refuses_what_slipped_past_the_filter(repo: Path) -> None:
    install(repo)
    (repo / ".gitattributes").unlink()
    git(repo, "add", "-A")
    refused = git(repo, "commit", "-qm", "lock", check=False)
    assert refused.returncode != 0
    assert "names a host" in refused.stderr
    assert git(repo, "rev-parse", "--verify", "-q", "HEAD", check=False).returncode != 0


def test_a_hook_of_ones_own_is_left_alone(repo: Path) -> None:
    hook = repo / ".git" / "hooks" / "pre-commit"
    hook.parent.mkdir(exist_ok=True)
    hook.write_text("#!/bin/sh\n")
    assert "is yours and stays" in install(repo)
    assert hook.read_text() == "#!/bin/sh\n"
