"""Control groups: real ones where this machine lets us make them, and the files that version 2 is told."""

from __future__ import annotations

import os
import re
import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import httpx
import pytest

from dockyard_sandbox import cgroups, janitor, start_server
from dockyard_sandbox.cgroups import Hierarchy, find_hierarchies, probe, sweep
from dockyard_sandbox.jail import cgroup
from dockyard_sandbox.probing import find_jailer

FIX = "def add(a, b):\n    return a + b\n\n\ndef mul(a, b):\n    return a * b\n"


@pytest.fixture
def limited(tmp_path: Path) -> Any:
    """A server that has a memory group; skipped where the machine gives none."""
    groups = probe()
    groups.close()
    if not any(name.startswith("memory") for name in groups.controllers):
        pytest.skip(f"no memory control group: {groups.notes}")
    handle = start_server(tmp_path / "root")
    yield handle
    assert handle.stop() == 0
    assert groups_of(handle.pid) == []


def groups_of(pid: int) -> list[str]:
    """Directories in any hierarchy that name the process as their owner."""
    own = [hierarchy.own for hierarchy in find_hierarchies()]
    return [str(path) for directory in own for path in directory.glob(f"dockyard-*-{pid}-*")]


def test_the_kernel_kills_what_outgrows_its_group_and_counts_it() -> None:
    groups = probe()
    try:
        if not any(name.startswith("memory") for name in groups.controllers):
            pytest.skip(f"no memory control group: {groups.notes}")
        parents = [(parent, list(names)) for parent, names in groups.parents]
        made = cgroup.create({"cgroups": parents, "memory_mb": 64, "disk_mb": 1, "pids": 9, "cpus": None})
        child = os.fork()
        if child == 0:
            cgroup.join(made)
            hoard = bytearray(b"x") * (400 << 20)
            os._exit(len(hoard) % 2)
        _, status = os.waitpid(child, 0)
        assert os.waitstatus_to_exitcode(status) == -9
        assert cgroup.num_oom_kills(made) >= 1
        cgroup.remove(made)
        assert not any(Path(group.path).exists() for group in made)
    finally:
        groups.close()


def test_the_memory_of_a_run_is_bounded_as_a_whole(limited: Any, project: Any, body: Any) -> None:
    """Each of 40 processes stays below the limit."""
    hoard = (
        "import os, time\n\nfor _ in range(40):\n    if os.fork() == 0:\n"
        "        x = bytearray(b'x') * (50 << 20)\n        time.sleep(20)\n        os._exit(0)\ntime.sleep(10)\n"
    )
    task = {**body(project.task(), project.patch({"calc/ops.py": f"{hoard}\n\n{FIX}"}))}
    task["limits"] = {"memory_mb": 128, "pids": 64, "disk_mb": 8}
    reply = httpx.post(f"{limited.url}/task/submit", json=task, timeout=60.0, trust_env=False).json()
    assert reply["status"] == "out_of_memory"
    assert len(groups_of(limited.pid)) >= 1
    for directory in groups_of(limited.pid):
        assert [path.name for path in Path(directory).glob("run-*")] == []


def test_files_of_a_run_count_as_its_disk_and_not_as_its_memory(limited: Any, project: Any, body: Any) -> None:
    writing = "with open('/tmp/x', 'wb') as f:\n    for _ in range(100):\n        f.write(bytes(1 << 20))\n"
    task = {**body(project.task(), project.patch({"calc/ops.py": f"{writing}\n\n{FIX}"}))}
    task["limits"] = {"memory_mb": 128, "disk_mb": 128}
    reply = httpx.post(f"{limited.url}/task/submit", json=task, timeout=60.0, trust_env=False).json()
    assert reply["status"] == "resolved", reply


