"""Start the server: checks first, then one ready line, then work, then an orderly end."""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import ipaddress
import os
import shutil
import signal
import socket
import subprocess
import sys
from collections.abc import AsyncIterator, Callable, Iterator
from dataclasses import dataclass
from importlib.util import cache_from_source, find_spec
from pathlib import Path

import uvicorn
from starlette.applications import Starlette

from dockyard_core import ConfigError
from dockyard_sandbox import janitor
from dockyard_sandbox.app import Api
from dockyard_sandbox.apply import Applier
from dockyard_sandbox.cancellation import Cancellation
from dockyard_sandbox.executor import Executor
from dockyard_sandbox.gitcmd import write_git_config
from dockyard_sandbox.isolation import Isolation, candidates, own_environment
from dockyard_sandbox.jailer import Jailer, Workload
from dockyard_sandbox.judge import RunResult
from dockyard_sandbox.prepare import Preparer
from dockyard_sandbox.repos import RepoStore
from dockyard_sandbox.trees import TreeStore
from dockyard_sandbox.wire import Limits

_PROBE = "import os\n\n\ndef test_probe():\n    assert os.getcwd()\n"
_GRACE_S = 1.0  # what runs in flight get to finish after a stop signal
_SHUTDOWN_S = 10
_KEEP_ALIVE_S = 75  # longer than any client keeps an idle connection, so that none is cut in use


@dataclass(frozen=True, kw_only=True)
class ServeConfig:
    """What ``dockyard-sandbox serve`` is told."""

    root: Path
    host: str = "127.0.0.1"
    port: int = 0
    token: str | None = None
    min_isolation: str | None = None
    """None = the strongest level that the probe finds; it is never ``unsafe``."""
    workers: int = dataclasses.field(default_factory=lambda: os.cpu_count() or 1)
    max_queue: int = 1024
    dies_with_parent: bool = False

    def __post_init__(self) -> None:
        if self.workers < 1:
            raise ConfigError(f"--workers must be >= 1, got {self.workers}")
        if set(str(self.root)) & set(":,\\"):
            raise ConfigError(f"--root must have no ':', ',' or backslash (mount options), got {str(self.root)!r}")
        if self.token is None and not _is_loopback(self.host):
            raise ConfigError(f"--host {self.host} is public and needs --token-file; or bind 127.0.0.1")


def _is_loopback(host: str) -> bool:
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"


@contextlib.contextmanager
def executor_on(config: ServeConfig) -> Iterator[Executor]:
    """Build an executor on ``config.root`` and remove its scratch directory at the end.

    Raises ConfigError when the machine gives less than the minimum isolation, or no git or pytest.
    """
    if shutil.which("git", path="/usr/local/bin:/usr/bin:/bin") is None:
        raise ConfigError("git must be installed in /usr/bin or /usr/local/bin, found none")
    root = config.root.resolve()
    root.mkdir(parents=True, exist_ok=True)
    janitor.sweep(root)
    scratch = janitor.create_scratch(root)
    try:
        jailer = find_jailer(scratch, config.min_isolation)
        git = write_git_config(scratch / "gitconfig")
        repos = RepoStore(root, git)
        trees = TreeStore(root, git, owner_uid=jailer.isolation.uid or None)
        level = jailer.isolation.level
        preparer = Preparer(git, repos, trees, Applier(git, scratch), level, installed=jailer.environment.modules)
        yield Executor(
            repos=repos,
            preparer=preparer,
            jailer=jailer,
            isolation=level,
            workers=config.workers,
            max_queue=config.max_queue,
        )
    finally:
        shutil.rmtree(scratch, ignore_errors=True)


def find_jailer(scratch: Path, minimum: str | None) -> Jailer:
    """Probe the levels, strongest first, with a real run. Raises ConfigError."""
    try:
        environment = own_environment()
    except ModuleNotFoundError as error:
        raise ConfigError(str(error)) from error
    tree = scratch / "probe"
    tree.mkdir()
    (tree / "test_probe.py").write_text(_PROBE)
    _compile_pytest(tree)
    levels = candidates()
    if minimum == "unsafe":
        levels.append(Isolation(level="unsafe", tree="copy", seccomp=False, uid=0))
    reasons: dict[str, str] = {}
    for isolation in levels:
        jailer = Jailer(scratch, environment, isolation)
        failure = _probe(jailer, tree)
        if failure is None:
            if minimum is not None and not isolation.satisfies(minimum):
                jailer.close()
                break
            return jailer
        reasons.setdefault(isolation.level, failure)
        jailer.close()
    found = "; ".join(f"{level}: {reason}" for level, reason in reasons.items())
    raise ConfigError(f"isolation must be at least {minimum or 'bwrap'}, this machine refuses it ({found})")


