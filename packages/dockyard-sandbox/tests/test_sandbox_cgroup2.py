"""A real hierarchy of version 2, in a group that is the server's alone, as a service manager gives it."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from dockyard_sandbox.cgroups import CONTROLLERS

PYTHON, PLAIN_UID = "/usr/bin/python3", 4244
ENTER = 'echo $$ > "$0/cgroup.procs"; exec setpriv --reuid "$1" --regid "$1" --clear-groups "${@:2}"'
SERVER = """
import json, os, sys
from pathlib import Path

from dockyard_sandbox import cgroups
from dockyard_sandbox.cancellation import Cancellation
from dockyard_sandbox.jailer import Jailer, Workload
from dockyard_sandbox.probing import find_jailer
from dockyard_sandbox.wire import Limits

scratch, ours = Path(sys.argv[1]), cgroups.CONTROLLERS
cgroups.CONTROLLERS = tuple(sys.argv[2].split(","))
job = Jailer.job


def known(self, **options):  # a controller of another kind than ours is joined and not limited
    made = job(self, **options)
    return {**made, "cgroups": [(path, [n for n in names if n[:-3] in ours]) for path, names in made["cgroups"]]}


def group(pid):
    return Path(f"/proc/{pid}/cgroup").read_text().split("0::")[1].split()[0]


Jailer.job = known
own = group("self")
jailer = find_jailer(scratch, None, with_groups=True)
(scratch / "tree").mkdir()
work = Workload(
    lower=scratch / "tree",
    files={"test_it.py": (False, b"def test_it():\\n    print(open('/proc/self/cgroup').read())\\n")},
    deleted=[], readonly=[], pytest_arguments=["-s", "test_it.py"], timeout_s=60.0, limits=Limits(),
)
run = jailer.run(work, Cancellation())
facts = {
    "own": own, "server": group("self"), "launcher": group(jailer._cold._process.pid),
    "run": [line for line in run.output.decode().splitlines() if line.startswith("0::")], "end": run.end,
    "controllers": jailer.groups.controllers, "notes": jailer.groups.notes,
    "runs left": [str(path) for parent, _ in jailer.groups.parents for path in Path(parent).glob("run-*")],
}
jailer.close()
print(json.dumps({**facts, "after": group("self")}))
"""


@pytest.fixture
def own() -> Iterator[tuple[Path, str]]:
    """A new group, and the controllers that it may share out; ours if the machine has them in version 2."""
    if os.geteuid() != 0:
        pytest.skip("only root can make a group for a server")
    lines = Path("/proc/self/mountinfo").read_text().splitlines()
    base = next((Path(line.split()[4]) for line in lines if " - cgroup2 " in line), None)
    if base is None:
        pytest.skip("no hierarchy of version 2 is mounted")
    offered = (base / "cgroup.controllers").read_text().split()
    names = [name for name in CONTROLLERS if name in offered] or offered[:1]
    if not names:
        pytest.skip("version 2 has no controller here: version 1 has them all")
    more = [name for name in names if name not in (base / "cgroup.subtree_control").read_text().split()]
    group = base / f"dockyard-test-{os.getpid()}"
    try:
        share(base, "+", more)
        group.mkdir()
    except OSError as error:
        pytest.skip(f"{base} may not be changed: {error}")
    yield group, ",".join(names)
    left = [str(path) for path in group.glob("*/")]
    for directory, _, _ in os.walk(group, topdown=False):
        Path(directory).rmdir()
    share(base, "-", more)
    assert left == []


def share(group: Path, sign: str, names: list[str]) -> None:
    if names:
        (group / "cgroup.subtree_control").write_text(" ".join(f"{sign}{name}" for name in names))


@pytest.mark.parametrize("uid", [0, PLAIN_UID])
def test_a_server_shares_out_a_group_that_it_was_given(uid: int, own: tuple[Path, str]) -> None:
    group, names = own
    for path in (group, *(group / f"cgroup.{name}" for name in ("procs", "threads", "subtree_control"))):
        os.chown(path, uid, uid)
    facts = served(group, names, uid)
    assert (facts["notes"], facts["end"]) == ([], "exited"), facts
    assert facts["controllers"] == [f"{name}.v2" for name in names.split(",")]
    assert facts["own"] == f"/{group.name}"
    parent = facts["server"].removesuffix("/server")
    assert parent.startswith(f"{facts['own']}/dockyard-")
    assert facts["launcher"] == facts["server"] == f"{parent}/server"
    (of_run,) = facts["run"]
    assert of_run.startswith(f"0::{parent}/run-")
    assert (facts["runs left"], facts["after"]) == ([], facts["own"])


def test_a_plain_user_gets_no_group_that_is_roots(own: tuple[Path, str]) -> None:
    group, names = own
    facts = served(group, names, PLAIN_UID)
    assert (facts["controllers"], facts["server"]) == ([], f"/{group.name}")
    assert "Permission denied" in facts["notes"][0]
    assert facts["end"] == "exited"


def served(group: Path, names: str, uid: int) -> dict[str, Any]:
    modules = ("pytest", "dockyard_core", "dockyard_sandbox")
    paths = [str(Path(sys.modules[name].__file__ or "").parent.parent) for name in modules]
    env = {"PATH": "/usr/bin:/bin", "PYTHONPATH": ":".join(paths), "PYTHONDONTWRITEBYTECODE": "1"}
    check = f"import sys, pydantic_core, pytest; sys.exit(sys.version_info[:2] != {sys.version_info[:2]})"
    if subprocess.run([PYTHON, "-P", "-c", check], env=env, check=False, cwd="/", user=PLAIN_UID).returncode:
        pytest.skip(f"{PYTHON} cannot import this interpreter's packages as another user")
    with tempfile.TemporaryDirectory(prefix="dockyard-cgroup2-", dir="/tmp") as scratch:
        os.chown(scratch, uid, uid)
        command = ["bash", "-c", ENTER, str(group), str(uid), PYTHON, "-P", "-c", SERVER, scratch, names]
        ended = subprocess.run(command, env=env, check=False, cwd="/", capture_output=True, text=True)
    assert ended.returncode == 0, ended.stderr
    found: dict[str, Any] = json.loads(ended.stdout)
    return found
