"""Ratchets over the whole tree: lengths, the lock, hosts, typed wheels."""

from __future__ import annotations

import ast
import re
import subprocess
import sys
import tomllib
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
MAX_FILE_LINES = 300
MAX_FUNCTION_LINES = 60
SOURCES = sorted([*ROOT.glob("packages/*/src/**/*.py"), *ROOT.glob("apps/*/src/**/*.py")])
WHEELS = sorted([*ROOT.glob("packages/*/pyproject.toml"), *ROOT.glob("apps/*/pyproject.toml")])


def tracked_files() -> list[Path]:
    listed = subprocess.run(["git", "ls-files", "-z"], cwd=ROOT, check=True, capture_output=True, text=True).stdout
    return [ROOT / name for name in listed.split("\0") if name]


def functions(path: Path) -> Iterator[tuple[str, int]]:
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            yield node.name, (node.end_lineno or node.lineno) - node.lineno + 1


def test_no_source_file_is_longer_than_300_lines() -> None:
    assert SOURCES
    lengths = {str(path.relative_to(ROOT)): len(path.read_text().splitlines()) for path in SOURCES}
    assert {name: lines for name, lines in lengths.items() if lines > MAX_FILE_LINES} == {}


def test_no_function_is_longer_than_60_lines() -> None:
    long = [
        f"{path.relative_to(ROOT)}:{name} {lines}"
        for path in SOURCES
        for name, lines in functions(path)
        if lines > MAX_FUNCTION_LINES
    ]
    assert long == []


def test_no_drawer_of_leftovers() -> None:
    assert [str(path) for path in SOURCES if path.name in ("utils.py", "helpers.py", "misc.py")] == []


def test_the_lock_names_no_host_and_matches_the_index() -> None:
    subprocess.run([sys.executable, "tools/lock.py", "--check"], cwd=ROOT, check=True)


def test_no_tracked_text_names_a_package_index() -> None:
    # Put together here, so that this file does not match itself.
    index = re.compile("://[^ \"']*/" + "simple([/\"' ]|$)", re.M)
    found = [
        str(path.relative_to(ROOT))
        for path in tracked_files()
        if path.suffix in {".py", ".md", ".toml", ".yaml", ".yml", ".sh", ".json", ""}
        and path.name != "uv.lock"
        and path.is_file()
        and index.search(path.read_text(errors="replace"))
    ]
    assert found == []


@pytest.mark.parametrize("pyproject", WHEELS, ids=lambda path: path.parent.name)
def test_every_wheel_is_typed_documented_and_pins_core_by_range(pyproject: Path) -> None:
    project = tomllib.loads(pyproject.read_text())["project"]
    package = pyproject.parent / "src" / project["name"].replace("-", "_")
    assert (package / "py.typed").exists()
    assert "__all__" in (package / "__init__.py").read_text()
    assert (pyproject.parent / "README.md").read_text().startswith(f"# {project['name']}\n")
    assert any((pyproject.parent / "changelog.d").glob("*.md")), "each change has a changelog fragment"
    core = [name for name in project["dependencies"] if name.startswith("dockyard-core")]
    assert all(">=" in name and "<" in name for name in core)
    assert core or project["name"] == "dockyard-core"
