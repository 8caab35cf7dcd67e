"""Layers of an image over each other, in one directory: whiteouts, links, and no way out of it."""

from __future__ import annotations

import os
import shutil
import stat
import tarfile
from dataclasses import dataclass
from pathlib import Path, PurePosixPath

_CHUNK = 1 << 20
_MAX_HOPS = 40
_WHITEOUT, _OPAQUE = ".wh.", ".wh..wh..opq"


class BadImage(ValueError):
    """An archive that is no image, does not match its digests, or reaches out of its directory."""


@dataclass(frozen=True, kw_only=True)
class ImageBounds:
    """What an archive may unpack to."""

    max_bytes: int = 64 << 30
    max_entries: int = 2_000_000


class LayerWriter:
    """Applies layers to one directory, which nobody else writes."""

    def __init__(self, root: Path, bounds: ImageBounds) -> None:
        self._root = root
        self._bounds = bounds
        self._num_bytes = 0
        self._num_entries = 0

    def apply(self, entries: tarfile.TarFile) -> None:
        """Write one layer over those before it."""
        fresh: set[Path] = set()
        for member in entries:
            self._num_entries += 1
            self._num_bytes += member.size
            if self._num_entries > self._bounds.max_entries or self._num_bytes > self._bounds.max_bytes:
                raise BadImage(f"the image unpacks to more than {self._bounds} allow")
            place = resolve_inside(self._root, member.name, make_parents=True)
            if place == self._root:
                continue
            if place.name == _OPAQUE:
                self._make_opaque(place.parent, fresh)
            elif place.name.startswith(_WHITEOUT):
                self._white_out(place)
            else:
                self._write(member, place, entries)
                fresh.update([place, *place.parents])

    def _make_opaque(self, directory: Path, fresh: set[Path]) -> None:
        for child in directory.iterdir():
            if child not in fresh:
                _remove(child)

    def _white_out(self, place: Path) -> None:
        name = place.name.removeprefix(_WHITEOUT)
        if name in ("", ".", ".."):
            raise BadImage(f"a whiteout must name a file, got {place.name!r}")
        _remove(place.parent / name)

    def _write(self, member: tarfile.TarInfo, place: Path, entries: tarfile.TarFile) -> None:
        if member.isdir():
            if place.is_symlink() or not place.is_dir():
                _remove(place)
                place.mkdir()
            place.chmod(member.mode & 0o777 | 0o700)
            return
        if member.issym():
            _remove(place)
            place.symlink_to(member.linkname)
        elif member.islnk():
            source = resolve_inside(self._root, member.linkname)
            if source == place:
                return
            if not stat.S_ISREG(_mode(source)) and not source.is_symlink():
                raise BadImage(f"{member.name!r} is a hard link to {member.linkname!r}, which is no file of the image")
            _remove(place)
            os.link(source, place, follow_symlinks=False)
        elif member.isreg():
            _remove(place)
            stream = entries.extractfile(member)
            assert stream is not None  # a regular file has content
            descriptor = os.open(place, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW, 0o600)
            with stream, os.fdopen(descriptor, "wb") as file:
                shutil.copyfileobj(stream, file, _CHUNK)
                os.fchmod(file.fileno(), member.mode & 0o777 | 0o400)  # no setuid, no setgid
            os.utime(place, (member.mtime, member.mtime))  # byte code is valid for one time of its source


def resolve_inside(root: Path, name: str, *, make_parents: bool = False) -> Path:
    """Where ``name`` lies below ``root``, as a process whose root is ``root`` would see its directory.

    The last part is not followed. Raises BadImage when the name, or a symlink on its way, leaves the root.
    """
    parts = PurePosixPath(name).parts
    if name.startswith("/") or ".." in parts:
        raise BadImage(f"a path must stay inside the image, got {name[:200]!r}")
    if not parts:
        return root
    done: list[str] = []
    pending, hops = list(reversed(parts[:-1])), 0
    while pending:
        part = pending.pop()
        if part == "..":
            if not done:
                raise BadImage(f"{name[:200]!r} lies behind a symlink that leaves the image")
            done.pop()
            continue
        here = root.joinpath(*done, part)
        if here.is_symlink():
            target = here.readlink()
            hops += 1
            if hops > _MAX_HOPS:
                raise BadImage(f"{name[:200]!r} lies behind a loop of symlinks")
            if target.is_absolute():
                done = []
            pending += reversed([one for one in target.parts if one != "/"])
            continue
        if not here.exists() and make_parents:
            here.mkdir(mode=0o755)
        elif make_parents and not here.is_dir():
            raise BadImage(f"{name[:200]!r} lies below a file")
        done.append(part)
    return root.joinpath(*done, parts[-1])


def _mode(path: Path) -> int:
    try:
        return path.lstat().st_mode
    except OSError:
        return 0


def _remove(path: Path) -> None:
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path)
    else:
        path.unlink(missing_ok=True)
