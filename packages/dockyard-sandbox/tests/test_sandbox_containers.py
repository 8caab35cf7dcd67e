"""Servers in what a container is to a process: fewer capabilities, a masked /proc, a user namespace around it."""

from __future__ import annotations

import contextlib
import importlib.util
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx
import pytest

from dockyard_sandbox import ServerHandle
from dockyard_sandbox.isolation import REMEDIES, SANDBOX_UID
from dockyard_sandbox.jail import landlock, seccomp, syscalls

PYTHON, PLAIN_UID, FIRST_SUBUID = "/usr/bin/python3", 4243, 100_000
DOCKER = (
    *("chown", "dac_override", "fowner", "fsetid", "kill", "setgid", "setuid", "setpcap", "setfcap"),
    *("net_bind_service", "net_raw", "sys_chroot", "mknod", "audit_write"),
)
"""Capabilities of a container's root where nobody asked for more or less."""
MASK = 'set -e; mount --bind /proc/sys /proc/sys; mount -o remount,bind,ro /proc/sys; exec "$@"'
ATTACKS = (
    "forged records, then exit",
    "token from /proc",
    "process of the host",
    "files of the host",
    "root",
    "capability",
    "interpreter by /proc",
    "new user namespace",
    "mount",
    "daemon, with the fix",
)


def _attack_cases() -> Any:
    spec = importlib.util.spec_from_file_location("attack_cases", Path(__file__).with_name("attack_cases.py"))
    assert spec is not None
    assert spec.loader is not None
    module = sys.modules["attack_cases"] = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


attack_cases = _attack_cases()
CASES = {case.name: case for case in attack_cases.CASES}


@dataclass(frozen=True, kw_only=True)
class Place:
    """How a server is started."""

    prefix: list[str] = field(default_factory=list)
    before_exec: Callable[[], None] | None = None
    uid: int = 0
    """Whose the server's directory is, seen from here."""
    is_closed: bool = False
    """Whether only root can read what the server is made of; else it is the machine's own Python that runs it."""

    @contextlib.contextmanager
    def command(self) -> Iterator[tuple[list[str], dict[str, Any]]]:
        """The command line up to the server's options, and what `subprocess` needs besides."""
        if os.geteuid() != 0:
            pytest.skip("only root can start a server as somebody else")
        _skip_unless_it_runs([*self.prefix, "true"], self.before_exec)
        python, env = (sys.executable, dict(os.environ)) if self.is_closed else (PYTHON, _environment())
        with tempfile.TemporaryDirectory(prefix="dockyard-container-", dir="/tmp") as name:
            os.chown(name, self.uid, self.uid)
            Path(name).chmod(0o700 if self.is_closed else 0o755)
            command = [*self.prefix, python, "-P", "-m", "dockyard_sandbox.cli", "serve", "--port", "0"]
            yield [*command, "--root", f"{name}/root"], {"env": env, "cwd": "/", "preexec_fn": self.before_exec}

    @contextlib.contextmanager
    def serving(self) -> Iterator[ServerHandle]:
        with self.command() as (command, how), tempfile.TemporaryFile() as log:
            process = subprocess.Popen([*command, "--workers", "2"], stdout=subprocess.PIPE, stderr=log, **how)
            assert process.stdout is not None
            words = process.stdout.readline().decode().split()
            try:
                log.seek(0)
                assert words[:2] == ["dockyard-sandbox", "ready"], log.read()
                handle = ServerHandle(url=words[2], isolation=words[3].removeprefix("isolation="), process=process)
                yield handle
                assert handle.stop() == 0
            finally:
                process.kill()
                process.wait()

    def refusal(self, minimum: str) -> str:
        """What a server says that is to have ``minimum`` and cannot."""
        with self.command() as (command, how):
            ended = subprocess.run(
                [*command, "--min-isolation", minimum], check=False, capture_output=True, text=True, **how
            )
        assert ended.returncode == 2, ended
        assert ended.stderr.count("\n") == 1
        return str(ended.stderr)


def _skip_unless_it_runs(command: list[str], before_exec: Callable[[], None] | None = None) -> None:
    try:
        tried = subprocess.run(command, check=False, capture_output=True, preexec_fn=before_exec)
    except (OSError, subprocess.SubprocessError) as error:
        pytest.skip(f"this machine refuses {command[0]} ({before_exec}): {error}")
    if tried.returncode:
        pytest.skip(f"this machine refuses {command[0]}: {tried.stderr.decode()}")


