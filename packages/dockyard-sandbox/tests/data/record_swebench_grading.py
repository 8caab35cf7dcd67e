# ruff: noqa: E501
# The long lines are files of the recorded projects.
"""Record what the public `swebench` package makes of pytest logs: `swebench_grading.json`.

    python packages/dockyard-sandbox/tests/data/record_swebench_grading.py

Needs an environment with `swebench` and `pytest`; the tests need neither of them, only the recording. `rule` has its
grading of status maps, `logs` its parser's and its grading's view of real logs of the projects below.
"""

from __future__ import annotations

import itertools
import json
import subprocess
import sys
import tempfile
from importlib.metadata import version
from pathlib import Path
from typing import Any

SOURCE = "def add(a, b):\n    return a {} b\n\n\ndef mul(a, b):\n    return a * b\n"
STATUSES = ("PASSED", "FAILED", "SKIPPED", "ERROR", "XFAIL", None)
_FIXTURES = "import pytest\nfrom calc import add, mul\n\n\n"
# name -> files of the tree as patched; FAIL_TO_PASS; PASS_TO_PASS
CASES: dict[str, tuple[dict[str, str], list[str], list[str]]] = {
    "right fix": (
        {
            "t/test_a.py": _FIXTURES
            + "def test_add():\n    assert add(2, 3) == 5\n\n\ndef test_mul():\n    assert mul(2, 3) == 6\n"
        },
        ["t/test_a.py::test_add"],
        ["t/test_a.py::test_mul"],
    ),
    "wrong fix": (
        {
            "calc.py": SOURCE.format("-"),
            "t/test_a.py": _FIXTURES
            + "def test_add():\n    assert add(2, 3) == 5\n\n\ndef test_mul():\n    assert mul(2, 3) == 6\n",
        },
        ["t/test_a.py::test_add"],
        ["t/test_a.py::test_mul"],
    ),
    "fix that breaks another": (
        {
            "t/test_a.py": _FIXTURES
            + "def test_add():\n    assert add(2, 3) == 5\n\n\ndef test_mul():\n    assert mul(2, 3) == 5\n"
        },
        ["t/test_a.py::test_add"],
        ["t/test_a.py::test_mul"],
    ),
    "parameters": (
        {
            "t/test_p.py": _FIXTURES
            + "@pytest.mark.parametrize(('a', 'b', 'c'), [(1, 2, 3), (2, 2, 4), (0, 0, 1)])\ndef test_add(a, b, c):\n"
            "    assert add(a, b) == c\n\n\n@pytest.mark.parametrize('x', ['a-b', 'a/b', 'ä', 'x::y'])\ndef test_text(x):\n    assert x\n"
        },
        ["t/test_p.py::test_add[1-2-3]", "t/test_p.py::test_add[2-2-4]"],
        ["t/test_p.py::test_add[0-0-1]", "t/test_p.py::test_text[a-b]", "t/test_p.py::test_text[a/b]"],
    ),
    "errors of setup and teardown": (
        {
            "t/test_e.py": _FIXTURES
            + "@pytest.fixture\ndef broken():\n    raise RuntimeError\n\n\n@pytest.fixture\ndef late():\n    yield\n    raise RuntimeError\n\n\n"
            "def test_setup(broken):\n    pass\n\n\ndef test_teardown(late):\n    assert add(1, 1) == 2\n\n\ndef test_ok():\n    assert add(1, 1) == 2\n"
        },
        ["t/test_e.py::test_setup"],
        ["t/test_e.py::test_teardown", "t/test_e.py::test_ok"],
    ),
    "error of teardown alone": (
        {
            "t/test_e.py": _FIXTURES + "@pytest.fixture\ndef late():\n    yield\n    raise RuntimeError\n\n\n"
            "def test_teardown(late):\n    assert add(1, 1) == 2\n\n\ndef test_ok():\n    assert add(1, 1) == 2\n"
        },
        ["t/test_e.py::test_ok"],
        ["t/test_e.py::test_teardown"],
    ),
    "expected failures": (
        {
            "t/test_x.py": _FIXTURES
            + "@pytest.mark.xfail\ndef test_fails():\n    assert add(1, 1) == 3\n\n\n@pytest.mark.xfail\ndef test_passes():\n    assert add(1, 1) == 2\n\n\n"
            "@pytest.mark.xfail(strict=True)\ndef test_strict():\n    assert add(1, 1) == 2\n\n\ndef test_ok():\n    assert add(1, 1) == 2\n"
        },
        ["t/test_x.py::test_fails", "t/test_x.py::test_ok"],
        [],
    ),
    "expected failure kept": (
        {
            "t/test_x.py": _FIXTURES
            + "@pytest.mark.xfail\ndef test_fails():\n    assert add(1, 1) == 3\n\n\ndef test_ok():\n    assert add(1, 1) == 2\n"
        },
        ["t/test_x.py::test_ok"],
        ["t/test_x.py::test_fails"],
    ),
    "strict expected failure that passes": (
        {
            "t/test_x.py": _FIXTURES
            + "@pytest.mark.xfail(strict=True)\ndef test_strict():\n    assert add(1, 1) == 2\n\n\ndef test_ok():\n    assert add(1, 1) == 2\n"
        },
        ["t/test_x.py::test_ok"],
        ["t/test_x.py::test_strict"],
    ),
    "unexpected pass": (
        {
            "t/test_x.py": _FIXTURES
            + "@pytest.mark.xfail\ndef test_passes():\n    assert add(1, 1) == 2\n\n\ndef test_ok():\n    assert add(1, 1) == 2\n"
        },
        ["t/test_x.py::test_ok"],
        ["t/test_x.py::test_passes"],
    ),
    "expected failure called": (
        {
            "t/test_x.py": _FIXTURES
            + "def test_called():\n    pytest.xfail('x')\n\n\ndef test_ok():\n    assert add(1, 1) == 2\n"
        },
        ["t/test_x.py::test_called", "t/test_x.py::test_ok"],
        [],
    ),
    "skipped fix": (
        {
            "t/test_s.py": _FIXTURES
            + "def test_add():\n    pytest.skip('no')\n\n\ndef test_mul():\n    assert mul(2, 3) == 6\n"
        },
        ["t/test_s.py::test_add"],
        ["t/test_s.py::test_mul"],
    ),
    "skipped test kept": (
        {
            "t/test_s.py": _FIXTURES
            + "@pytest.mark.skip\ndef test_mul():\n    pass\n\n\ndef test_add():\n    assert add(2, 3) == 5\n"
        },
        ["t/test_s.py::test_add"],
        ["t/test_s.py::test_mul"],
    ),
    "one id is absent": (
        {"t/test_a.py": _FIXTURES + "def test_add():\n    assert add(2, 3) == 5\n"},
        ["t/test_a.py::test_add", "t/test_a.py::test_gone"],
        [],
    ),
    "one file cannot be collected": (
        {
            "t/test_a.py": _FIXTURES + "def test_add():\n    assert add(2, 3) == 5\n",
            "t/test_b.py": "import nowhere\n\n\ndef test_b():\n    pass\n",
        },
        ["t/test_a.py::test_add"],
        ["t/test_b.py::test_b"],
    ),
    "classes and unittest": (
        {
            "t/test_c.py": "import unittest\nfrom calc import add\n\n\nclass TestPlain:\n    def test_add(self):\n        assert add(2, 3) == 5\n\n\n"
            "class Case(unittest.TestCase):\n    def test_add(self):\n        self.assertEqual(add(2, 3), 5)\n\n"
            "    def test_bad(self):\n        self.assertEqual(add(2, 3), 6)\n\n    @unittest.expectedFailure\n    def test_expected(self):\n"
            "        self.assertEqual(add(2, 3), 6)\n"
        },
        ["t/test_c.py::TestPlain::test_add", "t/test_c.py::Case::test_add", "t/test_c.py::Case::test_expected"],
        ["t/test_c.py::Case::test_bad"],
    ),
    "a test that is not asked for fails": (
        {
            "t/test_a.py": _FIXTURES
            + "def test_add():\n    assert add(2, 3) == 5\n\n\ndef test_other():\n    assert add(2, 3) == 6\n"
        },
        ["t/test_a.py::test_add"],
        [],
    ),
}


