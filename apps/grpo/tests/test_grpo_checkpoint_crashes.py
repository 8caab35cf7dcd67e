"""Checkpoints under SIGKILL at every file operation, and on a disk that is really full.

Run as a script, this file is the process that is killed, or that writes to the full disk.
"""

from __future__ import annotations

import asyncio
import errno
import json
import os
import shutil
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from dockyard_grpo import checkpoint_files
from dockyard_grpo.resume import find_restore_point, is_complete
from dockyard_grpo.retention import Retention
from dockyard_grpo.run_directory import RunDirectory

RULE = Retention(keep_last=1, keep_best=1, metric="score")
FILE_OPERATIONS = frozenset(
    {"open", "os.mkdir", "os.rename", "os.symlink", "os.link", "os.remove", "os.rmdir", "os.truncate", "shutil.rmtree"}
)
PAGE = 4096


def fill(folder: Path, step: int) -> None:
    for name in ("policy", "hf"):
        (folder / name).mkdir()
    (folder / "policy" / "weights").write_bytes(bytes([step % 256]) * 5 * PAGE)
    os.link(folder / "policy" / "weights", folder / "hf" / "weights")
    (folder / "policy" / "trainer.json").write_text("{}")


def write_checkpoint(run: RunDirectory, step: int, score: float) -> None:
    """The stages of a checkpoint in the order of `Checkpointer`."""
    partial = checkpoint_files.open_partial(run.checkpoints, step)
    try:
        fill(partial, step)
        loop = {"step": step, "incarnation": 0, "events_bytes": 0, "machine": {"ledger": {"frontier": 0}}}
        run.commit_checkpoint(partial, json.dumps(loop), {"score": score})
    except OSError:
        shutil.rmtree(partial, ignore_errors=True)
        raise
    checkpoint_files.prune(run.checkpoints, RULE, newest=step)


def steps(folder: Path) -> dict[int, bool]:
    """Every checkpoint that a reader would look at, and whether it is complete."""
    return {int(path.name.removeprefix("step-")): is_complete(path) for path in folder.glob("step-*")}


def linked(folder: Path, name: str) -> tuple[int, bool]:
    path = (folder / name).resolve()
    return int(path.name.removeprefix("step-")), is_complete(path)


# ---- killed -------------------------------------------------------------------------------------------


def die_at(operation: int) -> None:
    """SIGKILL to this process right before its n-th file operation from here on."""
    seen = 0

    def watch(event: str, args: tuple[Any, ...]) -> None:
        nonlocal seen
        if event in FILE_OPERATIONS:
            if seen == operation:
                os.kill(os.getpid(), signal.SIGKILL)
            seen += 1

    sys.addaudithook(watch)


def next_life(run: RunDirectory) -> dict[str, Any]:
    """What a reader finds after the kill, then what a new life makes of it."""
    found = find_restore_point(run.path).step
    report = {
        "found": found, "steps": steps(run.checkpoints),
        "latest": linked(run.checkpoints, "latest"), "best": linked(run.checkpoints, "best"),
    }  # fmt: skip
    checkpoint_files.sweep(run.checkpoints)
    report["left"] = sorted(path.name for path in run.checkpoints.glob(".*"))
    write_checkpoint(run, 8, score=0.1)
    report["after"] = [find_restore_point(run.path).step, sorted(steps(run.checkpoints).items())]
    return report


def kill_everywhere(folder: Path) -> list[dict[str, Any]]:
    """One forked life per file operation of a checkpoint, until one lives to its end."""
    reports: list[dict[str, Any]] = []
    while True:
        path = folder / f"killed-{len(reports)}"
        (path / "checkpoints").mkdir(parents=True)
        run = RunDirectory(path)
        write_checkpoint(run, 2, score=0.9)  # stays for being best
        write_checkpoint(run, 4, score=0.2)  # goes when 6 is complete
        child = os.fork()
        if child == 0:
            die_at(len(reports))
            write_checkpoint(run, 6, score=0.3)
            os._exit(0)
        _, status = os.waitpid(child, 0)
        is_killed = os.WIFSIGNALED(status) and os.WTERMSIG(status) == signal.SIGKILL
        reports.append({"killed": is_killed, **next_life(run)})
        shutil.rmtree(path)
        if not is_killed:
            assert status == 0
            return reports


