"""The server's side of the jail: two launcher processes, one call per run.

`Jailer.run` blocks its thread; the server calls it from its worker threads. The launchers end when
their sockets close, their runs end when their control pipes do, so a killed server leaves nothing.
"""

from __future__ import annotations

import json
import marshal
import os
import py_compile
import selectors
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from dockyard_sandbox.cancellation import Cancellation
from dockyard_sandbox.cgroups import ControlGroups
from dockyard_sandbox.environments import Environment, EnvironmentStore
from dockyard_sandbox.isolation import Isolation
from dockyard_sandbox.judge import RunResult
from dockyard_sandbox.launchers import cold_launcher, warm_launcher
from dockyard_sandbox.portable import portable
from dockyard_sandbox.wire import Limits

MAX_RECORD_BYTES = 32 * 1024 * 1024
_SETUP_S, _STOP_S = 120.0, 30.0  # past a run's deadline, in which its supervisor must have set it up and stopped it
NO_PLUGINS = "PYTEST_DISABLE_PLUGIN_AUTOLOAD"
_RUNNER_DIRECTORY = "/opt/dockyard"
_PACKAGE = Path(__file__).parent


@dataclass(frozen=True, kw_only=True)
class Workload:
    """What one run executes, on which tree."""

    lower: Path
    files: dict[str, tuple[bool, bytes]]
    """Path to (executable, content) written over the base tree."""
    deleted: list[str]
    readonly: list[str]
    pytest_arguments: list[str]
    timeout_s: float
    limits: Limits
    patch_file: str | None = None
    """One of ``files`` that GNU patch is to apply, instead of any test; the records say what it changed."""
    environment: str | None = None
    loads_all_plugins: bool = False
    """Whether pytest loads every plug-in that is installed beside it."""
    is_warm: bool = False
    """Forks an interpreter that has imported pytest, where the jailer has one: see `Jailer.has_warm_path`."""


class Jailer:
    """Owns the launcher processes and the compiled runner.

    Args:
        scratch: directory of this server.
        environment: the executor's own interpreter.
        isolation: the level of every run.
        groups: control groups for runs; None = none.
        environments: imported ones; None = none.
    """

    def __init__(
        self,
        scratch: Path,
        environment: Environment,
        isolation: Isolation,
        *,
        groups: ControlGroups | None = None,
        environments: EnvironmentStore | None = None,
    ) -> None:
        self.isolation = isolation
        self.environment = environment
        self.environments = environments
        self.groups = groups or ControlGroups()
        self._mount_point = scratch / "mnt"
        self._mount_point.mkdir(mode=0o755, exist_ok=True)
        self._programs = scratch / "runner"
        self._programs.mkdir(mode=0o755, exist_ok=True)
        for name in ("runner", "patcher"):
            source, compiled = _PACKAGE / f"{name}.py", self._programs / f"{name}.pyc"
            py_compile.compile(str(source), cfile=str(compiled), dfile=f"{name}.py", doraise=True)
            compiled.with_suffix(".py").write_text(portable(source.read_text()))  # for other versions of Python
        for path in self._programs.iterdir():
            path.chmod(0o644)
        self._cold = cold_launcher()
        self._warm = warm_launcher(
            environment,
            self._programs / "runner.pyc",
            run_environment(environment),
            namespaced=isolation.level == "namespaces",
        )
        self.is_warm = False
        """Whether runs may be warm; set once one has been seen to work."""

    def has_warm_path(self, environment: str | None) -> bool:
        """Whether a run in this environment can be warm: not in an image, whose interpreter would need our rights."""
        return self.is_warm and self._environment(environment) is self.environment

    def run(self, work: Workload, cancellation: Cancellation) -> RunResult:
        """Run one workload to its end. Raises OSError when the launcher cannot be started."""
        launcher = self._warm if work.is_warm else self._cold
        output_read, output_write = os.pipe()
        record_read, record_write = os.pipe()
        result_read, result_write = os.pipe()
        control_read, control_write = os.pipe()
        job = self.message_file(self._job(work))
        theirs = [job, output_write, record_write, result_write, control_read]
        ours = [output_read, record_read, result_read]
        cancellation.attach(control_write)
        try:
            try:
                launcher.send(theirs)
            finally:
                for fd in theirs:
                    os.close(fd)
            return _pump(ours, cancellation, work.limits.output_kb * 1024, work.timeout_s)
        finally:
            cancellation.release()
            for fd in ours:
                os.close(fd)

    def close(self) -> None:
        """End the launchers and wait for them, and remove the control groups."""
        for launcher in (self._cold, self._warm):
            launcher.close()
        self.groups.close()

    def message_file(self, message: dict[str, Any]) -> int:
        """A descriptor from which ``message`` can be read once, by another process."""
        try:
            fd = os.memfd_create("job")
        except PermissionError:  # a server inside a sandbox like ours
            with tempfile.TemporaryFile(dir=self._mount_point.parent) as temporary:
                fd = os.dup(temporary.fileno())
        with open(fd, "wb", closefd=False) as file:
            marshal.dump(message, file)
        os.lseek(fd, 0, os.SEEK_SET)
        return fd

    def job(self, *, lower: Path, limits: Limits, environment: str | None, timeout_s: float) -> dict[str, Any]:
        """What the jail is told of any run: see ``jail/main.py``. Raises UnknownEnvironment."""
        found = self._environment(environment)
        return {
            "level": self.isolation.level,
            "tree": self.isolation.tree,
            "seccomp": self.isolation.seccomp,
            "seccomp_fd": -1,
            "uid": self.isolation.uid,
            "user_namespace": self.isolation.user_namespace,
            "drop_to": self.isolation.uid if self.isolation.level == "landlock" else 0,
            "landlock": None,
            "bwrap": self.isolation.bwrap,
            "wrap": [],
            "cgroups": [(parent, list(names)) for parent, names in self.groups.parents],
            "cpus": limits.cpus,
            "is_session": False,
            "tmp": "/tmp",
            "rootfs": found.rootfs,
            "mount_point": str(self._mount_point),
            "binds": [*((path, path) for path in found.binds), (str(self._programs), _RUNNER_DIRECTORY)],
            "lower": str(lower),
            "files": {},
            "deleted": [],
            "readonly": [],
            "argv": [],
            "env": run_environment(found),
            "deadline_s": timeout_s,
            "memory_mb": limits.memory_mb,
            "pids": limits.pids,
            "disk_mb": limits.disk_mb,
        }

    def _environment(self, name: str | None) -> Environment:
        return self.environment if self.environments is None else self.environments.get(name)

    def _job(self, work: Workload) -> dict[str, Any]:
        is_moved = self.isolation.level in ("namespaces", "bwrap")
        name = "runner" if work.patch_file is None else "patcher"
        program = f"{_RUNNER_DIRECTORY if is_moved else self._programs}/{name}.pyc"
        # the fuzzy patch is applied by the host's interpreter, whatever the tests run with
        found = self._environment(work.environment if work.patch_file is None else None)
        configuration: dict[str, Any] = {"arguments": work.pytest_arguments, "import_paths": found.import_paths}
        if work.patch_file is not None:
            configuration = {"patch_file": work.patch_file}
        job = self.job(lower=work.lower, limits=work.limits, environment=work.environment, timeout_s=work.timeout_s)
        if work.loads_all_plugins:
            del job["env"][NO_PLUGINS]
        return {
            **job,
            "files": work.files,
            "deleted": work.deleted,
            "readonly": work.readonly,
            "argv": [*found.command(program), json.dumps(configuration)],
        }

    def send(self, fds: list[int]) -> None:
        """Give one job, named by its descriptors, to a launcher whose runs execute an interpreter. Raises OSError."""
        self._cold.send(fds)


