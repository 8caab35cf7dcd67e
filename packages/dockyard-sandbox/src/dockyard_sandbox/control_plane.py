"""Which paths belong to the tests, and are put back whatever the patch did to them.

Not only the files of the test patch: anything that decides how pytest collects, configures or
imports, because any of it can force a pass.
"""

from __future__ import annotations

import re
import sys
import tomllib
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from pathlib import PurePosixPath

from dockyard_sandbox.trees import Entry

CONFIG_NAMES = frozenset(
    {"conftest.py", "pytest.ini", ".pytest.ini", "pytest.toml", ".pytest.toml", "tox.ini", "setup.cfg"}
)
_START_UP_STEMS = frozenset({"sitecustomize", "usercustomize"})
_PYTEST_STEMS = frozenset(
    {"pytest", "_pytest", "py", "pluggy", "iniconfig", "packaging", "pygments", "exceptiongroup", "tomli", "colorama"}
)
_INSTALLED_PART = re.compile(r"^__pycache__$|\.(egg-info|dist-info|egg-link|pth|pyc|pyo)$")
_TEST_DIRECTORY = re.compile(r"^_*(unit|integration|functional)?_?test(s|ing)?_*$", re.IGNORECASE)
_TEST_FILE = re.compile(r"^test_.*\.py$|^.*_tests?\.py$|^tests?\.py$")


@dataclass(frozen=True, kw_only=True)
class ControlPlane:
    """The protected paths of one task."""

    files: frozenset[str]
    """Deciding test files and files of the test patch."""
    directories: frozenset[str]
    """Test directories, restored as a whole."""
    base: Mapping[str, Entry]
    base_directories: frozenset[str]

    def protects(self, path: str, *, is_new: bool) -> bool:
        """Whether a change of ``path`` by the model's patch is undone."""
        parts = PurePosixPath(path).parts
        name, stems = parts[-1], {part.split(".")[0] for part in parts}
        if path in self.files or name in CONFIG_NAMES or stems & _START_UP_STEMS:
            return True
        if any(_INSTALLED_PART.search(part) for part in parts):
            return True
        if any(path.startswith(f"{directory}/") for directory in self.directories):
            return True
        if is_new and _TEST_FILE.match(name) and str(PurePosixPath(path).parent) in self._test_parents:
            return True
        return is_new and self._shadows(path)

    @property
    def _test_parents(self) -> set[str]:
        return {str(PurePosixPath(path).parent) for path in self.files}

    def _shadows(self, path: str) -> bool:
        """Whether a new file could be imported in place of the standard library or pytest.

        A module inside a package cannot (``pkg/json.py`` is ``pkg.json``); one in a directory
        without ``__init__.py`` can, if that directory gets onto the import path.
        """
        parts = PurePosixPath(path).parts
        for depth, part in enumerate(parts):
            stem = part.split(".")[0]
            is_module = depth < len(parts) - 1 or part.endswith((".py", ".so"))
            if is_module and (stem in sys.stdlib_module_names or stem in _PYTEST_STEMS):
                package = "/".join([*parts[:depth], "__init__.py"])
                already_there = "/".join(parts[: depth + 1]) in self.base_directories
                if not already_there and (depth == 0 or package not in self.base):
                    return True
        return False


def control_plane(
    base: Mapping[str, Entry], deciding_ids: Iterable[str], test_changes: Mapping[str, Entry | None]
) -> ControlPlane:
    """Return what is protected, given the deciding tests and what the test patch changes."""
    files = {test.split("::", 1)[0] for test in deciding_ids} | set(test_changes)
    directories = set()
    for path in files:
        parts = PurePosixPath(path).parts
        for depth, part in enumerate(parts[:-1]):
            if _TEST_DIRECTORY.match(part):
                directories.add("/".join(parts[: depth + 1]))
                break
    return ControlPlane(
        files=frozenset(files),
        directories=frozenset(directories),
        base=base,
        base_directories=frozenset(str(parent) for path in base for parent in PurePosixPath(path).parents),
    )


def pytest_tables_differ(before: bytes | None, after: bytes | None) -> bool:
    """Whether two versions of pyproject.toml configure pytest differently (unreadable = differently)."""
    return _pytest_table(before) != _pytest_table(after) if after is not None else before is not None


def _pytest_table(content: bytes | None) -> object:
    if content is None:
        return None
    try:
        return tomllib.loads(content.decode()).get("tool", {}).get("pytest")
    except (UnicodeDecodeError, tomllib.TOMLDecodeError):
        return "unreadable"


def restore(
    plane: ControlPlane,
    changes: Mapping[str, Entry | None],
    *,
    read_base: Callable[[str], bytes],
    contents: Mapping[str, bytes],
) -> tuple[dict[str, Entry | None], list[str]]:
    """Split the model's changes into those that stay and the paths that were put back."""
    kept: dict[str, Entry | None] = {}
    undone: list[str] = []
    for path, entry in changes.items():
        is_new = path not in plane.base
        undo = plane.protects(path, is_new=is_new)
        if not undo and path.rsplit("/", 1)[-1] == "pyproject.toml":
            before = None if is_new else read_base(plane.base[path].blob)
            undo = pytest_tables_differ(before, None if entry is None else contents[entry.blob])
        if undo:
            undone.append(path)
        else:
            kept[path] = entry
    return kept, undone
