"""Read-only base trees on disk, one per git tree id, written without checkout, filters or hooks."""

from __future__ import annotations

import os
import shutil
import tempfile
import threading
from bisect import bisect_left
from collections.abc import Iterable
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path, PurePosixPath

from dockyard_sandbox.gitcmd import Git
from dockyard_sandbox.repos import locked

SYMLINK, GITLINK, EXECUTABLE = "120000", "160000", "100755"
_MAX_HOPS = 40


@dataclass(frozen=True, slots=True)
class Entry:
    """One path of a tree."""

    mode: str
    blob: str


@dataclass(frozen=True, kw_only=True)
class BaseTree:
    """A materialised tree and what git says is in it."""

    tree: str
    bare: Path
    directory: Path
    entries: dict[str, Entry]
    index_path: Path
    """A ready index of this tree, copied for every attempt."""

    @cached_property
    def directories(self) -> frozenset[str]:
        """Every directory that has a file somewhere below; "." is the root."""
        return directories_of(self.entries)

    @cached_property
    def sorted_paths(self) -> list[str]:
        """Every path, in order: those below a directory stand together."""
        return sorted(self.entries)

    @cached_property
    def by_name(self) -> dict[str, list[str]]:
        """Paths by their last part."""
        found: dict[str, list[str]] = {}
        for path in self.entries:
            found.setdefault(path.rsplit("/", 1)[-1], []).append(path)
        return found

    def paths_below(self, directory: str) -> list[str]:
        """Every path below ``directory``."""
        prefix = f"{directory}/"
        start = bisect_left(self.sorted_paths, prefix)
        return self.sorted_paths[start : bisect_left(self.sorted_paths, f"{directory}0", start)]  # "0" follows "/"

    def resolve(self, path: str) -> str:
        """Follow the tree's own symlinks; a path that leaves the tree, or never ends, stays as it is."""
        pending = list(reversed(PurePosixPath(path).parts))
        done: list[str] = []
        hops = 0
        while pending:
            part = pending.pop()
            if part == "..":
                if not done:
                    return path
                done.pop()
                continue
            here = "/".join([*done, part])
            entry = self.entries.get(here)
            if entry is None or entry.mode != SYMLINK:
                done.append(part)
                continue
            target = PurePosixPath((self.directory / here).readlink())
            hops += 1
            if target.is_absolute() or hops > _MAX_HOPS:
                return path
            pending.extend(reversed(target.parts))
        return "/".join(done)


def directories_of(paths: Iterable[str]) -> frozenset[str]:
    """Every directory above one of ``paths``; "." is the root."""
    found: set[str] = set()
    for path in paths:
        end = path.rfind("/")
        while end > 0 and path[:end] not in found:
            found.add(path[:end])
            end = path.rfind("/", 0, end)
    return frozenset(found | {"."})


class TreeStore:
    """Base trees under ``root/trees``; materialising is done once per tree and is crash-safe."""

    def __init__(self, root: Path, git: Git, *, owner_uid: int | None) -> None:
        self._directory = root / "trees"
        self._directory.mkdir(parents=True, exist_ok=True)
        self._git = git
        self._owner_uid = owner_uid
        self._lock = threading.Lock()
        self._trees: dict[tuple[Path, str], BaseTree] = {}
        self._entries: dict[str, dict[str, Entry]] = {}

    def get(self, bare: Path, tree: str) -> BaseTree:
        """Return the tree, materialising it on first use. Raises GitFailed, OSError."""
        known = self._trees.get((bare, tree))
        if known is None:
            with self._lock, locked(self._directory / ".lock"):
                known = self._trees.get((bare, tree)) or self._load(bare, tree)
                self._trees[(bare, tree)] = known
        return known

    def entries(self, bare: Path, tree: str) -> dict[str, Entry]:
        """What a tree has at which path, without materialising it. Raises GitFailed."""
        known = self._entries.get(tree)
        if known is None:
            known = {}
            listing = self._git.run("ls-tree", "-r", "-z", "--full-tree", tree, git_dir=bare)
            for line in listing.split(b"\0")[:-1]:
                head, path = line.split(b"\t", 1)
                mode, _, blob = head.decode().split(" ")
                known[os.fsdecode(path)] = Entry(mode, blob)
            self._entries[tree] = known
        return known

    def _load(self, bare: Path, tree: str) -> BaseTree:
        entries = self.entries(bare, tree)
        final = self._directory / f"{tree}-{'own' if self._owner_uid is None else self._owner_uid}"
        index_path = self._directory / f"{final.name}.index"
        if not final.exists() or not index_path.exists():
            shutil.rmtree(final, ignore_errors=True)
            temporary = Path(tempfile.mkdtemp(prefix=".new-", dir=self._directory))
            self._materialise(bare, entries, temporary / "tree")
            self._git.run("read-tree", tree, git_dir=bare, extra_env={"GIT_INDEX_FILE": str(temporary / "index")})
            (temporary / "index").replace(index_path)
            (temporary / "tree").replace(final)
            temporary.rmdir()
        return BaseTree(tree=tree, bare=bare, directory=final, entries=entries, index_path=index_path)

    def _materialise(self, bare: Path, entries: dict[str, Entry], target: Path) -> None:
        target.mkdir(mode=0o755)
        blobs = [(path, entry) for path, entry in entries.items() if entry.mode != GITLINK]
        request = "".join(f"{entry.blob}\n" for _, entry in blobs).encode()
        output = memoryview(self._git.run("cat-file", "--batch", git_dir=bare, stdin=request, timeout_s=600.0))
        offset = 0
        for path, entry in blobs:
            header_end = offset + bytes(output[offset : offset + 256]).index(b"\n")
            size = int(bytes(output[offset:header_end]).split(b" ")[2])
            content = bytes(output[header_end + 1 : header_end + 1 + size])
            offset = header_end + size + 2
            place = target / path
            place.parent.mkdir(parents=True, exist_ok=True)
            if entry.mode == SYMLINK:
                place.symlink_to(os.fsdecode(content))
            else:
                place.write_bytes(content)
                place.chmod(0o755 if entry.mode == EXECUTABLE else 0o644)
        for path, entry in entries.items():
            if entry.mode == GITLINK:
                (target / path).mkdir(parents=True, exist_ok=True)
        if self._owner_uid is not None:
            for directory, _, names in os.walk(target):
                for name in (directory, *(f"{directory}/{name}" for name in names)):
                    os.chown(name, self._owner_uid, self._owner_uid, follow_symlinks=False)
