"""Isolation levels: which one this machine gives, and what a run may see of the machine."""

from __future__ import annotations

import os
import shutil
import sys
import sysconfig
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path

LEVELS = ("unsafe", "landlock", "bwrap", "namespaces")
"""Weakest first."""
SANDBOX_UID = 61_713
"""Host user of a run when the server is root; it owns nothing else."""


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

    def satisfies(self, minimum: str) -> bool:
        """Whether this level is at least ``minimum``."""
        return LEVELS.index(self.level) >= LEVELS.index(minimum)


def candidates() -> list[Isolation]:
    """Levels worth probing on this machine, strongest first; never ``unsafe``."""
    uid = SANDBOX_UID if os.geteuid() == 0 else 0
    found = [
        Isolation(level="namespaces", tree=tree, seccomp=seccomp, uid=uid)
        for seccomp in (True, False)
        for tree in ("overlay", "copy")
    ]
    bwrap = shutil.which("bwrap")
    if bwrap is not None:
        found.append(Isolation(level="bwrap", tree="copy", seccomp=False, uid=0, bwrap=bwrap))
    return found


@dataclass(frozen=True, kw_only=True)
class Environment:
    """The interpreter that runs the tests, and the directories that it needs."""

    python: str
    binds: tuple[str, ...]
    import_paths: tuple[str, ...]
    """Where pytest lies, if the interpreter does not find it by itself."""
    modules: frozenset[str] = frozenset()
    """Top-level modules installed beside the interpreter: a tree must not shadow them anew."""


def own_environment() -> Environment:
    """The executor's own interpreter with its pytest. Raises ModuleNotFoundError when it has none."""
    spec = find_spec("pytest")
    if spec is None or spec.origin is None:
        raise ModuleNotFoundError("the executor's interpreter has no pytest; install it beside dockyard-sandbox")
    site = str(Path(spec.origin).parent.parent)
    prefixes = {os.path.realpath(sys.base_prefix), sys.base_prefix, sys.prefix}
    binds = prefixes | ({site} if not any(site.startswith(f"{prefix}/") for prefix in prefixes) else set())
    outer = [path for path in sorted(binds) if not any(path.startswith(f"{other}/") for other in binds)]
    return Environment(
        python=sys.executable,
        binds=tuple(outer),
        import_paths=() if site.startswith(f"{sys.prefix}/") else (site,),
        modules=_modules_in({site, *(sysconfig.get_path(name) for name in ("purelib", "platlib"))}),
    )


def _modules_in(directories: set[str]) -> frozenset[str]:
    stems = set()
    for directory in directories:
        for path in Path(directory).glob("*"):
            if path.suffix in (".py", ".so") or path.is_dir():
                stems.add(path.name.split(".")[0] if path.is_file() else path.name)
    return frozenset(stem for stem in stems if stem.isidentifier() and stem != "__pycache__")
