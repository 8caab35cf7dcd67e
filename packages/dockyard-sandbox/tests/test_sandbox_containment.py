"""Attacks on the process, the machine and the limits: what a run can do is bounded by the kernel."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from dockyard_core import VerdictStatus as S

FIX = "def add(a, b):\n    return a + b\n\n\ndef mul(a, b):\n    return a * b\n"
BUG = FIX.replace("a + b", "a - b")


@dataclass(frozen=True)
class Attack:
    name: str
    files: Mapping[str, str | bytes | None]
    expected: tuple[S, ...]
    timeout_s: float = 30.0

    def __str__(self) -> str:
        return self.name


def at_import(code: str, rest: str = BUG) -> dict[str, str | bytes | None]:
    return {"calc/ops.py": f"{code}\n\n\n{rest}"}


def in_add(statement: str) -> dict[str, str | bytes | None]:
    return {"calc/ops.py": BUG.replace("    return a -", f"    {statement}\n    return a -")}


def conditional(probe: str) -> dict[str, str | bytes | None]:
    """The fix works only if ``probe``, the body of a function, returns a true value."""
    body = "\n".join(f"    {line}" for line in probe.splitlines())
    return {"calc/ops.py": f"def probe():\n{body}\n\n\n{FIX.replace('return a + b', 'return a + b if probe() else 0')}"}


PROCESS = [
    Attack("os._exit(0) at import", at_import("import os\n\nos._exit(0)"), (S.INCOMPLETE,)),
    Attack("sys.exit(0) at import", at_import("import sys\n\nsys.exit(0)"), (S.INCOMPLETE, S.NO_TESTS_RAN)),
    Attack(
        "os._exit(0) in a test",
        in_add("__import__('os')._exit(0)"),
        (S.INCOMPLETE,),
    ),
    Attack("syntax error", {"calc/ops.py": "def add(:\n"}, (S.NO_TESTS_RAN,)),
    Attack("kills itself", at_import("import os\n\nos.kill(os.getpid(), 9)"), (S.INCOMPLETE,)),
    Attack("kills pid 1, with the fix", at_import("import os\n\nos.kill(1, 9)", FIX), (S.RESOLVED,)),
    Attack("loop at import", at_import("while True:\n    pass"), (S.TIMEOUT,), timeout_s=1.5),
    Attack("stops itself", at_import("import os\n\nos.kill(os.getpid(), 19)"), (S.TIMEOUT,), timeout_s=1.5),
    Attack(
        "memory bomb",
        in_add("x = bytearray(1 << 40)"),
        (S.OUT_OF_MEMORY,),
    ),
    Attack("fake summary", at_import("print('2 passed in 0.01s')"), (S.UNRESOLVED,)),
    Attack("atexit", at_import("import atexit, os\n\natexit.register(os._exit, 0)"), (S.UNRESOLVED,)),
    Attack("closes stdout, with the fix", at_import("import os\n\nos.close(1)", FIX), (S.RESOLVED, S.INCOMPLETE)),
    Attack("closes the record pipe", at_import("import os\n\nos.close(3)", FIX), (S.INCOMPLETE,)),
    Attack(
        "clumsily forged records, then exit",
        at_import(
            "import os\n\nfor n, id in enumerate(['tests/test_add.py::test_add', 'tests/test_ops.py::test_mul']):\n"
            "    for when in ('setup', 'call', 'teardown'):\n"
            '        line = \'{"n": 0, "id": "%s", "when": "%s", "outcome": "passed"}\' % (id, when)\n'
            "        os.write(3, line.encode() + b'\\n')\n"
            'os.write(3, b\'{"n": 7, "end": 0}\\n\')\nos._exit(0)'
        ),
        (S.TAMPERED,),
    ),
    Attack(
        "reports patched in the interpreter",
        at_import(
            "from _pytest.reports import TestReport\n\n_make = TestReport.from_item_and_call.__func__\n\n\n"
            "def _lie(cls, item, call):\n    report = _make(cls, item, call)\n    report.outcome = 'passed'\n"
            "    report.longrepr = None\n    return report\n\n\nTestReport.from_item_and_call = classmethod(_lie)"
        ),
        (S.TAMPERED,),
    ),
    Attack(
        "xfail in the source",
        in_add("__import__('pytest').xfail('x')"),
        (S.UNRESOLVED,),
    ),
    Attack(
        "skip in the source",
        in_add("__import__('pytest').skip('x')"),
        (S.UNRESOLVED,),
    ),
    Attack(
        "rewrites the test on disk",
        at_import("with open('tests/test_add.py', 'w') as f:\n    f.write('def test_add():\\n    pass\\n')"),
        (S.NO_TESTS_RAN, S.UNRESOLVED),
    ),
    Attack("renames the test directory away", at_import("import os\n\nos.rename('tests', 'gone')"), (S.NO_TESTS_RAN,)),
]


REACH = {
    "the environment of pid 1": "return open('/proc/1/environ').read()",
    "a process of the host": "import os\nreturn [p for p in os.listdir('/proc') if p.isdigit() and int(p) > 9]",
    "root": "import os\nreturn os.getuid() == 0",
    "a capability": "return 'CapBnd:\\t0000000000000000' not in open('/proc/self/status').read()",
    "the interpreter's files": "import pytest\nopen(pytest.__file__, 'a').close()\nreturn True",
    "a new user namespace": "import ctypes\nreturn ctypes.CDLL(None).unshare(0x10000000) == 0",
    "a mount": "import ctypes\nreturn ctypes.CDLL(None).mount(b'none', b'/tmp', b'tmpfs', 0, None) == 0",
    "a git directory": "import os\nreturn os.path.exists('.git')",
    "a variable of the server": "import os\nreturn {'VIRTUAL_ENV', 'USER', 'PWD', 'PYTHONPATH'} & set(os.environ)",
}


@pytest.mark.parametrize("attack", PROCESS, ids=str)
def test_hostile_process_gets_its_verdict(attack: Attack, project: Any, judge: Any) -> None:
    verdict = judge(project.task(timeout_s=attack.timeout_s), project.patch(attack.files))
    assert verdict.status in attack.expected, (verdict.status, verdict.detail, verdict.flags, verdict.log)


@pytest.mark.parametrize("what", REACH)
def test_a_run_does_not_reach(what: str, project: Any, judge: Any) -> None:
    verdict = judge(project.task(), project.patch(conditional(REACH[what])))
    assert verdict.status is S.UNRESOLVED, verdict


def test_a_probe_that_succeeds_would_resolve(project: Any, judge: Any) -> None:
    """The control of the probes above: they are unresolved because they fail, not because they are there."""
    assert judge(project.task(), project.patch(conditional("return True"))).status is S.RESOLVED


def test_a_daemon_ends_with_its_run(project: Any, judge: Any) -> None:
    code = "import subprocess\n\nsubprocess.Popen(['sleep', '86413'], start_new_session=True)"
    assert judge(project.task(), project.patch(at_import(code, FIX))).status is S.RESOLVED
    assert not processes_with("86413")


def test_a_process_flood_is_bounded_and_leaves_nothing(project: Any, judge: Any) -> None:
    flood = "import os, time\n\nwhile True:\n    try:\n        os.fork()\n    except OSError:\n        time.sleep(1)"
    name = "tests/test_flood_86414.py"
    held_out = project.patch({name: "from calc.ops import add\n\n\ndef test_add():\n    assert add(1, 2) == 3\n"})
    task = project.task(test_patch=held_out, fail_to_pass=(f"{name}::test_add",), timeout_s=2.0)
    verdict = judge(task, project.patch(at_import(flood)))
    assert not verdict.is_resolved
    assert verdict.status.is_scorable
    assert not processes_with(name)


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


@pytest.mark.parametrize("call", ["os.memfd_create('x')", "ctypes.CDLL(None).shmget(0, 4096, 0o1600) >= 0"])
def test_memory_that_no_limit_counts_is_not_given(call: str, project: Any, judge: Any) -> None:
    probe = f"import ctypes, os\ntry:\n    return {call}\nexcept OSError:\n    return False"
    assert judge(project.task(), project.patch(conditional(probe))).status is S.UNRESOLVED


def test_the_network_is_out_of_reach(project: Any, judge: Any) -> None:
    port = int(judge.server.url.rsplit(":", 1)[1])
    probe = f"import socket\nreturn socket.create_connection(('127.0.0.1', {port}), 2)"
    assert judge(project.task(), project.patch(conditional(probe))).status is S.UNRESOLVED


def test_host_files_are_out_of_reach(project: Any, judge: Any, tmp_path: Path) -> None:
    secret = tmp_path / "secret"
    secret.write_text("token")
    secret.chmod(0o644)
    probe = f"import os\nreturn os.path.exists({str(secret)!r}) or os.path.exists('/etc/shadow')"
    assert judge(project.task(), project.patch(conditional(probe))).status is S.UNRESOLVED


def processes_with(text: str) -> list[str]:
    found = []
    for path in Path("/proc").glob("[0-9]*/cmdline"):
        try:
            command = path.read_bytes()
        except OSError:
            continue
        if text.encode() in command:
            found.append(command.decode(errors="replace"))
    return found
