"""git over a base tree with an index and objects of our own: what it changes there touches nothing else."""

from __future__ import annotations

import shutil
from pathlib import Path

from dockyard_sandbox.cancellation import Cancellation
from dockyard_sandbox.gitcmd import Bounds, Git
from dockyard_sandbox.trees import BaseTree


class PrivateIndex:
    """The base's index, copied into ``work``, which is empty and somebody else's to remove."""

    def __init__(self, git: Git, base: BaseTree, work: Path, *, bounds: Bounds, cancellation: Cancellation) -> None:
        self._git = git
        self._base = base
        self._bounds = bounds
        self._cancellation = cancellation
        self.objects = work / "objects"
        """Loose objects that git adds; those of the base are read from its own store."""
        self.objects.mkdir()
        shutil.copyfile(base.index_path, work / "index")
        self._environment = {
            "GIT_INDEX_FILE": str(work / "index"),
            "GIT_OBJECT_DIRECTORY": str(self.objects),
            "GIT_ALTERNATE_OBJECT_DIRECTORIES": str(base.bare / "objects"),
        }

    def run(self, *arguments: str, stdin: bytes = b"", may_be_long: bool = False) -> bytes:
        """What `Git.run` returns and raises."""
        return self._git.run(
            *arguments,
            git_dir=self._base.bare,
            stdin=stdin,
            extra_env=self._environment,
            bounds=self._bounds,
            cancellation=self._cancellation,
            may_be_long=may_be_long,
        )