def _probe(jailer: Jailer, tree: Path) -> str | None:
    work = Workload(
        lower=tree,
        files={"test_probe.py": (False, _PROBE.encode())},
        deleted=[],
        readonly=["test_probe.py"],
        pytest_arguments=["test_probe.py"],
        timeout_s=60.0,
        limits=Limits(),
    )
    run: RunResult = jailer.run(work, Cancellation())
    if run.end == "exited" and run.exit_code == 0:
        return None
    output = " ".join(run.output.decode(errors="replace").split())[-200:]
    return run.error or output or f"{run.end}, exit code {run.exit_code}"


def _compile_pytest(tree: Path) -> None:
    """Let pytest write its byte code once: inside the sandbox nothing can, and every run would pay."""
    spec = find_spec("_pytest.main")
    if spec is not None and spec.origin and not Path(cache_from_source(spec.origin)).exists():
        command = [sys.executable, "-P", "-m", "pytest", "-q", "-p", "no:cacheprovider", "test_probe.py"]
        environment = {"PATH": os.defpath, "PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1"}
        subprocess.run(command, cwd=tree, env=environment, capture_output=True, check=False)


class _Server(uvicorn.Server):
    """uvicorn that announces itself, and whose end is an exit code rather than a signal."""

    def __init__(self, config: uvicorn.Config, on_ready: Callable[[], None], on_stop: Callable[[], None]) -> None:
        super().__init__(config)
        self._on_ready = on_ready
        self._on_stop = on_stop

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        await super().startup(sockets=sockets)
        self._on_ready()

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        loop = asyncio.get_running_loop()
        for number in (signal.SIGINT, signal.SIGTERM):
            loop.add_signal_handler(number, self._stop)
        yield

    def _stop(self) -> None:
        if not self.should_exit:
            self.should_exit = True
            asyncio.get_running_loop().call_later(_GRACE_S, self._on_stop)

    def stop_with(self, parent: int) -> None:
        """Stop in order when the process ``parent`` ends, however it ends."""
        loop, pidfd = asyncio.get_running_loop(), os.pidfd_open(parent)

        def ended() -> None:
            loop.remove_reader(pidfd)
            self._stop()

        loop.add_reader(pidfd, ended)


def serve(config: ServeConfig, announce: Callable[[str], None]) -> None:
    """Serve until SIGTERM or SIGINT. Raises ConfigError before anything is served."""
    parent = os.getppid()
    with _listen(config) as listener, executor_on(config) as executor:

        @contextlib.asynccontextmanager
        async def lifespan(app: Starlette) -> AsyncIterator[None]:
            if config.dies_with_parent:
                server.stop_with(parent)
            yield
            await executor.close()

        host, port = listener.getsockname()[:2]
        url = f"http://[{host}]:{port}" if ":" in host else f"http://{host}:{port}"
        api = Api(executor, config.token)
        uvicorn_config = uvicorn.Config(
            api.application(lifespan),
            loop="asyncio",
            log_level="error",
            access_log=False,
            lifespan="on",
            timeout_graceful_shutdown=_SHUTDOWN_S,
            timeout_keep_alive=_KEEP_ALIVE_S,
        )
        server = _Server(
            uvicorn_config,
            on_ready=lambda: announce(f"dockyard-sandbox ready {url} isolation={executor.isolation}"),
            on_stop=api.stop,
        )
        server.run(sockets=[listener])


def _listen(config: ServeConfig) -> socket.socket:
    family = socket.AF_INET6 if ":" in config.host else socket.AF_INET
    listener = socket.socket(family, socket.SOCK_STREAM)
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        listener.bind((config.host, config.port))
        listener.listen(2048)
    except OSError as error:
        listener.close()
        reason = error.strerror or str(error)
        raise ConfigError(
            f"cannot bind {config.host}:{config.port}: {reason}; choose another --port (0 picks one)"
        ) from error
    return listener
