"""A small seccomp filter: the system calls that a test run never needs and an attack might."""

from __future__ import annotations

import ctypes
import errno
import platform
import struct
from typing import Any

from .syscalls import CLONE_NEWUSER

PR_SET_SECCOMP = 22
SECCOMP_MODE_FILTER = 2

_ALLOW = 0x7FFF0000
_ERRNO = 0x00050000
_KILL_PROCESS = 0x80000000

_LOAD = 0x20  # BPF_LD | BPF_W | BPF_ABS
_JUMP_EQ = 0x15
_JUMP_GE = 0x35
_JUMP_SET = 0x45
_RETURN = 0x06
_OFFSET_NUMBER, _OFFSET_ARCH, _OFFSET_ARG0 = 0, 4, 16

_AUDIT_ARCH = {"x86_64": 0xC000003E, "aarch64": 0xC00000B7}
_X32_BIT = 0x40000000
_CLONE = {"x86_64": 56, "aarch64": 220}
_CLONE3 = 435
_SOCKET = {"x86_64": 41, "aarch64": 198}

# names for the reader; numbers per architecture
_DENIED = {
    "x86_64": {
        "ptrace": 101, "mount": 165, "umount2": 166, "pivot_root": 155, "chroot": 161, "swapon": 167, "swapoff": 168,
        "reboot": 169, "init_module": 175, "delete_module": 176, "finit_module": 313, "kexec_load": 246,
        "kexec_file_load": 320, "add_key": 248, "request_key": 249, "keyctl": 250, "unshare": 272, "setns": 308,
        "perf_event_open": 298, "open_by_handle_at": 304, "process_vm_readv": 310, "process_vm_writev": 311,
        "kcmp": 312, "bpf": 321, "userfaultfd": 323, "memfd_create": 319, "shmget": 29,
    },
    "aarch64": {
        "ptrace": 117, "mount": 40, "umount2": 39, "pivot_root": 41, "chroot": 51, "swapon": 224, "swapoff": 225,
        "reboot": 142, "init_module": 105, "delete_module": 106, "finit_module": 273, "kexec_load": 104,
        "kexec_file_load": 294, "add_key": 217, "request_key": 218, "keyctl": 219, "unshare": 97, "setns": 268,
        "perf_event_open": 241, "open_by_handle_at": 265, "process_vm_readv": 270, "process_vm_writev": 271,
        "kcmp": 272, "bpf": 280, "userfaultfd": 282, "memfd_create": 279, "shmget": 194,
    },
}  # fmt: skip
_DENIED_EVERYWHERE = {
    "io_uring_setup": 425, "io_uring_enter": 426, "io_uring_register": 427, "open_tree": 428, "move_mount": 429,
    "fsopen": 430, "fsconfig": 431, "fsmount": 432, "fspick": 433, "pidfd_getfd": 438, "mount_setattr": 442,
}  # fmt: skip


def _op(code: int, k: int, jump_true: int = 0, jump_false: int = 0) -> bytes:
    return struct.pack("=HBBI", code, jump_true, jump_false, k)


def build_filter(machine: str, *, sockets: bool = True) -> bytes:
    """Return the BPF program for ``machine``: denied calls answer EPERM, clone3 answers ENOSYS.

    clone3 hides its flags behind a pointer, so it is refused as "not there": libc then falls back
    to clone, whose flags can be read. Without a network namespace, ``sockets=False`` denies every
    socket but the pairs of socketpair.
    """
    denied = {*_DENIED[machine].values(), *_DENIED_EVERYWHERE.values()}
    numbers = sorted(denied if sockets else denied | {_SOCKET[machine]})
    program = [
        _op(_LOAD, _OFFSET_ARCH),
        _op(_JUMP_EQ, _AUDIT_ARCH[machine], 1, 0),
        _op(_RETURN, _KILL_PROCESS),
        _op(_LOAD, _OFFSET_NUMBER),
    ]
    if machine == "x86_64":
        program += [_op(_JUMP_GE, _X32_BIT, 0, 1), _op(_RETURN, _KILL_PROCESS)]
    program += [_op(_JUMP_EQ, _CLONE3, 0, 1), _op(_RETURN, _ERRNO | errno.ENOSYS)]
    for number in numbers:
        program += [_op(_JUMP_EQ, number, 0, 1), _op(_RETURN, _ERRNO | errno.EPERM)]
    program += [
        _op(_JUMP_EQ, _CLONE[machine], 0, 3),
        _op(_LOAD, _OFFSET_ARG0),
        _op(_JUMP_SET, CLONE_NEWUSER, 0, 1),
        _op(_RETURN, _ERRNO | errno.EPERM),
        _op(_RETURN, _ALLOW),
    ]
    return b"".join(program)


_prepared: dict[bool, tuple[Any, Any]] = {}


def prepare(*, sockets: bool = True) -> None:
    """Build the filter once, before the forks that install it."""
    program = build_filter(platform.machine(), sockets=sockets)
    buffer = ctypes.create_string_buffer(program, len(program))

    class Program(ctypes.Structure):
        _fields_ = [("length", ctypes.c_ushort), ("instructions", ctypes.c_void_p)]

    _prepared[sockets] = (Program(len(program) // 8, ctypes.addressof(buffer)), buffer)


def install(*, sockets: bool = True) -> None:
    """Install the filter on this process. Needs no_new_privs. Raises OSError where seccomp is absent."""
    if sockets not in _prepared:
        prepare(sockets=sockets)
    header, _ = _prepared[sockets]
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.prctl(PR_SET_SECCOMP, ctypes.c_ulong(SECCOMP_MODE_FILTER), ctypes.byref(header), 0, 0) != 0:
        raise OSError(ctypes.get_errno(), "seccomp filter refused")
