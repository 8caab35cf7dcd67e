"""Warm runs: what they see is what cold ones see, nothing passes from one to the next, and a difference is found."""

from __future__ import annotations

import asyncio
import contextlib
import json
import signal
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import httpx
import pytest

from dockyard_core import VerdictStatus as S
from dockyard_sandbox import start_server
from dockyard_sandbox.canaries import Flock
from dockyard_sandbox.cancellation import Cancellation
from dockyard_sandbox.jailer import Jailer, Workload
from dockyard_sandbox.judge import RunResult
from dockyard_sandbox.launchers import Launcher
from dockyard_sandbox.prepare import Prepared
from dockyard_sandbox.probing import find_jailer, try_warm_path
from dockyard_sandbox.trials import RunWorkload, Trials
from dockyard_sandbox.wire import Limits

LEVELS = ("namespaces", "unsafe")
FIXED = "def add(a, b):\n    return a + b\n\n\ndef mul(a, b):\n    return a * b\n"
FACTS = """\
import atexit, gc, importlib, json, os, resource, signal, socket, sys, threading

STATUS = dict(line.split(":\\t", 1) for line in open("/proc/self/status").read().splitlines())
LIMITS = [name for name in dir(resource) if name.startswith("RLIMIT_")]


def kind(fd):
    try:
        return os.readlink(f"/proc/self/fd/{fd}").split(":")[0]
    except OSError:
        return "closed"  # the directory that was listed


def test_facts():
    facts = {
        "argv": sys.argv,
        "orig_argv": sys.orig_argv,
        "flags": repr(sys.flags),
        "main": [sys.modules["__main__"].__file__, sys.modules["__main__"].__name__],
        "path": sys.path,
        "ours": [name for name in sys.modules if name.split(".")[0] in ("jail", "dockyard_sandbox", "dockyard_core")],
        "environment": dict(os.environ),
        "descriptors": {fd: kind(fd) for fd in os.listdir("/proc/self/fd")},
        "streams": [[s.encoding, s.errors, s.line_buffering] for s in (sys.__stdin__, sys.__stdout__, sys.__stderr__)],
        "output": [sys.__stdout__.seekable(), sys.__stdout__.isatty(), sys.__stderr__.seekable()],
        "signals": {number: str(signal.getsignal(number)) for number in range(1, 32)},
        "masks": {name: STATUS[name] for name in ("SigBlk", "SigIgn", "SigCgt")},
        "ids": [os.getresuid(), os.getresgid(), os.getgroups(), os.getpgid(0) == os.getpid() == os.getsid(0)],
        "rights": {name: STATUS.get(name) for name in ("CapInh", "CapPrm", "CapEff", "CapBnd", "CapAmb", "NoNewPrivs")},
        "seccomp": STATUS["Seccomp"],
        "limits": {name: resource.getrlimit(getattr(resource, name)) for name in LIMITS},
        "place": [os.getcwd(), os.listdir("/"), socket.gethostname(), oct(os.umask(0o22))],
        "own files are readable": bool(open("/proc/self/maps").read()),
        "interpreter": [sys.executable, bool(os.statvfs("/proc/self/exe").f_flag & os.ST_RDONLY)],
        "mounts": [line.split()[4:6] for line in open("/proc/self/mountinfo") if " /proc/" not in line],
        "threads": [threading.current_thread() is threading.main_thread(), threading.active_count()],
        "collector": [gc.isenabled(), gc.get_threshold(), gc.get_freeze_count() > 0],
        "hash": hash("dockyard"),
        "processes": sorted(name for name in os.listdir("/proc") if name.isdigit()),
    }
    print(json.dumps(facts))
"""
BEHAVIOURS = {
    "passes": "def test_it():\n    pass\n",
    "fails": "def test_it():\n    assert [1, {'a': 2}] == [1, {'a': 3}]\n",
    "raises in collection": "import nothing_like_it\n",
    "leaves in collection": "import sys\nsys.exit(7)\n",
    "leaves with a text": "import sys\ndef test_it():\n    raise KeyboardInterrupt('text')\n",
    "leaves at once": "import os\ndef test_it():\n    os._exit(5)\n",
    "dies": "import os\ndef test_it():\n    os.kill(os.getpid(), 9)\n",
    "is interrupted": "import os, signal\ndef test_it():\n    os.kill(os.getpid(), signal.SIGINT)\n",
    "breaks a pipe": "import os\ndef test_it():\n    r, w = os.pipe()\n    os.close(r)\n    os.write(w, b'x')\n",
    "registers an exit": "import atexit\natexit.register(print, 'bye')\ndef test_it():\n    pass\n",
    "warns": "import warnings\ndef test_it():\n    warnings.warn('old', DeprecationWarning)\n",
    "is a unittest": "import unittest\nclass T(unittest.TestCase):\n    def test_it(self):\n        self.fail('no')\n",
    "forks": "import os\ndef test_it():\n    pid = os.fork()\n    os._exit(0) if pid == 0 else os.waitpid(pid, 0)\n",
    "starts an interpreter": (
        "import subprocess, sys\ndef test_it():\n"
        "    assert subprocess.check_output([sys.executable, '-c', 'print(1)']) == b'1\\n'\n"
    ),
    "uses a thread": (
        "import threading\ndef test_it():\n    t = threading.Thread(target=print)\n    t.start()\n    t.join()\n"
    ),
    "exhausts the memory": "def test_it():\n    bytearray(1 << 40)\n",
    "fails with a directory": "def test_it(tmp_path):\n    (tmp_path / 'x').write_text('y')\n    assert not tmp_path\n",
}
CONFIGURED = '[tool.pytest.ini_options]\naddopts = "-q"\n'


