"""Directories that are written whole or not at all, also by a writer that is killed."""

import errno
import signal
import subprocess
import sys
from contextlib import contextmanager
from pathlib import Path

import pytest

from dockyard_core.directories import (
    WrittenFile,
    disk_error,
    write_aside,
    write_aside_together,
    write_file,
    write_new_files,
)

KILLED = """
import os, signal, sys
from pathlib import Path
from dockyard_core.directories import write_aside

def write(aside: Path) -> None:
    (aside / "model").write_text("new")
    os.kill(os.getpid(), signal.SIGKILL)

write_aside(Path(sys.argv[1]), write)
"""


def contents(directory: Path) -> dict[str, str]:
    return {path.relative_to(directory).as_posix(): path.read_text() for path in directory.rglob("*") if path.is_file()}


def test_a_writer_that_is_killed_leaves_what_was_there_and_the_next_one_succeeds(tmp_path) -> None:
    directory = tmp_path / "policy"
    write_aside(directory, lambda aside: (aside / "model").write_text("old"))
    ended = subprocess.run([sys.executable, "-c", KILLED, str(directory)], check=False, timeout=60)
    assert ended.returncode == -signal.SIGKILL
    assert contents(directory) == {"model": "old"}
    write_aside(directory, lambda aside: (aside / "other").write_text("newest"))
    assert contents(tmp_path) == {"policy/other": "newest"}


def test_a_writer_that_raises_leaves_nothing_of_its_own(tmp_path) -> None:
    def write(aside: Path) -> None:
        (aside / "model").write_text("new")
        raise OSError(errno.ENOSPC, "full")

    write_aside(tmp_path / "policy", lambda aside: (aside / "model").write_text("old"))
    for target in ("policy", "absent"):
        with pytest.raises(OSError, match="full"):
            write_aside(tmp_path / target, write)
    with pytest.raises(OSError, match="full"):
        write_file(tmp_path / "policy" / "model", lambda path: write(path.parent))
    assert sorted(path.name for path in tmp_path.rglob("*")) == ["model", "policy"]


class TwoRanks:
    """The other rank fails in one of the parts of the work, or in none."""

    def __init__(self, rank: int, failing: int | None = None) -> None:
        self.rank, self._failing, self._num_parts = rank, failing, 0

    @contextmanager
    def together(self, elsewhere: Exception):
        yield
        self._num_parts += 1
        if self._num_parts - 1 == self._failing:
            raise elsewhere


def test_ranks_put_a_directory_in_place_together_or_leave_the_one_before(tmp_path) -> None:
    directory = tmp_path / "policy"
    write_aside_together(directory, lambda aside: (aside / "model").write_text("old"), TwoRanks(0))
    for failing in (0, 1):
        with pytest.raises(OSError, match="another rank could not write its part") as caught:
            write_aside_together(directory, lambda aside: (aside / "new").touch(), TwoRanks(0, failing))
        assert caught.value.errno == errno.EIO
        assert contents(tmp_path) == {"policy/model": "old"}
    (tmp_path / ".policy.partial").mkdir()  # of rank 0, elsewhere
    write_aside_together(directory, lambda aside: (aside / "mine").touch(), TwoRanks(1))
    assert contents(tmp_path) == {"policy/model": "old", ".policy.partial/mine": ""}


def test_new_files_are_all_written_or_none_and_replace_nothing(tmp_path) -> None:
    def refuse(path: Path) -> None:
        raise OSError(errno.ENOSPC, "full")

    def write(path: Path) -> None:
        path.write_text("new")

    with pytest.raises(OSError, match="full"):
        write_new_files(tmp_path / "policy", {"a": write, "b": refuse}, unless="model")
    assert contents(tmp_path) == {}
    write_new_files(tmp_path / "policy", {"a": write}, unless="model")
    for files in ({"b": write, "a": write}, {"b": write}):
        (tmp_path / "policy" / "model").write_text("of one rank")
        with pytest.raises(FileExistsError, match="give another one"):
            write_new_files(tmp_path / "policy", files, unless="model")
    assert contents(tmp_path / "policy") == {"a": "new", "model": "of one rank"}


def test_a_written_file_is_known_until_it_changes(tmp_path) -> None:
    path = tmp_path / "model"
    path.write_text("one")
    written = WrittenFile.of(path)
    assert written.is_there
    path.write_text("other bytes")
    assert not written.is_there
    path.unlink()
    assert not written.is_there


@pytest.mark.parametrize(
    ("words", "number"),
    [
        ("I/O error: File too large (os error 27)", errno.EFBIG),
        ("Failed to write 3291 bytes to file 19: File too large [os_error_code='28']", errno.ENOSPC),
        ("Error writing [OS error 28: ENOSPC No space left on device]", errno.ENOSPC),
        ("something else", errno.EIO),
    ],
)
def test_the_errno_is_found_in_words(words, number) -> None:
    error = disk_error(RuntimeError(words), Path("model"))
    assert (error.errno, error.filename) == (number, "model")
