"""Where a row's repository is, and its files at a commit. Objects are read, nothing is checked out.

Git runs with a scrubbed environment, without hooks and without the user's and the system's
configuration. A repository's own configuration cannot make it fetch: every transport is off, except
the one that a clone names.
"""

from __future__ import annotations

import hashlib
import os
import re
import shutil
import subprocess
import tempfile
from collections.abc import Mapping
from pathlib import Path
from types import TracebackType
from typing import IO, Self
from urllib.parse import unquote, urlsplit

_PASSED_ON = ("PATH", "LD_LIBRARY_PATH", "GIT_SSL_CAINFO", "SSL_CERT_FILE")
_PASSED_ON_TO_CLONES = ("http_proxy", "https_proxy", "no_proxy", "HTTP_PROXY", "HTTPS_PROXY", "NO_PROXY")
_BUNDLE_MARK = re.compile(rb"# v[23] git bundle\n")
_CLONE_TIMEOUT_S = 3600.0


class RepoError(Exception):
    """A repository cannot be used; the message has rule, value and way out, but no row."""


def default_cache_dir() -> Path:
    """``$XDG_CACHE_HOME/dockyard/repos``, or the same under ``~/.cache``."""
    base = os.environ.get("XDG_CACHE_HOME")
    return (Path(base) if base else Path.home() / ".cache") / "dockyard" / "repos"


def resolve_repo(repo: str, folder: Path) -> str:
    """A row's ``repo`` as `Task.repo` carries it.

    An existing path (absolute, or relative to ``folder``) becomes absolute, and a ``file://`` URL
    becomes a path; an ``https://`` URL and an ``owner/name`` that no path matches stay as they are,
    the latter being a name that only the sandbox knows.

    Raises:
        RepoError: a path that does not exist, or another kind of URL.
    """
    scheme = urlsplit(repo).scheme if "://" in repo else ""
    if scheme == "https":
        return repo
    if scheme not in ("", "file"):
        raise RepoError(f"must be a path, a name, or a file:// or https:// URL, got {repo!r}; clone it and give a path")
    path = Path(unquote(urlsplit(repo).path)) if scheme else folder / repo
    if path.exists():
        return str(path.resolve())
    looks_like_path = scheme or repo.startswith((".", "/", "~")) or repo.endswith((".git", ".bundle"))
    if looks_like_path or not re.fullmatch(r"[\w.-]+(/[\w.-]+)?", repo):
        raise RepoError(f"must exist, got {repo!r} ({path}); paths are relative to the dataset's folder")
    return repo


def open_repo(repo: str, cache_dir: Path) -> Path | None:
    """The git directory of a resolved ``repo``; None for a name that only the sandbox knows.

    A bundle file or URL is cloned once, bare, into ``cache_dir``: a bundle under the hash of its
    bytes, so that a rebuilt one is cloned anew.

    Raises:
        RepoError: not a repository, or the clone failed.
    """
    if repo.startswith("https://"):
        name = re.sub(r"[^\w.-]+", "-", repo.removeprefix("https://")).strip("-")[:80]
        digest = hashlib.sha256(repo.encode()).hexdigest()[:16]
        return _clone_once(repo, cache_dir / f"{name}-{digest}.git", protocol="https")
    path = Path(repo)
    if not path.is_absolute():
        return None
    if path.is_dir():
        git_dir = path / ".git" if (path / ".git").exists() else path
        if git_dir.is_dir() and not (git_dir / "objects").is_dir():
            raise RepoError(f"must be a git repository or a bundle file, got {repo!r}; run git init or git bundle")
        return git_dir
    with path.open("rb") as file:
        if not _BUNDLE_MARK.match(file.read(32)):
            raise RepoError(f"a file must be a git bundle, got {repo!r}; write it with git bundle create")
        file.seek(0)
        digest = hashlib.file_digest(file, "sha256").hexdigest()[:32]
    return _clone_once(repo, cache_dir / f"bundle-{digest}.git", protocol="file")


