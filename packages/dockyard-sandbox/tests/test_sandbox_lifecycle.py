"""Start and end: refusals in one line, and nothing left however the server ends."""

from __future__ import annotations

import http.client
import json
import os
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import httpx
import pytest

from dockyard_core import SandboxUnavailable
from dockyard_sandbox import ServerHandle, start_server
from dockyard_sandbox.jail import seccomp, syscalls
from dockyard_sandbox.preflight import git_notes

SERVE = [sys.executable, "-P", "-m", "dockyard_sandbox.cli", "serve"]
HANG = {"calc/ops.py": "import subprocess, time\n\nsubprocess.Popen(['sleep', '300'])\ntime.sleep(300)\n"}


def wait_until(condition: Callable[[], object], what: str, deadline_s: float = 60.0) -> None:
    end = time.monotonic() + deadline_s
    while not condition():
        assert time.monotonic() < end, f"not within {deadline_s} s: {what}"
        time.sleep(0.05)


def descendants(pid: int) -> set[int]:
    children: dict[int, list[int]] = {}
    for path in Path("/proc").glob("[0-9]*/stat"):
        try:
            fields = path.read_text().rsplit(")", 1)[1].split()
        except OSError:
            continue
        if fields[0] != "Z":
            children.setdefault(int(fields[1]), []).append(int(path.parent.name))
    found: set[int] = set()
    todo = [pid]
    while todo:
        new = [child for child in children.get(todo.pop(), []) if child not in found]
        found.update(new)
        todo += new
    return found


def parent(pid: int) -> int:
    """0 = it has ended."""
    try:
        return int(Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[1])
    except OSError:
        return 0


def command_line(pid: int) -> bytes:
    try:
        return Path(f"/proc/{pid}/cmdline").read_bytes()
    except OSError:
        return b""


def hangs(server: int) -> bool:
    """Whether the daemon of a hanging run is there: not one of the runs that come before it."""
    return any(is_alive(pid) and command_line(pid) == b"sleep\x00300\x00" for pid in descendants(server))


def has_no_run(server: int) -> bool:
    """Whether all that is left are launchers, which the server has started itself."""
    return all(parent(pid) == server for pid in descendants(server) if is_alive(pid))


