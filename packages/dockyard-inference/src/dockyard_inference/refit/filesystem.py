"""The filesystem transport, for hosts that share a directory and no fast network.

Each sender has a folder of its own in the directory, and in it one folder per update with a
safetensors file per bucket. Ranks take each file as soon as it is announced; ``latest.json`` names the
files of the newest whole version and is replaced atomically, for whoever is in no group.

A version is removed when every rank has attested the next one, and the whole folder with the sender.
One that was killed holds its lock no longer: the ranks it left, or the next sender, remove its folder.
"""

from __future__ import annotations

import fcntl
import json
import os
import shutil
import struct
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from dockyard_core.refit import Bucket
from dockyard_inference.refit.group import Board, Deadline
from dockyard_inference.refit.wire import BufferPool, Counts, NoRoom, WireError, largest

if TYPE_CHECKING:
    import torch

_FOLDER = "refit-"
_LOCK = "owner.lock"
_POINTER = "latest.json"
_LENGTH_BYTES = 8
_DTYPES = {"float32": "F32", "bfloat16": "BF16", "float16": "F16", "float64": "F64"}


class FilesystemSendWire:
    """Writes the files.

    Args:
        board: of the group.
        ranks: every engine worker.
        directory: that the ranks see under the same path; made when it is not there.
        device: of the buffer that is packed.

    Raises:
        OSError: the directory cannot be written.
    """

    def __init__(self, board: Board, ranks: Sequence[int], directory: Path, device: torch.device) -> None:
        self._board, self._device = board, device
        self._counts = Counts(board, ranks)
        directory.mkdir(parents=True, exist_ok=True)
        remove_orphans(directory)
        self._root, self._lock = _own_folder(directory)
        self._folder, self._number = self._root, 0
        self._buckets: Sequence[Bucket] = ()
        self._buffer: torch.Tensor | None = None

    def begin(self, number: int, buckets: Sequence[Bucket], deadline: Deadline) -> None:
        """See ``SendWire``."""
        self._buckets, self._number = buckets, number
        self._counts.begin(number, deadline)
        self._folder = self._root / f"update-{number}"
        try:
            self._folder.mkdir()
            self._board.put(f"{number}/place", str(self._folder))
        except (OSError, RuntimeError) as error:
            raise NoRoom(f"{self._folder} cannot be made: {error}") from error
        self._buffer = BufferPool(largest(buckets), self._device).take(largest(buckets))

    def buffer(self, number: int) -> torch.Tensor:
        """See ``SendWire``; what was put is on file."""
        assert self._buffer is not None, "begin() comes first"
        return self._buffer[: self._buckets[number].num_bytes]

    def put(self, number: int) -> None:
        """See ``SendWire``."""
        try:
            with bucket_path(self._folder, number).open("wb") as file:
                file.write(_header(self._buckets[number]))
                file.write(memoryview(self.buffer(number).cpu().numpy()))
        except OSError as error:
            raise NoRoom(f"bucket {number} cannot be written: {error}") from error
        self._counts.put(number + 1)

    def finish(self) -> None:
        """See ``SendWire``; from here on the version is there for everybody."""
        self._buffer = None
        files = [bucket_path(self._folder, number).name for number in range(len(self._buckets))]
        pointer, new = self._root / _POINTER, self._root / f"{_POINTER}.new"
        try:
            new.write_text(json.dumps({"folder": self._folder.name, "files": files}))
            new.replace(pointer)
        except OSError as error:
            raise NoRoom(f"{pointer} cannot be replaced: {error}") from error

    def attested(self) -> None:
        """See ``SendWire``."""
        for folder in self._root.glob("update-*"):
            if folder != self._folder:
                shutil.rmtree(folder, ignore_errors=True)

    def close(self) -> None:
        """See ``SendWire``."""
        self._counts.call_off()
        self._buffer = None
        shutil.rmtree(self._root, ignore_errors=True)
        if self._lock >= 0:
            os.close(self._lock)
            self._lock = -1


