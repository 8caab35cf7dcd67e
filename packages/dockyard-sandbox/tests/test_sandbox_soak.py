"""Long use, sudden death, too much work: nothing is left, nothing is lost, nothing is done twice."""

from __future__ import annotations

import asyncio
import os
import random
import signal
import time
import uuid
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest

from dockyard_core import VerdictStatus
from dockyard_sandbox import SandboxClient, ServerHandle, start_server
from dockyard_sandbox.cgroups import find_hierarchies

FIX = "def add(a, b):\n    return a + b\n\n\ndef mul(a, b):\n    return a * b\n"
HOSTILE = {
    "daemon": f"import subprocess\n\nsubprocess.Popen(['sleep', '86441'], start_new_session=True)\n\n\n{FIX}",
    "memory": "import os\n\nx = bytearray(1 << 40)\n",
    "flood": "import os, time\n\nwhile 1:\n    try:\n        os.fork()\n    except OSError:\n        time.sleep(1)\n",
    "output": "while True:\n    print('x' * 10000)\n",
    "disk": "with open('/tmp/x', 'wb') as f:\n    while True:\n        f.write(bytes(1 << 16))\n",
    "exit": "import os\n\nos._exit(0)\n",
    "hang": "import time\n\ntime.sleep(100)\n",
    "pid 1": f"import os\n\nos.kill(1, 9)\n\n\n{FIX}",
}
SCRATCH = {"gitconfig", "mnt", "probe", "runner", "secret"}


def children_of() -> dict[int, list[int]]:
    found: dict[int, list[int]] = {}
    for path in Path("/proc").glob("[0-9]*/stat"):
        try:
            fields = path.read_text().rsplit(")", 1)[1].split()
        except OSError:
            continue
        if fields[0] != "Z":
            found.setdefault(int(fields[1]), []).append(int(path.parent.name))
    return found


def descendants(pid: int) -> set[int]:
    children, found, todo = children_of(), set[int](), [pid]
    while todo:
        new = [child for child in children.get(todo.pop(), []) if child not in found]
        found.update(new)
        todo += new
    return found


def wait_until(condition: Callable[[], object], what: str, deadline_s: float = 60.0) -> None:
    end = time.monotonic() + deadline_s
    while not condition():
        assert time.monotonic() < end, f"not within {deadline_s} s: {what}"
        time.sleep(0.05)


def rss_mb(pid: int) -> float:
    line = next(line for line in Path(f"/proc/{pid}/status").read_text().splitlines() if line.startswith("VmRSS"))
    return int(line.split()[1]) / 1024


def num_fds(pid: int) -> int:
    return len(list(Path(f"/proc/{pid}/fd").iterdir()))


def groups_of(pid: int) -> list[Path]:
    return [path for hierarchy in find_hierarchies() for path in hierarchy.own.glob(f"dockyard-*-{pid}-*")]


def mounts() -> list[str]:
    return Path("/proc/self/mounts").read_text().splitlines()


def assert_nothing_is_left(handle: ServerHandle, root: Path) -> None:
    def only_launchers() -> bool:
        """The cold one and the warm one; whatever belongs to a run is a child of theirs."""
        found = descendants(handle.pid)
        return len(found) <= 2 and found <= set(children_of().get(handle.pid, []))

    wait_until(only_launchers, "only the launchers are left")
    (scratch,) = (root / "scratch").iterdir()
    assert {path.name for path in scratch.iterdir()} <= SCRATCH
    assert list((scratch / "mnt").iterdir()) == []
    assert [path.name for group in groups_of(handle.pid) for path in group.glob("run-*")] == []