def is_alive(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[0] != "Z"
    except OSError:
        return False


def start_a_hanging_run(handle: ServerHandle, project: Any, body: Any) -> set[int]:
    """Submit a run that never ends; return every process of the server once its daemon runs."""
    task = body(project.task(timeout_s=300.0), project.patch(HANG))

    def post() -> None:
        try:
            httpx.post(handle.url + "/task/submit", json=task, timeout=120.0, trust_env=False)
        except httpx.TransportError:
            pass  # the server is stopped under it

    threading.Thread(target=post, daemon=True).start()
    wait_until(lambda: hangs(handle.pid), "the run has started")
    return descendants(handle.pid)


def mounts() -> list[str]:
    return Path("/proc/self/mounts").read_text().splitlines()


@pytest.mark.parametrize("number", [signal.SIGTERM, pytest.param(signal.SIGINT, marks=pytest.mark.ci)])
def test_a_stopped_server_leaves_nothing(number: int, project: Any, body: Any, tmp_path: Path) -> None:
    before = mounts()
    handle = start_server(tmp_path / "root")
    family = start_a_hanging_run(handle, project, body)
    handle.process.send_signal(number)
    assert handle.stop(timeout_s=60.0) == 0
    assert [pid for pid in family if is_alive(pid)] == []
    assert list((tmp_path / "root" / "scratch").iterdir()) == []
    assert mounts() == before


def test_a_killed_server_leaves_nothing_running_and_is_swept(project: Any, body: Any, tmp_path: Path) -> None:
    root = tmp_path / "root"
    handle = start_server(root)
    family = start_a_hanging_run(handle, project, body)
    handle.process.kill()
    handle.stop()
    wait_until(lambda: not any(is_alive(pid) for pid in family), "every process of the run is gone")
    (left,) = (root / "scratch").iterdir()
    again = start_server(root)
    assert not left.exists()
    assert again.stop() == 0


def test_a_launcher_that_dies_costs_a_retry(project: Any, body: Any, tmp_path: Path) -> None:
    handle = start_server(tmp_path / "root", warm=False)  # a warm run that dies is run cold
    try:
        task = body(project.task(timeout_s=300.0), project.patch(HANG))
        replies: list[dict[str, Any]] = []

        def post() -> None:
            replies.append(httpx.post(handle.url + "/task/submit", json=task, timeout=120.0, trust_env=False).json())

        thread = threading.Thread(target=post)
        thread.start()
        wait_until(lambda: hangs(handle.pid), "the run has started")
        family = descendants(handle.pid)
        (launcher,) = (pid for pid in family if parent(pid) == handle.pid and b"jail.main" in command_line(pid))
        os.kill(launcher, signal.SIGKILL)
        thread.join(timeout=60.0)
        assert (replies[0]["status"], replies[0]["retryable"]) == ("infra_error", True)
        wait_until(lambda: not any(is_alive(pid) for pid in family), "the run ended with its launcher")
        task = body(project.task(), project.gold())
        again = httpx.post(handle.url + "/task/submit", json=task, timeout=60.0, trust_env=False).json()
        assert again["status"] == "resolved"
    finally:
        assert handle.stop() == 0


@pytest.mark.ci
def test_a_disconnected_client_ends_its_run(project: Any, body: Any, tmp_path: Path) -> None:
    handle = start_server(tmp_path / "root")
    try:
        task = body(project.task(timeout_s=300.0), project.patch(HANG))
        client = http.client.HTTPConnection(handle.url.removeprefix("http://"))
        client.request("POST", "/task/submit", body=json.dumps(task))
        wait_until(lambda: hangs(handle.pid), "the run has started")
        client.close()
        wait_until(lambda: has_no_run(handle.pid), "only launchers are left")
    finally:
        assert handle.stop() == 0


def test_the_server_dies_with_its_parent(tmp_path: Path) -> None:
    code = (
        "import os, sys\nfrom dockyard_sandbox import start_server\n"
        f"print(start_server({str(tmp_path / 'root')!r}).pid, flush=True)\nos._exit(0)\n"
    )
    output = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout
    wait_until(lambda: not is_alive(int(output)), "the server is gone")


def refused(arguments: list[str], preexec: Callable[[], None] | None = None) -> str:
    """Run ``serve``; assert that it exits with 2 and one line, and return the line."""
    done = subprocess.run(
        [*SERVE, *arguments], capture_output=True, text=True, timeout=60, preexec_fn=preexec, check=False
    )
    assert done.returncode == 2, done
    assert done.stdout == ""
    (line,) = done.stderr.splitlines()
    return line


def test_a_public_bind_needs_a_token(tmp_path: Path) -> None:
    assert "--token-file" in refused(["--host", "0.0.0.0", "--port", "0", "--root", str(tmp_path)])


def test_a_prefix_that_allows_its_neighbours_is_refused(tmp_path: Path) -> None:
    assert "--repos-from" in refused(["--port", "0", "--root", str(tmp_path), "--repos-from", "/srv/repos"])


def test_a_taken_port_is_one_line(tmp_path: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = str(taken.getsockname()[1])
        assert f"127.0.0.1:{port}" in refused(["--port", port, "--root", str(tmp_path)])
        with pytest.raises(SandboxUnavailable, match=port):
            start_server(tmp_path / "other", port=int(port))


def without_namespaces() -> None:
    """Make this process a machine that refuses unshare and mount."""
    syscalls.prctl(syscalls.PR_SET_NO_NEW_PRIVS, 1)
    seccomp.install()


def test_a_machine_below_the_minimum_is_refused(tmp_path: Path) -> None:
    arguments = ["--port", "0", "--root", str(tmp_path), "--min-isolation", "namespaces"]
    assert "isolation must be at least namespaces" in refused(arguments, without_namespaces)
    assert list((tmp_path / "scratch").iterdir()) == []


@pytest.mark.ci
def test_unsafe_runs_only_when_asked_and_says_so(project: Any, body: Any, tmp_path: Path) -> None:
    task = tmp_path / "task.json"
    task.write_text(json.dumps(body(project.task(), project.gold())))
    command = [sys.executable, "-P", "-m", "dockyard_sandbox.cli", "run", str(task), "--root", str(tmp_path / "root")]
    weaker = subprocess.run(command, capture_output=True, text=True, preexec_fn=without_namespaces, check=False)
    # where Landlock works for this interpreter, it is what is found; never unsafe
    assert weaker.returncode == 2 or json.loads(weaker.stdout)["isolation"] == "landlock", weaker
    assert weaker.returncode != 2 or "namespaces: " in weaker.stderr
    command += ["--min-isolation", "unsafe"]
    done = subprocess.run(command, capture_output=True, text=True, preexec_fn=without_namespaces, check=False)
    reply = json.loads(done.stdout)
    expected = "unsafe" if weaker.returncode == 2 else "landlock"
    assert (reply["status"], reply["isolation"], done.returncode) == ("resolved", expected, 0)
    assert list((tmp_path / "root" / "scratch").iterdir()) == []


@pytest.mark.ci
def test_run_prints_a_verdict_and_doctor_a_level(project: Any, body: Any, tmp_path: Path) -> None:
    task = tmp_path / "task.json"
    task.write_text(json.dumps(body(project.task(), "")))
    cli = [sys.executable, "-P", "-m", "dockyard_sandbox.cli"]
    done = subprocess.run([*cli, "run", str(task)], capture_output=True, text=True, check=False)
    assert (json.loads(done.stdout)["status"], done.returncode) == ("unresolved", 1)
    report = json.loads(subprocess.run([*cli, "doctor"], capture_output=True, text=True, check=True).stdout)
    assert report["isolation"] == "namespaces"
    assert report["git"].startswith("git version")
    assert report["git_lacks"] == list(git_notes(report["git"]))
    assert report["levels"]["namespaces"] == {"available": True, "lacks": []}
    for level in report["levels"].values():
        assert level["available"] or (level["why"] and level["remedy"])


@pytest.mark.ci
def test_a_plain_user_gets_namespaces_too(project: Any, body: Any) -> None:
    """The same server without any privilege, through a user namespace, on the system's Python."""
    python, uid = "/usr/bin/python3", 4242
    if os.geteuid() != 0:
        pytest.skip("the other tests run as a plain user already")
    site = str(Path(pytest.__file__).parent.parent)
    probe = f"import sys, pydantic_core, pytest; print(sys.version_info[:2] == {sys.version_info[:2]})"
    plain: dict[str, Any] = {"user": uid, "group": uid, "extra_groups": [], "cwd": "/"}
    sources = [
        str(Path(sys.modules[name].__file__ or "").parent.parent) for name in ("dockyard_core", "dockyard_sandbox")
    ]
    env = {"PATH": "/usr/bin:/bin", "PYTHONPATH": ":".join([site, *sources]), "PYTHONDONTWRITEBYTECODE": "1"}
    try:
        check = subprocess.run(
            [python, "-P", "-c", probe], env=env, capture_output=True, text=True, check=False, **plain
        )
    except OSError as error:
        pytest.skip(f"no {python}: {error}")
    if check.stdout.strip() != "True":
        pytest.skip(f"{python} cannot import this interpreter's packages as uid {uid}: {check.stderr[-200:]}")
    root = Path("/tmp") / f"dockyard-plain-{os.getpid()}"
    root.mkdir()
    try:
        subprocess.run(["cp", "-r", str(project.path), str(root / "repo")], check=True)
        for directory, _, names in os.walk(root):
            for name in (directory, *(f"{directory}/{name}" for name in names)):
                os.chown(name, uid, uid)
        daemon = "import subprocess\n\nsubprocess.Popen(['sleep', '86415'], start_new_session=True)\n\n\n"
        fix = "def add(a, b):\n    return a + b\n\n\ndef mul(a, b):\n    return a * b\n"
        patches = {
            "resolved": project.patch({"calc/ops.py": daemon + fix}),
            "unresolved": "",
            "incomplete": project.patch({"calc/ops.py": "import os\n\nos._exit(0)\n"}),
        }
        task = {**body(project.task(), ""), "repo": str(root / "repo")}
        command = [
            python,
            "-P",
            "-m",
            "dockyard_sandbox.cli",
            "run",
            str(root / "task.json"),
            "--root",
            str(root / "s"),
        ]
        for status, patch in patches.items():
            (root / "task.json").write_text(json.dumps({**task, "model_patch": patch}))
            done = subprocess.run(command, env=env, capture_output=True, text=True, check=False, **plain)
            reply = json.loads(done.stdout or "{}")
            assert (reply.get("status"), reply.get("isolation")) == (status, "namespaces"), done
    finally:
        subprocess.run(["rm", "-rf", str(root)], check=True)