class FilesystemReceiveWire:
    """Reads the files."""

    def __init__(self, board: Board, device: torch.device) -> None:
        self._board, self._device = board, device
        self._counts = Counts(board, ())
        self._folder: Path | None = None
        self._buckets: Sequence[Bucket] = ()
        self._pool = BufferPool(0, device)

    def begin(self, number: int, buckets: Sequence[Bucket], deadline: Deadline) -> None:
        """See ``ReceiveWire``."""
        import torch

        self._buckets = buckets
        self._counts.begin(number, deadline)
        self._pool = BufferPool(largest(buckets), torch.device("cpu"))
        place = self._board.await_key(f"{number}/place", deadline)
        if place is None:
            raise WireError("the sender named no folder")
        self._folder = Path(place)

    def take(self, number: int, *, is_kept: bool) -> torch.Tensor:
        """See ``ReceiveWire``."""
        assert self._folder is not None, "begin() comes first"
        self._counts.await_put(number + 1)
        buffer = self._pool.take(self._buckets[number].num_bytes)
        path = bucket_path(self._folder, number)
        try:
            with path.open("rb", buffering=0) as file:
                (length,) = struct.unpack("<Q", file.read(_LENGTH_BYTES).ljust(_LENGTH_BYTES, b"\0"))
                file.seek(min(length, os.fstat(file.fileno()).st_size), os.SEEK_CUR)
                _fill(memoryview(buffer.numpy()), file)
        except OSError as error:
            raise WireError(f"{path} cannot be read: {error}") from error
        if number == len(self._buckets) - 1:
            self._pool = BufferPool(0, self._device)
        return buffer.to(self._device)

    def release(self) -> None:
        """See ``ReceiveWire``."""

    def close(self) -> None:
        """See ``ReceiveWire``."""
        self._pool = BufferPool(0, self._device)
        folder, self._folder = self._folder, None
        if folder is not None:
            remove_orphans(folder.parent.parent)


def remove_orphans(directory: Path) -> None:
    """Remove the folders of senders that are gone; one that lives holds the lock of its own."""
    for lock_path in directory.glob(f"{_FOLDER}*/{_LOCK}"):
        try:
            lock = os.open(lock_path, os.O_RDWR)
        except OSError:
            continue
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            shutil.rmtree(lock_path.parent, ignore_errors=True)
        except OSError:
            pass  # its sender lives
        finally:
            os.close(lock)


def bucket_path(folder: Path, number: int) -> Path:
    """The file of one bucket of an update."""
    return folder / f"bucket-{number:05d}.safetensors"


def _own_folder(directory: Path) -> tuple[Path, int]:
    """A new folder and the lock on it, which the system lets go of when this process ends."""
    while True:
        root = Path(tempfile.mkdtemp(prefix=_FOLDER, dir=directory))
        lock = os.open(root / _LOCK, os.O_CREAT | os.O_RDWR | os.O_CLOEXEC, 0o600)
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            if (root / _LOCK).exists():
                return root, lock
        except BlockingIOError:
            pass  # taken for an orphan in the moment before it was locked
        os.close(lock)


def _header(bucket: Bucket) -> bytes:
    entries: dict[str, Any] = {}
    start = 0
    for spec in bucket.tensors:
        end = start + spec.num_bytes
        entries[spec.name] = {"dtype": _DTYPES[spec.dtype], "shape": list(spec.shape), "data_offsets": [start, end]}
        start = end
    text = json.dumps(entries).encode()
    text += b" " * (-len(text) % 8)
    return struct.pack("<Q", len(text)) + text


def _fill(target: memoryview, file: Any) -> None:
    """Read into ``target``; zeros where the file ends before, which its digest will not have."""
    while len(target) and (count := file.readinto(target)):
        target = target[count:]
    target[:] = bytes(len(target))
