"""Control groups of this server: where the kernel lets us make them, and the sweep of dead servers' ones.

Version 1: a directory of ours below this process's group of each controller. Version 2: the same below
its one group, whose processes must then live in a leaf: only where this server is alone in it. So a server asks
before it starts a process, and what it starts is born in the leaf.
"""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path

from dockyard_sandbox import janitor

CONTROLLERS = ("memory", "pids", "cpu")
_PREFIX = "dockyard-"
_LEAF, _PROCESSES, _SHARED = "server", "cgroup.procs", "cgroup.subtree_control"


@dataclass(frozen=True, kw_only=True)
class ControlGroups:
    """What the probe found."""

    parents: tuple[tuple[str, tuple[str, ...]], ...] = ()
    """(directory of this server, what a run's group in it limits, such as ``memory.v1``)."""
    notes: tuple[str, ...] = ()
    """What is missing, why, and how to get it."""

    @property
    def controllers(self) -> tuple[str, ...]:
        """Controllers in use, such as ``memory.v1``."""
        return tuple(name for _, names in self.parents for name in names)

    def close(self) -> None:
        """Remove this server's directories; those that still hold a process are left to the next sweep."""
        for parent, _ in self.parents:
            _withdraw(Path(parent))
            _remove(Path(parent))


@dataclass(frozen=True, kw_only=True)
class Hierarchy:
    """One mounted hierarchy and this process's group in it."""

    version: int
    controllers: tuple[str, ...]
    own: Path


def find_hierarchies(proc: Path = Path("/proc/self")) -> list[Hierarchy]:
    """Hierarchies mounted here that know a controller of ours."""
    groups: dict[str, str] = {}
    for line in (proc / "cgroup").read_text().splitlines():
        _, controllers, path = line.split(":", 2)
        groups.update(dict.fromkeys(controllers.split(","), path))
    found = []
    for line in (proc / "mountinfo").read_text().splitlines():
        fields, _, rest = line.partition(" - ")
        root, mounted = fields.split()[3:5]
        kind, _, options = rest.split()[:3]
        named = set(options.split(",")) & set(CONTROLLERS) if kind == "cgroup" else {""}
        if kind not in ("cgroup", "cgroup2") or not named & set(groups):
            continue
        path = groups[min(named & set(groups))]
        inside = path.removeprefix(root.rstrip("/")) if path.startswith(root) else path
        own = Path(mounted + inside.rstrip("/"))
        known = named if kind == "cgroup" else set(_read_words(own / "cgroup.controllers"))
        names = tuple(name for name in CONTROLLERS if name in known)
        if names:
            found.append(Hierarchy(version=2 if kind == "cgroup2" else 1, controllers=names, own=own))
    return found


def _read_words(path: Path) -> list[str]:
    try:
        return path.read_text().split()
    except OSError:
        return []


def probe(hierarchies: list[Hierarchy] | None = None) -> ControlGroups:
    """Make this server's directories where that is allowed; say what is missing where it is not."""
    parents, notes, missing = [], [], set(CONTROLLERS)
    for hierarchy in find_hierarchies() if hierarchies is None else hierarchies:
        try:
            directory = _make(hierarchy)
        except OSError as error:
            notes.append(f"cgroup v{hierarchy.version} {','.join(hierarchy.controllers)}: {error.strerror or error}")
            continue
        parents.append((str(directory), tuple(f"{name}.v{hierarchy.version}" for name in hierarchy.controllers)))
        missing -= set(hierarchy.controllers)
    if missing:
        notes.append(
            f"no control group for {', '.join(sorted(missing))}: limits hold per process, and memory is watched; "
            "run the server in a group of its own that it may write, alone in it (systemd: Delegate=cpu memory pids); "
            "a container's is read-only"
        )
    return ControlGroups(parents=tuple(parents), notes=tuple(notes))


def sweep(hierarchies: list[Hierarchy] | None = None) -> list[str]:
    """Remove the groups of dead servers; return the names removed."""
    removed = []
    for hierarchy in find_hierarchies() if hierarchies is None else hierarchies:
        for directory in sorted(hierarchy.own.glob(f"{_PREFIX}*")):
            if not janitor.is_owner_alive(directory.name.removeprefix(_PREFIX)):
                _remove(directory)
                removed.append(str(directory))
    return removed


def _make(hierarchy: Hierarchy) -> Path:
    directory = hierarchy.own / f"{_PREFIX}{janitor.owner_name()}"
    directory.mkdir(exist_ok=True)
    try:
        if hierarchy.version == 2:
            _delegate(hierarchy, directory)
        else:
            _check_writable(directory, hierarchy.controllers)
    except OSError:
        _withdraw(directory)
        _remove(directory)
        raise
    return directory


def _check_writable(directory: Path, controllers: tuple[str, ...]) -> None:
    probe_group = directory / "probe"
    probe_group.mkdir(exist_ok=True)
    try:
        if "pids" in controllers:
            (probe_group / "pids.max").write_text("1000")
        if not os.access(probe_group / _PROCESSES, os.W_OK):
            raise PermissionError(f"{probe_group}/{_PROCESSES} may not be written")
    finally:
        probe_group.rmdir()


def _delegate(hierarchy: Hierarchy, directory: Path) -> None:
    """Enable the controllers below ``directory``: its own group must have no process of its own for that."""
    enable = " ".join(f"+{name}" for name in hierarchy.controllers)
    if not set(hierarchy.controllers) <= set(_read_words(hierarchy.own / _SHARED)):
        if (hierarchy.own / "cgroup.type").exists():  # the first group of all has none, and may hold processes as well
            others = set(_read_words(hierarchy.own / _PROCESSES)) - {str(os.getpid())}
            if others:
                raise OSError(
                    f"{hierarchy.own} holds {len(others)} other processes: its controllers cannot be shared out"
                )
            leaf = directory / _LEAF
            leaf.mkdir(exist_ok=True)
            (leaf / _PROCESSES).write_text(str(os.getpid()))
        (hierarchy.own / _SHARED).write_text(enable)
    (directory / _SHARED).write_text(enable)


def _withdraw(directory: Path) -> None:
    """Undo `_delegate`: let this process live in its own group again, as others may that come after it."""
    if str(os.getpid()) not in _read_words(directory / _LEAF / _PROCESSES):
        return
    own = directory.parent
    try:
        for group in (directory, own):
            (group / _SHARED).write_text(" ".join(f"-{name}" for name in _read_words(group / _SHARED)))
        (own / _PROCESSES).write_text(str(os.getpid()))
    except OSError:
        return  # another group has come to need them: it ends with this process


def _remove(directory: Path) -> None:
    for path in (*directory.glob("*/"), directory):
        try:
            path.rmdir()
        except OSError:
            continue  # it still holds a process: a later sweep finds it
