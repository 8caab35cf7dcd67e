"""What ordinary repositories need of a run: plug-ins, an interpreter on PATH, files that their fix changes."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from dockyard_core import TestStatus as T
from dockyard_core import VerdictStatus as S

FIX = "def add(a, b):\n    return a + b\n\n\ndef mul(a, b):\n    return a * b\n"
PLUGIN = "_hypothesis_pytestplugin"


@pytest.fixture(scope="module")
def configured(new_project: Any, tmp_path_factory: pytest.TempPathFactory) -> Any:
    """A repository whose configuration has an option of a plug-in."""
    pytest.importorskip(PLUGIN)
    files = {
        "calc/__init__.py": "",
        "calc/ops.py": FIX.replace("a + b", "a - b"),
        "tests/test_ops.py": "from calc.ops import mul\n\n\ndef test_mul():\n    assert mul(2, 3) == 6\n",
        "tests/conftest.py": "import pytest\n\n\n@pytest.fixture\ndef two():\n    return 2\n",
        "pyproject.toml": '[tool.pytest.ini_options]\naddopts = "--hypothesis-seed=1"\n',
    }
    return new_project(tmp_path_factory.mktemp("configured") / "calc", files)


@pytest.mark.parametrize(
    ("plugins", "status"),
    [((), S.NO_TESTS_RAN), ((PLUGIN,), S.RESOLVED), (("auto",), S.RESOLVED), (("nothing_like_it",), S.NO_TESTS_RAN)],
)
def test_a_task_names_the_plugins_of_its_tests(
    plugins: tuple[str, ...], status: S, configured: Any, judge: Any
) -> None:
    verdict = judge(configured.task(plugins=plugins), configured.patch({"calc/ops.py": FIX}))
    assert verdict.status is status, verdict
    assert verdict.is_resolved or "hypothesis-seed" in verdict.log or "nothing_like_it" in verdict.log


def test_a_patch_cannot_stand_in_for_a_plugin(configured: Any, judge: Any) -> None:
    evil = "def pytest_runtest_makereport(item, call):\n    raise SystemExit(0)\n"
    patch = configured.patch({f"{PLUGIN}.py": evil, "calc/ops.py": FIX})
    verdict = judge(configured.task(plugins=(PLUGIN,)), patch)
    assert verdict.is_resolved
    assert f"restored:{PLUGIN}.py" in verdict.flags


SEES = {
    "an interpreter on PATH": "import shutil, sys\n    assert shutil.which('python'), sys.executable",
    "pytest on PATH": "import subprocess\n    subprocess.run(['python', '-m', 'pytest', '--version'], check=True)",
    "one thread per library": "import os\n    assert os.environ['OMP_NUM_THREADS'] == '1'",
}


@pytest.mark.parametrize("what", SEES)
def test_a_run_has(what: str, project: Any, judge: Any) -> None:
    text = f"def test_add():\n    {SEES[what]}\n"
    verdict = judge(project.task(test_patch=project.patch({"tests/test_add.py": text})), project.gold())
    assert verdict.is_resolved, verdict


def test_what_the_known_fix_changes_may_be_changed(configured: Any, judge: Any) -> None:
    held_out = "from calc.ops import add\n\n\ndef test_add(three):\n    assert add(three, 3) == 6\n"
    task = configured.task(plugins=(PLUGIN,), test_patch=configured.patch({"tests/test_add.py": held_out}))
    gold = configured.patch(
        {
            "calc/ops.py": FIX,
            "tests/conftest.py": "import pytest\n\n\n@pytest.fixture\ndef two():\n    return 2\n\n\n"
            "@pytest.fixture\ndef three():\n    return 3\n",
        }
    )
    restored = judge(task, gold)
    assert restored.status is S.UNRESOLVED
    assert restored.flags == ("restored:tests/conftest.py",)
    exempt = judge(replace(task, gold_patch=gold), gold)
    assert exempt.is_resolved, exempt
    assert exempt.flags == ("exempt:tests/conftest.py",)


def test_no_known_fix_exempts_a_deciding_test(project: Any, judge: Any) -> None:
    forged = project.patch({"tests/test_add.py": "def test_add():\n    pass\n", "calc/new.py": "x = 1\n"})
    verdict = judge(replace(project.task(), gold_patch=forged), forged)
    assert verdict.status is S.UNRESOLVED
    assert verdict.flags == ("restored:tests/test_add.py",)


def test_an_unresolved_verdict_names_the_tests(project: Any, judge: Any) -> None:
    task = project.task(fail_to_pass=("tests/test_add.py::test_add", "tests/test_add.py::test_nowhere"))
    verdict = judge(task, "")
    assert verdict.tests["tests/test_add.py::test_nowhere"] is T.MISSING
    named = "tests/test_add.py::test_nowhere missing, tests/test_add.py::test_add failed"
    assert verdict.detail == f"2 of 3 deciding tests did not pass: {named}"
