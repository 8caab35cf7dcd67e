"""A deciding test in a file that can never be there is refused before anything runs."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from dockyard_sandbox.client import request_body
from dockyard_sandbox.deciding_files import DecidingFiles, MissingTestFile
from dockyard_sandbox.gitcmd import write_git_config
from dockyard_sandbox.repos import RepoStore
from dockyard_sandbox.trees import TreeStore
from dockyard_sandbox.wire import TaskRequest


@pytest.fixture(scope="module")
def linked(new_project: Any, tmp_path_factory: pytest.TempPathFactory) -> Any:
    """A repository whose tests are reached through a symlink as well."""
    made = new_project(tmp_path_factory.mktemp("linked") / "calc")
    (made.path / "link").symlink_to("tests")
    made.git("add", "--all")
    made.git("commit", "--quiet", "--message", "link")
    return type(made)(made.path, made.git("rev-parse", "HEAD").strip())


@pytest.fixture
def check(tmp_path: Path) -> Iterator[Any]:
    git = write_git_config(tmp_path / "gitconfig")
    files = DecidingFiles(RepoStore(tmp_path, git), TreeStore(tmp_path, git, owner_uid=None))

    def ask(task: Any) -> None:
        asyncio.run(files.check(TaskRequest.model_validate(request_body(task, ""))))

    yield ask
    assert list((tmp_path / "trees").glob("[!.]*")) == []  # no tree was written


@pytest.mark.parametrize("test", ["tests/test_ops.py::test_mul", "tests/test_add.py::test_add", "link/test_ops.py::x"])
def test_a_file_of_the_base_or_the_test_patch_is_there(test: str, check: Any, linked: Any) -> None:
    check(linked.task(fail_to_pass=(test,), pass_to_pass=()))


@pytest.mark.parametrize("field", ["FAIL_TO_PASS", "PASS_TO_PASS"])
def test_any_other_is_not(field: str, check: Any, linked: Any) -> None:
    ids = {"fail_to_pass": ("tests/test_add.py::test_add",), "pass_to_pass": ()}
    ids[field.lower()] += ("tests/test_nowhere.py::test_add",)
    with pytest.raises(MissingTestFile, match=r"tests/test_nowhere\.py::test_add") as caught:
        check(linked.task(**ids))
    assert caught.value.field == field
