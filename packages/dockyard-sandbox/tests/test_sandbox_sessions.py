"""Sessions: isolated like runs, bounded like runs, and judged on a fresh tree."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest

from dockyard_sandbox import ServerHandle, start_server

FIX = "sed -i 's/a - b/a + b/' calc/ops.py"


class Session:
    """One session by bare HTTP."""

    def __init__(self, http: httpx.Client, body: dict[str, Any]) -> None:
        self.http = http
        reply = http.post("/session", json=body)
        assert reply.status_code == 201, reply.text
        self.path = f"/session/{reply.json()['session_id']}"

    def call(self, verb: str, **body: Any) -> httpx.Response:
        return self.http.post(f"{self.path}/{verb}", json=body)

    def exec(self, command: str, **more: Any) -> dict[str, Any]:
        reply = self.call("exec", command=command, **more)
        assert reply.status_code == 200, reply.text
        found: dict[str, Any] = reply.json()
        return found

    def finish(self) -> tuple[dict[str, Any], str]:
        reply = self.call("finish")
        assert reply.status_code == 200, reply.text
        return reply.json()["verdict"], reply.json()["patch"]


@pytest.fixture
def http(server: ServerHandle) -> Iterator[httpx.Client]:
    with httpx.Client(base_url=server.url, timeout=120.0, trust_env=False) as client:
        yield client


@pytest.fixture
def session(http: httpx.Client, project: Any, body: Any) -> Iterator[Session]:
    opened = Session(http, body(project.task(), ""))
    yield opened
    http.delete(opened.path)


def wait_until(condition: Callable[[], Any]) -> None:
    end = time.monotonic() + 30
    while not condition():
        assert time.monotonic() < end
        time.sleep(0.05)


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


REACH = {
    "the network": "python -c 'import socket; socket.create_connection((\"127.0.0.1\", {port}), 2)'",
    "a file of the host": "cat {secret}",
    "the environment of pid 1": "cat /proc/1/environ",
    "the descriptors of pid 1": "ls /proc/1/fd",
    "root": "test $(id -u) = 0",
    "a capability": "grep -q 'CapBnd:.*[1-9a-f]' /proc/self/status",
    "a mount": "mount -t tmpfs none /tmp",
    "a user namespace": "unshare -U true",
    "the interpreter's files": "touch $(python -c 'import pytest; print(pytest.__file__)')",
    "a git directory": "test -e .git",
    "the held-out test": "test -e tests/test_add.py",
    "the system": "touch /usr/x",
    "the root directory": "touch /x",
    "memory that no limit counts": "python -c 'import os; os.memfd_create(\"x\")'",
}


@pytest.mark.parametrize("what", REACH)
def test_a_command_of_a_session_does_not_reach(what: str, session: Session, server: Any, tmp_path: Path) -> None:
    (tmp_path / "secret").write_text("token")
    command = REACH[what].format(port=server.url.rsplit(":", 1)[1], secret=tmp_path / "secret")
    assert session.exec(command)["exit_code"] != 0


def test_a_command_runs_with_python_and_pytest_of_the_tests(session: Session) -> None:
    done = session.exec(
        "python -m pytest -q tests 2>&1 | tail -1; env | sort | cut -d= -f1 | tr '\\n' ' '; pwd; whoami"
    )
    assert "1 passed" in done["output"]
    assert "TOKEN" not in done["output"]
    assert done["output"].splitlines()[-1] == "sandbox"
    assert "/testbed" in done["output"]


def test_a_command_has_no_descriptor_but_its_own(session: Session) -> None:
    listed = session.exec("ls -l /proc/self/fd")["output"].splitlines()[1:]
    found = {line.split()[8]: line.split(" -> ")[1] for line in listed}
    assert (found["0"], found["3"]) == ("/dev/null", "/dev/null")
    assert found["1"] == found["2"]
    assert sorted(found) == ["0", "1", "2", "3", "4"], found  # the last one is ls' own
    assert found["4"].startswith("/proc/")


def test_long_output_keeps_its_ends_and_costs_no_memory(http: httpx.Client, project: Any, body: Any) -> None:
    session = Session(http, {**body(project.task(), ""), "limits": {"output_kb": 4}})
    done = session.exec("echo first; head -c 30000000 /dev/zero | tr '\\0' x; echo; echo last")
    assert done["output"].startswith("first\n")
    assert done["output"].endswith("last\n")
    assert len(done["output"]) == 4096
    assert done["num_dropped_bytes"] == 30_000_000 + 1 + len("first\nlast\n") - 4096
    http.delete(session.path)


def test_a_deadline_kills_the_command_and_its_children(session: Session) -> None:
    began = time.monotonic()
    done = session.exec("sleep 86421 & sleep 86422", timeout_s=0.5)
    assert (done["timed_out"], done["exit_code"]) == (True, -9)
    assert time.monotonic() - began < 30
    assert not processes_with("86422")
    assert session.exec("echo on")["output"] == "on\n"


def test_a_client_that_leaves_ends_its_command_and_not_its_session(session: Session, server: ServerHandle) -> None:
    with pytest.raises(httpx.ReadTimeout):
        httpx.post(f"{server.url}{session.path}/exec", json={"command": "sleep 86427"}, timeout=1.0, trust_env=False)
    wait_until(lambda: not processes_with("86427"))
    assert session.exec("echo on")["output"] == "on\n"


def test_background_processes_stay_until_the_session_ends(session: Session) -> None:
    session.exec("setsid sleep 86423 >/dev/null 2>&1 &")
    wait_until(lambda: processes_with("86423"))  # the shell is back before its child has become the program
    assert session.http.delete(session.path).status_code == 204
    wait_until(lambda: not processes_with("86423"))
    assert session.call("exec", command="true").status_code == 404


def test_a_session_that_holds_too_much_memory_ends(http: httpx.Client, project: Any, body: Any) -> None:
    session = Session(http, {**body(project.task(), ""), "limits": {"memory_mb": 128}})
    hoard = "python -c \"x = b'x' * (90 << 20); import time; time.sleep(60)\""
    reply = session.call("exec", command=f"{hoard} & {hoard} & {hoard} & wait", timeout_s=60)
    assert reply.status_code == 410
    assert "memory" in reply.json()["error"]["message"]
    http.delete(session.path)


def test_the_disk_of_a_session_is_bounded(http: httpx.Client, project: Any, body: Any) -> None:
    session = Session(http, {**body(project.task(), ""), "limits": {"disk_mb": 8}})
    filling = "for i in 1 2 3; do head -c 5000000 /dev/zero > /tmp/$i || exit 1; done"
    assert session.exec(filling)["exit_code"] == 1
    http.delete(session.path)


def test_a_session_that_nobody_uses_is_closed(http: httpx.Client, project: Any, body: Any) -> None:
    session = Session(http, {**body(project.task(), ""), "idle_ttl_s": 0.5})
    session.exec("setsid sleep 86424 >/dev/null 2>&1 &")
    end = time.monotonic() + 30
    while processes_with("86424"):
        assert time.monotonic() < end
        time.sleep(0.1)
    assert session.call("exec", command="true").status_code == 404


def test_the_verdict_is_on_a_fresh_tree(session: Session) -> None:
    """What the live tree's processes know or hold is gone: only the diff counts."""
    session.exec("echo 'import os; os._exit(0)' > /tmp/sitecustomize.py; setsid sleep 86425 >/dev/null 2>&1 &")
    session.exec(f"{FIX}; mkdir -p .pytest_cache __pycache__; echo x > __pycache__/a.pyc; git init -q . 2>/dev/null")
    verdict, patch = session.finish()
    assert (verdict["status"], verdict["isolation"]) == ("resolved", "namespaces")
    assert [line for line in patch.splitlines() if line.startswith("+++")] == ["+++ b/calc/ops.py"]
    assert not processes_with("86425")
    assert session.call("exec", command="true").status_code == 410
    assert session.finish() == (verdict, patch)  # asking again is free


