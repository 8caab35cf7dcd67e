"""Freeze the quickstart's tasks: `train.jsonl`, `heldout.jsonl` and `tasks.bundle`.

    python -m dockyard_grpo.quickstart.tasks --out DIR

Rows have SWE-bench's columns and `labels`. `repo` is the path of the bundle relative to the rows' file; each base
commit is a branch in it, named like its task. Names, dates and order are fixed, so the same git writes the same bytes
and every git the same commit ids.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import os
import random
import subprocess
import tempfile
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from dockyard_grpo.quickstart.family import BUG_CLASSES, Function, Problem, draw_problem

__all__ = ["BUNDLE_NAME", "QuickstartTask", "build_tasks", "main", "write_tasks"]

BUNDLE_NAME = "tasks.bundle"
NUM_TRAIN = 96
NUM_HELDOUT = 72
_SEEDS = {False: 1, True: 2}

_IDENTITY = "Quickstart <quickstart@example.invalid> 1767225600 +0000"
_ROOT_FILES = {
    "README.md": "# tiny tools\n\nSmall functions, one module at a time.\n",
    "pyproject.toml": '[project]\nname = "tiny-tools"\nversion = "0.1.0"\nrequires-python = ">=3.11"\n',
}


@dataclass(frozen=True, kw_only=True, slots=True)
class QuickstartTask:
    """One task before its base commit exists."""

    instance_id: str
    problem: Problem
    test_path: str
    tests: str
    """Text of the hidden test file."""
    fail_to_pass: tuple[str, ...]
    pass_to_pass: tuple[str, ...]

    @property
    def test_patch(self) -> str:
        """The diff that creates the hidden test file."""
        lines = self.tests.splitlines(keepends=True)
        header = f"--- /dev/null\n+++ b/{self.test_path}\n@@ -0,0 +1,{len(lines)} @@\n"
        return header + "".join(f"+{line}" for line in lines)

    def row(self, base_commit: str) -> dict[str, object]:
        """Return the SWE-bench record."""
        problem = self.problem
        return {
            "instance_id": self.instance_id,
            "repo": BUNDLE_NAME,
            "base_commit": base_commit,
            "problem_statement": problem.issue,
            "patch": problem.patch(problem.function.right),
            "test_patch": self.test_patch,
            "FAIL_TO_PASS": list(self.fail_to_pass),
            "PASS_TO_PASS": list(self.pass_to_pass),
            "labels": {"bug_class": problem.function.bug_class.name, "phrase": problem.phrase},
        }


def outcome(function: Function, filling: str, arguments: Sequence[object]) -> object:
    """Return what the function with `filling` in its slot gives for `arguments`."""
    namespace: dict[str, object] = {}
    exec("\n".join(function.lines(filling)), namespace)
    call = namespace[function.name]
    assert callable(call)
    result: object = call(*arguments)
    return result


def make_task(problem: Problem) -> QuickstartTask:
    """Write the hidden tests of `problem` and sort them by what they do at the base commit."""
    module = problem.path.removesuffix(".py")
    test_path = f"test_{module}.py"
    names = ", ".join(function.name for function in problem.functions)
    blocks = [f"from {module} import {names}\n"]
    fail_to_pass: list[str] = []
    pass_to_pass: list[str] = []
    for function in problem.functions:
        filling = problem.wrong if function is problem.function else function.right
        for index, arguments in enumerate(function.bug_class.arguments):
            expected = outcome(function, function.right, arguments)
            test_name = f"test_{function.name}_{index}"
            call = f"{function.name}({', '.join(map(repr, arguments))})"
            check = f"{call} is {expected}" if isinstance(expected, bool) else f"{call} == {expected!r}"
            blocks.append(f"\ndef {test_name}():\n    assert {check}\n")
            is_kept = outcome(function, filling, arguments) == expected
            (pass_to_pass if is_kept else fail_to_pass).append(f"{test_path}::{test_name}")
    assert fail_to_pass, f"no test sees the bug of {problem}"
    digest = hashlib.sha256((problem.issue + problem.source(problem.wrong)).encode()).hexdigest()[:8]
    return QuickstartTask(
        instance_id=f"quickstart__{problem.function.name}-{digest}",
        problem=problem,
        test_path=test_path,
        tests="\n".join(blocks),
        fail_to_pass=tuple(fail_to_pass),
        pass_to_pass=tuple(pass_to_pass),
    )


def build_tasks(num_tasks: int, *, heldout: bool) -> list[QuickstartTask]:
    """Draw `num_tasks` distinct tasks, as many of each plain phrase; the same ones at every call."""
    num_phrases = sum(len(bug_class.phrases) for bug_class in BUG_CLASSES)
    if num_tasks % num_phrases:
        raise ValueError(f"num_tasks must be a multiple of the {num_phrases} phrases, got {num_tasks}; round it")
    rng = random.Random(_SEEDS[heldout])
    tasks: dict[str, QuickstartTask] = {}
    drawn: Counter[str] = Counter()
    while len(tasks) < num_tasks:
        task = make_task(draw_problem(rng, heldout=heldout))
        phrase = task.problem.phrase
        if task.instance_id not in tasks and drawn[phrase] < num_tasks // num_phrases:
            tasks[task.instance_id] = task
            drawn[phrase] += 1
    return list(tasks.values())


def _fast_import_stream(tasks: Sequence[QuickstartTask]) -> str:
    def commit(branch: str, message: str, files: Mapping[str, str], parent: str | None) -> str:
        lines = [f"commit refs/heads/{branch}\ncommitter {_IDENTITY}\n", f"data {len(message)}\n{message}\n"]
        if parent is not None:
            lines.append(f"from refs/heads/{parent}\n")
        lines += [f"M 100644 inline {path}\ndata {len(text)}\n{text}\n" for path, text in files.items()]
        return "".join(lines)

    chunks = [commit("main", "Start tiny tools", _ROOT_FILES, None)]
    for task in tasks:
        problem = task.problem
        files = {problem.path: problem.source(problem.wrong)}
        chunks.append(commit(task.instance_id, f"Add {problem.path}", files, "main"))
    stream = "".join(chunks)
    assert stream.isascii(), "fast-import counts bytes"
    return stream


def write_bundle(path: Path, tasks: Sequence[QuickstartTask]) -> dict[str, str]:
    """Write the bundle of every task's base commit; return instance_id -> commit id.

    Raises `subprocess.CalledProcessError` when git fails.
    """
    environment = {"PATH": os.environ["PATH"], "GIT_CONFIG_NOSYSTEM": "1", "GIT_CONFIG_GLOBAL": os.devnull}
    with tempfile.TemporaryDirectory() as folder:

        def git(*arguments: str, stdin: str = "") -> str:
            command = ["git", "-c", "pack.threads=1", *arguments]
            done = subprocess.run(
                command, cwd=folder, env=environment, input=stdin, capture_output=True, text=True, check=True
            )
            return done.stdout

        git("init", "--quiet", "--bare", "--object-format=sha1", "--initial-branch=main")
        git("fast-import", "--quiet", stdin=_fast_import_stream(tasks))
        git("bundle", "create", "--quiet", "--version=2", str(path.resolve()), "HEAD", "--branches")
        refs = git("for-each-ref", "--format=%(refname:short) %(objectname)", "refs/heads").splitlines()
    commits = dict(line.split() for line in refs)
    return {task.instance_id: commits[task.instance_id] for task in tasks}


def write_tasks(out: Path) -> None:
    """Write the three files of the quickstart's data set to the folder `out`."""
    out.mkdir(parents=True, exist_ok=True)
    splits = {
        "train.jsonl": build_tasks(NUM_TRAIN, heldout=False),
        "heldout.jsonl": build_tasks(NUM_HELDOUT, heldout=True),
    }
    commits = write_bundle(out / BUNDLE_NAME, [task for tasks in splits.values() for task in tasks])
    for name, tasks in splits.items():
        lines = [json.dumps(task.row(commits[task.instance_id])) + "\n" for task in tasks]
        (out / name).write_text("".join(lines), encoding="utf-8")


def main(argv: Sequence[str] | None = None) -> None:
    """Regenerate the frozen files from the command line."""
    parser = argparse.ArgumentParser(description="Write the quickstart's tasks and their repository bundle.")
    parser.add_argument("--out", type=Path, default=Path(__file__).parent)
    write_tasks(parser.parse_args(argv).out)


if __name__ == "__main__":
    main()
