"""The bubblewrap level, where bubblewrap is installed: confined runs, sessions, deadlines."""

from __future__ import annotations

import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from dockyard_sandbox.cancellation import Cancellation
from dockyard_sandbox.environments import own_environment
from dockyard_sandbox.isolation import Isolation
from dockyard_sandbox.jailer import Jailer, Workload
from dockyard_sandbox.judge import RunResult
from dockyard_sandbox.live_session import LiveSession
from dockyard_sandbox.wire import Limits

BWRAP = shutil.which("bwrap")
pytestmark = pytest.mark.skipif(BWRAP is None, reason="no bwrap on PATH")


@pytest.fixture(scope="module")
def scratch() -> Iterator[Path]:
    with tempfile.TemporaryDirectory(prefix="dockyard-bwrap-", dir="/tmp") as name:
        Path(name).chmod(0o755)
        yield Path(name)


@pytest.fixture(scope="module")
def jailer(scratch: Path) -> Iterator[Jailer]:
    isolation = Isolation(level="bwrap", tree="copy", seccomp=True, uid=0, bwrap=BWRAP)
    made = Jailer(scratch, own_environment(), isolation)
    yield made
    made.close()
    assert list((scratch / "mnt").iterdir()) == []


def run(jailer: Jailer, scratch: Path, code: str, *, timeout_s: float = 60.0) -> RunResult:
    tree = scratch / "tree"
    tree.mkdir(exist_ok=True)
    text = f"def test_it():\n    {code}\n".encode()
    work = Workload(
        lower=tree,
        files={"test_x.py": (False, text)},
        deleted=[],
        readonly=["test_x.py"],
        pytest_arguments=["test_x.py"],
        timeout_s=timeout_s,
        limits=Limits(),
    )
    return jailer.run(work, Cancellation())


OUTSIDE = {
    "a file of the host": "open({secret!r})",
    "the host's name": "open('/etc/hostname')",
    "the test itself": "open('test_x.py', 'w')",
    "a network": "__import__('socket').create_connection(('127.0.0.1', 22), 2)",
    "a user namespace": "assert __import__('ctypes').CDLL(None).unshare(0x10000000) == 0",
    "a write to the system": "open('/usr/x', 'w')",
}


@pytest.mark.parametrize("what", OUTSIDE)
def test_a_bubblewrapped_run_does_not_reach(what: str, jailer: Jailer, scratch: Path) -> None:
    (scratch / "secret").write_text("token")
    result = run(jailer, scratch, OUTSIDE[what].format(secret=str(scratch / "secret")))
    assert (result.end, result.exit_code) == ("exited", 1), result


def test_a_bubblewrapped_run_works_and_is_filtered(jailer: Jailer, scratch: Path) -> None:
    code = "assert 'Seccomp:\\t2' in open('/proc/self/status').read() and open('/tmp/x', 'w').write('x')"
    result = run(jailer, scratch, code)
    assert (result.end, result.exit_code) == ("exited", 0), result.output


def test_a_bubblewrapped_deadline_holds(jailer: Jailer, scratch: Path) -> None:
    code = "import os, time; os.fork(); time.sleep(86451)"
    assert run(jailer, scratch, code, timeout_s=1.5).end == "deadline"


def test_a_bubblewrapped_session_keeps_its_tree(jailer: Jailer, scratch: Path) -> None:
    tree = scratch / "tree"
    tree.mkdir(exist_ok=True)
    session = LiveSession(jailer, lower=tree, limits=Limits(), environment=None)
    try:
        outputs = []
        for command in ("echo kept > new", "cat new; grep Seccomp: /proc/self/status", "sleep 100"):
            result = session.exec(command, timeout_s=3.0, max_output_bytes=4096, cancellation=Cancellation())
            outputs.append((result.end, result.output))
        assert outputs == [("exited", b""), ("exited", b"kept\nSeccomp:\t2\n"), ("deadline", b"")]
        assert session.read("new", offset=0, max_bytes=9, cancellation=Cancellation()) == (b"kept\n", 5)
        assert session.list_tree("sha1", cancellation=Cancellation())["new"][0] == "100644"
    finally:
        session.close()
