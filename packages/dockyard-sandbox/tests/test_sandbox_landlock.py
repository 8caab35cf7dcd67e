"""The level without namespaces: a server whose unshare and mount are refused, as root and as a plain user.

The machine's own Python runs it, since this interpreter may lie where no other user can read.
"""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
import pytest

from dockyard_sandbox import isolation
from dockyard_sandbox.isolation import SANDBOX_UID
from dockyard_sandbox.jail import landlock, plain, seccomp, syscalls

PYTHON, PLAIN_UID = "/usr/bin/python3", 4242
FIX = "def add(a, b):\n    return a + b\n\n\ndef mul(a, b):\n    return a * b\n"


def test_runs_take_users_that_belong_to_nobody_and_exist_in_every_container() -> None:
    """From 60578 to 61183: above people, below those that systemd makes up."""
    assert 60_577 < SANDBOX_UID < SANDBOX_UID + plain.NUM_UIDS < 61_184


def test_a_container_without_those_users_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "geteuid", lambda: 0)
    monkeypatch.setattr(isolation, "_id_map", lambda kind: [(0, 1000, 1), (1, 100_000, 65_535)])
    assert "namespaces" not in isolation.absent()
    monkeypatch.setattr(isolation, "_id_map", lambda kind: [(0, 1000, 1)] if kind == "gid" else [(0, 100_000, 65_536)])
    assert "65536 ids" in isolation.absent()["namespaces"]
    assert {found.level for found in isolation.candidates()} <= {"bwrap"}


def test_a_user_that_has_processes_is_not_given_to_a_run(tmp_path: Path) -> None:
    if os.geteuid() != 0:
        pytest.skip("only root can be somebody else")
    job: dict[str, Any] = {"mount_point": str(tmp_path), "drop_to": SANDBOX_UID}
    first = plain._claim_uid(job)
    Path(job["claim"]).unlink()
    with subprocess.Popen(["sleep", "86462"], user=first) as stranger:
        try:
            assert plain._claim_uid(job) not in (first, SANDBOX_UID)
        finally:
            stranger.send_signal(signal.SIGKILL)
    assert [path.name for path in tmp_path.iterdir()] == [Path(job["claim"]).name]


@dataclass(frozen=True)
class Weak:
    """A server at the landlock level."""

    url: str
    pid: int
    uid: int
    repo: str
    root: Path

    def post(self, body: dict[str, Any], path: str = "/task/submit") -> httpx.Response:
        content = {**body, "repo": self.repo} if "repo" in body else body
        return httpx.post(self.url + path, json=content, timeout=120.0, trust_env=False)


def _without_namespaces() -> None:
    syscalls.prctl(syscalls.PR_SET_NO_NEW_PRIVS, 1)
    seccomp.install()


@pytest.fixture(scope="module", params=["root", pytest.param("plain user", marks=pytest.mark.ci)])
def weak(request: pytest.FixtureRequest, project: Any) -> Iterator[Weak]:
    if landlock.abi() < landlock.MIN_ABI:
        pytest.skip(f"this kernel has Landlock ABI {landlock.abi()}, {landlock.MIN_ABI} is needed")
    uid = 0 if request.param == "root" else PLAIN_UID
    if os.geteuid() != 0:
        if uid == 0:
            pytest.skip("not root")
        uid = os.geteuid()
    site = str(Path(pytest.__file__).parent.parent)
    names = ("dockyard_core", "dockyard_sandbox")
    sources = [str(Path(sys.modules[name].__file__ or "").parent.parent) for name in names]
    env = {"PATH": "/usr/bin:/bin", "PYTHONPATH": ":".join([site, *sources]), "PYTHONDONTWRITEBYTECODE": "1"}
    who: dict[str, Any] = {"user": uid, "group": uid, "extra_groups": []} if uid != os.geteuid() else {}
    version = f"import sys, pydantic_core, pytest; sys.exit(sys.version_info[:2] != {sys.version_info[:2]})"
    # whoever runs the tests must be able to read them
    reader: dict[str, Any] = {"user": PLAIN_UID, "group": PLAIN_UID} if os.geteuid() == 0 else {}
    check = subprocess.run([PYTHON, "-P", "-c", version], env=env, check=False, cwd="/", **reader)
    if check.returncode:
        pytest.skip(f"{PYTHON} cannot import this interpreter's packages as another user")
    with tempfile.TemporaryDirectory(prefix="dockyard-weak-", dir="/tmp") as name:
        directory = Path(name)
        directory.chmod(0o755)
        shutil.copytree(project.path, directory / "repo")
        for parent, _, files in os.walk(directory):
            for path in (parent, *(f"{parent}/{file}" for file in files)):
                os.chown(path, uid, uid)
        command = [PYTHON, "-P", "-m", "dockyard_sandbox.cli", "serve", "--port", "0", "--root", f"{directory}/root"]
        process = subprocess.Popen(
            command, env=env, cwd="/", stdout=subprocess.PIPE, preexec_fn=_without_namespaces, text=True, **who
        )
        assert process.stdout is not None
        words = process.stdout.readline().split()
        assert words[-1:] == ["isolation=landlock"], words
        yield Weak(words[2], process.pid, uid, f"{directory}/repo", directory)
        if process.poll() is None:
            process.send_signal(signal.SIGTERM)
        try:
            assert process.wait(timeout=60) in (0, -signal.SIGKILL)
        finally:
            process.kill()
            process.stdout.close()
        assert process.returncode == -signal.SIGKILL or list((directory / "root" / "scratch").iterdir()) == []


