"""Start the server: checks first, then one ready line, then work, then an orderly end."""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import ipaddress
import logging
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
from dockyard_sandbox import cgroups, janitor, preflight
from dockyard_sandbox.app import Api, Service
from dockyard_sandbox.apply import Applier
from dockyard_sandbox.deciding_files import DecidingFiles
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

_LOG = logging.getLogger(__name__)
_GRACE_S = 1.0  # what runs in flight get to finish after a stop signal
_SHUTDOWN_S = 10
_MANY = 1_000_000  # more is a slip of the keyboard
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
    workers: int = dataclasses.field(default_factory=preflight.num_cpus)
    max_queue: int = 1024
    max_sessions: int = 256
    repos_from: tuple[str, ...] = ()
    """Beginnings of the paths and URLs that tasks may name themselves; () = any."""
    warm: bool = True
    """Whether runs fork an interpreter that has imported pytest, where that is proven to make no difference."""
    dies_with_parent: bool = False

    def __post_init__(self) -> None:
        for name, value, low, high in (
            ("port", self.port, 0, 65_535),
            ("workers", self.workers, 1, _MANY),
            ("max-queue", self.max_queue, 0, _MANY),
            ("max-sessions", self.max_sessions, 1, _MANY),
        ):
            if not low <= value <= high:
                raise ConfigError(f"--{name} must be from {low} to {high}, got {value}")
        for prefix in self.repos_from:
            if not prefix.endswith("/"):
                raise ConfigError(f"--repos-from must end with '/', or it allows its neighbours too, got {prefix!r}")
            if not prefix.startswith(("/", "file://", "https://")):
                raise ConfigError(
                    f"--repos-from must begin with '/', 'file://' or 'https://', or it allows nothing, got {prefix!r}"
                )
        if self.tokens is None and not _is_loopback(self.host):
            raise ConfigError(f"--host {self.host} is public and needs --token-file; or bind 127.0.0.1")


def _is_loopback(host: str) -> bool:
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"


@contextlib.contextmanager
def executor_on(config: ServeConfig) -> Iterator[Executor]:
    """Build an executor on ``config.root``; its launchers and its scratch directory go at the end.

    Raises ConfigError when the machine gives less than the minimum isolation, or no git or pytest.
    """
    with _parts_on(config) as parts:
        yield parts.executor


@contextlib.contextmanager
def environments_on(root: Path) -> Iterator[EnvironmentStore]:
    """The environments of the server at ``root``, able to probe new ones. Raises ConfigError."""
    with _parts_on(ServeConfig(root=root, workers=1)) as parts:
        yield parts.environments


@dataclass(frozen=True, kw_only=True)
class _Parts:
    root: Path
    executor: Executor
    environments: EnvironmentStore
    jailer: Jailer
    trees: TreeStore
    git: Git
    scratch: Path
    notes: tuple[str, ...]


@contextlib.contextmanager
def _parts_on(config: ServeConfig, *, is_server: bool = False) -> Iterator[_Parts]:
    git_notes = preflight.git_notes(preflight.git_version())
    root = preflight.make_root(config.root)
    with contextlib.ExitStack() as stack:
        scratch = _claim(root, stack, is_server=is_server)
        jailer = find_jailer(scratch, config.min_isolation, with_groups=True)
        stack.callback(jailer.close)
        warm_notes = try_warm_path(jailer, scratch) if config.warm else ()
        level = jailer.isolation.level
        try:
            environments = EnvironmentStore(root, jailer.environment, level=level)
        except BadEnvironment as error:
            raise ConfigError(str(error)) from error
        jailer.environments = environments
        environments.probe = lambda name: probe_environment(jailer, scratch, name)
        with preflight.root_errors(root):
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
            deciding_files=DecidingFiles(repos, trees),
            isolation=level,
            workers=config.workers,
        )
        for note in git_notes:
            _LOG.warning("%s", note)
        yield _Parts(
            root=root,
            executor=executor,
            environments=environments,
            jailer=jailer,
            trees=trees,
            git=git,
            scratch=scratch,
            notes=jailer.isolation.notes + jailer.groups.notes + warm_notes + git_notes,
        )


def _claim(root: Path, stack: contextlib.ExitStack, *, is_server: bool) -> Path:
    """Remove what dead processes left under ``root`` and make this one's scratch directory, which ends with ``stack``.

    Beside a server nothing is swept: one in another container is alive, although its process cannot be seen here.
    """
    if is_server:
        stack.enter_context(preflight.only_server(root))
    with contextlib.nullcontext(True) if is_server else preflight.no_server(root) as may_sweep:
        with preflight.root_errors(root):
            if may_sweep:
                janitor.sweep(root)
            scratch = janitor.create_scratch(root)
    cgroups.sweep()
    stack.callback(shutil.rmtree, scratch, ignore_errors=True)
    return scratch


def _service(parts: _Parts, config: ServeConfig) -> Service:
    metrics = Metrics()
    admission = Admission(workers=config.workers, max_queue=config.max_queue)
    with preflight.root_errors(parts.root):
        journal = Journal(parts.root, interrupted_reply)
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
    with preflight.listen(config.host, config.port) as listener, _parts_on(config, is_server=True) as parts:
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

        if not _is_loopback(config.host) and not config.repos_from:
            _LOG.warning(
                "--host %s without --repos-from: whoever has a token can have this server mirror every repository that "
                "it can read, and any https URL; name prefixes with --repos-from",
                config.host,
            )
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
