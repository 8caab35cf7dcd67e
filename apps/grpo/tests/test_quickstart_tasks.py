from __future__ import annotations

import difflib
import json
import os
import random
import subprocess
import sys
from collections import Counter
from itertools import combinations
from pathlib import Path
from typing import Any

import pytest

import dockyard_grpo.quickstart as quickstart
from dockyard_core.data import read_tasks
from dockyard_core.prompt import render_numbered
from dockyard_core.task import Task
from dockyard_grpo.quickstart.family import BUG_CLASSES, JARGON, Function, draw_problem
from dockyard_grpo.quickstart.tasks import BUNDLE_NAME, NUM_TRAIN, build_tasks, outcome, write_tasks
from dockyard_grpo.quickstart.tokenizer import render_prompt

FOLDER = Path(quickstart.__file__).parent
ROWS_FILES = ("train.jsonl", "heldout.jsonl")


def read_rows(name: str) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (FOLDER / name).read_text(encoding="utf-8").splitlines()]


def git(*arguments: str | Path, cwd: Path, stdin: str | None = None) -> str:
    done = subprocess.run(["git", *arguments], cwd=cwd, input=stdin, capture_output=True, text=True, check=True)
    return done.stdout


def run_tests(tree: Path, test_path: str) -> dict[str, str]:
    """Run one test file in a fresh interpreter; return node id -> PASSED, FAILED or ERROR."""
    command = [sys.executable, "-m", "pytest", "-p", "no:cacheprovider", "-q", "-rA", "--tb=no", test_path]
    environment = {**os.environ, "PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1", "PYTHONDONTWRITEBYTECODE": "1"}
    done = subprocess.run(command, cwd=tree, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode in (0, 1), done.stdout + done.stderr
    lines = (line.split() for line in done.stdout.splitlines())
    return {words[1]: words[0] for words in lines if words and words[0] in ("PASSED", "FAILED", "ERROR")}


@pytest.fixture(scope="module")
def tasks(tmp_path_factory: pytest.TempPathFactory) -> dict[str, tuple[Task, ...]]:
    cache = tmp_path_factory.mktemp("cache")
    return {name: read_tasks(FOLDER / name, cache_dir=cache) for name in ROWS_FILES}


@pytest.fixture(scope="module")
def clone(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("quickstart")
    git("clone", "--quiet", FOLDER / BUNDLE_NAME, "clone", cwd=folder)
    return folder / "clone"


def test_the_frozen_files_are_what_the_command_writes(tmp_path: Path) -> None:
    write_tasks(tmp_path)
    for name in ROWS_FILES:
        assert (tmp_path / name).read_bytes() == (FOLDER / name).read_bytes()
    # Another version of git may pack the same commits into other bytes.
    heads = [git("bundle", "list-heads", folder / BUNDLE_NAME, cwd=tmp_path) for folder in (tmp_path, FOLDER)]
    assert heads[0] == heads[1]


def test_writing_twice_gives_the_same_bundle_bytes(tmp_path: Path) -> None:
    write_tasks(tmp_path / "first")
    write_tasks(tmp_path / "second")
    assert (tmp_path / "first" / BUNDLE_NAME).read_bytes() == (tmp_path / "second" / BUNDLE_NAME).read_bytes()


def test_every_row_is_distinct_and_is_a_branch_of_the_bundle(clone: Path) -> None:
    rows = [row for name in ROWS_FILES for row in read_rows(name)]
    heads = git("bundle", "list-heads", FOLDER / BUNDLE_NAME, cwd=clone)
    refs = {line.split()[1].removeprefix("refs/heads/"): line.split()[0] for line in heads.splitlines()}
    assert len({(row["base_commit"], row["problem_statement"]) for row in rows}) == len(rows)
    assert {row["instance_id"]: row["base_commit"] for row in rows} == {
        name: commit for name, commit in refs.items() if name.startswith("quickstart__")
    }


def test_the_prompt_shows_the_module_at_the_base_commit(tasks: dict[str, tuple[Task, ...]]) -> None:
    rebuilt = {task.instance_id: task.problem for task in build_tasks(NUM_TRAIN, heldout=False)}
    for task in tasks["train.jsonl"]:
        assert render_numbered(task) == render_prompt(rebuilt[task.instance_id])


@pytest.mark.parametrize("name", ROWS_FILES)
def test_each_phrase_has_as_many_tasks(name: str) -> None:
    counts = Counter(row["labels"]["phrase"] for row in read_rows(name))
    assert set(counts) == {phrase for bug_class in BUG_CLASSES for phrase in bug_class.phrases.values()}
    assert len(set(counts.values())) == 1


def test_heldout_functions_are_new_and_the_jargon_is_never_used(tasks: dict[str, tuple[Task, ...]]) -> None:
    def names(split: str) -> set[str]:
        lines = [line for task in tasks[split] for _, text in task.prompt_files for line in text.splitlines()]
        return {line[len("def ") : line.index("(")] for line in lines if line.startswith("def ")}

    assert len(names("train.jsonl")) > 90
    assert not names("train.jsonl") & names("heldout.jsonl")
    issues = " ".join(task.problem_statement for split in tasks.values() for task in split)
    assert not set(issues.split()) & {word for words in JARGON.values() for word in words}


@pytest.mark.parametrize("bug_class", BUG_CLASSES, ids=lambda bug_class: bug_class.name)
def test_the_hidden_tests_tell_any_two_fillings_apart(bug_class: Any) -> None:
    function = Function(name="f", params=("a", "b")[: bug_class.num_params], bug_class=bug_class, right="")
    results = {
        filling: [outcome(function, filling, arguments) for arguments in bug_class.arguments]
        for filling in bug_class.fillings
    }
    for first, second in combinations(bug_class.fillings, 2):
        assert results[first] != results[second]


@pytest.mark.parametrize("num_functions", [1, 2, 3])
def test_patches_are_the_diffs_of_their_sources(num_functions: int) -> None:
    rng = random.Random(num_functions)
    for _ in range(50):
        problem = draw_problem(rng, num_functions=num_functions)
        old = problem.source(problem.wrong).splitlines(keepends=True)
        for filling in problem.plausible_fillings:
            new = problem.source(filling).splitlines(keepends=True)
            diff = difflib.unified_diff(old, new, f"a/{problem.path}", f"b/{problem.path}", n=1)
            assert problem.patch(filling) == "".join(diff)


def test_an_uneven_number_of_tasks_is_refused() -> None:
    with pytest.raises(ValueError, match="multiple of the 12 phrases, got 13"):
        build_tasks(13, heldout=False)


def sample_of_each_phrase() -> list[dict[str, Any]]:
    by_phrase = {row["labels"]["phrase"]: row for row in read_rows("train.jsonl")}
    return [*by_phrase.values(), *read_rows("heldout.jsonl")[:2]]


@pytest.mark.parametrize("row", sample_of_each_phrase(), ids=lambda row: row["instance_id"])
def test_the_gold_patch_resolves_and_an_empty_one_does_not(row: dict[str, Any], clone: Path, tmp_path: Path) -> None:
    git("clone", "--quiet", "--shared", "--no-checkout", clone, "tree", cwd=tmp_path)
    tree = tmp_path / "tree"
    git("checkout", "--quiet", row["base_commit"], cwd=tree)
    git("apply", "-", cwd=tree, stdin=row["test_patch"])
    test_path = row["FAIL_TO_PASS"][0].split("::")[0]

    before = run_tests(tree, test_path)
    assert {node for node, result in before.items() if result == "FAILED"} == set(row["FAIL_TO_PASS"])
    assert {node for node, result in before.items() if result == "PASSED"} == set(row["PASS_TO_PASS"])

    git("apply", "-", cwd=tree, stdin=row["patch"])
    after = run_tests(tree, test_path)
    assert after == dict.fromkeys(before, "PASSED")