class Bench:
    """One jailer, and a tree to run on."""

    def __init__(self, work: Path, level: str) -> None:
        work.chmod(0o755)
        self.jailer: Jailer = find_jailer(work, level)
        if self.jailer.isolation.level != level and level != "unsafe":
            pytest.skip(f"this machine gives {self.jailer.isolation.level}")
        self.notes = try_warm_path(self.jailer, work)
        self.tree = work / "tree"
        self.tree.mkdir(mode=0o755)

    def run(self, text: str, *, is_warm: bool) -> RunResult:
        return self.jailer.run(self.workload(text, is_warm=is_warm), Cancellation())

    def workload(self, text: str, *, is_warm: bool) -> Workload:
        return Workload(
            lower=self.tree,
            files={"test_it.py": (False, text.encode()), "pyproject.toml": (False, CONFIGURED.encode())},
            deleted=[],
            readonly=["test_it.py"],
            pytest_arguments=["-s", "test_it.py"],
            timeout_s=60.0,
            limits=Limits(),
            is_warm=is_warm,
        )


@pytest.fixture(scope="module", params=LEVELS)
def bench(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Bench]:
    made = Bench(tmp_path_factory.mktemp("warm"), request.param)
    assert made.jailer.is_warm, made.notes
    yield made
    made.jailer.close()


def facts_of(run: RunResult) -> dict[str, Any]:
    line = next(line for line in run.output.decode().splitlines() if line.startswith("{"))
    found: dict[str, Any] = json.loads(line)
    return found


def test_a_warm_run_sees_what_a_cold_one_sees(bench: Bench) -> None:
    cold, warm = (facts_of(bench.run(FACTS, is_warm=is_warm)) for is_warm in (False, True))
    if bench.jailer.isolation.level == "unsafe":  # its runs see the machine: its processes, mounts and their own tree
        for facts in (cold, warm):
            for name in ("processes", "mounts", "place"):
                del facts[name]
    for name, value in cold.items():
        assert warm[name] == value, name
    assert cold["ours"] == []
    assert bench.jailer.isolation.level == "unsafe" or cold["interpreter"][1]


@pytest.mark.parametrize("name", BEHAVIOURS)
def test_a_warm_run_ends_as_a_cold_one_does(bench: Bench, name: str) -> None:
    cold, warm = (bench.run(BEHAVIOURS[name], is_warm=is_warm) for is_warm in (False, True))
    assert (warm.end, warm.exit_code) == (cold.end, cold.exit_code)
    assert warm.records == cold.records
    assert without_times(warm.output) == without_times(cold.output)


def without_times(output: bytes) -> list[str]:
    lines = output.decode().replace("/private", "").splitlines()
    return [line.split(" in ")[0] for line in lines if "Traceback" not in line and not line.startswith("  File ")]


def test_nothing_passes_from_one_run_to_the_next(bench: Bench) -> None:
    poison = (
        "import builtins, os, sys, _pytest.runner, pluggy\n"
        "builtins.len = lambda x: 0\nsys.modules['json'] = None\nos.environ['POISON'] = '1'\nsys.path.clear()\n"
        "_pytest.runner.call_and_report = None\npluggy._manager.PluginManager.register = None\nopen('left', 'w')\n"
        "def test_it():\n    pass\n"
    )
    honest = bench.run(BEHAVIOURS["passes"], is_warm=True)
    assert b'"end": 0' not in bench.run(poison, is_warm=True).records
    after = bench.run(
        "import os\ndef test_it():\n    assert not os.environ.get('POISON') and not os.path.exists('left')\n",
        is_warm=True,
    )
    assert after.records == honest.records


def test_a_warm_launcher_that_dies_is_started_again(bench: Bench) -> None:
    assert bench.run(BEHAVIOURS["passes"], is_warm=True).exit_code == 0
    process = bench.jailer._warm._process
    assert process is not None
    process.send_signal(signal.SIGKILL)
    process.wait()
    assert bench.run(BEHAVIOURS["passes"], is_warm=True).exit_code == 0


@pytest.fixture(scope="module")
def ask(tmp_path_factory: pytest.TempPathFactory, judge: Any) -> Iterator[Any]:
    """A server of its own: its counts are those of one test after the other."""
    handle = start_server(tmp_path_factory.mktemp("warm-root"), workers=2)
    yield type(judge)(handle)
    assert handle.stop() == 0


def runs(judge: Any) -> dict[str, int]:
    lines = httpx.get(f"{judge.server.url}/metrics", trust_env=False).text.splitlines()
    found = [line.split('"') for line in lines if line.startswith("dockyard_sandbox_runs{")]
    return {path: int(value.removeprefix("} ")) for _, path, value in found}


