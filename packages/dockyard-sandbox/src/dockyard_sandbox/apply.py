"""Patch to tree on the trusted side: an index, objects of our own, and no working tree.

The result of an attempt is a delta over the base tree. Nothing of the patch touches a file system
before it is inside the sandbox.
"""

from __future__ import annotations

import shutil
import tempfile
import zlib
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from dockyard_sandbox.gitcmd import Git, GitFailed
from dockyard_sandbox.trees import EXECUTABLE, BaseTree, Entry

_REGULAR = ("100644", EXECUTABLE)
_DELETED = "000000"
# What git says when it refuses a path rather than a hunk.
_PATH_REFUSALS = ("invalid path", "is beyond a symbolic link", "unable to add cache entry")


class PatchRejected(Exception):
    """git could not apply the patch; the message is its reason."""


class PolicyViolation(Exception):
    """The patch applies but changes something that no fix may change."""


@dataclass(frozen=True, kw_only=True)
class Delta:
    """What an applied patch changes, relative to its base tree."""

    tree: str
    changes: Mapping[str, Entry | None]
    """Path to its new entry; None = deleted."""
    contents: Mapping[str, bytes]
    """Blob id to content, for every new entry."""


NO_CHANGE_CONTENTS: Mapping[str, bytes] = {}


class Applier:
    """Applies patches to base trees inside a scratch directory of this server."""

    def __init__(self, git: Git, scratch: Path) -> None:
        self._git = git
        self._scratch = scratch

    def apply(self, base: BaseTree, patch: str) -> Delta:
        """Apply ``patch`` to ``base``.

        A patch of white space only changes nothing. A missing last newline is added, since models
        and datasets drop it and nothing else can be meant.

        Raises:
            PatchRejected: malformed, or does not apply.
            PolicyViolation: it touches a symlink, a submodule, a ``.git*`` path or an odd mode.
        """
        if not patch.strip():
            return Delta(tree=base.tree, changes={}, contents=NO_CHANGE_CONTENTS)
        text = patch if patch.endswith("\n") else patch + "\n"
        work = Path(tempfile.mkdtemp(prefix="apply-", dir=self._scratch))
        try:
            return self._apply(base, text.encode(), work)
        finally:
            shutil.rmtree(work, ignore_errors=True)

    def _apply(self, base: BaseTree, patch: bytes, work: Path) -> Delta:
        objects = work / "objects"
        objects.mkdir()
        shutil.copyfile(base.index_path, work / "index")
        environment = {
            "GIT_INDEX_FILE": str(work / "index"),
            "GIT_OBJECT_DIRECTORY": str(objects),
            "GIT_ALTERNATE_OBJECT_DIRECTORIES": str(base.bare / "objects"),
        }
        try:
            self._git.run(
                "apply", "--cached", "--whitespace=nowarn", "-", git_dir=base.bare, stdin=patch, extra_env=environment
            )
        except GitFailed as error:
            if any(reason in error.stderr for reason in _PATH_REFUSALS):
                raise PolicyViolation(str(error)) from error
            raise PatchRejected(str(error)) from error
        tree = self._git.run("write-tree", git_dir=base.bare, extra_env=environment).decode().strip()
        raw = self._git.run(
            "diff-tree", "-r", "--raw", "-z", "--no-renames", base.tree, tree, git_dir=base.bare, extra_env=environment
        )
        changes = _read_raw_diff(raw)
        blobs = {entry.blob for entry in changes.values() if entry is not None}
        contents = {blob: self._content(base, objects, blob, environment) for blob in blobs}
        return Delta(tree=tree, changes=changes, contents=contents)

    def _content(self, base: BaseTree, objects: Path, blob: str, environment: dict[str, str]) -> bytes:
        """Read a blob; new ones are loose files of this attempt, which spares a process."""
        loose = objects / blob[:2] / blob[2:]
        if loose.exists():
            return zlib.decompress(loose.read_bytes()).split(b"\0", 1)[1]
        return self._git.run("cat-file", "blob", blob, git_dir=base.bare, extra_env=environment)


def _read_raw_diff(raw: bytes) -> dict[str, Entry | None]:
    fields = raw.split(b"\0")[:-1]
    changes: dict[str, Entry | None] = {}
    for head, encoded in zip(fields[::2], fields[1::2], strict=True):
        old_mode, mode, _, blob, _ = head.decode()[1:].split(" ")
        try:
            path = encoded.decode()
        except UnicodeDecodeError:
            raise PolicyViolation(f"a patch may change paths in UTF-8 only, got {encoded!r}") from None
        for part in path.split("/"):
            if part.lower().startswith(".git"):
                raise PolicyViolation(f"a patch must not change {path!r}: paths named .git* are refused")
        for changed_mode in (old_mode, mode):
            if changed_mode not in (*_REGULAR, _DELETED):
                raise PolicyViolation(f"a patch may change regular files only, {path!r} has mode {changed_mode}")
        changes[path] = None if mode == _DELETED else Entry(mode, blob)
    return changes
