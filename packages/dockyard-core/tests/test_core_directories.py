"""Directories that are written whole or not at all, also by a writer that is killed."""

import errno
import signal
import subprocess
import sys
from contextlib import contextmanager
from pathlib import Path

import pytest

from dockyard_core import directories
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


def write_text(text: str):
    return lambda aside: (aside / "model").write_text(text)


def test_there_is_no_moment_without_the_old_or_the_new_one(tmp_path, monkeypatch) -> None:
    directory, move, seen = tmp_path / "policy", directories._exchange, []

    def exchanged(one: Path, other: Path) -> bool:
        seen.append(contents(directory))
        is_moved = move(one, other)
        seen.append(contents(directory))
        return is_moved

    write_aside(directory, write_text("old"))
    monkeypatch.setattr(directories, "_exchange", exchanged)
    write_aside(directory, write_text("new"))
    if sys.platform == "linux":
        assert seen == [{"model": "old"}, {"model": "new"}]
    assert contents(tmp_path) == {"policy/model": "new"}
    assert [path.name for path in tmp_path.iterdir()] == ["policy"]


def test_one_that_was_killed_between_two_renames_is_made_good_by_the_next(tmp_path, monkeypatch) -> None:
    directory, rename = tmp_path / "policy", Path.rename
    monkeypatch.setattr(directories, "_exchange", lambda one, other: False)  # as on many network disks

    def killed(path: Path, target: Path) -> None:
        if path.name.endswith(".partial"):
            raise KeyboardInterrupt
        rename(path, target)

    def refuse(_: Path) -> None:
        raise OSError(errno.ENOSPC, "full")

    write_aside(directory, write_text("old"))
    with monkeypatch.context() as patch:
        patch.setattr(Path, "rename", killed)
        with pytest.raises(KeyboardInterrupt):
            write_aside(directory, write_text("new"))
    assert not directory.exists()
    with pytest.raises(OSError, match="full"):
        write_aside(directory, refuse)
    assert contents(tmp_path) == {"policy/model": "old"}
    write_aside(directory, write_text("new"))
    assert contents(tmp_path) == {"policy/model": "new"}


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


def test_what_a_link_names_is_replaced_again_and_again_and_the_link_stays(tmp_path) -> None:
    (tmp_path / "large disk").mkdir()
    link = tmp_path / "policy"
    link.symlink_to(tmp_path / "large disk" / "policy")  # of which there is nothing yet
    for number in range(3):
        write_aside(link, lambda aside, text=str(number): (aside / "model").write_text(text))
        write_aside_together(link, lambda aside, text=str(number): (aside / "model").write_text(text), TwoRanks(0))
        assert link.is_symlink()
        assert sorted(path.name for path in tmp_path.iterdir()) == ["large disk", "policy"]
        assert contents(tmp_path / "large disk") == {"policy/model": str(number)}


def test_a_file_is_not_taken_for_a_directory(tmp_path) -> None:
    (tmp_path / "policy").write_text("mine")
    with pytest.raises(NotADirectoryError, match="give another path"):
        write_aside(tmp_path / "policy", write_text("new"))
    assert contents(tmp_path) == {"policy": "mine"}


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
