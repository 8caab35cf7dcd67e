"""Every attack of the table gets its verdict, from a server of root and from one of a plain user."""

from __future__ import annotations

import importlib.util
import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from dockyard_sandbox import ServerHandle

_PLAIN_UID = 61_999
_TESTS = Path(__file__).parent


def _load(name: str) -> Any:
    spec = importlib.util.spec_from_file_location(name, _TESTS / f"{name}.py")
    assert spec is not None
    assert spec.loader is not None
    module = sys.modules[name] = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


attacks = _load("attack_cases")


def judged(case: Any, project: Any, judge: Any, body: Any) -> dict[str, Any]:
    patch = project.patch(case.files) if case.patch is None else case.patch(project)
    task = {**body(project.task(timeout_s=case.timeout_s), patch), "limits": dict(case.limits)}
    reply: dict[str, Any] = judge.post(task).json()
    return reply


def check(case: Any, reply: dict[str, Any]) -> None:
    assert reply["status"] in case.verdict, (reply["status"], reply["detail"], reply["flags"], reply["log"])
    assert not case.evidence or any(flag.startswith(case.evidence) for flag in reply["flags"]), reply["flags"]
    assert not case.gone or not processes_with(case.gone)


@pytest.mark.parametrize("case", attacks.CASES, ids=lambda case: case.name)
def test_an_attack_gets_its_verdict(case: Any, project: Any, judge: Any, body: Any) -> None:
    check(case, judged(case, project, judge, body))


def test_a_probe_that_succeeds_would_resolve(project: Any, judge: Any) -> None:
    """The control of the cases of the machine: they are unresolved because they fail, not because they are there."""
    assert judge(project.task(), project.patch(attacks.conditional("return True"))).is_resolved


def test_the_published_table_is_the_tested_one() -> None:
    page = attacks.PAGE.read_text()
    assert page == attacks.with_table(page), "run attack_cases.py --write"
    assert len({case.name for case in attacks.CASES}) == len(attacks.CASES)


@pytest.fixture(scope="module")
def public(new_project: Any) -> Iterator[Any]:
    """The project where every user can read it."""
    directory = Path(tempfile.mkdtemp(prefix="dockyard-public-"))
    directory.chmod(0o755)
    yield new_project(directory / "calc")
    shutil.rmtree(directory)


@pytest.fixture(scope="module")
def plain_judge(judge: Any, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Any]:
    """A server of a plain user, whoever runs the tests."""
    if os.geteuid() != 0:
        pytest.skip("the other tests ran as a plain user already; root cannot be had")
    root = Path(tempfile.mkdtemp(prefix="dockyard-plain-"))
    os.chown(root, _PLAIN_UID, _PLAIN_UID)
    command = [*_as_plain_user(root), sys.executable, "-P", "-m", "dockyard_sandbox.cli", "serve"]
    command += ["--port", "0", "--root", str(root), "--workers", "2", "--die-with-parent"]
    log = tmp_path_factory.mktemp("plain") / "log"
    with log.open("wb") as errors:
        process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=errors, cwd="/")
    assert process.stdout is not None
    words = process.stdout.readline().decode().split()
    try:
        if words[:2] != ["dockyard-sandbox", "ready"]:
            process.wait()
            pytest.skip(f"this kernel gives a plain user no sandbox: {log.read_text().strip()[-300:]}")
        handle = ServerHandle(url=words[2], isolation=words[3].removeprefix("isolation="), process=process)
        assert Path(f"/proc/{process.pid}").stat().st_uid == _PLAIN_UID
        yield type(judge)(handle)
        assert handle.stop() == 0
    finally:
        process.kill()
        process.wait()
        shutil.rmtree(root, ignore_errors=True)


def _as_plain_user(work: Path) -> list[str]:
    """A command line before the command that it runs as `_PLAIN_UID`.

    Where an interpreter lies in a directory that is closed to others, such as root's home, a private
    mount namespace shows the interpreter there, and nothing else.
    """
    needed = sorted({sys.base_prefix, sys.prefix, str(_TESTS.parents[2])})
    closed = next(
        (str(one) for path in needed for one in reversed(Path(path).parents) if not one.stat().st_mode & 1), ""
    )
    script = "set -e; "
    inside = [path for path in needed if closed and path.startswith(f"{closed}/")]
    for number, path in enumerate(inside):
        script += f"mkdir {work}/bind{number}; mount --bind '{path}' {work}/bind{number}; "
    if closed:
        script += f"mount -t tmpfs -o mode=755 none '{closed}'; "
    for number, path in enumerate(inside):
        script += f"mkdir -p '{path}'; mount --bind {work}/bind{number} '{path}'; umount {work}/bind{number}; "
    script += f'exec setpriv --reuid {_PLAIN_UID} --regid {_PLAIN_UID} --clear-groups "$@"'
    for tool in ("unshare", "setpriv"):
        if shutil.which(tool) is None:
            pytest.skip(f"{tool} is needed to start a server of a plain user")
    return ["unshare", "--mount", "--propagation", "private", "sh", "-c", script, "sh"]


@pytest.mark.ci
@pytest.mark.parametrize("case", attacks.CASES, ids=lambda case: case.name)
def test_an_attack_on_a_plain_users_server_gets_its_verdict(
    case: Any, public: Any, plain_judge: Any, body: Any
) -> None:
    check(case, judged(case, public, plain_judge, body))


def test_a_plain_users_server_resolves_and_refuses(public: Any, plain_judge: Any, body: Any) -> None:
    assert plain_judge(public.task(), public.gold()).is_resolved
    forged = next(case for case in attacks.CASES if case.name == "forged records, then exit")
    check(forged, judged(forged, public, plain_judge, body))


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
