"""An offline data file, larger than memory: checked and indexed once, then read row by row.

Of a row only its place, its length, and where its group and its step begin are kept.
"""

from __future__ import annotations

import hashlib
from array import array
from collections.abc import Iterator, Sequence
from pathlib import Path
from types import TracebackType
from typing import BinaryIO, Self

import numpy as np

from dockyard_core.errors import DataError
from dockyard_core.offline.rows import Command, OfflineRow, parse_row

_OTHER_KINDS = (
    (b"\x1f\x8b", "a gzip file", "unpack it first"),
    (b"\x28\xb5\x2f\xfd", "a zstd file", "unpack it first"),
    (b"PAR1", "a Parquet file", "write one JSON object per line"),
    (b"\xef\xbb\xbf", "a byte order mark before the first row", "save it without one"),
    (b"\xff\xfe", "UTF-16", "convert the file to UTF-8"),
    (b"\xfe\xff", "UTF-16", "convert the file to UTF-8"),
)
"""How files begin that are given by mistake."""


class OfflineDataset:
    """The rows of a JSONL file, by index. Blank lines are skipped.

    Building it reads the whole file once, so that a bad row is found before the first step.

    Args:
        path: one JSON object per line.
        command: which fields a row may and must have.
        vocab_size: of the model.

    Raises:
        DataError: ``file:line: field: rule, value, way out``.
    """

    def __init__(self, path: Path, *, command: Command, vocab_size: int) -> None:
        self.path = path
        self._command = command
        self._vocab_size = vocab_size
        self._offsets, self._line_numbers = array("q"), array("q")
        layout = _Layout(path)
        digest = hashlib.sha256()
        try:
            self._file: BinaryIO = path.open("rb")
        except OSError as error:
            raise DataError(f"{path}: file: must be readable, got {error.strerror}; check the path") from error
        try:
            self._check_kind()
            for number, offset, line in _lines(self._file):
                digest.update(line)
                if line.strip():
                    row = parse_row(line, f"{path}:{number}", command=command, vocab_size=vocab_size)
                    layout.add(row, number)
                    self._offsets.append(offset)
                    self._line_numbers.append(number)
            layout.finish()
        except BaseException:
            self._file.close()
            raise
        self.sha256 = digest.hexdigest()
        """Of the file's bytes."""
        self.unit_starts = np.array([*layout.unit_starts, len(self._offsets)], np.int64)
        """Index of the first row of each unit, and the number of rows: a unit is never split over steps."""
        self.has_steps = layout.has_steps
        """The rows name their step; a unit is a step."""
        self.has_proximal = layout.has_proximal
        """Every row has ``proximal_logprobs``."""
        self.has_signal = layout.has_trained and layout.has_advantage
        """Some token is trained, and some advantage is not 0; of no meaning for sft."""

    def _check_kind(self) -> None:
        """Refuse what would be read for long and then fail, or fail with a message that misleads."""
        if not self._file.seekable():
            raise DataError(
                f"{self.path}: file: must be a regular file, whose rows are read again, got a pipe; write it to a file"
            )
        start = self._file.read(4)
        self._file.seek(0)
        for magic, kind, way_out in _OTHER_KINDS:
            if start.startswith(magic):
                raise DataError(f"{self.path}: file: must be plain UTF-8 JSONL, got {kind}; {way_out}")

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def close(self) -> None:
        """Close the file."""
        self._file.close()

    def __len__(self) -> int:
        return len(self._offsets)

    def read(self, indices: Sequence[int] | np.ndarray) -> list[OfflineRow]:
        """Rows by index, in the order asked for."""
        return [self._read(int(index)) for index in indices]

    def _read(self, index: int) -> OfflineRow:
        self._file.seek(self._offsets[index])
        where = f"{self.path}:{self._line_numbers[index]}"
        return parse_row(self._file.readline(), where, command=self._command, vocab_size=self._vocab_size)


def _lines(file: BinaryIO) -> Iterator[tuple[int, int, bytes]]:
    offset = 0
    for number, line in enumerate(file, 1):
        yield number, offset, line
        offset += len(line)


class _Layout:
    """Where units begin, and what rows must have in common."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self.unit_starts = array("q")
        self.has_steps = False
        self.has_proximal = False
        self.has_trained = self.has_advantage = False
        self._num_rows = 0
        self._last: OfflineRow | None = None
        self._seen_groups: dict[str | int, int] = {}
        self._seen_steps: dict[int, int] = {}
        self._has_rewards = self._has_pair = False

    def add(self, row: OfflineRow, number: int) -> None:
        where = f"{self._path}:{number}"
        if self._last is None:
            self.has_steps, self.has_proximal = row.step is not None, row.proximal_logprobs_T is not None
        self._check_alike(row, where)
        is_new_step = self._last is None or row.step != self._last.step
        is_new_group = row.group is None or is_new_step or self._last is None or row.group != self._last.group
        if self.has_steps and is_new_step:
            assert row.step is not None
            self._note("step", row.step, self._seen_steps, number, where)
            self._seen_groups.clear()  # the id of a group counts within its step
        if is_new_group and row.group is not None:
            self._note("group", row.group, self._seen_groups, number, where)
        if is_new_step if self.has_steps else is_new_group:
            self.unit_starts.append(self._num_rows)
        self._has_rewards |= row.reward is not None
        self._has_pair |= row.reward is not None and not is_new_group
        self.has_trained |= bool(row.loss_mask_T.any())
        # Rewards of a group differ if two neighbours do.
        is_other_reward = not is_new_group and self._last is not None and row.reward != self._last.reward
        self.has_advantage |= bool(row.advantage) or is_other_reward
        self._num_rows += 1
        self._last = row

    def finish(self) -> None:
        if not self._num_rows:
            raise DataError(f"{self._path}: file: must hold at least one row, got none; add rows")
        if self._has_rewards and not self._has_pair:
            raise DataError(
                f"{self._path}: group: some group must have 2 rows or more, got 1 in each; "
                "give rollouts of one prompt the same group"
            )

    def _check_alike(self, row: OfflineRow, where: str) -> None:
        for field, has, wanted in (
            ("step", row.step is not None, self.has_steps),
            ("proximal_logprobs", row.proximal_logprobs_T is not None, self.has_proximal),
        ):
            if has != wanted:
                found = "one here and none before" if has else "none here and some before"
                raise DataError(
                    f"{where}: {field}: every row must have it or none, got {found}; give it in all rows or in none"
                )
        last = self._last
        is_same_group = last is not None and row.group is not None and (row.step, row.group) == (last.step, last.group)
        if is_same_group and last is not None and (row.reward is None) != (last.reward is None):
            raise DataError(
                f"{where}: reward: the rows of a group must all have a reward or all an advantage, "
                f"got both in group {row.group!r}; give one kind"
            )

    def _note(self, field: str, value: str | int, seen: dict, number: int, where: str) -> None:
        if value in seen:
            raise DataError(
                f"{where}: {field}: rows of one {field} must stand together, got {value!r} again after line "
                f"{seen[value]}; sort the file by {field}, or give each {field} a value of its own"
            )
        seen[value] = number
