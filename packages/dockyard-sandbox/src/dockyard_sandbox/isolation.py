"""Isolation levels: which one this machine gives, and what a run may see of the machine."""

from __future__ import annotations

import os
import platform
import shutil
from dataclasses import dataclass
from pathlib import Path

from dockyard_sandbox.jail import landlock, syscalls
from dockyard_sandbox.jail.plain import NUM_UIDS

LEVELS = ("unsafe", "landlock", "bwrap", "namespaces")
"""Weakest first."""
SANDBOX_UID = 60_600
"""Host user of a run when the server is root; it owns nothing else. Landlock runs take one of those above it.

Below are people, from 61184 on the users that systemd makes up for services, then nobody; a container has 65536 ids.
"""
REMEDIES = {
    "namespaces": "run as root with CAP_SYS_ADMIN, or allow user namespaces (kernel.unprivileged_userns_clone=1, "
    "user.max_user_namespaces > 0, kernel.apparmor_restrict_unprivileged_userns=0 or an AppArmor profile with "
    "'userns,'). A container also needs a whole /proc and leave to mount: Docker --security-opt "
    "systempaths=unconfined --security-opt seccomp=unconfined --security-opt apparmor=unconfined; Podman "
    "--security-opt unmask=ALL --security-opt seccomp=unconfined; Kubernetes hostUsers: false, procMount: Unmasked, "
    "and both profiles Unconfined",
    "bwrap": "install bubblewrap; it needs user namespaces and a whole /proc too, or the setuid form",
    "landlock": f"use a kernel with Landlock ABI {landlock.MIN_ABI} or later (Linux 6.2) and 'landlock' in lsm=",
}
"""How to get each level."""


@dataclass(frozen=True, kw_only=True)
class Isolation:
    """What the probe found."""

    level: str
    tree: str
    """overlay, or copy where the kernel refuses an overlay."""
    seccomp: bool
    uid: int
    """Host uid of a run; 0 = the server's own (unprivileged) user."""
    user_namespace: bool = False
    """Whether the right to mount is that of a user namespace only: an overlay must know."""
    bwrap: str | None = None
    notes: tuple[str, ...] = ()
    """What this level does not give."""

    def satisfies(self, minimum: str) -> bool:
        """Whether this level is at least ``minimum``."""
        return LEVELS.index(self.level) >= LEVELS.index(minimum)


_FIRST_USER_NAMESPACE = 0xEFFFFFFD  # the kernel numbers those of its start itself
_UNMAPPED = (
    f"this container has no users {SANDBOX_UID} to {SANDBOX_UID + NUM_UIDS}, as which runs would go: "
    "map 65536 ids into it, or start the server as a plain user"
)
_WEAKER = {
    "bwrap": ("the tree is copied, without a size limit of its own",),
    "landlock": (
        "no namespaces: the tree is copied, disk_mb holds per file, and files outside can be seen to exist",
        "no sockets but socketpair, no /proc, no /dev/shm",
    ),
    "unsafe": ("nothing keeps a run from the machine",),
}


def candidates() -> list[Isolation]:
    """Levels worth probing on this machine, strongest first; never ``unsafe``."""
    missing = absent()
    uid = SANDBOX_UID if os.geteuid() == 0 else 0
    found = [
        Isolation(
            level="namespaces",
            tree=tree,
            seccomp=seccomp,
            uid=uid,
            user_namespace=uid == 0 or not syscalls.may_mount() or not _is_first_user_namespace(),
            notes=() if seccomp else ("this kernel refuses a seccomp filter",),
        )
        for seccomp in (True, False)
        for tree in ("overlay", "copy")
    ]
    bwrap = shutil.which("bwrap")
    for seccomp in (True, False):
        notes = _WEAKER["bwrap"] if seccomp else (*_WEAKER["bwrap"], "no seccomp filter")
        found.append(Isolation(level="bwrap", tree="copy", seccomp=seccomp, uid=0, bwrap=bwrap, notes=notes))
    notes = _WEAKER["landlock"]
    if uid == 0:
        notes += ("the server is no root: the files of the tests are read-only by their mode alone",)
    if landlock.abi() < 6:
        notes += (f"Landlock ABI {landlock.abi()} < 6: runs of one user can signal each other",)
    found.append(Isolation(level="landlock", tree="copy", seccomp=True, uid=uid, notes=notes))
    return [isolation for isolation in found if isolation.level not in missing]


def unsafe() -> Isolation:
    """No isolation; only by explicit wish."""
    return Isolation(level="unsafe", tree="copy", seccomp=False, uid=0, notes=_WEAKER["unsafe"])


def absent() -> dict[str, str]:
    """Why a level is not even a candidate here."""
    found = {}
    is_root = os.geteuid() == 0
    if is_root and not _are_mapped(SANDBOX_UID, SANDBOX_UID):
        found["namespaces"] = _UNMAPPED
    if shutil.which("bwrap") is None:
        found["bwrap"] = "no bwrap on PATH"
    if landlock.abi() < landlock.MIN_ABI:
        found["landlock"] = f"Linux {platform.release()} offers Landlock ABI {landlock.abi()}"
    elif is_root and not _are_mapped(SANDBOX_UID, SANDBOX_UID + NUM_UIDS):
        found["landlock"] = _UNMAPPED
    return found


def _are_mapped(first: int, last: int) -> bool:
    """Whether the users and groups from ``first`` to ``last`` exist in this user namespace."""
    return all(
        any(start <= first and last < start + count for start, _, count in _id_map(kind)) for kind in ("uid", "gid")
    )


def _is_first_user_namespace() -> bool:
    return Path("/proc/self/ns/user").stat().st_ino == _FIRST_USER_NAMESPACE


def _id_map(kind: str) -> list[tuple[int, ...]]:
    """Ranges of ids of this user namespace: (first here, first outside, how many)."""
    lines = Path(f"/proc/self/{kind}_map").read_text().splitlines()
    return [tuple(map(int, line.split())) for line in lines]
