"""``certify``'s task files, and the command itself."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from dockyard_core import DataError
from dockyard_sandbox.task_rows import read_tasks

ROW = {
    "instance_id": "x",
    "repo": "org/name",
    "base_commit": "0" * 40,
    "patch": "p",
    "FAIL_TO_PASS": '["t.py::a"]',
    "hints_text": "ignored",
}


def test_rows_are_read_with_their_defaults(tmp_path: Path) -> None:
    (tmp_path / "beside").mkdir()
    lines = [ROW, {**ROW, "repo": "beside", "apply": "swebench", "PASS_TO_PASS": ["t.py::b"]}]
    (tmp_path / "t.jsonl").write_text("\n\n".join(map(json.dumps, lines)))
    first, second = read_tasks(tmp_path / "t.jsonl")
    assert (first.repo, first.fail_to_pass, first.pass_to_pass, first.apply) == ("org/name", ("t.py::a",), (), "strict")
    assert (second.repo, second.pass_to_pass, second.apply) == (str(tmp_path / "beside"), ("t.py::b",), "swebench")


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "must hold a task"),
        ("{", "t.jsonl:1: must be JSON"),
        ("[]", "t.jsonl:1: "),
        (json.dumps({**ROW, "patch": ""}), "t.jsonl:1: patch"),
        (json.dumps(ROW) + "\n" + json.dumps({**ROW, "FAIL_TO_PASS": "x"}), "t.jsonl:2: FAIL_TO_PASS"),
        (json.dumps({**ROW, "apply": "fuzzy"}), "t.jsonl:1: apply"),
    ],
)
def test_a_row_that_is_wrong_is_named_by_line_and_field(text: str, message: str, tmp_path: Path) -> None:
    (tmp_path / "t.jsonl").write_text(text)
    with pytest.raises(DataError, match=message):
        read_tasks(tmp_path / "t.jsonl")


@pytest.mark.ci
def test_certify_writes_a_certificate_for_each_task_and_says_which_are_good(project: Any, tmp_path: Path) -> None:
    task = project.task()
    good = {
        "instance_id": "good",
        "repo": str(project.path),
        "base_commit": project.commit,
        "patch": project.gold(),
        "test_patch": task.test_patch,
        "FAIL_TO_PASS": task.fail_to_pass,
        "PASS_TO_PASS": task.pass_to_pass,
    }
    bad = {**good, "instance_id": "bad", "patch": project.patch({"calc/ops.py": "x = 1\n"})}
    (tmp_path / "t.jsonl").write_text(f"{json.dumps(good)}\n{json.dumps(bad)}\n")
    command = [sys.executable, "-P", "-m", "dockyard_sandbox.cli", "certify", str(tmp_path / "t.jsonl"), "--runs", "2"]
    done = subprocess.run([*command, "--out", str(tmp_path / "out")], capture_output=True, text=True, check=False)
    assert done.returncode == 1, done.stderr
    first, second = map(json.loads, done.stdout.splitlines())
    assert (first["instance_id"], first["is_certified"], first["reasons"]) == ("good", True, [])
    assert (second["instance_id"], second["is_certified"]) == ("bad", False)
    assert second["reasons"]
    for line in (first, second):
        assert json.loads(Path(line["certificate"]).read_text())["instance_id"] == line["instance_id"]
