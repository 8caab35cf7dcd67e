"""Linux system calls that the standard library of Python 3.11 does not offer."""

from __future__ import annotations

import ctypes
import os
import platform

CLONE_NEWNS = 0x00020000
CLONE_NEWUTS = 0x04000000
CLONE_NEWIPC = 0x08000000
CLONE_NEWUSER = 0x10000000
CLONE_NEWPID = 0x20000000
CLONE_NEWNET = 0x40000000

MS_RDONLY = 1
MS_NOSUID = 2
MS_NODEV = 4
MS_NOEXEC = 8
MS_REMOUNT = 32
MS_BIND = 4096
MS_REC = 16384
MS_PRIVATE = 1 << 18
MNT_DETACH = 2

PR_SET_PDEATHSIG = 1
PR_SET_DUMPABLE = 4
PR_SET_KEEPCAPS = 8
PR_CAPBSET_DROP = 24
PR_SET_CHILD_SUBREAPER = 36
PR_SET_NO_NEW_PRIVS = 38
PR_CAP_AMBIENT = 47
PR_CAP_AMBIENT_CLEAR_ALL = 4

AT_FDCWD = -100
AT_RECURSIVE = 0x8000
MOUNT_ATTR_RDONLY = 1
MOUNT_ATTR_NOSUID = 2
MOUNT_ATTR_NODEV = 4
SYS_MOUNT_SETATTR = 442  # the same number on every architecture

CAP_SYS_ADMIN = 21

_SYS_PIVOT_ROOT = {"x86_64": 155, "aarch64": 41}
_SYS_CAPSET = {"x86_64": 126, "aarch64": 91}
_SYS_CAPGET = {"x86_64": 125, "aarch64": 90}
_CAP_VERSION_3 = 0x20080522
_LAST_CAP = 40

_libc = ctypes.CDLL(None, use_errno=True)


def _number(table: dict[str, int]) -> int:
    machine = platform.machine()
    if machine not in table:
        raise OSError(f"the namespaces level knows the system calls of {sorted(table)}, this machine is {machine!r}")
    return table[machine]


def _check(result: int, what: str) -> None:
    if result != 0:
        number = ctypes.get_errno()
        raise OSError(number, f"{what}: {os.strerror(number)}")


def unshare(flags: int) -> None:
    """Move this process (for pid: its next child) to new namespaces. Raises OSError."""
    _check(_libc.unshare(flags), f"unshare({flags:#x})")


def mount(source: str, target: str, kind: str, flags: int = 0, options: str = "") -> None:
    """mount(2). Raises OSError that names the target."""
    result = _libc.mount(
        source.encode(),
        target.encode(),
        kind.encode() if kind else None,
        ctypes.c_ulong(flags),
        options.encode() or None,
    )
    _check(result, f"mount {kind or source} on {target}")


def detach(target: str) -> None:
    """Lazily unmount ``target``; users that hold it keep it."""
    _check(_libc.umount2(target.encode(), MNT_DETACH), f"umount {target}")


def make_readonly(path: str, *, recursive: bool) -> None:
    """Make a mount (and all below it) read-only, nosuid and nodev, keeping its other flags."""

    class MountAttr(ctypes.Structure):
        _fields_ = [(name, ctypes.c_uint64) for name in ("attr_set", "attr_clr", "propagation", "userns_fd")]

    attr = MountAttr(MOUNT_ATTR_RDONLY | MOUNT_ATTR_NOSUID | MOUNT_ATTR_NODEV, 0, 0, 0)
    result = _libc.syscall(
        ctypes.c_long(SYS_MOUNT_SETATTR),
        ctypes.c_int(AT_FDCWD),
        ctypes.c_char_p(path.encode()),
        ctypes.c_uint(AT_RECURSIVE if recursive else 0),
        ctypes.byref(attr),
        ctypes.c_size_t(ctypes.sizeof(attr)),
    )
    _check(result, f"mount_setattr {path}")


def pivot_root(new_root: str) -> None:
    """Make ``new_root`` the root and drop the old one. Raises OSError."""
    os.chdir(new_root)
    _check(_libc.syscall(ctypes.c_long(_number(_SYS_PIVOT_ROOT)), b".", b"."), "pivot_root")
    _check(_libc.umount2(b".", MNT_DETACH), "umount the old root")
    os.chdir("/")


def prctl(option: int, value: int = 0) -> None:
    """prctl(2) with one argument. Raises OSError."""
    _check(_libc.prctl(option, ctypes.c_ulong(value), 0, 0, 0), f"prctl({option})")


def sethostname(name: str) -> None:
    """Set the host name of this uts namespace."""
    encoded = name.encode()
    _check(_libc.sethostname(encoded, ctypes.c_size_t(len(encoded))), "sethostname")


def may_mount() -> bool:
    """Whether this process has CAP_SYS_ADMIN in its user namespace; False where we do not know how to ask."""
    header = (ctypes.c_uint32 * 2)(_CAP_VERSION_3, 0)
    sets = (ctypes.c_uint32 * 6)()  # effective, permitted, inheritable; then the same of the upper 32
    number = _SYS_CAPGET.get(platform.machine())
    known = number is not None and _libc.syscall(ctypes.c_long(number), header, sets) == 0
    return bool(known and sets[0] >> CAP_SYS_ADMIN & 1)


def drop_capabilities() -> None:
    """Give up every capability, in every set, for good."""
    prctl(PR_CAP_AMBIENT, PR_CAP_AMBIENT_CLEAR_ALL)
    for capability in range(_LAST_CAP + 1):
        _libc.prctl(PR_CAPBSET_DROP, ctypes.c_ulong(capability), 0, 0, 0)  # EPERM: it was not ours
    header = (ctypes.c_uint32 * 2)(_CAP_VERSION_3, 0)
    empty = (ctypes.c_uint32 * 6)()
    _check(_libc.syscall(ctypes.c_long(_number(_SYS_CAPSET)), header, empty), "capset")
    prctl(PR_SET_NO_NEW_PRIVS, 1)
