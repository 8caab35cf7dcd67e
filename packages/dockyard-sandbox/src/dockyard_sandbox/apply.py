"""Patch to tree on the trusted side: an index, objects of our own, and no working tree.

The result of an attempt is a delta over the base tree. Nothing of the patch touches a file system
before it is inside the sandbox.
"""

from __future__ import annotations

import hashlib
import os
import shutil
import subprocess
import tempfile
import zlib
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path

from dockyard_sandbox.cancellation import Cancellation
from dockyard_sandbox.gitcmd import Bounds, Git, GitFailed
from dockyard_sandbox.private_index import PrivateIndex
from dockyard_sandbox.trees import EXECUTABLE, BaseTree, Entry

REGULAR = ("100644", EXECUTABLE)
_DELETED = "000000"
# What git says when it refuses a path rather than a hunk.
_PATH_REFUSALS = ("invalid path", "is beyond a symbolic link", "unable to add cache entry")
_SHORT_BYTES = 16 * 1024  # of a patch that cannot keep git busy for long; see `Git.run`
_BOUNDS = Bounds(memory_mb=1024, cpu_s=20, file_mb=256)
_MAX_NAME_BYTES, _MAX_PATH_BYTES = 255, 3072  # what Linux file systems take, less the tree's own place
MAX_CONTENT_BYTES = 64 * 1024 * 1024


class PatchRejected(Exception):
    """git could not apply the patch; the message is its reason."""


class PolicyViolation(Exception):
    """The patch applies but changes something that no fix may change."""


@dataclass(frozen=True, kw_only=True)
class Delta:
    """What an applied patch changes, relative to its base tree."""

    changes: Mapping[str, Entry | None]
    """Path to its new entry; None = deleted."""
    contents: Mapping[str, bytes]
    """Blob id to content, for every new entry."""


@dataclass(frozen=True, slots=True)
class IndexedFile:
    """One path as it is to be in the index."""

    path: str
    mode: str | None
    """git's mode; None = deleted."""
    content: bytes


NO_CHANGE_CONTENTS: Mapping[str, bytes] = {}


class Applier:
    """Applies patches to base trees inside a scratch directory of this server."""

    def __init__(self, git: Git, scratch: Path) -> None:
        self._git = git
        self._scratch = scratch

    def apply(
        self, base: BaseTree, patch: str, cancellation: Cancellation | None = None, *, options: tuple[str, ...] = ()
    ) -> Delta:
        """Apply ``patch`` to ``base``.

        A patch of white space only changes nothing. A missing last newline is added, since models
        and datasets drop it and nothing else can be meant.

        Args:
            base: the tree.
            patch: unified diff.
            cancellation: ends it.
            options: further ones of ``git apply``.

        Raises:
            PatchRejected: malformed, does not apply, or costs git more than a patch may.
            PolicyViolation: it touches a symlink, a submodule, a ``.git*`` path or an odd mode, names a path
                that no file system takes, or changes files of more than `MAX_CONTENT_BYTES` together.
        """
        if not patch.strip():
            return Delta(changes={}, contents=NO_CHANGE_CONTENTS)
        text = patch if patch.endswith("\n") else patch + "\n"

        def change(git: Callable[..., bytes], objects: Path) -> None:
            try:
                git("apply", "--cached", "--whitespace=nowarn", *options, "-", stdin=text.encode())
            except GitFailed as error:
                if error.returncode < 0:
                    raise
                if any(reason in error.stderr for reason in _PATH_REFUSALS):
                    raise PolicyViolation(str(error)) from error
                raise PatchRejected(str(error)) from error

        return self._in_index(base, cancellation or Cancellation(), change)

    def index(self, base: BaseTree, files: list[IndexedFile], cancellation: Cancellation) -> Delta:
        """Put files into the index of ``base``, whatever made them. Raises as `apply` does."""
        if not files:
            return Delta(changes={}, contents=NO_CHANGE_CONTENTS)
        if sum(len(file.content) for file in files) > MAX_CONTENT_BYTES:
            raise PolicyViolation(f"the changed files must be at most {MAX_CONTENT_BYTES} bytes together")

        def change(git: Callable[..., bytes], objects: Path) -> None:
            lines = []
            for file in files:
                blob = "0" * len(base.tree) if file.mode is None else _write_blob(objects, file.content, len(base.tree))
                lines.append(f"{file.mode or 0} {blob}\t".encode() + os.fsencode(file.path) + b"\0")
            try:
                git("update-index", "-z", "--index-info", stdin=b"".join(lines))
            except GitFailed as error:
                if error.returncode < 0:
                    raise
                raise PolicyViolation(str(error)) from error

        return self._in_index(base, cancellation, change)

    def _in_index(
        self, base: BaseTree, cancellation: Cancellation, change: Callable[[Callable[..., bytes], Path], None]
    ) -> Delta:
        """Let ``change`` change a private index of ``base``, and read off what became of it."""
        work = Path(tempfile.mkdtemp(prefix="apply-", dir=self._scratch))
        try:
            return self._change(base, work, cancellation, change)
        except (GitFailed, subprocess.TimeoutExpired) as error:
            ended_by_signal = isinstance(error, subprocess.TimeoutExpired) or error.returncode < 0
            if self._git.is_closed or cancellation.is_cancelled or not ended_by_signal:
                raise
            raise PatchRejected(f"the patch costs git more than a patch may: {error}") from error
        finally:
            shutil.rmtree(work, ignore_errors=True)

    def _change(
        self,
        base: BaseTree,
        work: Path,
        cancellation: Cancellation,
        change: Callable[[Callable[..., bytes], Path], None],
    ) -> Delta:
        index = PrivateIndex(self._git, base, work, bounds=_BOUNDS, cancellation=cancellation)

        def git(*arguments: str, stdin: bytes = b"") -> bytes:
            return index.run(*arguments, stdin=stdin, may_be_long=len(stdin) > _SHORT_BYTES)

        change(git, index.objects)
        changes = _read_raw_diff(git("diff-index", "--cached", "--raw", "-z", "--no-renames", base.tree))
        blobs = sorted({entry.blob for entry in changes.values() if entry is not None})
        return Delta(changes=changes, contents=_contents(index.objects, blobs, git))