def more(judge: Any, before: dict[str, int]) -> dict[str, int]:
    after = runs(judge)
    return {path: after[path] - before.get(path, 0) for path in after if after[path] != before.get(path, 0)}


def test_a_task_runs_warm_once_that_is_proven(project: Any, ask: Any) -> None:
    task, before = project.task(timeout_s=31.0), runs(ask)
    wrong = project.patch({"calc/wrong.py": "x = 1\n"})
    assert ask(task, wrong).status is S.UNRESOLVED
    assert more(ask, before) == {"cold": 1, "warm": 2}  # the unpatched tree both ways, then the patch
    before = runs(ask)
    assert ask(task, project.gold()).is_resolved
    assert more(ask, before) == {"warm": 1, "cold": 1}  # the first fix both ways
    before = runs(ask)
    assert ask(task, project.patch({"calc/ops.py": FIXED, "calc/more.py": "x = 1\n"})).is_resolved
    assert more(ask, before) == {"warm": 1}
    assert httpx.get(f"{ask.server.url}/readyz", trust_env=False).json()["warm"] is True


def test_a_flagged_fix_is_confirmed_cold(project: Any, ask: Any) -> None:
    task, before = project.task(timeout_s=32.0), runs(ask)
    flagged = project.patch({"calc/ops.py": f"import ctypes\n\n\n{FIXED}"})
    verdict = ask(task, flagged)
    assert verdict.is_resolved
    assert any(flag.startswith("scan:") for flag in verdict.flags)
    assert more(ask, before)["cold"] == 1 + 1 + 2  # the unpatched tree, the first fix, and two confirmations


def test_a_fix_that_works_only_warm_does_not_resolve(project: Any, ask: Any) -> None:
    """Whatever tells warm from cold: here, what the warm interpreter has imported for itself."""
    cheat = FIXED.replace("return a + b", "return a + b if 'ctypes' in sys.modules else a - b")
    task, before = project.task(timeout_s=33.0), runs(ask)
    verdict = ask(task, project.patch({"calc/ops.py": f"import sys\n\n\n{cheat}"}))
    assert verdict.status is S.UNRESOLVED, verdict
    assert more(ask, before) == {"warm": 2, "cold": 2, "differed": 1}
    before = runs(ask)
    assert ask(task, project.gold()).is_resolved
    assert more(ask, before) == {"cold": 1}


def test_a_task_that_differs_on_its_unpatched_tree_runs_cold(project: Any, ask: Any, body: Any) -> None:
    aware = "import sys\n\n\ndef test_aware():\n    assert 'ctypes' not in sys.modules\n"
    task = replace(project.task(), test_patch=project.patch({"tests/test_add.py": aware}))
    task = replace(task, fail_to_pass=("tests/test_add.py::test_aware",))
    before = runs(ask)
    reply = ask.post(body(task, "")).json()
    assert reply["resolved"], reply
    assert more(ask, before) == {"cold": 2, "warm": 1, "differed": 1}


@pytest.mark.parametrize("end", ["launcher_died", "setup_failed", "raises"])
def test_a_warm_run_that_does_not_start_is_run_cold(bench: Bench, end: str) -> None:
    trials = Trials(_broken_when_warm(bench.jailer, end), _never, isolation="any")
    prepared = Prepared(
        workload=bench.workload(BEHAVIOURS["passes"], is_warm=True),
        xfail_files=frozenset(),
        test_files={},
        flags=(),
        tree_key="x",
    )
    run, stream = asyncio.run(trials._look(prepared, Flock(files={}), is_warm=True))
    assert (run.end, stream.exit_code) == ("exited", 0)
    assert trials.num_runs == {"warm": 1, "failed": 1, "cold": 1}


def _broken_when_warm(jailer: Jailer, end: str) -> RunWorkload:
    async def run(work: Workload) -> RunResult:
        if work.is_warm and end == "raises":
            raise BrokenPipeError("the launcher is gone")
        found = await asyncio.to_thread(jailer.run, work, Cancellation())
        return replace(found, end=end) if work.is_warm else found

    return run


async def _never(request: Any) -> Any:
    raise AssertionError


def test_a_launcher_that_ends_at_once_says_so(bench: Bench) -> None:
    alive, bench.jailer._warm = bench.jailer._warm, Launcher(lambda fd: ["/bin/false"])
    try:
        with contextlib.suppress(BrokenPipeError, ConnectionResetError):
            assert bench.run(BEHAVIOURS["passes"], is_warm=True).end == "launcher_died"
    finally:
        bench.jailer._warm.close()
        bench.jailer._warm = alive


def test_a_server_may_do_without(tmp_path: Path, project: Any, judge: Any) -> None:
    handle = start_server(tmp_path, workers=1, warm=False)
    try:
        cold = type(judge)(handle)
        assert cold(project.task(), project.gold()).is_resolved
        assert runs(cold) == {"cold": 2}
        assert httpx.get(f"{handle.url}/readyz", trust_env=False).json()["warm"] is False
    finally:
        assert handle.stop() == 0