CHANGES = {
    "nothing": ("true", "unresolved", []),
    "a deletion": ("rm calc/ops.py", "no_tests_ran", ["calc/ops.py"]),
    "a file in place of a directory": ("rm -r calc; echo x > calc", None, ["calc", "calc/__init__.py", "calc/ops.py"]),
    "a directory in place of a file": (
        "rm calc/ops.py; mkdir calc/ops.py; touch calc/ops.py/x",
        None,
        ["calc/ops.py", "calc/ops.py/x"],
    ),
    "an executable bit": (f"{FIX}; chmod +x calc/ops.py", "resolved", ["calc/ops.py"]),
    "bytes of another encoding": (
        f"{FIX}; printf '# \\351t\\351\\n' > calc/x.txt",
        "resolved",
        ["calc/ops.py", "calc/x.txt"],
    ),
    "binary data": (f"{FIX}; head -c 3000 /dev/urandom > calc/x.bin", "resolved", ["calc/ops.py", "calc/x.bin"]),
    "a name with spaces and quotes": (f"{FIX}; echo 1 > 'calc/a \"b\" é.txt'", "resolved", None),
    "a symlink": (f"{FIX}; ln -s /etc/passwd calc/link", "policy_violation", ["calc/link", "calc/ops.py"]),
    "a conftest": (f"{FIX}; echo 'x = 1' > conftest.py", "resolved", ["calc/ops.py", "conftest.py"]),
    "a fifo and a socket": (f"{FIX}; mkfifo calc/f", "resolved", ["calc/ops.py"]),
    "no final newline": (
        "printf 'def add(a, b): return a + b\\ndef mul(a, b): return a * b' > calc/ops.py",
        "resolved",
        None,
    ),
    "carriage returns": (f"{FIX}; sed -i 's/$/\\r/' calc/ops.py", "resolved", None),
}  # fmt: skip


