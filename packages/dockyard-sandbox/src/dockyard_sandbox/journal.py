"""What the server owes: one file per accepted submission, so that a killed server's debts are known.

A submission is written down before any of it starts and again with its replies before they are given.
The files survive the server's death; a power cut may lose the last seconds, as nothing waits for the disk.
"""

from __future__ import annotations

import json
import threading
from collections import OrderedDict
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from dockyard_sandbox import janitor

MAX_SUBMISSIONS = 4096
MAX_BYTES = 1 << 30


@dataclass(frozen=True, kw_only=True)
class Entry:
    """What is known of an answered submission without reading its file."""

    submission_id: str
    tenant: str
    key: str | None
    body_hash: str
    is_batch: bool
    num_bytes: int


class Journal:
    """Submissions under ``root/tasks``; the oldest answered ones leave when there are too many.

    Args:
        root: the server's directory.
        interrupted: makes the reply on a task of which a killed server had written down this description.
    """

    def __init__(self, root: Path, interrupted: Callable[[dict[str, Any]], dict[str, Any]]) -> None:
        self._directory = root / "tasks"
        self._directory.mkdir(mode=0o700, parents=True, exist_ok=True)
        self._owner = janitor.owner_name()
        self._lock = threading.Lock()
        self._entries: OrderedDict[str, Entry] = OrderedDict()
        self._by_key: dict[tuple[str, str], str] = {}
        self._num_bytes = 0
        self.num_interrupted = 0
        """Submissions of a killed server that are answered ``infra_error``."""
        self._load(interrupted)

    def find(self, submission_id: str) -> Entry | None:
        """The answered submission of this id, or None."""
        return self._entries.get(submission_id)

    def find_key(self, tenant: str, key: str) -> Entry | None:
        """The answered submission that ``tenant`` sent under ``key``, or None."""
        with self._lock:
            found = self._by_key.get((tenant, key))
            return None if found is None else self._entries.get(found)

    def replies(self, entry: Entry) -> list[dict[str, Any]] | None:
        """Its replies; None = they were dropped meanwhile."""
        try:
            replies: list[dict[str, Any]] = json.loads(self._path(entry.submission_id).read_bytes())["replies"]
        except FileNotFoundError:
            return None
        return replies

    def accept(self, entry: Entry, tasks: list[dict[str, Any]]) -> None:
        """Write down a submission and the descriptions of its tasks, before any of them starts."""
        self._write(entry, {"owner": self._owner, "tasks": tasks})

    def finish(self, entry: Entry, replies: list[dict[str, Any]]) -> None:
        """Write down the replies, before they are given."""
        with self._lock:
            self._remember(entry, self._write(entry, {"replies": replies}))

    def forget(self, submission_id: str) -> None:
        """Drop a submission that nobody is owed any more."""
        self._path(submission_id).unlink(missing_ok=True)

    def _path(self, submission_id: str) -> Path:
        return self._directory / f"{submission_id}.json"

    def _write(self, entry: Entry, rest: dict[str, Any]) -> int:
        record = {
            "tenant": entry.tenant,
            "key": entry.key,
            "body_hash": entry.body_hash,
            "is_batch": entry.is_batch,
            **rest,
        }
        data = json.dumps(record).encode()
        path = self._path(entry.submission_id)
        temporary = path.with_suffix(".new")
        temporary.write_bytes(data)
        temporary.replace(path)
        return len(data)

    def _remember(self, entry: Entry, num_bytes: int) -> None:
        self._entries[entry.submission_id] = Entry(**{**vars(entry), "num_bytes": num_bytes})
        self._num_bytes += num_bytes
        if entry.key is not None:
            self._by_key[entry.tenant, entry.key] = entry.submission_id
        while len(self._entries) > MAX_SUBMISSIONS or (self._num_bytes > MAX_BYTES and len(self._entries) > 1):
            _, oldest = self._entries.popitem(last=False)
            self._num_bytes -= oldest.num_bytes
            if oldest.key is not None and self._by_key.get((oldest.tenant, oldest.key)) == oldest.submission_id:
                del self._by_key[oldest.tenant, oldest.key]
            self.forget(oldest.submission_id)

    def _load(self, interrupted: Callable[[dict[str, Any]], dict[str, Any]]) -> None:
        for path in self._directory.glob("*.new"):
            path.unlink(missing_ok=True)
        for path in sorted(self._directory.glob("*.json"), key=lambda path: path.stat().st_mtime):
            record = json.loads(path.read_bytes())
            entry = Entry(
                submission_id=path.stem,
                num_bytes=0,
                **{name: record[name] for name in ("tenant", "key", "body_hash", "is_batch")},
            )
            if "replies" in record:
                self._remember(entry, path.stat().st_size)
            elif not janitor.is_owner_alive(record["owner"]):
                self.num_interrupted += 1
                self.finish(entry, [interrupted(task) for task in record["tasks"]])
