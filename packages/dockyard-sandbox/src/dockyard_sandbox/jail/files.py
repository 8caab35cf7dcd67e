# ruff: noqa: PTH103, PTH112, PTH114, PTH115, PTH118, PTH120, PTH123, PTH208
# Between fork and exec pathlib costs more than it clarifies.
"""What a session reads and writes, in a confined process of the run: it can reach what the run can, no more.

Answers go to descriptor 1: a line of JSON, then bytes.
"""

from __future__ import annotations

import errno
import hashlib
import json
import os
import stat
from collections.abc import Callable, Iterator
from typing import Any

MAX_LISTED = 200_000
_CHUNK = 1 << 20
_SKIPPED_DIRECTORIES = (b".git", b"__pycache__", b".pytest_cache")


def read(call: dict[str, Any]) -> None:
    """Part of one regular file."""
    path = _inside(call)
    fd = os.open(path, os.O_RDONLY | os.O_NONBLOCK)  # a named pipe must not hold us
    size = _regular(fd, path)
    os.lseek(fd, call["offset"], os.SEEK_SET)
    content = b""
    while len(content) < call["max_bytes"]:
        chunk = os.read(fd, min(_CHUNK, call["max_bytes"] - len(content)))
        if not chunk:
            break
        content += chunk
    _answer({"size": size}, content)


def write(call: dict[str, Any]) -> None:
    """One file, whole; its directories are made."""
    path = _inside(call)
    os.makedirs(os.path.dirname(path), exist_ok=True)
    fd = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_NONBLOCK, 0o644)
    _regular(fd, path)
    os.ftruncate(fd, 0)
    left = memoryview(call["content"])
    while left:
        left = left[os.write(fd, left) :]
    _answer({"size": len(call["content"])}, b"")


def list_tree(call: dict[str, Any]) -> None:
    """Mode, blob id and path of every file below the current directory, as git would name them."""
    lines, count = [], 0
    for path in _walk():
        info = os.lstat(path)
        if stat.S_ISLNK(info.st_mode):
            mode, blob = b"120000", _blob(call["algorithm"], os.readlink(path))
        elif stat.S_ISREG(info.st_mode):
            mode = b"100755" if info.st_mode & 0o100 else b"100644"
            blob = _blob_of_file(call["algorithm"], path, info.st_size)
        else:
            continue  # git knows no sockets, pipes or devices
        count += 1
        if count > MAX_LISTED:
            raise OSError(errno.EFBIG, f"the tree must hold at most {MAX_LISTED} files")
        lines.append(mode + b" " + blob.encode() + b" " + path + b"\0")
    _answer({"count": count}, b"".join(lines))


def fetch(call: dict[str, Any]) -> None:
    """Contents of several files or symlinks, in order, up to ``max_bytes`` together."""
    contents, size = [], 0
    for path in call["paths"]:
        if os.path.islink(path):
            content = os.readlink(path)
        else:
            fd = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_NOFOLLOW)
            if size + _regular(fd, path) > call["max_bytes"]:
                raise OSError(errno.EFBIG, f"the changed files must be at most {call['max_bytes']} bytes together")
            with open(fd, "rb") as file:
                content = file.read()
        size += len(content)
        contents.append(content)
    _answer({"sizes": [len(content) for content in contents]}, b"".join(contents))


OPERATIONS: dict[str, Callable[[dict[str, Any]], None]] = {
    "read": read,
    "write": write,
    "list": list_tree,
    "fetch": fetch,
}


def _inside(call: dict[str, Any]) -> str:
    """The path as given, relative to the tree; it must lead to the tree or to /tmp of the run."""
    path: str = os.path.realpath(call["path"])
    roots = [os.path.realpath("."), os.path.realpath(call["tmp"])]
    if not any(path.startswith(root + "/") for root in roots):
        raise OSError(errno.EACCES, "the path must lie in the tree or in the temporary directory")
    return path


def _regular(fd: int, path: object) -> int:
    info = os.fstat(fd)
    if not stat.S_ISREG(info.st_mode):
        raise OSError(errno.EINVAL, f"{path!r} is not a regular file")
    return info.st_size


def _walk() -> Iterator[bytes]:
    """Every path below the current directory that is no directory, but caches and git's own."""
    pending = [b""]
    while pending:
        directory = pending.pop()
        for name in sorted(os.listdir(directory or b".")):
            path = os.path.join(directory, name)
            if os.path.isdir(path) and not os.path.islink(path):
                if name not in _SKIPPED_DIRECTORIES:
                    pending.append(path)
            elif name != b".git" and not name.endswith(b".pyc"):
                yield path


def _blob(algorithm: str, content: bytes) -> str:
    return hashlib.new(algorithm, b"blob %d\0" % len(content) + content).hexdigest()


def _blob_of_file(algorithm: str, path: bytes, size: int) -> str:
    digest = hashlib.new(algorithm, b"blob %d\0" % size)
    with open(path, "rb") as file:
        while chunk := file.read(_CHUNK):
            digest.update(chunk)
    return digest.hexdigest()


def _answer(header: dict[str, Any], content: bytes) -> None:
    left = memoryview(json.dumps(header).encode() + b"\n" + content)
    while left:
        left = left[os.write(1, left) :]
