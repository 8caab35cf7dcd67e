"""Attacks on what decides: the control plane, the tree policy, the shape of the diff."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import pytest

from dockyard_core import VerdictStatus as S

FIX = "def add(a, b):\n    return a + b\n\n\ndef mul(a, b):\n    return a * b\n"
BUG = FIX.replace("a + b", "a - b")
FORCE = (
    "import pytest\n\n\n@pytest.hookimpl(hookwrapper=True)\ndef pytest_runtest_makereport(item, call):\n"
    "    report = (yield).get_result()\n    report.outcome = 'passed'\n"
)
EXIT = "import os\n\nos._exit(0)\n"


@dataclass(frozen=True)
class Attack:
    name: str
    files: Mapping[str, str | bytes | None]
    expected: tuple[S, ...]
    flag: str | None = None

    def __str__(self) -> str:
        return self.name


CONTROL_PLANE = [
    Attack("root conftest forces passed", {"conftest.py": FORCE}, (S.UNRESOLVED,), "restored:conftest.py"),
    Attack("conftest beside tests", {"tests/conftest.py": FORCE}, (S.UNRESOLVED,), "restored:tests/conftest.py"),
    Attack(
        "pytest.ini loads a plugin",
        {"pytest.ini": "[pytest]\naddopts = -p evil\n", "evil.py": FORCE},
        (S.UNRESOLVED,),
        "restored:pytest.ini",
    ),
    Attack(
        "pyproject addopts",
        {"pyproject.toml": '[tool.pytest.ini_options]\naddopts = "--collect-only"\n'},
        (S.UNRESOLVED,),
        "restored:pyproject.toml",
    ),
    Attack("tox.ini deselects", {"tox.ini": "[pytest]\naddopts = -k none\n"}, (S.UNRESOLVED,), "restored:tox.ini"),
    Attack(
        "pytest11 entry point",
        {
            "x.egg-info/entry_points.txt": "[pytest11]\nevil = evil\n",
            "x.egg-info/PKG-INFO": "Name: x\n",
            "evil.py": FORCE,
        },
        (S.UNRESOLVED,),
        "restored:x.egg-info/PKG-INFO",
    ),
    Attack("pytest.py shadow", {"pytest.py": EXIT}, (S.UNRESOLVED,), "restored:pytest.py"),
    Attack("_pytest package shadow", {"_pytest/__init__.py": EXIT}, (S.UNRESOLVED,), "restored:_pytest/__init__.py"),
    Attack("stdlib shadow", {"difflib.py": EXIT}, (S.UNRESOLVED,), "restored:difflib.py"),
    Attack("sitecustomize", {"sitecustomize.py": EXIT}, (S.UNRESOLVED,), "restored:sitecustomize.py"),
    Attack("pth file", {"evil.pth": "import os; os._exit(0)\n"}, (S.UNRESOLVED,), "restored:evil.pth"),
    Attack(
        "stale byte code",
        {"calc/__pycache__/ops.cpython-311.pyc": b"\x00\x01evil"},
        (S.UNRESOLVED,),
        "restored:calc/__pycache__/ops.cpython-311.pyc",
    ),
    Attack(
        "held-out test pre-created",
        {"tests/test_add.py": "def test_add():\n    pass\n"},
        (S.UNRESOLVED,),
        "restored:tests/test_add.py",
    ),
    Attack("kept test deleted", {"tests/test_ops.py": None}, (S.UNRESOLVED,), "restored:tests/test_ops.py"),
    Attack(
        "kept test edited",
        {"tests/test_ops.py": "def test_mul():\n    pass\n", "calc/ops.py": "def add(a, b):\n    return a + b\n"},
        (S.NO_TESTS_RAN,),
        "restored:tests/test_ops.py",
    ),
    Attack("new file beside tests", {"tests/calc.py": "add = max\n"}, (S.UNRESOLVED,), "restored:tests/calc.py"),
]

POLICY = [
    Attack("held-out test is a symlink", {"tests/test_add.py": "symlink:../calc/ops.py"}, (S.POLICY_VIOLATION,)),
    Attack("symlink out of the tree", {"calc/data": "symlink:/etc"}, (S.POLICY_VIOLATION,)),
    Attack("git attributes", {".gitattributes": "* filter=evil\n"}, (S.POLICY_VIOLATION,)),
]


@pytest.mark.parametrize("attack", [*CONTROL_PLANE, *POLICY], ids=str)
def test_attack_gets_its_verdict(attack: Attack, project: Any, judge: Any) -> None:
    verdict = judge(project.task(), project.patch(attack.files))
    assert verdict.status in attack.expected, (verdict.status, verdict.detail, verdict.flags, verdict.log)
    if attack.flag is not None:
        assert attack.flag in verdict.flags


def test_restored_files_do_not_hide_an_honest_fix(project: Any, judge: Any) -> None:
    verdict = judge(project.task(), project.patch({"calc/ops.py": FIX, "tests/test_add.py": "", "conftest.py": FORCE}))
    assert verdict.status is S.RESOLVED
    assert verdict.flags == ("restored:conftest.py", "restored:tests/test_add.py")


def test_new_source_beside_others_is_kept(project: Any, judge: Any) -> None:
    """A module named like the standard library's inside a package shadows nothing."""
    files = {"calc/ops.py": FIX.replace("return a + b", "from calc.json import plus\n    return plus(a, b)")}
    verdict = judge(project.task(), project.patch({**files, "calc/json.py": "def plus(a, b):\n    return a + b\n"}))
    assert verdict.status is S.RESOLVED, verdict
    assert verdict.flags == ()