class Mix:
    """A seeded stream of bodies: mostly fixes, some wrong, 5 % hostile, each a tree of its own."""

    def __init__(self, project: Any, body: Any, seed: int) -> None:
        self._random = random.Random(seed)
        self._hostile = {name: project.patch({"calc/ops.py": code}) for name, code in HOSTILE.items()}
        self._fix, self._wrong = project.gold(), project.patch({"calc/ops.py": FIX.replace("a + b", "b - a")})
        self._task = body(project.task(timeout_s=20.0), "")
        self._short = body(project.task(timeout_s=1.5), "")

    def one(self) -> tuple[str, dict[str, Any]]:
        draw = self._random.random()
        if draw < 0.05:
            name = self._random.choice(sorted(self._hostile))
            limits = {"pids": 32, "disk_mb": 16, "output_kb": 64, "memory_mb": 512}
            return name, {**self._short, "model_patch": self._marked(self._hostile[name]), "limits": limits}
        if draw < 0.15:
            return "garbage", {**self._task, "model_patch": f"garbage {uuid.uuid4().hex}"}
        kind, patch = ("fix", self._fix) if draw < 0.7 else ("wrong", self._wrong)
        return kind, {**self._task, "model_patch": self._marked(patch)}

    def _marked(self, patch: str) -> str:
        name = f"calc/mark_{uuid.uuid4().hex}.py"
        head = f"diff --git a/{name} b/{name}\nnew file mode 100644\n--- /dev/null\n+++ b/{name}\n"
        return f"{patch}{head}@@ -0,0 +1 @@\n+x = 1\n"


EXPECTED = {
    "fix": {"resolved"},
    "wrong": {"unresolved"},
    "garbage": {"apply_failed"},
    "daemon": {"resolved"},
    "pid 1": {"resolved"},
    "memory": {"out_of_memory", "no_tests_ran"},
    "flood": {"timeout", "out_of_memory"},
    "output": {"output_limit", "no_tests_ran"},
    "disk": {"no_tests_ran"},
    "exit": {"incomplete"},
    "hang": {"timeout"},
}


async def soak(url: str, mix: Mix, count: int, seed: int) -> Counter[str]:
    """Send ``count`` tasks, eight at a time; leave 3 % of them in the middle."""
    chance, outcomes, left = random.Random(seed), Counter[str](), count

    async def worker(http: httpx.AsyncClient) -> None:
        nonlocal left
        while left > 0:
            left -= 1
            kind, body = mix.one()
            headers = {"Idempotency-Key": uuid.uuid4().hex} if chance.random() < 0.5 else {}
            leaves_after_s = chance.random() if chance.random() < 0.03 else 300.0
            try:
                async with asyncio.timeout(leaves_after_s):
                    reply = await http.post("/task/submit", json=body, headers=headers)
            except TimeoutError:
                assert leaves_after_s < 300
                outcomes["left"] += 1
                continue
            assert reply.status_code == 200, reply.text
            status = reply.json()["status"]
            outcomes[status] += 1
            # a short deadline under load may pass before anything else does
            assert status in EXPECTED[kind] | ({"timeout"} if kind in HOSTILE else set()), (kind, reply.json())

    async with httpx.AsyncClient(base_url=url, timeout=None, trust_env=False) as http:
        async with asyncio.TaskGroup() as group:
            for _ in range(8):
                group.create_task(worker(http))
    return outcomes


@pytest.mark.timeout(6 * 3600)
@pytest.mark.parametrize(
    "count", [pytest.param(500, marks=pytest.mark.ci), pytest.param(10_000, marks=pytest.mark.nightly)]
)
def test_long_use_leaves_nothing_and_takes_no_more(count: int, project: Any, body: Any, tmp_path: Path) -> None:
    root, before = tmp_path / "root", mounts()
    handle = start_server(root, workers=2)
    try:
        mix = Mix(project, body, seed=1)
        asyncio.run(soak(handle.url, mix, 100, seed=2))
        assert_nothing_is_left(handle, root)
        memory, descriptors = rss_mb(handle.pid), num_fds(handle.pid)
        outcomes = asyncio.run(soak(handle.url, mix, count, seed=3))
        assert outcomes.total() == count
        assert outcomes["left"] > 0
        assert outcomes["resolved"] > count / 3
        assert_nothing_is_left(handle, root)
        assert mounts() == before
        wait_until(lambda: num_fds(handle.pid) <= descriptors, "connections are closed")
        # the caches of verdicts fill up to 2 x 4096 entries of about 3 kB, and no further
        assert rss_mb(handle.pid) - memory <= 16 + min(count, 4096) * 2 * 4 / 1024
    finally:
        assert handle.stop() == 0
    assert list((root / "scratch").iterdir()) == []
    assert groups_of(handle.pid) == []