@pytest.mark.ci
def test_a_cpu_quota_slows_a_run(limited: Any, project: Any, body: Any) -> None:
    burning = "import time\n\nend = time.process_time() + 0.4\nwhile time.process_time() < end:\n    pass\n"
    task = {**body(project.task(), project.patch({"calc/ops.py": f"{burning}\n\n{FIX}"})), "limits": {"cpus": 0.2}}
    reply = httpx.post(f"{limited.url}/task/submit", json=task, timeout=60.0, trust_env=False).json()
    assert reply["status"] == "resolved"
    assert reply["duration_s"]["test"] >= 1.5  # 0.4 s of work at a fifth of a CPU


def test_groups_of_a_killed_server_are_swept(tmp_path: Path) -> None:
    if not probe_and_close():
        pytest.skip("no control group here")
    handle = start_server(tmp_path / "root")
    assert groups_of(handle.pid)
    handle.process.kill()
    handle.stop()
    assert groups_of(handle.pid)
    again = start_server(tmp_path / "root")
    assert groups_of(handle.pid) == []
    assert again.stop() == 0


def probe_and_close() -> bool:
    groups = probe()
    groups.close()
    return bool(groups.parents)


@pytest.fixture
def version2(tmp_path: Path) -> Hierarchy:
    """A directory with the files of a version 2 group: what is written can be read back, the kernel is not asked."""
    own = tmp_path / "cgroup"
    own.mkdir()
    (own / "cgroup.type").write_text("domain")
    (own / "cgroup.controllers").write_text("cpu memory pids io")
    (own / "cgroup.subtree_control").write_text("")
    (own / "cgroup.procs").write_text(f"{os.getpid()}\n")
    return Hierarchy(version=2, controllers=("memory", "pids", "cpu"), own=own)


def test_version_2_moves_the_server_to_a_leaf_and_shares_its_controllers_out(version2: Hierarchy) -> None:
    groups = probe([version2])
    assert groups.notes == ()
    ((parent, controllers),) = groups.parents
    assert controllers == ("memory.v2", "pids.v2", "cpu.v2")
    assert Path(parent).name == f"dockyard-{janitor.owner_name()}"
    assert (Path(parent) / "server" / "cgroup.procs").read_text() == str(os.getpid())
    for directory in (version2.own, Path(parent)):
        assert (directory / "cgroup.subtree_control").read_text() == "+memory +pids +cpu"


def test_version_2_is_left_alone_where_others_live(version2: Hierarchy) -> None:
    (version2.own / "cgroup.procs").write_text(f"{os.getpid()}\n1\n")
    groups = probe([version2])
    assert groups.parents == ()
    assert "1 other processes" in groups.notes[0]
    assert "Delegate=" in groups.notes[-1]


def test_version_2_may_be_shared_out_beside_others_in_the_first_group_of_all(version2: Hierarchy) -> None:
    (version2.own / "cgroup.type").unlink()
    (version2.own / "cgroup.procs").write_text(f"{os.getpid()}\n1\n")
    ((parent, controllers),) = probe([version2]).parents
    assert len(controllers) == 3
    assert not (Path(parent) / "server").exists()


def test_version_2_is_given_back(version2: Hierarchy) -> None:
    groups = probe([version2])
    for directory in (version2.own, Path(groups.parents[0][0])):
        (directory / "cgroup.subtree_control").write_text("cpu memory pids")  # as the kernel would say it
    groups.close()
    assert (version2.own / "cgroup.subtree_control").read_text() == "-cpu -memory -pids"
    assert (version2.own / "cgroup.procs").read_text() == str(os.getpid())


class _Group(type(Path())):  # type: ignore[misc]  # Path() has the class of its platform
    """A path in a made-up hierarchy: who is in a group is up to what this process has started by now."""

    older: tuple[int, ...] = ()

    def read_text(self, *arguments: Any, **options: Any) -> str:
        if self.name == "cgroup.procs" and (self.parent / "cgroup.type").exists():
            return "\n".join(str(pid) for pid in _family(os.getpid()) if pid not in self.older)
        return str(super().read_text(*arguments, **options))


def _family(pid: int) -> list[int]:
    children = Path(f"/proc/{pid}/task/{pid}/children").read_text().split()
    return [pid, *(one for child in children for one in _family(int(child)))]