def _write_blob(objects: Path, content: bytes, id_length: int) -> str:
    """Store a loose blob and return its id: SHA-1 of 40 hex digits, or SHA-256 of 64."""
    data = b"blob %d\0" % len(content) + content
    blob = (hashlib.sha1(data, usedforsecurity=False) if id_length == 40 else hashlib.sha256(data)).hexdigest()
    path = objects / blob[:2] / blob[2:]
    path.parent.mkdir(exist_ok=True)
    path.write_bytes(zlib.compress(data, 1))
    return blob


def _contents(objects: Path, blobs: list[str], git: Callable[..., bytes]) -> dict[str, bytes]:
    """Read blobs, after their sizes; new ones are loose files of this attempt, which spares a process."""
    loose = {blob: path for blob in blobs if (path := objects / blob[:2] / blob[2:]).exists()}
    packed = "".join(f"{blob}\n" for blob in blobs if blob not in loose).encode()
    size = sum(_loose_size(path) for path in loose.values())
    if packed:
        lines = git("cat-file", "--batch-check=%(objectsize)", stdin=packed).split()
        size += sum(int(line) for line in lines)
    if size > MAX_CONTENT_BYTES:
        raise PolicyViolation(f"the changed files must be at most {MAX_CONTENT_BYTES} bytes together, got {size}")
    contents = {blob: zlib.decompress(path.read_bytes()).split(b"\0", 1)[1] for blob, path in loose.items()}
    output = memoryview(git("cat-file", "--batch=%(objectname) %(objectsize)", stdin=packed)) if packed else b""
    offset = 0
    while offset < len(output):
        header_end = offset + bytes(output[offset : offset + 256]).index(b"\n")
        blob, length = bytes(output[offset:header_end]).decode().split(" ")
        contents[blob] = bytes(output[header_end + 1 : header_end + 1 + int(length)])
        offset = header_end + int(length) + 2
    return contents


def _loose_size(path: Path) -> int:
    with path.open("rb") as file:
        header = zlib.decompressobj().decompress(file.read(256), 64)
    return int(header.split(b"\0", 1)[0].split(b" ")[1])


def _read_raw_diff(raw: bytes) -> dict[str, Entry | None]:
    fields = raw.split(b"\0")[:-1]
    changes: dict[str, Entry | None] = {}
    for head, encoded in zip(fields[::2], fields[1::2], strict=True):
        old_mode, mode, _, blob, _ = head.decode()[1:].split(" ")
        try:
            path = encoded.decode()
        except UnicodeDecodeError:
            raise PolicyViolation(f"a patch may change paths in UTF-8 only, got {encoded!r}") from None
        if len(encoded) > _MAX_PATH_BYTES or max(map(len, encoded.split(b"/"))) > _MAX_NAME_BYTES:
            raise PolicyViolation(f"a patch must not change a path that no file system takes: {path[:80]!r}…")
        for part in path.split("/"):
            if part.lower().startswith(".git"):
                raise PolicyViolation(f"a patch must not change {path!r}: paths named .git* are refused")
        for changed_mode in (old_mode, mode):
            if changed_mode not in (*REGULAR, _DELETED):
                raise PolicyViolation(f"a patch may change regular files only, {path!r} has mode {changed_mode}")
        changes[path] = None if mode == _DELETED else Entry(mode, blob)
    return changes