def _environment() -> dict[str, str]:
    """What the machine's own Python needs to import this interpreter's packages."""
    names = ("pytest", "dockyard_core", "dockyard_sandbox")
    paths = [str(Path(sys.modules[name].__file__ or "").parent.parent) for name in names]
    env = {"PATH": "/usr/bin:/bin", "PYTHONPATH": ":".join(paths), "PYTHONDONTWRITEBYTECODE": "1"}
    check = f"import sys, pydantic_core, pytest; sys.exit(sys.version_info[:2] != {sys.version_info[:2]})"
    tried = subprocess.run(
        [PYTHON, "-P", "-c", check], env=env, check=False, cwd="/", user=PLAIN_UID, group=PLAIN_UID, capture_output=True
    )
    if tried.returncode:
        pytest.skip(f"{PYTHON} cannot import this interpreter's packages as another user")
    return env


def with_capabilities(names: Sequence[str]) -> list[str]:
    return ["setpriv", "--bounding-set", ",".join(["-all", *(f"+{name}" for name in names)]), "--inh-caps=-all"]


def behind_mask(command: list[str]) -> list[str]:
    return ["unshare", "--mount", "--propagation", "private", "sh", "-c", MASK, "sh", *command]


def _become_root_of_a_container() -> None:
    """In a user namespace of 65536 ids, none of which is root outside."""
    pid = os.getpid()
    entered_read, entered_write = os.pipe()
    if os.fork() == 0:
        os.close(entered_write)
        os.read(entered_read, 1)
        for kind in ("uid", "gid"):
            Path(f"/proc/{pid}/{kind}_map").write_text(f"0 {FIRST_SUBUID} 65536")
        os._exit(0)
    syscalls.unshare(syscalls.CLONE_NEWUSER | syscalls.CLONE_NEWNS)
    os.close(entered_write)
    os.wait()
    os.setgroups([])
    os.setresgid(0, 0, 0)
    os.setresuid(0, 0, 0)


def _refuse_namespaces() -> None:
    syscalls.prctl(syscalls.PR_SET_NO_NEW_PRIVS, 1)
    seccomp.install()


CONTAINERS = {
    "docker": Place(prefix=with_capabilities(DOCKER), is_closed=True),
    "docker, with SYS_ADMIN": Place(prefix=with_capabilities([*DOCKER, "sys_admin"]), is_closed=True),
    "rootless": Place(prefix=with_capabilities(DOCKER), before_exec=_become_root_of_a_container, uid=FIRST_SUBUID),
    "rootless, all capabilities": Place(before_exec=_become_root_of_a_container, uid=FIRST_SUBUID),
}


@pytest.fixture(scope="module")
def public(new_project: Any) -> Iterator[Any]:
    """The project where every user can read it."""
    with tempfile.TemporaryDirectory(prefix="dockyard-public-", dir="/tmp") as name:
        Path(name).chmod(0o755)
        yield new_project(Path(name) / "calc")


@pytest.fixture(scope="module", params=CONTAINERS)
def contained(request: pytest.FixtureRequest, judge: Any) -> Iterator[Any]:
    """Asks a server which is root of a container: its own mounts need a user namespace."""
    _skip_unless_it_runs(["unshare", "--user", "true"])
    with CONTAINERS[request.param].serving() as handle:
        yield type(judge)(handle)


def ready(handle: ServerHandle) -> dict[str, Any]:
    found: dict[str, Any] = httpx.get(f"{handle.url}/readyz", trust_env=False).json()
    return found


def test_the_root_of_a_container_gives_namespaces(contained: Any, public: Any) -> None:
    found = ready(contained.server)
    assert (found["isolation"], found["warm"]) == ("namespaces", True), found
    assert not [note for note in found["notes"] if "form" in note or "warm" in note]
    right, wrong = contained.all(public.task(), [public.gold(), public.patch({"calc/x.py": "x = 1\n"})])
    assert right.is_resolved
    assert wrong.status.value == "unresolved"


@pytest.mark.parametrize("name", ATTACKS)
def test_an_attack_in_a_container_gets_its_verdict(name: str, contained: Any, public: Any, body: Any) -> None:
    case = CASES[name]
    task = {**body(public.task(timeout_s=case.timeout_s), public.patch(case.files)), "limits": dict(case.limits)}
    reply = contained.post(task).json()
    assert reply["status"] in case.verdict, reply
    assert not case.gone or not processes_with(case.gone)


