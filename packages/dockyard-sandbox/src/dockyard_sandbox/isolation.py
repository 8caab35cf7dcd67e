"""Isolation levels: which one this machine gives, and what a run may see of the machine."""

from __future__ import annotations

import os
import platform
import shutil
from dataclasses import dataclass

from dockyard_sandbox.jail import landlock

LEVELS = ("unsafe", "landlock", "bwrap", "namespaces")
"""Weakest first."""
SANDBOX_UID = 61_713
"""Host user of a run when the server is root; it owns nothing else. Landlock runs take one of the 4096 above it."""
REMEDIES = {
    "namespaces": "run as root with CAP_SYS_ADMIN, or allow user namespaces (kernel.unprivileged_userns_clone=1, "
    "kernel.apparmor_restrict_unprivileged_userns=0; Docker: --security-opt seccomp=unconfined)",
    "bwrap": "install bubblewrap; it needs user namespaces too, or the setuid form",
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
    bwrap: str | None = None
    notes: tuple[str, ...] = ()
    """What this level does not give."""

    def satisfies(self, minimum: str) -> bool:
        """Whether this level is at least ``minimum``."""
        return LEVELS.index(self.level) >= LEVELS.index(minimum)


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
    uid = SANDBOX_UID if os.geteuid() == 0 else 0
    found = [
        Isolation(
            level="namespaces",
            tree=tree,
            seccomp=seccomp,
            uid=uid,
            notes=() if seccomp else ("this kernel refuses a seccomp filter",),
        )
        for seccomp in (True, False)
        for tree in ("overlay", "copy")
    ]
    bwrap = shutil.which("bwrap")
    if bwrap is not None:
        for seccomp in (True, False):
            notes = _WEAKER["bwrap"] if seccomp else (*_WEAKER["bwrap"], "no seccomp filter")
            found.append(Isolation(level="bwrap", tree="copy", seccomp=seccomp, uid=0, bwrap=bwrap, notes=notes))
    if landlock.abi() >= landlock.MIN_ABI:
        notes = _WEAKER["landlock"]
        if uid == 0:
            notes += ("the server is no root: the files of the tests are read-only by their mode alone",)
        if landlock.abi() < 6:
            notes += (f"Landlock ABI {landlock.abi()} < 6: runs of one user can signal each other",)
        found.append(Isolation(level="landlock", tree="copy", seccomp=True, uid=uid, notes=notes))
    return found


def unsafe() -> Isolation:
    """No isolation; only by explicit wish."""
    return Isolation(level="unsafe", tree="copy", seccomp=False, uid=0, notes=_WEAKER["unsafe"])


def absent() -> dict[str, str]:
    """Why a level is not even a candidate here."""
    found = {}
    if shutil.which("bwrap") is None:
        found["bwrap"] = "no bwrap on PATH"
    if landlock.abi() < landlock.MIN_ABI:
        found["landlock"] = f"Linux {platform.release()} offers Landlock ABI {landlock.abi()}"
    return found
