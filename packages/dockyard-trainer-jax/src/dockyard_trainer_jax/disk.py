"""Directories that are written whole or not at all, and errors of the disk as OSError."""

from __future__ import annotations

import errno
import os
import re
import shutil
from collections.abc import Callable, Mapping
from pathlib import Path

import numpy as np
from safetensors import SafetensorError, safe_open
from safetensors.numpy import save_file


def write_aside(directory: Path, write: Callable[[Path], None]) -> None:
    """Let ``write`` fill a folder beside ``directory``, fsync it and rename it into place.

    When anything of it raises, the folder is removed and ``directory`` is as it was.
    """
    aside = directory.with_name(f".{directory.name}.partial")
    shutil.rmtree(aside, ignore_errors=True)
    aside.mkdir(parents=True)
    try:
        write(aside)
        _put_in_place(aside, directory)
    finally:
        shutil.rmtree(aside, ignore_errors=True)  # it is there only if something raised


def save_tensors(tensors: Mapping[str, np.ndarray], path: Path, metadata: Mapping[str, str] | None = None) -> None:
    """Write arrays as safetensors, with text in the header.

    Raises OSError when the disk does not take them all, with the errno that the library puts in words only.
    """
    contiguous = {name: np.ascontiguousarray(array) for name, array in tensors.items()}
    try:
        # Other readers look for this word before they read anything else.
        save_file(contiguous, path, metadata={"format": "pt", **(metadata or {})})
        with safe_open(path, "np"):  # compares the length with the header: a write cut short is found here
            pass
    except SafetensorError as error:
        number = re.search(r"os error (\d+)", str(error))
        if number is None:
            raise OSError(errno.EIO, str(error), str(path)) from error
        raise OSError(int(number[1]), os.strerror(int(number[1])), str(path)) from error


def _put_in_place(aside: Path, directory: Path) -> None:
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