@pytest.mark.timeout(4 * 3600)
@pytest.mark.parametrize(
    "rounds", [pytest.param(6, marks=pytest.mark.ci), pytest.param(100, marks=pytest.mark.nightly)]
)
def test_a_server_killed_anywhere_owes_every_answer_and_repeats_no_work(
    rounds: int, project: Any, body: Any, tmp_path: Path
) -> None:
    root, chance, mix = tmp_path / "root", random.Random(4), Mix(project, body, seed=5)
    accepted: dict[str, tuple[str, dict[str, Any]]] = {}  # task id -> (key, body)
    told: dict[str, dict[str, Any]] = {}
    before = mounts()
    for _ in range(rounds):
        handle = start_server(root, workers=2)
        try:
            with httpx.Client(base_url=handle.url, timeout=60.0, trust_env=False) as http:
                check_debts(http, accepted, told)
                end = time.monotonic() + chance.random() * 4
                while time.monotonic() < end:
                    key, (_, task) = uuid.uuid4().hex, mix.one()
                    headers = {"Idempotency-Key": key}
                    reply = http.post("/task/submit?wait=false", json=task, headers=headers)
                    assert reply.status_code == 202
                    accepted[reply.json()["task_id"]] = (key, task)
                    for task_id in chance.sample(sorted(accepted), min(3, len(accepted))):
                        answer = http.get(f"/task/{task_id}")
                        if answer.status_code == 200:
                            assert told.setdefault(task_id, answer.json()) == answer.json()
                    time.sleep(chance.random() * 0.2)
            family = descendants(handle.pid)
            os.kill(handle.pid, signal.SIGKILL)
            wait_until(lambda: not any(is_alive(pid) for pid in family), "every process of the dead server is gone")  # noqa: B023
        finally:
            handle.process.kill()
            handle.stop()
    handle = start_server(root, workers=2)
    try:
        with httpx.Client(base_url=handle.url, timeout=60.0, trust_env=False) as http:
            check_debts(http, accepted, told)
            statuses = Counter(told[task_id]["status"] for task_id in accepted)
        assert statuses["infra_error"] > 0
        assert_nothing_is_left(handle, root)
        assert mounts() == before
        assert {path.stem for path in (root / "tasks").iterdir()} == set(accepted)
        assert len(groups_of(handle.pid)) == len([path for path in all_groups() if path.name in own_names(root)])
    finally:
        assert handle.stop() == 0


def all_groups() -> list[Path]:
    return [path for hierarchy in find_hierarchies() for path in hierarchy.own.glob("dockyard-*")]


def own_names(root: Path) -> set[str]:
    return {f"dockyard-{path.name}" for path in (root / "scratch").iterdir()}


def check_debts(
    http: httpx.Client, accepted: dict[str, tuple[str, dict[str, Any]]], told: dict[str, dict[str, Any]]
) -> None:
    """After a restart every accepted task is answered, the same answer for ever, and nothing runs for its key."""
    for task_id, (key, task) in accepted.items():
        reply = http.get(f"/task/{task_id}")
        assert reply.status_code == 200, reply.text
        verdict = reply.json()
        assert told.setdefault(task_id, verdict) == verdict
        assert VerdictStatus(verdict["status"])
        again = http.post("/task/submit", json=task, headers={"Idempotency-Key": key})
        assert again.json() == verdict
    assert http.get("/readyz").json()["num_executions"] == 0


def is_alive(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[0] != "Z"
    except OSError:
        return False


@pytest.fixture
def small(tmp_path: Path) -> Iterator[ServerHandle]:
    handle = start_server(tmp_path / "root", workers=1, max_queue=3)
    yield handle
    assert handle.stop() == 0


@pytest.mark.ci
def test_clients_that_come_back_lose_nothing(small: ServerHandle, project: Any, body: Any) -> None:
    mix = Mix(project, body, seed=7)
    patches = [mix._marked(project.gold()) for _ in range(24)]

    async def ask() -> list[VerdictStatus]:
        async with SandboxClient(small.url, timeout_s=250.0, max_retries=200) as client:
            task = project.task()
            calls = (client.judge(task, patch, attempt_id=uuid.uuid4().hex) for patch in patches)
            return [verdict.status for verdict in await asyncio.gather(*calls)]

    assert asyncio.run(ask()) == [VerdictStatus.RESOLVED] * 24
