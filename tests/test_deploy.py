"""What is deployed: every file parses, and every path, option and version that it names exists. No engine runs here."""

from __future__ import annotations

import ctypes
import json
import platform
import re
import shlex
import shutil
import subprocess
import sys
import tomllib
from argparse import Namespace
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml

from dockyard_sandbox.cli import _parser as sandbox_parser
from dockyard_sandbox.isolation import SANDBOX_UID
from dockyard_sandbox.jail import seccomp, syscalls
from dockyard_sandbox.jail.plain import NUM_UIDS

ROOT = Path(__file__).resolve().parent.parent
DEPLOY = ROOT / "deploy"
PAGE = ROOT / "docs/deployment/standalone-sandbox.md"
CONTAINERFILE = DEPLOY / "ubuntu-swe/Containerfile"
CONSTRAINTS = DEPLOY / "ubuntu-swe/constraints.txt"
UNIT = DEPLOY / "systemd/dockyard-sandbox.service"
INSTALL = DEPLOY / "systemd/install.sh"
MANIFEST = DEPLOY / "kubernetes/sandbox.yaml"
PROFILE = DEPLOY / "apparmor/dockyard-sandbox"
VENV, STATE = "/opt/dockyard-sandbox", "/var/lib/dockyard-sandbox"
# what the executor calls outside of a run's own filter, although that filter refuses it inside
NEEDED = {"mount", "umount2", "mount_setattr", "pivot_root", "unshare", "memfd_create", "chroot", "shmget"}
# numbers of what deploy/seccomp.json refuses beyond the filter of a run
NUMBERS = {
    "x86_64": {
        "acct": 163, "clock_settime": 227, "create_module": 174, "fanotify_init": 300, "ioperm": 173, "iopl": 172,
        "lookup_dcookie": 212, "nfsservctl": 180, "quotactl": 179, "quotactl_fd": 443, "settimeofday": 164,
        "syslog": 103, "vhangup": 153,
    },
    "aarch64": {
        "acct": 89, "clock_settime": 112, "fanotify_init": 262, "lookup_dcookie": 18, "nfsservctl": 42, "quotactl": 60,
        "quotactl_fd": 443, "settimeofday": 170, "syslog": 116, "vhangup": 58,
    },
}  # fmt: skip


def understood(words: list[str]) -> Namespace:
    """What the sandbox's own parser makes of a command line."""
    try:
        return sandbox_parser().parse_args(words)
    except SystemExit as error:
        raise AssertionError(f"dockyard-sandbox {shlex.join(words)} is not understood") from error


