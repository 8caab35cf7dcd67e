"""What is looked at and taken before anything starts: git, the CPUs, the directory, the address."""

from __future__ import annotations

import contextlib
import errno
import fcntl
import os
import re
import socket
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path
from typing import TextIO

from dockyard_core import ConfigError
from dockyard_sandbox import cgroups

GIT_PATH = "/usr/local/bin:/usr/bin:/bin"
_OLDEST_GIT = (2, 32)  # the first that reads GIT_CONFIG_GLOBAL: an older one would ignore our configuration
# the first release of each line with the fixes of CVE-2023-23946, CVE-2023-25652 and CVE-2024-32021; from 2.46 on, all
_FIXED_GITS = {39: 4, 40: 2, 41: 1, 42: 2, 43: 4, 44: 1, 45: 1}
_LOCK = "server.lock"
_LOCK_WAIT_S = 3.0  # a server that is ending, or another command's sweep, lets go soon


def git_version() -> str | None:
    """What `git --version` says, None = there is no git."""
    try:
        done = subprocess.run(
            ["git", "--version"], env={"PATH": GIT_PATH}, capture_output=True, text=True, timeout=60, check=False
        )
    except OSError:
        return None
    return done.stdout.strip() or None


def git_notes(version: str | None) -> tuple[str, ...]:
    """What is to be said about this git. Raises ConfigError when it cannot be worked with.

    A number below the fixed releases is a note and no refusal: distributions patch old releases without a new
    number, so that a server would be refused on up-to-date machines.
    """
    oldest = ".".join(map(str, _OLDEST_GIT))
    if version is None:
        raise ConfigError(f"git {oldest} or later must be in {GIT_PATH.replace(':', ', ')}, found none; install it")
    found = re.search(r"(\d+)\.(\d+)(?:\.(\d+))?", version)
    major, minor, patch = (int(part or 0) for part in found.groups()) if found else (0, 0, 0)
    if (major, minor) < _OLDEST_GIT:
        raise ConfigError(f"git must be {oldest} or later, got {version!r}; install a newer one in /usr/local/bin")
    fixed = _FIXED_GITS.get(minor)
    if (major, minor) >= (2, 46) or (fixed is not None and patch >= fixed):
        return ()
    return (
        f"{version} has a number below the releases that fix CVE-2023-23946, CVE-2023-25652 and CVE-2024-32021 "
        "(2.39.4, 2.43.4, 2.45.1 and others): keep it up to date if your distribution patches it under that number, "
        "else install a newer one",
    )


@contextlib.contextmanager
def root_errors(root: Path) -> Iterator[None]:
    """Turn what the file system refuses below ``root`` into a ConfigError."""
    try:
        yield
    except OSError as error:
        where = f"{error.filename}: " if error.filename not in (None, str(root)) else ""
        why = f"{where}{error.strerror or error}"
        raise ConfigError(
            f"--root must be a directory that this user may write, got {str(root)!r}: {why}; "
            "name another one, such as --root ./sandbox"
        ) from error


def make_root(root: Path) -> Path:
    """Make the directory and its parents and return its real path. Raises ConfigError, and has made nothing then."""
    real = Path(os.path.realpath(root))
    if not str(real).isprintable() or set(str(real)) & set(":,\\"):
        raise ConfigError(
            f"--root must be a printable path without ':', ',' and backslash (mount options), got {str(real)!r}"
        )
    made: list[Path] = []
    with root_errors(root):
        try:
            for directory in reversed([real, *real.parents]):
                if not os.path.lexists(directory):
                    directory.mkdir()
                    made.append(directory)
            list(real.iterdir())  # it may be a file, or closed to this user
            return real
        except OSError:
            for directory in reversed(made):
                directory.rmdir()
            raise


@contextlib.contextmanager
def only_server(root: Path) -> Iterator[None]:
    """Be the one server of ``root``, until the end or this process's. Raises ConfigError when another one is."""
    with _open_lock(root) as file:
        if not _take(file, root, _LOCK_WAIT_S):
            raise ConfigError(
                f"--root must be one server's only, got {str(root)!r}, which another server uses; "
                "stop that one, or name another directory"
            )
        yield


@contextlib.contextmanager
def no_server(root: Path) -> Iterator[bool]:
    """Whether ``root`` has no server; none starts before the end of this. Raises ConfigError."""
    with _open_lock(root) as file:
        yield _take(file, root, 0.0)


def _open_lock(root: Path) -> TextIO:
    with root_errors(root):
        return (root / _LOCK).open("a")


def _take(file: TextIO, root: Path, wait_s: float) -> bool:
    deadline = time.monotonic() + wait_s
    with root_errors(root):
        while True:
            try:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                if time.monotonic() >= deadline:
                    return False
                time.sleep(0.05)
            else:
                return True


def num_cpus() -> int:
    """CPUs that this process may use: those of its affinity, or as many as the quota of its control group pays for."""
    return max(1, min([len(os.sched_getaffinity(0)), *map(int, _quotas())]))


def _quotas() -> Iterator[float]:
    for hierarchy in cgroups.find_hierarchies():
        try:
            if "cpu" not in hierarchy.controllers:
                continue
            if hierarchy.version == 2:
                quota, period = (hierarchy.own / "cpu.max").read_text().split()
            else:
                quota, period = ((hierarchy.own / f"cpu.cfs_{name}_us").read_text() for name in ("quota", "period"))
        except OSError:
            continue  # the root group has no quota
        if quota != "max" and int(quota) > 0:
            yield int(quota) / int(period)


def listen(host: str, port: int) -> socket.socket:
    """A socket that listens on the address; port 0 = any that is free. Raises ConfigError."""
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    # asyncio looks at the protocol before it turns Nagle's algorithm off: without it each reply waits 40 ms for an ACK
    listener = socket.socket(family, socket.SOCK_STREAM, socket.IPPROTO_TCP)
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        listener.bind((host, port))
        listener.listen(2048)
    except OSError as error:
        listener.close()
        is_host = isinstance(error, socket.gaierror) or error.errno == errno.EADDRNOTAVAIL
        other = "--host" if is_host else "--port (0 picks one)"
        raise ConfigError(f"cannot bind {host}:{port}: {error.strerror or error}; choose another {other}") from error
    return listener
