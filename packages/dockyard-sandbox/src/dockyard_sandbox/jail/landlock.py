# ruff: noqa: PTH112
# Between fork and exec pathlib costs more than it clarifies.
"""Landlock by system calls: what one process, and all that it starts, may reach from now on."""

from __future__ import annotations

import ctypes
import os
from collections.abc import Iterable

from . import syscalls as sc

MIN_ABI = 3
"""Older kernels let a process truncate files that it may not write."""

_CREATE_RULESET, _ADD_RULE, _RESTRICT_SELF = 444, 445, 446  # the same numbers on every architecture
_VERSION_QUERY = 1
_PATH_BENEATH = 1

_EXECUTE, _WRITE_FILE, _READ_FILE, _READ_DIR = 1 << 0, 1 << 1, 1 << 2, 1 << 3
_TRUNCATE, _IOCTL_DEV = 1 << 14, 1 << 15
_OF_FILES = _EXECUTE | _WRITE_FILE | _READ_FILE | _TRUNCATE | _IOCTL_DEV
_READ = _EXECUTE | _READ_FILE | _READ_DIR
_NET_TCP = 0b11  # bind, connect
_SCOPED = 0b11  # abstract unix sockets, signals

_libc = ctypes.CDLL(None, use_errno=True)


class _Ruleset(ctypes.Structure):
    _fields_ = [(name, ctypes.c_uint64) for name in ("fs", "net", "scoped")]


class _PathBeneath(ctypes.Structure):
    _pack_ = 1
    _fields_ = [("allowed", ctypes.c_uint64), ("parent", ctypes.c_int32)]


def abi() -> int:
    """Version of Landlock in this kernel; 0 = none, or refused."""
    return max(
        0, int(_libc.syscall(ctypes.c_long(_CREATE_RULESET), None, ctypes.c_size_t(0), ctypes.c_uint(_VERSION_QUERY)))
    )


def restrict(read: Iterable[str], write: Iterable[str]) -> None:
    """Allow reading below ``read``, everything below ``write``, and nothing else of any file system.

    TCP and signals to the outside are denied too where the kernel knows how. Needs no_new_privs.
    Raises OSError.
    """
    version = abi()
    if version < MIN_ABI:
        raise OSError(f"Landlock ABI must be at least {MIN_ABI}, this kernel has {version}")
    handled = (1 << (16 if version >= 5 else 15)) - 1
    rules = _Ruleset(handled, _NET_TCP if version >= 4 else 0, _SCOPED if version >= 6 else 0)
    size = 24 if version >= 6 else 16 if version >= 4 else 8
    ruleset = _call(_CREATE_RULESET, ctypes.byref(rules), ctypes.c_size_t(size), ctypes.c_uint(0))
    try:
        for paths, access in ((read, _READ), (write, handled)):
            for path in paths:
                _allow(ruleset, path, access & handled)
        sc.prctl(sc.PR_SET_NO_NEW_PRIVS, 1)
        _call(_RESTRICT_SELF, ctypes.c_int(ruleset), ctypes.c_uint(0))
    finally:
        os.close(ruleset)


def _allow(ruleset: int, path: str, access: int) -> None:
    try:
        parent = os.open(path, os.O_PATH | os.O_CLOEXEC)
    except FileNotFoundError:
        return  # what is not there cannot be reached
    try:
        rule = _PathBeneath(access if os.path.isdir(path) else access & _OF_FILES, parent)
        _call(_ADD_RULE, ctypes.c_int(ruleset), ctypes.c_int(_PATH_BENEATH), ctypes.byref(rule), ctypes.c_uint(0))
    finally:
        os.close(parent)


def _call(number: int, *arguments: object) -> int:
    result = int(_libc.syscall(ctypes.c_long(number), *arguments))
    if result < 0:
        error = ctypes.get_errno()
        raise OSError(error, f"landlock system call {number}: {os.strerror(error)}")
    return result