# ---- full ---------------------------------------------------------------------------------------------


def fill_disk(folder: Path, *, free_pages: int) -> None:
    free = os.statvfs(folder)
    num_bytes = free.f_bavail * free.f_frsize - free_pages * PAGE
    with (folder / "filler").open("wb") as file:
        os.posix_fallocate(file.fileno(), 0, max(1, num_bytes))


def take_inodes(folder: Path, *, free_inodes: int) -> None:
    (folder / "fillers").mkdir()
    while os.statvfs(folder).f_favail > free_inodes:
        (folder / "fillers" / str(os.statvfs(folder).f_favail)).touch()


def try_full(disk: Path, make_full: Callable[[Path], None]) -> dict[str, Any]:
    run = RunDirectory(disk / "run")
    run.checkpoints.mkdir(parents=True)
    run.append("metrics", {"step": 2})
    write_checkpoint(run, 2, score=0.9)
    write_checkpoint(run, 4, score=0.2)
    before = sorted(path.name for path in run.checkpoints.iterdir())
    make_full(disk)
    try:
        write_checkpoint(run, 6, score=0.3)
        code = 0
    except OSError as error:
        code = error.errno or -1
    names = sorted(path.name for path in run.checkpoints.iterdir())
    report = {
        "errno": code, "is_untouched": names == before, "found": find_restore_point(run.path).step,
        "latest": linked(run.checkpoints, "latest"), "steps": steps(run.checkpoints),
    }  # fmt: skip
    for name in ("filler", "fillers"):
        shutil.rmtree(disk / name, ignore_errors=True)
        (disk / name).unlink(missing_ok=True)
    write_checkpoint(run, 8, score=0.4)  # there is room again: the next one is written
    report["next"] = find_restore_point(run.path).step
    shutil.rmtree(disk / "run")
    return report


def fill_everywhere(disk: Path) -> list[dict[str, Any]]:
    pages = [try_full(disk, lambda folder, n=n: fill_disk(folder, free_pages=n)) for n in range(14)]  # type: ignore[misc]
    inodes = [try_full(disk, lambda folder, n=n: take_inodes(folder, free_inodes=n)) for n in range(14)]  # type: ignore[misc]
    return [*pages, *inodes]


def train_on_full_disk(disk: Path) -> dict[str, Any]:
    """A real trainer rank steps on while the disk is full, nearly full, and has room again."""
    from test_grpo_checkpoints import PROBES, Life, group  # beside this script

    life = Life(disk)

    async def save(step: int, free_pages: int | None) -> int:
        if free_pages is not None:
            fill_disk(disk, free_pages=free_pages)
        await life.begin(step, group(7), group(8))
        version = (await life.step(step)).policy_version
        await life.checkpointer.wait()
        (disk / "filler").unlink(missing_ok=True)
        return int(version)

    async def scenario() -> dict[str, Any]:
        await life.worker.build("")
        versions = [await save(1, None)]
        for step, free_pages in ((2, 0), (3, 1), (4, 10), (5, 900), (6, 2110)):
            versions.append(await save(step, free_pages))
        found = find_restore_point(disk)
        kept = sorted(path.name for path in life.run.checkpoints.iterdir())
        await life.worker.restore(life.run.checkpoints / "latest")
        restored = await life.worker.probe(PROBES)
        versions.append(await save(7, None))
        await life.worker.restore(life.run.checkpoints / "latest")
        return {
            "versions": versions, "failed": life.failed, "saved": life.saved, "found": found.step, "kept": kept,
            "is_restored": restored == await life.worker.probe(PROBES), "last": find_restore_point(disk).step,
        }  # fmt: skip

    return asyncio.run(scenario())


