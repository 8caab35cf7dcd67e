"""Limits and isolation, where one submission does not show it. The attacks themselves: `attack_cases.py`."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest

from dockyard_core import VerdictStatus as S
from dockyard_sandbox.jail import memory

FIX = "def add(a, b):\n    return a + b\n\n\ndef mul(a, b):\n    return a * b\n"
BUG = FIX.replace("a + b", "a - b")


def at_import(code: str, rest: str = BUG) -> dict[str, str | bytes | None]:
    return {"calc/ops.py": f"{code}\n\n\n{rest}"}


def conditional(probe: str) -> dict[str, str | bytes | None]:
    """The fix works only if ``probe``, the body of a function, returns a true value."""
    body = "\n".join(f"    {line}" for line in probe.splitlines())
    return {"calc/ops.py": f"def probe():\n{body}\n\n\n{FIX.replace('return a + b', 'return a + b if probe() else 0')}"}


def test_output_and_disk_are_bounded(project: Any, judge: Any, body: Any) -> None:
    """pytest captures output on disk, so an endless writer meets the disk limit first, then the output limit."""
    limits = {"disk_mb": 8, "output_kb": 64}
    printing = at_import("while True:\n    print('x' * 10000)")
    task = {**body(project.task(), project.patch(printing)), "limits": limits}
    assert judge.post(task).json()["status"] == "output_limit"
    filling = at_import("with open('/tmp/x', 'wb') as f:\n    while True:\n        f.write(bytes(1 << 16))")
    task = {**body(project.task(), project.patch(filling)), "limits": limits}
    reply = judge.post(task).json()
    assert reply["status"] == "no_tests_ran"
    assert "File too large" in reply["log"] or "No space left" in reply["log"]


def test_memory_is_bounded_for_all_processes_together(project: Any, judge: Any, body: Any) -> None:
    limits = {"memory_mb": 256, "pids": 64}

    def status(num_children: int, mib: int) -> str:
        hoard = (
            f"import os, time\n\nfor _ in range({num_children}):\n    if os.fork() == 0:\n"
            f"        x = bytearray(b'x') * ({mib} << 20)\n        time.sleep(20)\n        os._exit(0)\n"
            "time.sleep(1)"
        )
        task = {**body(project.task(), project.patch(at_import(hoard, FIX))), "limits": limits}
        return str(judge.post(task).json()["status"])

    assert status(4, 90) == "out_of_memory"
    assert status(12, 1) == "resolved"  # what forks share is counted once


def test_memory_is_bounded_where_the_server_may_not_look_into_a_process(tmp_path: Path) -> None:
    """A root without CAP_SYS_PTRACE sees the sizes only: all but files counts, except for our own init."""
    for pid, children in (("10", "11 12"), ("11", ""), ("12", "")):
        (tmp_path / pid / "task" / pid).mkdir(parents=True)
        (tmp_path / pid / "task" / pid / "children").write_text(children)
        (tmp_path / pid / "statm").write_text("90000 30000 5000 1 0 9 0\n")
    held_mib = 2 * 25_000 * os.sysconf("SC_PAGE_SIZE") >> 20
    proc = os.open(tmp_path, os.O_RDONLY | os.O_DIRECTORY)
    try:
        assert [memory.exceeds(proc, 10, held_mib + by) for by in (-1, 1)] == [True, False]
    finally:
        os.close(proc)


@pytest.mark.parametrize("call", ["os.memfd_create('x')", "ctypes.CDLL(None).shmget(0, 4096, 0o1600) >= 0"])
def test_memory_that_no_limit_counts_is_not_given(call: str, project: Any, judge: Any) -> None:
    probe = f"import ctypes, os\ntry:\n    return {call}\nexcept OSError:\n    return False"
    assert judge(project.task(), project.patch(conditional(probe))).status is S.UNRESOLVED


def test_the_network_is_out_of_reach(project: Any, judge: Any) -> None:
    port = int(judge.server.url.rsplit(":", 1)[1])
    probe = f"import socket\nreturn socket.create_connection(('127.0.0.1', {port}), 2)"
    assert judge(project.task(), project.patch(conditional(probe))).status is S.UNRESOLVED


def test_a_run_has_a_network_of_its_own_that_ends_at_itself(project: Any, judge: Any) -> None:
    """Nobody listens on the server's port there, and whoever opens a port is alone with it."""
    if judge.server.isolation == "landlock":
        pytest.skip("this level refuses sockets")
    probe = (
        "import errno, socket\n"
        f"refused = [socket.socket().connect_ex(('127.0.0.1', {int(judge.server.url.rsplit(':', 1)[1])}))]\n"
        "refused.append(socket.socket().connect_ex(('192.0.2.1', 80)))\n"
        "with socket.create_server(('localhost', 0)) as own:\n"
        "    with socket.create_connection(own.getsockname(), 5) as there:\n"
        "        there.sendall(b'x')\n"
        "        return own.accept()[0].recv(1) == b'x' and refused == [errno.ECONNREFUSED, errno.ENETUNREACH]"
    )
    assert judge(project.task(), project.patch(conditional(probe))).is_resolved


def test_host_files_are_out_of_reach(project: Any, judge: Any, tmp_path: Path) -> None:
    secret = tmp_path / "secret"
    secret.write_text("token")
    secret.chmod(0o644)
    probe = f"import os\nreturn os.path.exists({str(secret)!r}) or os.path.exists('/etc/shadow')"
    assert judge(project.task(), project.patch(conditional(probe))).status is S.UNRESOLVED