def test_a_server_has_version_2_although_it_starts_processes(
    version2: Hierarchy, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It shares its controllers out while it is alone: a launcher that it has would be one of the others."""
    monkeypatch.setattr(_Group, "older", tuple(_family(os.getpid())[1:]))
    hierarchy = replace(version2, own=_Group(version2.own))
    monkeypatch.setattr(cgroups, "find_hierarchies", lambda: [hierarchy])
    scratch = tmp_path / "scratch"
    scratch.mkdir()
    late = find_jailer(scratch, None)
    # The launcher, and what it has just started may not be gone yet.
    assert re.search(r"holds [1-9]\d* other processes", probe([hierarchy]).notes[0])
    late.close()
    jailer = find_jailer(scratch, None, with_groups=True)
    try:
        assert jailer.groups.controllers == ("memory.v2", "pids.v2", "cpu.v2"), jailer.groups.notes
        assert jailer.groups.notes == ()
        assert len(_family(os.getpid())) > 1 + len(_Group.older)
    finally:
        jailer.close()


def test_version_2_files_hold_the_limits_of_a_run(version2: Hierarchy) -> None:
    parent = probe([version2]).parents[0][0]
    job = {"cgroups": [(parent, ["memory.v2", "pids.v2", "cpu.v2"])], "memory_mb": 100, "disk_mb": 20, "pids": 9}
    (group,) = cgroup.create({**job, "cpus": 1.5})
    path = Path(group.path)
    assert (path / "memory.max").read_text() == str((100 + 20 + 64) << 20)
    assert (path / "memory.swap.max").read_text() == "0"
    assert (path / "pids.max").read_text() == "11"
    assert (path / "cpu.max").read_text() == "150000 100000"
    (path / "memory.events").write_text("low 0\nhigh 0\nmax 5\noom 2\noom_kill 3\n")
    assert cgroup.num_oom_kills([group]) == 3
    shutil.rmtree(path)
    cgroup.remove([group])


def test_only_dead_owners_are_swept(version2: Hierarchy) -> None:
    alive, dead = (version2.own / f"dockyard-{name}" for name in (janitor.owner_name(), "00000000-1-1"))
    for directory in (alive, dead):
        (directory / "run-1").mkdir(parents=True)
    assert sweep([version2]) == [str(dead)]
    assert alive.exists()
    assert not dead.exists()


MOUNTS = """\
25 1 0:22 / / rw - ext4 /dev/sda rw
30 25 0:26 / /sys/fs/cgroup/memory rw - cgroup cgroup rw,memory
31 25 0:27 /outer /sys/fs/cgroup/cpu,cpuacct rw - cgroup cgroup rw,cpu,cpuacct
32 25 0:28 / {unified} rw - cgroup2 cgroup2 rw
"""


def test_hierarchies_are_found_where_they_are_mounted(tmp_path: Path) -> None:
    unified = tmp_path / "unified"
    (unified / "me").mkdir(parents=True)
    (unified / "me" / "cgroup.controllers").write_text("pids hugetlb")
    (tmp_path / "cgroup").write_text("4:memory:/a/b\n3:cpu,cpuacct:/outer/c\n0::/me\n")
    (tmp_path / "mountinfo").write_text(MOUNTS.format(unified=unified))
    assert find_hierarchies(tmp_path) == [
        Hierarchy(version=1, controllers=("memory",), own=Path("/sys/fs/cgroup/memory/a/b")),
        Hierarchy(version=1, controllers=("cpu",), own=Path("/sys/fs/cgroup/cpu,cpuacct/c")),
        Hierarchy(version=2, controllers=("pids",), own=unified / "me"),
    ]


def test_a_machine_without_groups_says_what_is_missing_and_how_to_get_it() -> None:
    groups = probe([])
    assert groups == cgroups.ControlGroups(notes=groups.notes)
    assert "cpu, memory, pids" in groups.notes[0]