def test_a_run_in_a_container_is_never_its_root(contained: Any, public: Any, body: Any) -> None:
    """Root's files, such as the repositories and every other tree, are not those of the run's user."""
    hang = "import subprocess\n\nsubprocess.run(['sleep', '86461'])\n"
    task = body(public.task(timeout_s=300.0), public.patch({"calc/ops.py": hang}))
    task_id = contained.post(task, path="/task/submit?wait=false").json()["task_id"]
    (sleeper,) = wait_until(lambda: processes_with("86461"))
    outside = 0 if Path(f"/proc/{contained.server.pid}").stat().st_uid == 0 else FIRST_SUBUID
    assert Path(f"/proc/{sleeper}").stat().st_uid == outside + SANDBOX_UID
    status = Path(f"/proc/{sleeper}/status").read_text()
    assert {line.split()[1] for line in status.splitlines() if line.startswith("Cap")} == {"0" * 16}
    assert Path(f"/proc/{sleeper}/uid_map").read_text().split()[::2] == ["1000", "1"]
    httpx.delete(f"{contained.server.url}/task/{task_id}", trust_env=False).raise_for_status()
    wait_until(lambda: not processes_with("86461"))


def test_a_test_in_a_container_may_ask_its_own_server(contained: Any, public: Any) -> None:
    probe = (
        "import socket\nwith socket.create_server(('127.0.0.1', 0)) as own:\n"
        "    return socket.create_connection(own.getsockname(), 5)"
    )
    assert contained(public.task(), public.patch(attack_cases.conditional(probe))).is_resolved


def test_a_session_in_a_container_is_judged(contained: Any, public: Any, body: Any) -> None:
    opened = contained.post(body(public.task(), ""), path="/session").json()
    path = f"/session/{opened['session_id']}"
    command = "sed -i 's/a - b/a + b/' calc/ops.py; rm -r calc/__pycache__; mkdir new; id -u; cat /etc/shadow"
    done = contained.post({"command": command}, path=f"{path}/exec").json()
    assert done["output"].splitlines()[-2] == "1000", done
    assert contained.post({}, path=f"{path}/finish").json()["verdict"]["status"] == "resolved"


def _without(name: str) -> list[str]:
    return with_capabilities([one for one in DOCKER if one != name])


WEAKER = {
    "masked /proc": (Place(prefix=behind_mask(with_capabilities(DOCKER))), ("/proc/sys", "systempaths=unconfined")),
    "masked /proc, plain user": (
        Place(
            prefix=behind_mask(["setpriv", f"--reuid={PLAIN_UID}", f"--regid={PLAIN_UID}", "--clear-groups"]),
            uid=PLAIN_UID,
        ),
        ("/proc/sys", "unmask=ALL"),
    ),
    "no user namespaces": (
        Place(prefix=with_capabilities(DOCKER), before_exec=_refuse_namespaces),
        ("refuses user namespaces",),
    ),
    "no right to map users": (Place(prefix=_without("setfcap")), ("CAP_SETFCAP",)),
}


@pytest.mark.parametrize("what", WEAKER)
def test_a_weaker_level_says_what_a_stronger_one_would_need(what: str, public: Any, judge: Any) -> None:
    if landlock.abi() < landlock.MIN_ABI:
        pytest.skip(f"this kernel has Landlock ABI {landlock.abi()}: there is no weaker level")
    place, words = WEAKER[what]
    with place.serving() as handle:
        assert handle.isolation == "landlock"
        (why,) = (note for note in ready(handle)["notes"] if note.startswith("not namespaces"))
        assert [word for word in words if word not in why] == []
        assert type(judge)(handle)(public.task(), public.gold()).is_resolved


def test_a_server_that_must_not_be_weaker_says_what_to_change() -> None:
    place, words = WEAKER["masked /proc, plain user"]
    said = place.refusal("namespaces")
    assert [word for word in (*words, REMEDIES["namespaces"]) if word not in said] == []


def processes_with(text: str) -> list[int]:
    found = []
    for path in Path("/proc").glob("[0-9]*/cmdline"):
        with contextlib.suppress(OSError):
            if text.encode() in path.read_bytes():
                found.append(int(path.parent.name))
    return found


def wait_until(condition: Callable[[], Any]) -> Any:
    end = time.monotonic() + 60
    while not (found := condition()):
        assert time.monotonic() < end
        time.sleep(0.05)
    return found