def _clone_once(source: str, target: Path, *, protocol: str) -> Path:
    if target.is_dir():
        return target
    target.parent.mkdir(parents=True, exist_ok=True)
    # Cloned aside and renamed: an interrupted clone is never taken for a whole one.
    aside = Path(tempfile.mkdtemp(prefix=f".{target.name}-", dir=target.parent))
    # A bundle holds what its maker chose, all of it wanted; a host also holds every pull request.
    refs = "--mirror" if protocol == "file" else "--bare"
    command = _git("clone", refs, "--quiet", "--template=", "--", source, str(aside / "clone"))
    try:
        done = subprocess.run(
            command,
            env=_environment(protocol),
            stdin=subprocess.DEVNULL,
            capture_output=True,
            timeout=_CLONE_TIMEOUT_S,
            check=False,
        )
        if done.returncode != 0:
            reason = done.stderr.decode("utf-8", "replace").strip().splitlines()[-1:] or ["no message"]
            raise RepoError(f"must be clonable, got {source!r} ({reason[0]}); clone it yourself and give its path")
        try:
            (aside / "clone").rename(target)
        except OSError:
            if not target.is_dir():  # else another process was faster, with the same content
                raise
    except subprocess.TimeoutExpired as error:
        raise RepoError(
            f"must be clonable in {_CLONE_TIMEOUT_S:.0f} s, got {source!r}; clone it yourself and give its path"
        ) from error
    finally:
        shutil.rmtree(aside, ignore_errors=True)
    return target


def _git(*arguments: str) -> list[str]:
    # The owner check guards a repository's own configuration, which cannot start anything here.
    safe = ("-c", "safe.directory=*", "-c", "core.hooksPath=/dev/null", "-c", "core.fsmonitor=false")
    return ["git", *safe, *arguments]


def _environment(protocol: str = "none") -> Mapping[str, str]:
    names = _PASSED_ON if protocol == "none" else _PASSED_ON + _PASSED_ON_TO_CLONES
    return {
        **{name: os.environ[name] for name in names if name in os.environ},
        "HOME": "/nonexistent",
        "LC_ALL": "C",
        "GIT_CONFIG_NOSYSTEM": "1",
        "GIT_CONFIG_GLOBAL": os.devnull,
        "GIT_TERMINAL_PROMPT": "0",
        "GIT_OPTIONAL_LOCKS": "0",
        "GIT_NO_REPLACE_OBJECTS": "1",
        "GIT_ALLOW_PROTOCOL": protocol,
    }


class BlobReader:
    """Files of one repository, through one ``git cat-file --batch`` process however many are asked.

    Raises:
        RepoError: from any method, when git gives up on the repository.
    """

    def __init__(self, git_dir: Path) -> None:
        self._git_dir = git_dir
        self._process = subprocess.Popen(
            _git(f"--git-dir={git_dir}", "cat-file", "--batch"),
            env=_environment(),
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
        )

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def close(self) -> None:
        """End the process; its standard input closing is what ends it."""
        try:
            self._process.communicate(timeout=10)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.communicate()

    def has_commit(self, commit: str) -> bool:
        """Whether ``commit`` is there and is a commit."""
        return self._read(f"{commit}^{{commit}}", "commit") is not None

    def read_text(self, commit: str, path: str) -> str | None:
        """A file at ``commit``; None when it is absent, no file, binary, or not UTF-8."""
        # A line break cannot be asked of a protocol made of lines; git dies of a path relative to "here".
        if "\n" in path or path.startswith(("./", "../")):
            return None
        content = self._read(f"{commit}:{path}", "blob")
        if content is None or b"\0" in content:
            return None
        try:
            return content.decode("utf-8")
        except UnicodeDecodeError:
            return None

    def _read(self, name: str, kind: str) -> bytes | None:
        stdin, stdout = self._pipes()
        try:
            stdin.write(name.encode("utf-8", "surrogateescape") + b"\n")
            stdin.flush()
        except BrokenPipeError:
            raise self._gave_up() from None
        # "<id> <type> <size>" and the bytes; or "<name> missing", where the name may hold spaces.
        header = stdout.readline()
        if not header:
            raise self._gave_up()
        fields = header.rsplit(maxsplit=2)
        if len(fields) != 3 or not re.fullmatch(rb"[0-9]+", fields[2]):
            return None
        content = stdout.read(int(fields[2]))
        stdout.read(1)
        return content if fields[1] == kind.encode() else None

    def _pipes(self) -> tuple[IO[bytes], IO[bytes]]:
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        return self._process.stdin, self._process.stdout

    def _gave_up(self) -> RepoError:
        assert self._process.stderr is not None
        lines = self._process.stderr.read().decode("utf-8", "replace").strip().splitlines()
        reason = lines[-1] if lines else "no message"
        return RepoError(f"must be a readable git repository, got {str(self._git_dir)!r} ({reason}); repair the path")
