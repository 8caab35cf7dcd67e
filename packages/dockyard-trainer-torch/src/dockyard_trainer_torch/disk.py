"""Directories that are written whole or not at all, and errors of the disk as OSError."""

from __future__ import annotations

import errno
import os
import re
import shutil
from collections.abc import Callable, Mapping
from pathlib import Path

from torch import Tensor

_NO_LINKS = frozenset({errno.EPERM, errno.EOPNOTSUPP, errno.ENOSYS, errno.EMLINK, errno.EXDEV})


def write_aside(directory: Path, write: Callable[[Path], None]) -> None:
    """Let ``write`` fill a folder beside ``directory``, fsync it and rename it into place.

    When anything of it raises, the folder is removed and ``directory`` is as it was.
    """
    aside = open_aside(directory)
    try:
        write(aside)
        put_in_place(aside, directory)
    finally:
        shutil.rmtree(aside, ignore_errors=True)  # it is there only if something raised


def open_aside(directory: Path) -> Path:
    """An empty folder beside ``directory``, to be filled for `put_in_place`."""
    aside = partial_path(directory)
    shutil.rmtree(aside, ignore_errors=True)
    aside.mkdir(parents=True)
    return aside


def partial_path(path: Path) -> Path:
    """Where a file or folder is while it is being written."""
    return path.with_name(f".{path.name}.partial")


def write_file(path: Path, write: Callable[[Path], None]) -> None:
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


def save_tensors(tensors: Mapping[str, Tensor], path: Path, metadata: Mapping[str, str] | None = None) -> None:
    """Write contiguous CPU tensors as safetensors, with text in the header.

    Raises OSError when the disk does not take them all, with the errno that the library puts in words only.
    """
    from safetensors import SafetensorError, safe_open
    from safetensors.torch import save_file

    try:
        save_file(dict(tensors), path, metadata={"format": "pt", **(metadata or {})})
        with safe_open(path, "pt"):  # compares the length with the header: a write cut short is found here
            pass
    except SafetensorError as error:
        number = re.search(r"os error (\d+)", str(error))
        if number is None:
            raise OSError(errno.EIO, str(error), str(path)) from error
        raise OSError(int(number[1]), os.strerror(int(number[1])), str(path)) from error


def link_or_copy(source: Path, target: Path) -> None:
    """Make ``target`` the same file as ``source``, or a copy where the file system has no links."""
    try:
        os.link(source, target)
    except OSError as error:
        if error.errno not in _NO_LINKS:
            raise
        shutil.copyfile(source, target)


def put_in_place(aside: Path, directory: Path) -> None:
    """Fsync and rename; a rename onto a full directory is refused by the system, so the old one steps aside."""
    for path in (*aside.iterdir(), aside):
        _fsync(path)
    replaced = directory.with_name(f".{directory.name}.replaced")
    shutil.rmtree(replaced, ignore_errors=True)
    if directory.exists():
        directory.rename(replaced)
    try:
        aside.rename(directory)
    except OSError:
        if replaced.exists():
            replaced.rename(directory)
        raise
    shutil.rmtree(replaced, ignore_errors=True)
    _fsync(directory.parent)


def _fsync(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
