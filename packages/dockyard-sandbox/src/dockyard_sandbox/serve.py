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
from collections.abc import AsyncIterator, Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import uvicorn
from starlette.applications import Starlette

from dockyard_core import ConfigError
from dockyard_sandbox import cgroups, janitor
from dockyard_sandbox.app import Api, Service
from dockyard_sandbox.apply import Applier
from dockyard_sandbox.environments import BadEnvironment, EnvironmentStore
from dockyard_sandbox.executor import Executor
from dockyard_sandbox.gitcmd import Git, write_git_config
from dockyard_sandbox.jailer import Jailer
from dockyard_sandbox.journal import Journal
from dockyard_sandbox.metrics import Metrics
from dockyard_sandbox.prepare import Preparer
from dockyard_sandbox.probing import find_jailer as find_jailer
from dockyard_sandbox.probing import probe_environment, try_warm_path
from dockyard_sandbox.queueing import Admission
from dockyard_sandbox.repos import RepoStore
from dockyard_sandbox.sessions import SessionStore
from dockyard_sandbox.tasks import TaskBoard, interrupted_reply
from dockyard_sandbox.tokens import Tokens
from dockyard_sandbox.trees import TreeStore

_GRACE_S = 1.0  # what runs in flight get to finish after a stop signal
_SHUTDOWN_S = 10
_KEEP_ALIVE_S = 75  # longer than any client keeps an idle connection, so that none is cut in use


@dataclass(frozen=True, kw_only=True)
class ServeConfig:
    """What ``dockyard-sandbox serve`` is told."""

    root: Path
    host: str = "127.0.0.1"
    port: int = 0
    tokens: Tokens | None = None
    min_isolation: str | None = None
    """None = the strongest level that the probe finds; it is never ``unsafe``."""
    workers: int = dataclasses.field(default_factory=lambda: os.cpu_count() or 1)
    max_queue: int = 1024
    max_sessions: int = 256
    repos_from: tuple[str, ...] = ()
    """Beginnings of the paths and URLs that tasks may name themselves; () = any."""
    warm: bool = True
    """Whether runs fork an interpreter that has imported pytest, where that is proven to make no difference."""
    dies_with_parent: bool = False

    def __post_init__(self) -> None:
        if self.workers < 1:
            raise ConfigError(f"--workers must be >= 1, got {self.workers}")
        if set(str(self.root)) & set(":,\\"):
            raise ConfigError(f"--root must have no ':', ',' or backslash (mount options), got {str(self.root)!r}")
        for prefix in self.repos_from:
            if not prefix.endswith("/"):
                raise ConfigError(f"--repos-from must end with '/', or it allows its neighbours too, got {prefix!r}")
        if self.tokens is None and not _is_loopback(self.host):
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
    with _parts_on(config) as parts:
        yield parts.executor


@contextlib.contextmanager
def environments_on(root: Path) -> Iterator[EnvironmentStore]:
    """The environments of the server at ``root``, able to probe new ones. Raises ConfigError."""
    with _parts_on(ServeConfig(root=root, workers=1)) as parts:
        try:
            yield parts.environments
        finally:
            parts.jailer.close()


@dataclass(frozen=True, kw_only=True)
class _Parts:
    executor: Executor
    environments: EnvironmentStore
    jailer: Jailer
    trees: TreeStore
    git: Git
    scratch: Path
    notes: tuple[str, ...]


@contextlib.contextmanager
def _parts_on(config: ServeConfig) -> Iterator[_Parts]:
    if shutil.which("git", path="/usr/local/bin:/usr/bin:/bin") is None:
        raise ConfigError("git must be installed in /usr/bin or /usr/local/bin, found none")
    root = config.root.resolve()
    root.mkdir(parents=True, exist_ok=True)
    janitor.sweep(root)
    cgroups.sweep()
    scratch = janitor.create_scratch(root)
    try:
        jailer = find_jailer(scratch, config.min_isolation, with_groups=True)
        warm_notes = try_warm_path(jailer, scratch) if config.warm else ()
        level = jailer.isolation.level
        try:
            environments = EnvironmentStore(root, jailer.environment, level=level)
        except BadEnvironment as error:
            raise ConfigError(str(error)) from error
        jailer.environments = environments
        environments.probe = lambda name: probe_environment(jailer, scratch, name)
        git = write_git_config(scratch / "gitconfig")
        repos = RepoStore(root, git, allowed=config.repos_from)
        trees = TreeStore(root, git, owner_uid=jailer.isolation.uid or None)
        preparer = Preparer(
            git,
            repos,
            trees,
            Applier(git, scratch),
            level,
            modules_of=lambda name: environments.get(name).modules,
            run=jailer.run,
        )
        executor = Executor(
            repos=repos,
            preparer=preparer,
            jailer=jailer,
            isolation=level,
            workers=config.workers,
            max_queue=config.max_queue,
        )
        yield _Parts(
            executor=executor,
            environments=environments,
            jailer=jailer,
            trees=trees,
            git=git,
            scratch=scratch,
            notes=jailer.isolation.notes + jailer.groups.notes + warm_notes,
        )
    finally:
        shutil.rmtree(scratch, ignore_errors=True)


def _service(parts: _Parts, config: ServeConfig) -> Service:
    metrics = Metrics()
    admission = Admission(workers=config.workers, max_queue=config.max_queue)
    journal = Journal(config.root.resolve(), interrupted_reply)
    sessions = SessionStore(
        parts.executor, parts.jailer, parts.trees, parts.git, parts.scratch, max_sessions=config.max_sessions
    )
    return Service(
        executor=parts.executor,
        environments=parts.environments,
        admission=admission,
        board=TaskBoard(parts.executor, admission, journal, metrics),
        sessions=sessions,
        metrics=metrics,
        notes=parts.notes,
    )


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
    with _listen(config) as listener, _parts_on(config) as parts:
        executor, service = parts.executor, _service(parts, config)

        @contextlib.asynccontextmanager
        async def lifespan(app: Starlette) -> AsyncIterator[None]:
            if config.dies_with_parent:
                server.stop_with(parent)
            sweeping = asyncio.create_task(service.sessions.sweep_forever())
            yield
            sweeping.cancel()
            await service.board.close()
            await asyncio.to_thread(service.sessions.close_all)
            await executor.close()

        host, port = listener.getsockname()[:2]
        url = f"http://[{host}]:{port}" if ":" in host else f"http://{host}:{port}"
        api = Api(service, config.tokens)
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
    # asyncio looks at the protocol before it turns Nagle's algorithm off: without it each reply waits 40 ms for an ACK
    listener = socket.socket(family, socket.SOCK_STREAM, socket.IPPROTO_TCP)
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
