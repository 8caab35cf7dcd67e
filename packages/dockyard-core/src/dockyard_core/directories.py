"""Files and directories that are written whole or not at all, and errors of the disk as OSError."""

from __future__ import annotations

import ctypes
import errno
import os
import re
import shutil
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager
from pathlib import Path
from typing import NamedTuple, Protocol

_NO_LINKS = frozenset({errno.EPERM, errno.EOPNOTSUPP, errno.ENOSYS, errno.EMLINK, errno.EXDEV})

_AT_FDCWD, _RENAME_EXCHANGE = -100, 2

Write = Callable[[Path], None]
"""Writes one file, or fills one folder, at the path it is given."""


class Ranks(Protocol):
    """Processes that write one directory."""

    @property
    def rank(self) -> int:
        """Which of them this is, from 0."""
        ...

    def together(self, elsewhere: Exception) -> AbstractContextManager[None]:
        """Every rank raises when the body raises on any: its own error there, ``elsewhere`` on the others."""
        ...


def write_aside(directory: Path, write: Write) -> None:
    """Let ``write`` fill a folder beside ``directory``, fsync it and rename it into place.

    What a link names is replaced, and the link stays. When anything of it raises, the folder is removed and
    ``directory`` is as it was.
    """
    directory = directory.resolve()
    aside = open_aside(directory)
    try:
        write(aside)
        put_in_place(aside, directory)
    finally:
        shutil.rmtree(aside, ignore_errors=True)  # it is there only if something raised


def write_aside_together(directory: Path, write: Write, ranks: Ranks) -> None:
    """Let ``write`` of every rank put files of its own into a folder beside ``directory``, and rename it (collective).

    Raises OSError on every rank when the disk of any does not take its part; ``directory`` is then as it was.
    """
    directory = directory.resolve()
    is_first, aside = ranks.rank == 0, partial_path(directory)
    elsewhere = OSError(errno.EIO, "another rank could not write its part; see that rank's error", str(directory))
    try:
        with ranks.together(elsewhere):
            if is_first:
                open_aside(directory)
        with ranks.together(elsewhere):
            write(aside)
        with ranks.together(elsewhere):
            if is_first:
                put_in_place(aside, directory)
    finally:
        if is_first:
            shutil.rmtree(aside, ignore_errors=True)  # it is there only if something raised


def open_aside(directory: Path) -> Path:
    """An empty folder beside ``directory``, to be filled for `put_in_place`."""
    if directory.exists() and not directory.is_dir():
        raise NotADirectoryError(
            errno.ENOTDIR, "a file is not replaced by a directory; give another path", str(directory)
        )
    aside, replaced = partial_path(directory), _replaced_path(directory)
    if replaced.exists() and not directory.exists():  # a writer was killed between its two renames
        replaced.rename(directory)
    shutil.rmtree(aside, ignore_errors=True)
    aside.mkdir(parents=True)
    return aside


def partial_path(path: Path) -> Path:
    """Where a file or folder is while it is being written."""
    return path.with_name(f".{path.name}.partial")


def put_in_place(aside: Path, directory: Path) -> None:
    """Fsync, and put ``aside`` in the place of ``directory``: in one move where the system can, else in two."""
    for path in (*aside.rglob("*"), aside):
        _fsync(path)
    if directory.exists() and _exchange(aside, directory):
        _fsync(directory.parent)
        shutil.rmtree(aside, ignore_errors=True)  # the old one by now
        return
    # A rename onto a full directory is refused, so the old one steps aside; `open_aside` knows where it is.
    replaced = _replaced_path(directory)
    shutil.rmtree(replaced, ignore_errors=True)
    if directory.exists():
        directory.rename(replaced)
    try:
        aside.rename(directory)
    except OSError:
        if replaced.exists():
            replaced.rename(directory)
        raise
    _fsync(directory.parent)
    shutil.rmtree(replaced, ignore_errors=True)


def _replaced_path(directory: Path) -> Path:
    return directory.with_name(f".{directory.name}.replaced")


def _exchange(one: Path, other: Path) -> bool:
    """Swap two names, so that there is no moment without either; False where the system or the disk cannot."""
    renameat2 = getattr(ctypes.CDLL(None), "renameat2", None) if os.name == "posix" else None  # Linux has it
    if renameat2 is None:
        return False
    return bool(renameat2(_AT_FDCWD, os.fsencode(one), _AT_FDCWD, os.fsencode(other), _RENAME_EXCHANGE) == 0)


def write_file(path: Path, write: Write) -> None:
    """Let ``write`` make a file beside ``path``, fsync it and rename it into place.

    When anything of it raises, the new file is removed and ``path`` is as it was.
    """
    aside = partial_path(path)
    try:
        write(aside)
        _fsync(aside)
        aside.rename(path)
    finally:
        aside.unlink(missing_ok=True)


def write_new_files(directory: Path, files: Mapping[str, Write], *, unless: str) -> None:
    """Write files by name, or none of them, into a directory that several ranks fill.

    Args:
        directory: made if missing.
        files: none of these may be there yet.
        unless: a file that must not be there either: what one rank alone writes.

    Raises FileExistsError for a file that is there already, and OSError when the disk does not take them.
    """
    directory.mkdir(parents=True, exist_ok=True)
    for name in (*files, unless):
        if (directory / name).exists():
            raise FileExistsError(
                errno.EEXIST,
                "several ranks write into a directory that holds no checkpoint or model yet; give another one",
                str(directory / name),
            )
    written: list[Path] = []
    try:
        for name, write in files.items():
            write_file(directory / name, write)
            written.append(directory / name)
    except OSError:
        for path in written:
            path.unlink(missing_ok=True)
        raise


class WrittenFile(NamedTuple):
    """A file, and what it was when it was written."""

    path: Path
    identity: tuple[int, ...]

    @classmethod
    def of(cls, path: Path) -> WrittenFile:
        """A file that has just been written."""
        return cls(path, _identity(path.stat()))

    @property
    def is_there(self) -> bool:
        """Whether it is still the file that was written."""
        try:
            return _identity(self.path.stat()) == self.identity
        except FileNotFoundError:
            return False


def link_or_copy(source: Path, target: Path) -> None:
    """Make ``target`` the same file as ``source``, or a copy where the file system has no links."""
    try:
        os.link(source, target)
    except OSError as error:
        if error.errno not in _NO_LINKS:
            raise
        shutil.copyfile(source, target)


def disk_error(error: Exception, path: Path) -> OSError:
    """What a library that puts the system's errno in words only should have raised."""
    number = re.search(r"os[ _]error(?:_code=')? ?(\d+)", str(error), re.IGNORECASE)
    if number is None:
        return OSError(errno.EIO, str(error), str(path))
    return OSError(int(number[1]), os.strerror(int(number[1])), str(path))


def _identity(stat: os.stat_result) -> tuple[int, ...]:
    return stat.st_dev, stat.st_ino, stat.st_size, stat.st_mtime_ns


def _fsync(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