def run_environment(environment: Environment) -> dict[str, str]:
    """The whole environment of a process that runs in ``environment``."""
    own = "" if environment.rootfs else f"{os.path.dirname(environment.python)}:"  # noqa: PTH120  a path inside
    return {
        "PATH": f"{own}/usr/local/bin:/usr/bin:/bin",
        "HOME": "/tmp",
        "TMPDIR": "/tmp",
        "LANG": "C.UTF-8",
        "PYTHONHASHSEED": "0",
        "PYTHONDONTWRITEBYTECODE": "1",
        # a thread per CPU of the machine, for each library, would fill the memory and process limits of a large one
        **dict.fromkeys(("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS"), "1"),
        NO_PLUGINS: "1",
        **environment.env,
    }


def _pump(fds: list[int], cancellation: Cancellation, max_output_bytes: int, timeout_s: float) -> RunResult:
    """Read a run's pipes to their ends; stop the run when it writes too much, or when its supervisor does not."""
    buffers = {fd: bytearray() for fd in fds}
    output, records, result = fds
    caps = {output: max_output_bytes, records: MAX_RECORD_BYTES, result: 1 << 20}
    over_limit = False
    ends = [time.monotonic() + timeout_s + _SETUP_S, time.monotonic() + timeout_s + _SETUP_S + _STOP_S]
    with selectors.DefaultSelector() as selector:
        for fd in fds:
            selector.register(fd, selectors.EVENT_READ)
        while selector.get_map() and ends:
            ready = selector.select(max(0.0, ends[0] - time.monotonic()))
            if not ready and time.monotonic() >= ends[0]:
                ends.pop(0)
                cancellation.release()
            for key, _ in ready:
                chunk = os.read(key.fd, 65536)
                if not chunk:
                    selector.unregister(key.fd)
                elif len(buffers[key.fd]) + len(chunk) <= caps[key.fd]:
                    buffers[key.fd] += chunk
                elif not over_limit:
                    over_limit = True
                    cancellation.release()  # closes the control pipe: the supervisor kills the run
    message: dict[str, Any] = marshal.loads(bytes(buffers[result])) if buffers[result] else {}
    status = message.get("wait_status")
    return RunResult(
        end="output_limit" if over_limit else message.get("end", "launcher_died"),
        exit_code=None if status is None else os.waitstatus_to_exitcode(status),
        output=bytes(buffers[output]),
        records=bytes(buffers[records]),
        start_s=message.get("start_s", 0.0),
        test_s=message.get("test_s", 0.0),
        cpu_s=message.get("cpu_s", 0.0),
        max_rss_kb=message.get("max_rss_kb", 0),
        error=message.get("error", ""),
    )
