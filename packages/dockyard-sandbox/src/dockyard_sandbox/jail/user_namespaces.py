# ruff: noqa: PTH123
# Between fork and exec pathlib costs more than it clarifies.
"""User namespaces: how a process that may not mount becomes one that may, in mounts of its own."""

from __future__ import annotations

import errno
import os
from typing import NoReturn

from . import syscalls as sc

INSIDE_ID = 1000
"""What the user of a run is called inside."""


def new_user_namespace(flags: int, own: str = "/proc/self", *, inside: int = INSIDE_ID) -> None:
    """Enter a user namespace that has this process's user and group, as ``inside``, and no other."""
    uid, gid = os.geteuid(), os.getegid()
    _unshare_user(flags)
    _write(f"{own}/setgroups", "deny")
    _write(f"{own}/uid_map", f"{inside} {uid} 1")
    _write(f"{own}/gid_map", f"{inside} {gid} 1")


def new_root_namespace(flags: int) -> None:
    """Enter a user namespace that has every user of this one: a root that may not mount becomes one that may.

    It stays the same root to files, and can drop to the sandbox's user as any root can. Such a map must be
    written from outside.
    """
    has_entered, enter_now = os.pipe()
    pid = os.getpid()
    writer = os.fork()
    if writer == 0:
        os.close(enter_now)
        _write_identity_maps(pid, has_entered)
    os.close(has_entered)
    try:
        _unshare_user(flags)
    finally:
        os.close(enter_now)
        _, status = os.waitpid(writer, 0)
    if status:
        reason = os.strerror(os.waitstatus_to_exitcode(status))
        raise OSError(f"map of users: {reason}; root needs CAP_SETUID, CAP_SETGID and CAP_SETFCAP, or CAP_SYS_ADMIN")


def _write_identity_maps(pid: int, has_entered: int) -> NoReturn:
    """In a forked process: wait until ``pid`` is in its user namespace, then give it every id of ours."""
    code = errno.EIO
    try:
        os.read(has_entered, 1)
        for name in ("uid_map", "gid_map"):
            with open(f"/proc/self/{name}") as file:
                ranges = [line.split() for line in file]
            _write(f"/proc/{pid}/{name}", "".join(f"{first} {first} {count}\n" for first, _, count in ranges))
        code = 0
    except OSError as error:
        code = error.errno or errno.EIO
    finally:
        os._exit(code)


def _unshare_user(flags: int) -> None:
    try:
        sc.unshare(sc.CLONE_NEWUSER | flags)
    except OSError as error:
        raise OSError(f"{error.strerror}: this machine, or this container's filter, refuses user namespaces") from error


def _write(path: str, text: str) -> None:
    with open(path, "w") as file:
        file.write(text)
