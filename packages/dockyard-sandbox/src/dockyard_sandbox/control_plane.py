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
from functools import cached_property
from pathlib import PurePosixPath

from dockyard_sandbox.trees import Entry, directories_of

CONFIG_NAMES = frozenset(
    {"conftest.py", "pytest.ini", ".pytest.ini", "pytest.toml", ".pytest.toml", "tox.ini", "setup.cfg"}
)
_START_UP_STEMS = frozenset({"sitecustomize", "usercustomize"})
_PYTEST_STEMS = frozenset(
    {"pytest", "_pytest", "py", "pluggy", "iniconfig", "packaging", "pygments", "exceptiongroup", "tomli", "colorama"}
)
_INSTALLED_PART = re.compile(r"^__pycache__$|\.(egg-info|dist-info|egg-link|pth|pyc|pyo)$")
_TEST_DIRECTORY = re.compile(r"^_*test|^_*(unit|integration|functional)_?tests?_*$", re.IGNORECASE)
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
    installed: frozenset[str] = frozenset()
    """Top-level modules of the environment that runs the tests."""
    exempt: frozenset[str] = frozenset()
    """Paths that the known fix changes, deciding test files left out."""
    new_packages: frozenset[str] = frozenset()
    """Directories that the model's patch makes, with their own ``__init__.py``."""

    def protects(self, path: str, *, is_new: bool) -> bool:
        """Whether a change of ``path`` by the model's patch is undone, unless it is exempt."""
        parts = PurePosixPath(path).parts
        name, stems = parts[-1], {part.split(".")[0] for part in parts}
        if path in self.files or name in CONFIG_NAMES or stems & _START_UP_STEMS:
            return True
        if any(_INSTALLED_PART.search(part) for part in parts):
            return True
        if any(path.startswith(f"{directory}/") for directory in self.directories):
            return True
        return is_new and (self._displaces_a_test(path) or self._shadows(path))

    def _displaces_a_test(self, path: str) -> bool:
        """Whether a new file stands beside, above or in place of a deciding test file.

        ``d/test_x/__init__.py`` and ``d/test_x.so`` are imported rather than ``d/test_x.py``, and a
        new ``__init__.py`` above a test changes the name under which it is imported.
        """
        name, parents = path.rsplit("/", 1)[-1], [str(parent) for parent in PurePosixPath(path).parents]
        stem = path[: len(path) - len(name)] + name.split(".")[0]
        if stem in self._test_stems or any(parent in self._test_stems for parent in parents):
            return True
        if name == "__init__.py" and parents[0] in self._test_ancestors:
            return True
        return _TEST_FILE.match(name) is not None and parents[0] in self._test_parents

    @cached_property
    def _test_parents(self) -> set[str]:
        return {str(PurePosixPath(path).parent) for path in self.files}

    @cached_property
    def _test_ancestors(self) -> set[str]:
        return {str(parent) for path in self.files for parent in PurePosixPath(path).parents}

    @cached_property
    def _test_stems(self) -> set[str]:
        return {path.removesuffix(".py") for path in self.files if path.endswith(".py")}

    def _shadows(self, path: str) -> bool:
        """Whether a new file could be imported in place of the standard library or pytest.

        A module inside a package cannot (``pkg/json.py`` is ``pkg.json``); one in a directory
        without ``__init__.py`` in the base can, if that directory gets onto the import path.
        """
        parts = PurePosixPath(path).parts
        for depth, part in enumerate(parts):
            stem = part.split(".")[0]
            is_module = depth < len(parts) - 1 or part.endswith((".py", ".so"))
            if is_module and (stem in sys.stdlib_module_names or stem in _PYTEST_STEMS or stem in self.installed):
                package = "/".join(parts[:depth])
                already_there = "/".join(parts[: depth + 1]) in self.base_directories
                in_package = f"{package}/__init__.py" in self.base or package in self.new_packages
                if not already_there and (depth == 0 or not in_package):
                    return True
        return False


def control_plane(
    base: Mapping[str, Entry],
    deciding_ids: Iterable[str],
    test_changes: Mapping[str, Entry | None],
    *,
    resolve: Callable[[str], str] = str,
    base_directories: frozenset[str] | None = None,
    installed: frozenset[str] = frozenset(),
    model_changes: Mapping[str, Entry | None] | None = None,
    exempt: frozenset[str] = frozenset(),
) -> ControlPlane:
    """Return what is protected, given the deciding tests and what the test patch changes.

    Args:
        base: the base tree.
        deciding_ids: node ids of the tests that decide.
        test_changes: what the test patch changes.
        resolve: follows the symlinks of the base tree.
        base_directories: of the base tree; None = found by a walk over it.
        installed: top-level modules of the environment.
        model_changes: what the model's patch changes, to tell its new packages from new files in old directories.
        exempt: paths that the known fix changes.
    """
    named = {test.split("::", 1)[0] for test in deciding_ids} | set(test_changes)
    files = named | {resolve(path) for path in named}
    directories: set[str] = set()
    for path in files:
        parts = PurePosixPath(path).parts
        for depth, part in enumerate(parts[:-1]):
            if _TEST_DIRECTORY.search(part):
                directories.update((directory := "/".join(parts[: depth + 1]), resolve(directory)))
                break
    if base_directories is None:
        base_directories = directories_of(base)
    added = {path.removesuffix("/__init__.py") for path in model_changes or () if path.endswith("/__init__.py")}
    return ControlPlane(
        files=frozenset(files),
        directories=frozenset(directories - {".", ""}),
        base=base,
        base_directories=base_directories,
        installed=installed,
        exempt=exempt - files,
        new_packages=frozenset(added - base_directories),
    )


def pytest_tables_differ(before: bytes | None, after: bytes | None) -> bool:
    """Whether two versions of pyproject.toml configure pytest differently (unreadable = differently)."""
    return _pytest_table(before) != _pytest_table(after) if after is not None else before is not None


def _pytest_table(content: bytes | None) -> object:
    if content is None:
        return None
    try:
        tool = tomllib.loads(content.decode()).get("tool", {})
    except (ValueError, RecursionError):  # not UTF-8, not TOML, deeper or longer than Python reads
        return "unreadable"
    return tool.get("pytest") if isinstance(tool, dict) else "unreadable"


def restore(
    plane: ControlPlane,
    changes: Mapping[str, Entry | None],
    *,
    read_base: Callable[[str], bytes],
    contents: Mapping[str, bytes],
) -> tuple[dict[str, Entry | None], list[str]]:
    """Split the model's changes into those that stay and the paths that were put back.

    Returns the changes, and flags: ``restored:`` and a path that was put back, ``exempt:`` and one that was not.
    """
    kept: dict[str, Entry | None] = {}
    flags: list[str] = []
    for path, entry in changes.items():
        is_new = path not in plane.base
        undo = plane.protects(path, is_new=is_new)
        if not undo and path.rsplit("/", 1)[-1] == "pyproject.toml":
            before = None if is_new else read_base(plane.base[path].blob)
            undo = pytest_tables_differ(before, None if entry is None else contents[entry.blob])
        if undo:
            flags.append(f"{'exempt' if path in plane.exempt else 'restored'}:{path}")
        if not undo or path in plane.exempt:
            kept[path] = entry
    return kept, flags