def is_bash(script: str) -> None:
    done = subprocess.run(["bash", "-n", "-c", script], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr


# ---- the image


def instructions() -> list[tuple[str, str]]:
    lines = [line for line in CONTAINERFILE.read_text().splitlines() if not line.startswith("#")]
    joined = re.sub(r"\\\n", "", "\n".join(lines))
    return [(word, rest.strip()) for word, _, rest in (line.partition(" ") for line in joined.splitlines() if line)]


def of_image(word: str) -> list[str]:
    return [rest for name, rest in instructions() if name == word]


def locked_versions() -> dict[str, str]:
    """Name to version of everything that the wheel installs, out of the lock."""
    packages = {package["name"]: package for package in tomllib.loads((ROOT / "uv.lock").read_text())["package"]}
    found: dict[str, str] = {}
    todo = ["dockyard-sandbox"]
    while todo:
        package = packages[todo.pop()]
        if package["name"] not in found:
            found[package["name"]] = package["version"]
            todo += [one["name"] for one in package.get("dependencies", [])]
    return {name: version for name, version in found.items() if not name.startswith("dockyard-")}


def test_the_image_installs_the_versions_of_the_lock() -> None:
    lines = [line for line in CONSTRAINTS.read_text().splitlines() if not line.startswith("#")]
    assert dict(line.split("==") for line in lines) == locked_versions()
    names = [line.partition("==")[0] for line in lines]
    assert names == sorted(names)


def test_the_commands_of_the_image_are_understood() -> None:
    *tini, program = json.loads(of_image("ENTRYPOINT")[0])
    (command,) = of_image("CMD")
    assert (tini, program) == (["/usr/bin/tini", "--"], f"{VENV}/bin/dockyard-sandbox")
    arguments = understood(json.loads(command))
    assert (str(arguments.root), arguments.min_isolation) == (STATE, "namespaces")
    assert of_image("VOLUME") == [STATE]
    assert of_image("EXPOSE") == [str(arguments.port)]
    assert f":{arguments.port}/healthz" in of_image("HEALTHCHECK")[0]


def test_what_the_image_copies_exists_and_is_in_its_context() -> None:
    ignored = (DEPLOY / "ubuntu-swe/Containerfile.dockerignore").read_text().splitlines()
    allowed = [line[1:] for line in ignored if line.startswith("!")]
    copied = [rest.split()[0] for rest in of_image("COPY") if not rest.startswith("--from")]
    assert [path for path in copied if not (ROOT / path).exists()] == []
    assert sorted(copied) == sorted(allowed)
    assert [rest for rest in of_image("COPY") if rest.startswith("--from")] == [f"--from=build {VENV} {VENV}"]


def test_the_image_has_what_the_executor_calls() -> None:
    for script in of_image("RUN"):
        is_bash(script)
    last = of_image("RUN")[[rest.startswith("apt-get") for rest in of_image("RUN")].index(True, 1)]
    assert {"bubblewrap", "ca-certificates", "git", "patch", "python3", "tini"} <= set(last.split())


# ---- systemd


def unit() -> dict[str, list[str]]:
    text = re.sub(r"\\\n", "", UNIT.read_text())
    found: dict[str, list[str]] = {}
    for line in text.splitlines():
        if line and line[0] not in "#[":
            name, _, value = line.partition("=")
            found.setdefault(name, []).append(value)
    return found


def test_the_command_of_the_unit_is_understood() -> None:
    (start,) = unit()["ExecStart"]
    program, *words = shlex.split(start)
    arguments = understood(words)
    assert program == f"{VENV}/bin/dockyard-sandbox"
    assert str(arguments.root) == f"/var/lib/{unit()['StateDirectory'][0]}" == STATE
    assert arguments.min_isolation == "namespaces"
    name, _, source = unit()["LoadCredential"][0].partition(":")
    assert str(arguments.token_file) == f"${{CREDENTIALS_DIRECTORY}}/{name}"
    assert f"token={source}\n" in INSTALL.read_text()


def test_the_unit_hides_nothing_that_a_run_is_made_of() -> None:
    """A mount over a part of /proc, for one, keeps every user namespace from mounting its own."""
    harmful = {"ProtectProc", "ProtectKernelTunables", "ProtectKernelLogs", "ProtectControlGroups", "ProtectHostname"}
    harmful |= {"RestrictNamespaces", "SystemCallFilter", "RestrictSUIDSGID", "MemoryDenyWriteExecute", "PrivateUsers"}
    assert harmful & set(unit()) == set()
    assert [name for name in harmful - {"PrivateUsers"} if name not in UNIT.read_text()] == []


def test_systemd_verifies_the_unit() -> None:
    if shutil.which("systemd-analyze") is None:
        pytest.skip("no systemd-analyze here")
    done = subprocess.run(["systemd-analyze", "verify", UNIT], capture_output=True, text=True, check=False)
    missing = f"Command {VENV}/bin/dockyard-sandbox is not executable: No such file or directory"
    assert [line for line in done.stderr.splitlines() if missing not in line] == []


def test_the_installation_names_files_that_exist() -> None:
    script = INSTALL.read_text()
    is_bash(script)
    named = set(re.findall(r"(?<![\w/.])(?:\./)?((?:deploy|docs|packages)/[\w./-]+)", script))
    assert len(named) >= 7
    assert [path for path in named if not (ROOT / path).exists()] == []
    assert "/usr/share/doc/dockyard-sandbox/standalone-sandbox.md" in unit()["Documentation"][0]
    assert "/usr/share/doc/dockyard-sandbox/standalone-sandbox.md" in script
    users = (DEPLOY / "systemd/dockyard-sandbox.sysusers.conf").read_text()
    assert shlex.split(users) == ["u", unit()["User"][0], "-", "Dockyard sandbox", STATE]


# ---- AppArmor


def test_the_profile_grants_user_namespaces_under_the_name_that_is_asked_for() -> None:
    text = PROFILE.read_text()
    (name,) = re.findall(r"^profile (\S+) flags=\(unconfined\) \{$", text, flags=re.M)
    assert unit()["AppArmorProfile"] == [f"-{name}"]
    assert f"localhostProfile: {name}}}" in MANIFEST.read_text()
    assert f"apparmor={name}" in PAGE.read_text()
    rules = re.sub(r"^\s*#.*$", "", text, flags=re.M)
    assert re.search(r"\{\s*userns,", rules)


def test_apparmor_reads_the_profile() -> None:
    parser = shutil.which("apparmor_parser")
    if parser is None:
        pytest.skip("no apparmor_parser here")
    subprocess.run([parser, "--skip-kernel-load", "--skip-cache", PROFILE], check=True)


# ---- seccomp


def denied_names() -> set[str]:
    profile = json.loads((DEPLOY / "seccomp.json").read_text())
    assert set(profile) == {"defaultAction", "syscalls"}
    assert profile["defaultAction"] == "SCMP_ACT_ALLOW"
    assert {group["action"] for group in profile["syscalls"]} == {"SCMP_ACT_ERRNO"}
    assert {key for group in profile["syscalls"] for key in group} == {"comment", "names", "action"}
    names = [name for group in profile["syscalls"] for name in group["names"]]
    assert len(names) == len(set(names))
    return set(names)


@pytest.mark.parametrize("machine", NUMBERS)
def test_the_filter_of_a_container_refuses_what_a_run_may_not_and_the_executor_does_not(machine: str) -> None:
    inside = {*seccomp._DENIED[machine], *seccomp._DENIED_EVERYWHERE}
    assert inside >= NEEDED
    assert denied_names() & NEEDED == set()
    assert denied_names() >= inside - NEEDED


def container_filter() -> bytes:
    """The program that an engine makes of the profile here; names that this machine does not have are left out."""
    machine = platform.machine()
    numbers = {**seccomp._DENIED[machine], **seccomp._DENIED_EVERYWHERE, **NUMBERS[machine]}
    assert machine != "x86_64" or denied_names() <= set(numbers)
    program = [seccomp._op(seccomp._LOAD, seccomp._OFFSET_NUMBER)]
    for number in sorted(numbers[name] for name in denied_names() & set(numbers)):
        program += [seccomp._op(seccomp._JUMP_EQ, number, 0, 1), seccomp._op(seccomp._RETURN, seccomp._ERRNO | 1)]
    return b"".join([*program, seccomp._op(seccomp._RETURN, seccomp._ALLOW)])


def inside_the_filter() -> Callable[[], None]:
    """What puts a child process behind the profile."""
    program = container_filter()
    buffer = ctypes.create_string_buffer(program, len(program))

    class Program(ctypes.Structure):
        _fields_ = [("length", ctypes.c_ushort), ("instructions", ctypes.c_void_p)]

    header = Program(len(program) // 8, ctypes.addressof(buffer))

    def install(keeps: object = buffer) -> None:
        syscalls.prctl(syscalls.PR_SET_NO_NEW_PRIVS, 1)
        libc = ctypes.CDLL(None, use_errno=True)
        code = libc.prctl(seccomp.PR_SET_SECCOMP, seccomp.SECCOMP_MODE_FILTER, ctypes.byref(header), 0, 0)
        if code:
            raise OSError(ctypes.get_errno(), "seccomp filter refused")

    return install


def test_the_executor_has_namespaces_behind_the_filter(tmp_path: Path) -> None:
    if platform.machine() not in NUMBERS:
        pytest.skip(f"no numbers of {platform.machine()}")
    refused = "import ctypes; print(ctypes.CDLL(None).syscall({keyctl}, 0, 0, 0, 0, 0))"
    code = refused.format(keyctl=seccomp._DENIED[platform.machine()]["keyctl"])
    done = subprocess.run(
        [sys.executable, "-c", code], preexec_fn=inside_the_filter(), capture_output=True, text=True, check=True
    )
    assert done.stdout == "-1\n"
    serve = [sys.executable, "-P", "-m", "dockyard_sandbox.cli", "serve", "--port", "0", "--root", str(tmp_path / "r")]
    server = subprocess.Popen(
        [*serve, "--workers", "1"], preexec_fn=inside_the_filter(), stdout=subprocess.PIPE, text=True
    )
    try:
        assert server.stdout is not None
        assert server.stdout.readline().endswith("isolation=namespaces\n")
        server.terminate()
        assert server.wait(60) == 0
    finally:
        server.kill()
        server.wait()


# ---- Kubernetes


def objects() -> dict[str, Any]:
    found = list(yaml.safe_load_all(MANIFEST.read_text()))
    assert [one["kind"] for one in found] == ["Namespace", "Service", "Deployment"]
    assert {one["metadata"].get("namespace", one["metadata"]["name"]) for one in found} == {"dockyard-sandbox"}
    return {one["kind"]: one for one in found}


def test_the_manifest_is_one_server_that_is_replaced_and_not_doubled() -> None:
    deployment = objects()["Deployment"]["spec"]
    assert (deployment["replicas"], deployment["strategy"]) == (1, {"type": "Recreate"})
    labels = deployment["template"]["metadata"]["labels"]
    assert deployment["selector"]["matchLabels"] == labels == objects()["Service"]["spec"]["selector"]


def test_the_command_of_the_pod_is_understood_and_fits_its_limits() -> None:
    pod = objects()["Deployment"]["spec"]["template"]["spec"]
    (container,) = pod["containers"]
    limits = container["resources"]["limits"]
    (variable,) = container["env"]
    assert variable["valueFrom"] == {"resourceFieldRef": {"resource": "limits.cpu"}}
    words = [word.replace(f"$({variable['name']})", limits["cpu"]) for word in container["args"]]
    arguments = understood(words)
    (port,) = container["ports"]
    assert port["containerPort"] == arguments.port == objects()["Service"]["spec"]["ports"][0]["port"]
    assert {container[probe]["httpGet"]["port"] for probe in ("readinessProbe", "livenessProbe")} == {port["name"]}
    mounted = {mount["name"]: mount["mountPath"] for mount in container["volumeMounts"]}
    assert set(mounted) == {volume["name"] for volume in pod["volumes"]}
    assert mounted["state"] == str(arguments.root) == STATE
    assert str(arguments.token_file.parent) == mounted["token"]
    gib = (arguments.workers + arguments.max_sessions) * (2048 + 256) / 1024
    assert gib < int(limits["memory"].removesuffix("Gi")) < gib + 5


def test_the_pod_may_do_what_a_run_is_made_of() -> None:
    pod = objects()["Deployment"]["spec"]["template"]["spec"]
    context = pod["containers"][0]["securityContext"]
    assert (pod["hostUsers"], pod["automountServiceAccountToken"]) == (False, False)
    assert context["procMount"] == "Unmasked"
    assert context["seccompProfile"] == context["appArmorProfile"] == {"type": "Unconfined"}
    assert "capabilities" not in context  # the usual ones map users, and none more is needed
    enforced = objects()["Namespace"]["metadata"]["labels"]["pod-security.kubernetes.io/enforce"]
    assert enforced == "privileged"
    assert SANDBOX_UID + NUM_UIDS < 65_536  # the ids of a pod's user namespace


# ---- the page


def fragments() -> Iterator[str]:
    for _, language, text in re.findall(r"^(`{3,})(text|bash|console)\n(.*?)^\1$", PAGE.read_text(), flags=re.M | re.S):
        yield re.sub(r"^\$ ", "", text, flags=re.M) if language == "console" else text


def commands(program: str) -> list[list[str]]:
    lines = [line for text in fragments() for line in text.replace("\\\n", " ").splitlines()]
    return [shlex.split(line, comments=True) for line in lines if line.split()[:1] == [program]]


def test_the_commands_of_the_page_are_shell_and_name_files_that_exist() -> None:
    for text in fragments():
        is_bash(text)
    named = set(re.findall(r"(?<![\w/])deploy/[\w./-]*\w", PAGE.read_text()))
    assert {"deploy/seccomp.json", "deploy/kubernetes/sandbox.yaml", "deploy/systemd/install.sh"} <= named
    assert [path for path in named if not (ROOT / path).exists()] == []


@pytest.mark.parametrize("engine", ["docker", "podman"])
def test_a_container_of_the_page_is_private_and_may_do_what_a_run_is_made_of(engine: str) -> None:
    (words,) = (words for words in commands(engine) if words[1] == "run")
    options = {words[at + 1] for at, word in enumerate(words) if word == "--security-opt"}
    unmasked = {"docker": "systempaths=unconfined", "podman": "unmask=ALL"}[engine]
    assert {"seccomp=deploy/seccomp.json", unmasked} <= options
    assert ("apparmor=unconfined" in options) == (engine == "docker")
    assert words[words.index("-p") + 1].startswith("127.0.0.1:9090:")
    assert any(word.endswith(f":{STATE}") for word in words)
    assert "--privileged" not in words
    if engine == "docker":  # its root is the host's, and would have an unmasked /proc/sys
        owner = re.search(r"install -d -m 0755 -o (\d+)", CONTAINERFILE.read_text())
        assert owner is not None
        assert words[words.index("--user") + 1] == owner[1]
        assert not SANDBOX_UID <= int(owner[1]) <= SANDBOX_UID + NUM_UIDS
    (build,) = (words for words in commands(engine) if words[1] == "build")
    assert build[build.index("-f") + 1] == str(CONTAINERFILE.relative_to(ROOT))


ELSEWHERE = {"--security-opt", "--cpus", "--memory", "--user", "--compile-bytecode", "--reject"}


def test_every_option_that_the_page_names_is_one() -> None:
    options = set(re.findall(r"`(--[a-z-]+)", PAGE.read_text()))
    own = (ROOT / "packages/dockyard-sandbox/src/dockyard_sandbox/cli.py").read_text()
    assert {"--min-isolation", "--repos-from", "--workers"} <= options
    assert [option for option in sorted(options - ELSEWHERE) if f'"{option}"' not in own] == []