def run_pytest(files: dict[str, str]) -> tuple[str, int]:
    """Return the log and the exit code of pytest with SWE-bench's options on a plain tree."""
    with tempfile.TemporaryDirectory() as directory:
        for name, text in {"calc.py": SOURCE.format("+"), **files}.items():
            path = Path(directory, name)
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(text)
        names = sorted(name for name in files if "/test_" in name)
        command = [sys.executable, "-m", "pytest", "-rA", "-p", "no:cacheprovider", "--rootdir", directory, *names]
        done = subprocess.run(command, cwd=directory, capture_output=True, text=True, check=False)
        log = done.stdout.replace(directory, "/testbed")
        for prefix in (sys.prefix, sys.base_prefix):
            log = log.replace(prefix, "/python")
        return log, done.returncode


def grade(log: str, exit_code: int, fail_to_pass: list[str], pass_to_pass: list[str]) -> tuple[dict[str, str], bool]:
    """Return swebench's status map of a log, and whether it calls the instance resolved."""
    from swebench.harness import constants, grading
    from swebench.types import TestSpec

    spec = TestSpec("i", "", [], "r", "1", fail_to_pass, pass_to_pass, "parse_log_pytest", "pass_and_fail")
    marked = (
        f"{constants.START_TEST_OUTPUT}\n{log}\n{constants.END_TEST_OUTPUT}\n{constants.TEST_EXIT_CODE}: {exit_code}\n"
    )
    with tempfile.NamedTemporaryFile("w", suffix=".txt") as file:
        file.write(marked)
        file.flush()
        statuses, found = grading.get_logs_eval(spec, file.name)
    return statuses, found and is_resolved(statuses, fail_to_pass, pass_to_pass)


