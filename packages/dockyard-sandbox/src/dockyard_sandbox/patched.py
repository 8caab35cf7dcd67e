"""A base tree with changes, asked path by path: to walk a large tree costs more than a short test."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import PurePosixPath

from dockyard_sandbox.apply import REGULAR
from dockyard_sandbox.trees import BaseTree, Entry


@dataclass(frozen=True, kw_only=True)
class PatchedTree:
    """What a run will find, before it is written anywhere."""

    base: BaseTree
    changes: Mapping[str, Entry | None]
    """Path to its new entry; None = deleted."""
    contents: Mapping[str, bytes]
    """Blob id to content, for every new entry."""

    def __contains__(self, path: str) -> bool:
        return self.get(path) is not None

    def get(self, path: str) -> Entry | None:
        """The entry at ``path``; None = there is none."""
        return self.changes[path] if path in self.changes else self.base.entries.get(path)

    def read(self, path: str) -> bytes:
        """The content of a regular file; b"" where there is none."""
        entry = self.get(path)
        if entry is None or entry.mode not in REGULAR:
            return b""
        return self.contents[entry.blob] if path in self.changes else (self.base.directory / path).read_bytes()

    @property
    def added(self) -> list[str]:
        """Changed paths that are there."""
        return [path for path, entry in self.changes.items() if entry is not None]

    def below(self, directories: Iterable[str]) -> set[str]:
        """Every path below one of ``directories``."""
        prefixes = tuple(f"{directory}/" for directory in directories)
        found = {path for path in self.added if path.startswith(prefixes)}
        return found | {path for prefix in prefixes for path in self.base.paths_below(prefix[:-1]) if path in self}

    def named(self, names: frozenset[str]) -> set[str]:
        """Every path whose last part is one of ``names``."""
        found = {path for name in names for path in self.base.by_name.get(name, ()) if path in self}
        return found | {path for path in self.added if path.rsplit("/", 1)[-1] in names}

    def clash(self) -> str | None:
        """A path that would be both a file and a directory."""
        for path in self.added:
            if path in self.base.directories and any(other in self for other in self.base.paths_below(path)):
                return path
            for parent in PurePosixPath(path).parents:
                if str(parent) in self:
                    return str(parent)
        return None

    def size(self) -> int:
        """Bytes of the changed files."""
        return sum(len(self.contents[entry.blob]) for entry in self.changes.values() if entry is not None)

    def key(self) -> str:
        """Names the tree: hash of the base tree's id and of every changed path with its blob."""
        digest = hashlib.sha256(self.base.tree.encode())
        for path, entry in sorted(self.changes.items()):
            if self.base.entries.get(path) != entry:
                digest.update(repr((path, entry and (entry.mode, entry.blob))).encode())
        return digest.hexdigest()