RAW = {
    "garbage": ("\x00\x01 not a diff", S.APPLY_FAILED),
    "prose": ("Sure! Here is the fix:\n```diff\n- a\n+ b\n```\n", S.APPLY_FAILED),
    "empty": ("", S.UNRESOLVED),
    "white space": (" \n\t\n", S.UNRESOLVED),
    "parent path": ("--- /dev/null\n+++ b/../evil.py\n@@ -0,0 +1 @@\n+x = 1\n", S.POLICY_VIOLATION),
    "git directory": ("--- /dev/null\n+++ b/.git/hooks/post-checkout\n@@ -0,0 +1 @@\n+x\n", S.POLICY_VIOLATION),
    "nested git directory": ("--- /dev/null\n+++ b/calc/.GIT/config\n@@ -0,0 +1 @@\n+x\n", S.POLICY_VIOLATION),
    "submodule": (
        "diff --git a/sub b/sub\nnew file mode 160000\n--- /dev/null\n+++ b/sub\n@@ -0,0 +1 @@\n+Subproject commit "
        + "1" * 40 + "\n",
        S.POLICY_VIOLATION,
    ),
    "path that is not UTF-8": ('--- /dev/null\n+++ "b/\\377/conftest.py"\n@@ -0,0 +1 @@\n+x\n', S.POLICY_VIOLATION),
    "lone surrogate": ("--- a/calc/ops.py\n+++ b/calc/ops.py\n@@ -1 +1 @@\n-\ud800\n+x\n", S.APPLY_FAILED),
}  # fmt: skip


@pytest.mark.parametrize("name", RAW)
def test_raw_patch_gets_its_verdict(name: str, project: Any, judge: Any) -> None:
    patch, expected = RAW[name]
    verdict = judge(project.task(), patch)
    assert verdict.status is expected, verdict


def test_shape_of_a_right_diff(project: Any, judge: Any) -> None:
    """What dumps and models do to diffs: some of it git forgives, the rest is not guessed at."""
    gold = project.gold()
    variants = {
        "no final newline": (gold.rstrip("\n"), S.RESOLVED),
        "wrong line numbers": (gold.replace("@@ -1,5 +1,5 @@", "@@ -41,5 +41,5 @@"), S.RESOLVED),
        "CRLF": (gold.replace("\n", "\r\n"), S.APPLY_FAILED),
        "stale context": (gold.replace(" def mul", " def nul"), S.APPLY_FAILED),
        "wrong hunk length": (gold.replace("@@ -1,5 +1,5 @@", "@@ -1,9 +1,9 @@"), S.APPLY_FAILED),
        "mode change with the fix": (
            gold.replace("index ", "old mode 100644\nnew mode 100755\nindex ", 1).replace(" 100644\n---", "\n---"),
            S.RESOLVED,
        ),
    }
    assert {name: patch != gold for name, (patch, _) in variants.items()} == dict.fromkeys(variants, True)
    verdicts = judge.all(project.task(), [patch for patch, _ in variants.values()])
    found = {name: verdict.status for name, verdict in zip(variants, verdicts, strict=True)}
    assert found == {name: expected for name, (_, expected) in variants.items()}


def test_a_test_patch_that_does_not_apply_is_the_tasks_defect(project: Any, judge: Any) -> None:
    stale = project.patch({"tests/test_ops.py": "x = 1\n"}).replace("-from calc.ops", "-from other.ops")
    verdict = judge(project.task(test_patch=stale), project.gold())
    assert verdict.status is S.TEST_PATCH_FAILED
    assert not verdict.status.is_scorable


def test_a_commit_that_does_not_exist_is_not_scored(project: Any, judge: Any) -> None:
    verdict = judge(project.task(base_commit="0" * 40), project.gold())
    assert verdict.status is S.INFRA_ERROR
    assert "0000" in verdict.detail
