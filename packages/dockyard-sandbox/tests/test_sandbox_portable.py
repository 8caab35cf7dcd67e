"""The runner as old images read it: the same program, without what their interpreters do not know."""

from __future__ import annotations

import ast
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

import dockyard_sandbox
from dockyard_sandbox.environments import _BOOT
from dockyard_sandbox.portable import OLDEST, portable

PACKAGE = Path(dockyard_sandbox.__file__).parent
TESTS = """\
import unittest
import pytest


def test_passes(): pass
def test_fails(): assert 1 == 2
@pytest.mark.skip
def test_is_skipped(): pass
@pytest.mark.xfail
def test_is_expected(): assert 0
@pytest.mark.parametrize("a", [1, 2])
def test_with(a): assert a


class T(unittest.TestCase):
    def test_case(self): self.assertEqual(1, 1)
    @unittest.expectedFailure
    def test_expected(self): self.fail()
"""


@pytest.mark.parametrize("name", ["runner", "patcher"])
def test_old_interpreters_can_read_it(name: str) -> None:
    tree = ast.parse(portable((PACKAGE / f"{name}.py").read_text()), feature_version=OLDEST)
    functions = [node for node in ast.walk(tree) if isinstance(node, ast.FunctionDef)]
    assert functions
    assert all(node.returns is None for node in functions)
    assert not [node for node in ast.walk(tree) if isinstance(node, ast.AnnAssign)]
    assert not [node for node in ast.walk(tree) if isinstance(node, ast.arg) and node.annotation is not None]
    assert "__future__" not in {node.module for node in ast.walk(tree) if isinstance(node, ast.ImportFrom)}
    # names that came after Python 3.6
    assert not {node.attr for node in ast.walk(tree) if isinstance(node, ast.Attribute)} & {
        "removeprefix",
        "removesuffix",
        "orig_argv",
        "freeze",
    }


def test_it_records_what_the_compiled_one_records(tmp_path: Path) -> None:
    (tmp_path / "test_it.py").write_text(TESTS)
    place = tmp_path / "runner.py"
    place.write_text(portable((PACKAGE / "runner.py").read_text()))
    site = str(Path(pytest.__file__).parent.parent)
    configuration = json.dumps({"arguments": ["test_it.py"], "import_paths": [site]})
    programs = [["-P", str(PACKAGE / "runner.py")], ["-c", _BOOT.format(path=str(place))]]
    seen = []
    for program in programs:
        read, write = os.pipe()
        script = f"import os, sys; os.dup2({write}, 3); os.execv(sys.executable, [sys.executable, *sys.argv[1:]])"
        command = [sys.executable, "-c", script, "-s", "-B", *program, configuration]
        environment = {"PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1", "PYTHONHASHSEED": "0"}
        done = subprocess.run(
            command, cwd=tmp_path, env=environment, capture_output=True, pass_fds=[write], check=False
        )
        os.close(write)
        with os.fdopen(read, "rb") as pipe:
            seen.append((done.returncode, pipe.read().splitlines()))
    assert seen[0] == seen[1]
    code, lines = seen[0]
    assert code == 1
    assert json.loads(lines[-1])["end"] == 1
    assert len(json.loads(lines[0])["collected"]) == 8