def conditional(project: Any, probe: str) -> str:
    """The fix works only if ``probe``, the body of a function, returns a true value."""
    body = "\n".join(f"    {line}" for line in probe.splitlines())
    patched = FIX.replace("return a + b", "return a + b if probe() else 0")
    patch: str = project.patch({"calc/ops.py": f"def probe():\n{body}\n\n\n{patched}"})
    return patch


def test_the_levels_verdicts_are_right_and_say_which_level(weak: Weak, project: Any, body: Any) -> None:
    for patch, status in ((project.gold(), "resolved"), ("", "unresolved"), ("garbage", "apply_failed")):
        reply = weak.post(body(project.task(), patch)).json()
        assert (reply["status"], reply["isolation"]) == (status, "landlock"), reply
    notes = httpx.get(weak.url + "/readyz", trust_env=False).json()["notes"]
    assert any("no namespaces" in note for note in notes)
    assert (
        any(note.startswith("not namespaces") and "refuses user namespaces" in note for note in notes) or weak.uid == 0
    )
    assert any("read-only by their mode" in note for note in notes) == (weak.uid != 0)


REACH = {
    "a file of the host": "return open({secret!r}).read()",
    "the password file": "return open('/etc/passwd').read()",
    "the root of the server": "import os\nreturn os.listdir({root!r})",
    "another process": "return open('/proc/{pid}/environ').read()",
    "processes": "import os\nreturn os.listdir('/proc')",
    "shared memory": "return open('/dev/shm/x', 'w')",
    "the temporary directory of all": "return open('/tmp/dockyard-x', 'w')",
    "the interpreter's files": "import pytest\nreturn open(pytest.__file__, 'a')",
    "the network": "import socket\nreturn socket.create_connection(('127.0.0.1', {port}), 2)",
    "a unix socket": "import socket\nreturn socket.socket(socket.AF_UNIX)",
    "a signal to the server": "import os\nos.kill({pid}, 0)\nreturn True",
    "a mount": "import ctypes\nreturn ctypes.CDLL(None).mount(b'none', b'/tmp', b'tmpfs', 0, None) == 0",
    "a truncation outside": "import os\nos.truncate({secret!r}, 0)\nreturn True",
}


@pytest.mark.parametrize("what", REACH)
def test_a_landlocked_run_does_not_reach(what: str, weak: Weak, project: Any, body: Any) -> None:
    secret = weak.root / "secret"
    secret.write_text("token")
    secret.chmod(0o666)
    code = REACH[what].format(
        secret=str(secret), root=str(weak.root / "root"), pid=weak.pid, port=weak.url.rsplit(":", 1)[1]
    )
    assert weak.post(body(project.task(), conditional(project, code))).json()["status"] == "unresolved"
    assert secret.read_text() == "token"