def on_small_disk(scenario: str, mount_point: Path, *, options: str) -> Any:
    """Run a scenario of this file on a tmpfs in a mount namespace of its own, which leaves with the process."""
    script = 'mount -t tmpfs -o "$1" none "$2" && exec "$3" "$4" "$5" "$2"'
    command = ["unshare", "-Urm", "sh", "-c", script, "sh", options, mount_point, sys.executable, __file__, scenario]
    if shutil.which("unshare") is None:
        pytest.skip("a full disk needs a small one: there is no `unshare` here")
    probe = subprocess.run(
        ["unshare", "-Urm", "mount", "-t", "tmpfs", "none", mount_point],
        capture_output=True, text=True, timeout=60, check=False,
    )  # fmt: skip
    if probe.returncode != 0:
        pytest.skip(f"a full disk needs a small one, and this machine mounts none: {probe.stderr.strip()}")
    done = subprocess.run(command, capture_output=True, text=True, timeout=280, check=False)
    assert done.returncode == 0, done.stderr[-4000:]
    return json.loads(done.stdout)


def test_a_kill_before_any_file_operation_leaves_the_old_or_the_new_checkpoint(tmp_path: Path) -> None:
    done = subprocess.run(
        [sys.executable, __file__, "kill_everywhere", tmp_path],
        capture_output=True,
        text=True,
        timeout=280,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-4000:]
    reports = json.loads(done.stdout)
    assert [report["killed"] for report in reports] == [True] * (len(reports) - 1) + [False]
    assert len(reports) > 30, "a checkpoint is that many file operations"
    found = [report["found"] for report in reports]
    assert found == sorted(found), "once the new one is there, it stays"
    assert set(found) == {4, 6}
    for report in reports:
        assert all(report["steps"].values()), "what has the name of a checkpoint is complete"
        assert report["steps"].keys() >= {"2", str(report["found"])}
        assert report["latest"] in ([4, True], [report["found"], True])
        assert report["best"] == [2, True]
        assert report["left"] == []
        assert report["after"] == [8, [[2, True], [8, True]]]


def test_a_full_disk_costs_one_checkpoint_and_no_earlier_one(tmp_path: Path) -> None:
    reports = on_small_disk("fill_everywhere", tmp_path, options="size=512k,nr_inodes=64")
    refused = [report for report in reports if report["errno"]]
    assert len(reports) - len(refused) >= 2, "with room enough, of pages and of inodes, it is written"
    assert len(refused) >= 12, "the disk was full at many stages"
    assert {report["errno"] for report in refused} == {errno.ENOSPC}
    for report in refused:
        assert report["is_untouched"], "no partial folder, no half-made link"
        assert (report["found"], report["latest"]) == (4, [4, True])
        assert report["steps"] == {"2": True, "4": True}
    for report in reports:
        assert report["next"] == 8
        if not report["errno"]:
            assert (report["found"], report["steps"]) == (6, {"2": True, "6": True})


@pytest.mark.ci
def test_a_trainer_on_a_full_disk_steps_on_and_saves_when_there_is_room_again(tmp_path: Path) -> None:
    report = on_small_disk("train_on_full_disk", tmp_path, options="size=32m")
    assert report["versions"] == [1, 2, 3, 4, 5, 6, 1], "no step was lost; the last one follows the restore"
    assert report["failed"] == [[step, "ENOSPC: No space left on device"] for step in (2, 3, 4, 5, 6)]
    assert report["saved"] == [[1, "step-000001"], [7, "step-000007"]]
    assert (report["found"], report["kept"], report["last"]) == (1, ["latest", "step-000001"], 7)
    assert report["is_restored"], "step 7 was saved from the restored state, which is that of step 1"


if __name__ == "__main__":
    # The last line of the output is the report; Python must not fail at its own end for the disk's sake.
    sys.stdout.write(json.dumps(globals()[sys.argv[1]](Path(sys.argv[2]))))
