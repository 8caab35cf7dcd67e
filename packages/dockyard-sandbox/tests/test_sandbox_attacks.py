"""What the policy and the restored control plane leave of a patch. The attacks themselves: `attack_cases.py`."""

from __future__ import annotations

from typing import Any

from dockyard_core import VerdictStatus as S

FIX = "def add(a, b):\n    return a + b\n\n\ndef mul(a, b):\n    return a * b\n"


def test_restored_files_do_not_hide_an_honest_fix(project: Any, judge: Any) -> None:
    verdict = judge(
        project.task(),
        project.patch({"calc/ops.py": FIX, "tests/test_add.py": "", "conftest.py": "import os; os._exit(0)\n"}),
    )
    assert verdict.status is S.RESOLVED
    assert verdict.flags == ("restored:conftest.py", "restored:tests/test_add.py")


def test_new_source_beside_others_is_kept(project: Any, judge: Any) -> None:
    """A module named like the standard library's inside a package shadows nothing."""
    files = {"calc/ops.py": FIX.replace("return a + b", "from calc.json import plus\n    return plus(a, b)")}
    verdict = judge(project.task(), project.patch({**files, "calc/json.py": "def plus(a, b):\n    return a + b\n"}))
    assert verdict.status is S.RESOLVED, verdict
    assert verdict.flags == ()


def test_a_test_patch_that_does_not_apply_is_the_tasks_defect(project: Any, judge: Any) -> None:
    stale = project.patch({"tests/test_ops.py": "x = 1\n"}).replace("-from calc.ops", "-from other.ops")
    verdict = judge(project.task(test_patch=project.task().test_patch + stale), project.gold())
    assert verdict.status is S.TEST_PATCH_FAILED
    assert not verdict.status.is_scorable