def test_a_landlock_probe_that_succeeds_would_resolve(weak: Weak, project: Any, body: Any) -> None:
    code = "import tempfile, socket\nsocket.socketpair()\nwith tempfile.TemporaryFile() as f:\n    return f.write(b'x')"
    assert weak.post(body(project.task(), conditional(project, code))).json()["status"] == "resolved"


def test_a_daemon_without_a_namespace_ends_with_its_run(weak: Weak, project: Any, body: Any) -> None:
    code = f"import subprocess\n\nsubprocess.Popen(['sleep', '86431'], start_new_session=True)\n\n\n{FIX}"
    assert weak.post(body(project.task(), project.patch({"calc/ops.py": code}))).json()["status"] == "resolved"
    assert not [path for path in Path("/proc").glob("[0-9]*/cmdline") if b"86431" in _read(path)]


def test_a_landlocked_deadline_holds(weak: Weak, project: Any, body: Any) -> None:
    patch = project.patch({"calc/ops.py": "import os\n\nos.fork()\nos.fork()\nwhile True:\n    pass\n"})
    began = time.monotonic()
    assert weak.post(body(project.task(timeout_s=1.5), patch)).json()["status"] == "timeout"
    assert time.monotonic() - began < 60


def test_the_tests_files_are_roots_where_the_server_is_root(weak: Weak, project: Any, body: Any) -> None:
    if weak.uid != 0:
        pytest.skip("a plain user's server can give its files to nobody else: a note in /readyz says so")
    rewrite = "with open('tests/test_add.py', 'w') as f:\n    f.write('def test_add():\\n    pass\\n')"
    for code in (rewrite, "import os\nos.rename('tests', 'gone')", "import os\nos.unlink('tests/test_add.py')"):
        patch = project.patch({"calc/ops.py": f"{code}\n\n\n{FIX.replace('a + b', 'a - b')}"})
        assert weak.post(body(project.task(), patch)).json()["status"] in ("no_tests_ran", "unresolved")


def test_a_landlocked_session_is_confined_and_judged(weak: Weak, project: Any, body: Any) -> None:
    opened = weak.post(body(project.task(), ""), "/session").json()
    path = f"/session/{opened['session_id']}"

    def exec_(command: str) -> dict[str, Any]:
        found: dict[str, Any] = weak.post({"command": command}, f"{path}/exec").json()
        return found

    for command in (f"ls {weak.root}/root", "cat /etc/passwd", "touch /tmp/dockyard-y", f"kill -0 {weak.pid}"):
        assert exec_(command)["exit_code"] != 0, command
    exec_("sleep 86432 & sed -i 's/a - b/a + b/' calc/ops.py; echo t > $TMPDIR/t")
    assert "return a + b" in weak.post({"path": "calc/ops.py"}, f"{path}/read").json()["content"]
    assert weak.post({"path": "/etc/passwd"}, f"{path}/read").status_code == 422
    assert weak.post({}, f"{path}/finish").json()["verdict"]["status"] == "resolved"
    assert not [path for path in Path("/proc").glob("[0-9]*/cmdline") if b"86432" in _read(path)]


def test_a_killed_landlock_server_leaves_no_process(weak: Weak, project: Any, body: Any) -> None:
    """Last in this file: no other test has a server after it."""
    hang = "import subprocess, time\n\nsubprocess.Popen(['sleep', '86433'], start_new_session=True)\ntime.sleep(300)\n"
    task = {**body(project.task(timeout_s=300.0), project.patch({"calc/ops.py": hang})), "repo": weak.repo}
    httpx.post(f"{weak.url}/task/submit?wait=false", json=task, trust_env=False).raise_for_status()

    def running() -> list[Path]:
        return [path for path in Path("/proc").glob("[0-9]*/cmdline") if b"86433" in _read(path)]

    wait_until(running)
    os.kill(weak.pid, signal.SIGKILL)
    wait_until(lambda: not running())


def wait_until(condition: Callable[[], object]) -> None:
    end = time.monotonic() + 60
    while not condition():
        assert time.monotonic() < end
        time.sleep(0.05)


def _read(path: Path) -> bytes:
    try:
        return path.read_bytes()
    except OSError:
        return b""