@pytest.mark.parametrize("what", CHANGES)
def test_what_a_session_changed_is_its_patch(what: str, session: Session) -> None:
    command, status, paths = CHANGES[what]
    assert session.exec(command)["exit_code"] == 0
    verdict, patch = session.finish()
    assert verdict["status"] == status if status is not None else verdict["status"] != "infra_error", verdict
    if paths is not None:
        found = [line.split(" b/", 1)[1] for line in patch.splitlines() if line.startswith("diff --git ")]
        assert found == paths


def test_a_patch_that_is_too_large_is_the_policys_doing(session: Session) -> None:
    session.exec(f"{FIX}; head -c 3000000 /dev/urandom > calc/x.bin")
    verdict, _ = session.finish()
    assert verdict["status"] == "policy_violation"


def test_files_are_read_in_parts_and_nothing_outside_is(session: Session, tmp_path: Path) -> None:
    (tmp_path / "secret").write_text("token")
    assert session.call("write", path="a/b.txt", content="héllo").json() == {"size": 6}
    assert session.call("read", path="a/b.txt").json() == {"content": "héllo", "encoding": "utf-8", "size": 6}
    part = session.call("read", path="a/b.txt", offset=1, max_bytes=1).json()
    assert part == {"content": "ww==", "encoding": "base64", "size": 6}
    session.exec(f"ln -s {tmp_path} out; ln -s /etc/passwd p; mkfifo f; echo t > /tmp/t")
    for path in ("out/secret", "p", "../x", "/etc/passwd", "f", "nowhere", "calc", "/dev/null", "/proc/1/environ"):
        reply = session.call("read", path=path)
        assert (reply.status_code, reply.json()["error"]["field"]) == (422, "path"), path
    for path in ("../x", "/usr/x", "p", "f", "calc"):
        assert session.call("write", path=path, content="x").status_code == 422, path
    assert session.call("read", path="/tmp/t").json()["content"] == "t\n"


BAD: dict[tuple[str, str], dict[str, Any]] = {
    ("exec", "command"): {"command": ""},
    ("exec", "timeout_s"): {"command": "true", "timeout_s": 0},
    ("exec", "shell"): {"command": "true", "shell": "zsh"},
    ("read", "path"): {},
    ("read", "max_bytes"): {"path": "x", "max_bytes": 1 << 40},
    ("write", "content"): {"path": "x", "content": "!", "encoding": "base64"},
    ("write", "encoding"): {"path": "x", "content": "", "encoding": "rot13"},
}


@pytest.mark.parametrize(("verb", "field"), BAD)
def test_a_malformed_call_of_a_session_is_refused_by_field(verb: str, field: str, session: Session) -> None:
    reply = session.call(verb, **BAD[verb, field])
    assert (reply.status_code, reply.json()["error"]["field"]) == (422, field)


BAD_OPENINGS: dict[str, dict[str, Any]] = {
    "model_patch": {"model_patch": "x"},
    "repo": {"repo": "nowhere"},
    "base_commit": {"base_commit": "0" * 40},
    "FAIL_TO_PASS": {"FAIL_TO_PASS": ["tests/test_nowhere.py::test_add"]},
    "environment": {"environment": "nope"},
    "idle_ttl_s": {"idle_ttl_s": -1},
}


@pytest.mark.parametrize("field", BAD_OPENINGS)
def test_a_session_that_cannot_be_opened_is_refused_by_field(
    field: str, http: httpx.Client, project: Any, body: Any
) -> None:
    reply = http.post("/session", json={**body(project.task(), ""), **BAD_OPENINGS[field]})
    assert (reply.status_code, reply.json()["error"]["field"]) == (422, field)


def test_sessions_end_with_their_server(project: Any, body: Any, tmp_path: Path) -> None:
    for number, how in enumerate(("stop", "kill")):
        handle = start_server(tmp_path / f"root{number}")
        with httpx.Client(base_url=handle.url, timeout=60.0, trust_env=False) as http:
            session = Session(http, body(project.task(), ""))
            session.exec("setsid sleep 86426 >/dev/null 2>&1 &")
            wait_until(lambda: processes_with("86426"))
        if how == "kill":
            handle.process.kill()
        handle.stop()
        wait_until(lambda: not processes_with("86426"))
