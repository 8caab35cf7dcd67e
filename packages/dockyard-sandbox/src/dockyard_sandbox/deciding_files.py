"""Whether the files of a task's deciding tests exist at all, told before anything is run.

They come from the base commit and the test patch alone, whatever the model's patch adds: a file in neither can
never be there. Whether an existing file has a test of some name is known to pytest alone, and may depend on the fix.
"""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from pathlib import PurePosixPath

from dockyard_core.patch import touched_paths
from dockyard_sandbox.repos import RepoStore
from dockyard_sandbox.trees import SYMLINK, Entry, TreeStore
from dockyard_sandbox.wire import TaskRequest


class MissingTestFile(ValueError):
    """A deciding test lies in a file that neither the base commit nor the test patch has."""

    def __init__(self, field: str, test: str) -> None:
        super().__init__(
            f"{test[:300]!r} lies in a file that neither base_commit nor test_patch has; "
            "give the test patch that adds it, or leave the id out"
        )
        self.field = field


class DecidingFiles:
    """Looks test files up in base trees, of which it needs no more than the names."""

    def __init__(self, repos: RepoStore, trees: TreeStore) -> None:
        self._repos = repos
        self._trees = trees

    async def check(self, request: TaskRequest) -> None:
        """Raise MissingTestFile, GitFailed, or what `RepoStore.tree_of` raises."""
        await asyncio.to_thread(self._check, request)

    def _check(self, request: TaskRequest) -> None:
        entries = self._trees.entries(*self._repos.tree_of(request.repo, request.base_commit.lower()))
        added = set(touched_paths(request.test_patch))
        for field, tests in (("FAIL_TO_PASS", request.fail_to_pass), ("PASS_TO_PASS", request.pass_to_pass)):
            for test in tests:
                path = test.split("::", 1)[0]
                if path not in entries and path not in added and not _is_below_a_symlink(path, entries):
                    raise MissingTestFile(field, test)


def _is_below_a_symlink(path: str, entries: Mapping[str, Entry]) -> bool:
    above = (entries.get(str(parent)) for parent in PurePosixPath(path).parents)
    return any(entry is not None and entry.mode == SYMLINK for entry in above)
