"""A Ray cluster of several nodes on this machine, in a process and a folder of its own.

`RayCluster` starts it, adds nodes, loses one as a machine is lost, and ends everything it started, found
by a mark in their environment: Ray's agents may outlive their raylet.
"""

from __future__ import annotations

import json
import os
import secrets
import shutil
import signal
import subprocess
import sys
import tempfile
import time
import uuid
from collections.abc import Sequence
from pathlib import Path
from types import TracebackType
from typing import Any, NamedTuple

_MARK = "DOCKYARD_TEST_CLUSTER"
_NODE = "DOCKYARD_TEST_NODE"


class Spec(NamedTuple):
    """One node."""

    name: str
    cpus: int
    roles: tuple[str, ...] = ()
    environment_roles: tuple[str, ...] | None = None
    """What its DOCKYARD_FLEET_ROLE says; None = the same as its labels."""


HEAD = Spec("head", 0)
ONE_PER_ROLE = (Spec("t", 2, ("trainer",)), Spec("i", 2, ("inference",)), Spec("s", 2, ("sandbox",)))


class RayCluster:
    """A head and further nodes; the address is for ``cluster.address``."""

    def __init__(self, nodes: Sequence[Spec] = ONE_PER_ROLE, *, head: Spec = HEAD, demands_token: bool = False) -> None:
        self.mark = uuid.uuid4().hex
        self.credentials = {"RAY_AUTH_MODE": "disabled"}
        """Environment variables that a driver needs."""
        if demands_token:
            self.credentials = {"RAY_AUTH_MODE": "token", "RAY_AUTH_TOKEN": secrets.token_hex(32)}
        self._folder = Path(tempfile.mkdtemp(prefix="ray-"))  # short: Ray puts sockets below it
        environment = {name: value for name, value in os.environ.items() if name != "PYTHONDONTWRITEBYTECODE"}
        environment |= {
            _MARK: self.mark,
            "RAY_TMPDIR": str(self._folder),
            "RAY_ENABLE_UV_RUN_RUNTIME_ENV": "0",
            "RAY_USAGE_STATS_ENABLED": "0",
            "RAY_worker_niceness": "0",
            "SPT_NOENV": "1",  # a process title must not overwrite the environment, by which we know our own
            "HF_HUB_OFFLINE": "1",
            **self.credentials,
        }
        self._log = (self._folder / "cluster.log").open("wb")
        self._process = subprocess.Popen(
            [sys.executable, __file__],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self._log,
            env=environment,
            cwd=self._folder,
            start_new_session=True,
            text=True,
        )
        try:
            self.address: str = self._ask("add", *head)
            for node in nodes:
                self.add(node)
        except BaseException:
            self.stop()
            raise

    def add(self, node: Spec) -> None:
        """Start a node and wait until the cluster knows it."""
        self._ask("add", *node)

    def alive(self) -> list[str]:
        """Names of the nodes that the cluster holds for living."""
        names: list[str] = self._ask("alive")
        return sorted(names)

    def lose(self, name: str, timeout_s: float = 60) -> None:
        """Kill every process of a node at once and wait until the cluster has noticed."""
        for pid in self.pids(name):
            _kill(pid)
        deadline = time.monotonic() + timeout_s
        while name in self.alive():
            assert time.monotonic() < deadline, f"{name} still counts as alive"
            time.sleep(0.2)

    def pids(self, node: str | None = None) -> list[int]:
        """Process ids of this cluster, or of one of its nodes."""
        wanted = {f"{_MARK}={self.mark}".encode()} | ({f"{_NODE}={node}".encode()} if node else set())
        found = []
        for entry in Path("/proc").iterdir():
            if not entry.name.isdigit():
                continue
            try:
                environment = set((entry / "environ").read_bytes().split(b"\0"))
                state = (entry / "stat").read_text().rpartition(")")[2].split()[0]
            except OSError:  # gone meanwhile, or another user's
                continue
            if wanted <= environment and state != "Z":
                found.append(int(entry.name))
        return found

    def commands(self, words: str, node: str | None = None) -> list[str]:
        """Command lines with ``words``, of the cluster or of one of its nodes."""
        lines = []
        for pid in self.pids(node):
            try:
                line = Path(f"/proc/{pid}/cmdline").read_bytes().replace(b"\0", b" ").decode(errors="replace")
            except OSError:
                continue
            if words in line:
                lines.append(line.strip())
        return lines

    def stop(self, timeout_s: float = 60) -> list[int]:
        """End the cluster; returns what had to be killed one by one. Afterwards nothing of it is left."""
        assert self._process.stdin is not None
        self._process.stdin.close()  # the signal to shut down
        try:
            self._process.wait(timeout_s)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
        killed: list[int] = []
        deadline = time.monotonic() + timeout_s
        while left := self.pids():
            assert time.monotonic() < deadline, f"cannot be ended: {left}"
            for pid in left:
                _kill(pid)
            killed += [pid for pid in left if pid not in killed]
            time.sleep(0.1)
        self._log.close()
        shutil.rmtree(self._folder, ignore_errors=True)
        return killed

    def _ask(self, *words: Any) -> Any:
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._process.stdin.write(json.dumps(words) + "\n")
        self._process.stdin.flush()
        line = self._process.stdout.readline()
        assert line, (self._folder / "cluster.log").read_text(errors="replace")[-3000:]
        return json.loads(line)

    def __enter__(self) -> RayCluster:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.stop()


def _kill(pid: int) -> None:
    try:
        os.kill(pid, signal.SIGKILL)
    except ProcessLookupError:
        pass


def _serve() -> None:
    """The child: answers one JSON line per command until stdin ends, then takes the cluster down."""
    from ray.cluster_utils import Cluster

    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # Ray prints
    cluster = Cluster(shutdown_at_exit=True)
    for line in sys.stdin:
        command, *values = json.loads(line)
        if command == "add":
            name, cpus, roles, environment_roles = values
            said = roles if environment_roles is None else environment_roles
            variables = {_NODE: name} | ({"DOCKYARD_FLEET_ROLE": ",".join(said)} if said else {})
            is_head = cluster.head_node is None
            cluster.add_node(
                num_cpus=cpus,
                node_name=name,
                labels={f"dockyard/{role}": "true" for role in roles},
                env_vars=variables,
                include_dashboard=False,
                **({"_system_config": {"max_direct_call_object_size": 8 << 10}} if is_head else {}),
            )
            answer: Any = cluster.address
        else:
            answer = [node["NodeName"] for node in cluster.global_state.node_table() if node["Alive"]]
        answers.write(json.dumps(answer) + "\n")
        answers.flush()
    cluster.shutdown()


if __name__ == "__main__":
    _serve()