def is_resolved(statuses: dict[str, str], fail_to_pass: list[str], pass_to_pass: list[str]) -> bool:
    """swebench's grading of a status map."""
    from swebench.harness.constants import ResolvedStatus
    from swebench.harness.grading import get_eval_tests_report, get_resolution_status

    ids = {"FAIL_TO_PASS": fail_to_pass, "PASS_TO_PASS": pass_to_pass}
    return bool(get_resolution_status(get_eval_tests_report(statuses, ids)) == ResolvedStatus.FULL.value)


def rule() -> list[dict[str, Any]]:
    """Every pair of statuses of a FAIL_TO_PASS and a PASS_TO_PASS id, beside one of each that pass."""
    found = []
    for first, second in itertools.product(STATUSES, STATUSES):
        statuses = {"t.py::f": first, "t.py::p": second, "t.py::g": "PASSED", "t.py::q": "PASSED"}
        present = {test: status for test, status in statuses.items() if status is not None}
        resolved = is_resolved(present, ["t.py::f", "t.py::g"], ["t.py::p", "t.py::q"])
        found.append({"fail_to_pass": first, "pass_to_pass": second, "resolved": resolved})
    return found


def main() -> None:
    """Write the file beside this script."""
    logs = []
    for name, (files, fail_to_pass, pass_to_pass) in CASES.items():
        log, exit_code = run_pytest(files)
        statuses, resolved = grade(log, exit_code, fail_to_pass, pass_to_pass)
        logs.append(
            {
                "name": name,
                "files": {"calc.py": SOURCE.format("+"), **files},
                "fail_to_pass": fail_to_pass,
                "pass_to_pass": pass_to_pass,
                "log": log,
                "exit_code": exit_code,
                "statuses": statuses,
                "resolved": resolved,
            }
        )
    record = {"swebench": version("swebench"), "pytest": version("pytest"), "rule": rule(), "logs": logs}
    text = json.dumps(record, indent=1, ensure_ascii=False, sort_keys=True)
    Path(__file__).with_name("swebench_grading.json").write_text(text + "\n")


if __name__ == "__main__":
    main()
