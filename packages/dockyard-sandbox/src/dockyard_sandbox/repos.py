"""The bare object store: one mirror per repository, cloned once, fetched again when a commit is missing."""

from __future__ import annotations

import asyncio
import fcntl
import hashlib
import json
import re
import shutil
import subprocess
import threading
from collections.abc import Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from urllib.parse import urlsplit

from dockyard_sandbox.gitcmd import Git, GitFailed

CLONE_TIMEOUT_S = 1800.0
_MAX_FETCHES = 4
# What git says where there is no such repository, or none without a login. Everything else may be otherwise in a
# minute: names that do not resolve, refused connections, bad certificates, 403 and 429 (limits of rate), 5xx.
_ABSENT = re.compile(
    r"^fatal: (?:repository '.*' not found"
    r"|could not read Username for .*"
    r"|Authentication failed for .*"
    r"|unable to access '.*': The requested URL returned error: 410"
    r"|'.*' does not appear to be a git repository"
    r"|invalid gitfile format: .*)$",
    re.MULTILINE,
)


class UnknownRepo(ValueError):
    """A task names no repository: nothing registered, no path, no accepted URL, or one where none is. Not retryable."""


class MissingCommit(Exception):
    """The repository does not have the commit, even after a fetch. A defect of the task, not retryable."""


class FetchFailed(Exception):
    """The repository could not be read now. Retryable."""


class RepoStore:
    """Registered names and mirrored objects under ``root/repos``.

    Args:
        root: the server's directory.
        git: runs git.
        allowed: beginnings of the paths and URLs that a task may name without a registered name; () = any.
    """

    def __init__(self, root: Path, git: Git, *, allowed: tuple[str, ...] = ()) -> None:
        self._allowed = allowed
        self._directory = root / "repos"
        self._directory.mkdir(parents=True, exist_ok=True)
        self._names_path = root / "repos.json"
        self._names: dict[str, str] = json.loads(self._names_path.read_text()) if self._names_path.exists() else {}
        self._git = git
        self._guard = threading.Lock()
        # of their own: a clone can take half an hour, and nothing else may wait for that
        self._remote = ThreadPoolExecutor(max_workers=_MAX_FETCHES, thread_name_prefix="fetch")
        self._local = ThreadPoolExecutor(max_workers=_MAX_FETCHES, thread_name_prefix="copy")
        self._commits: dict[tuple[str, str], str] = {}

    def names(self) -> dict[str, str]:
        """Registered name to path or URL."""
        return dict(self._names)

    def register(self, repos: Mapping[str, str]) -> None:
        """Add names; they outlive the server. Raises UnknownRepo when a source has no accepted form."""
        for source in repos.values():
            self.resolve(source, registered=False)
        with self._guard:
            merged = {**self.names(), **repos}
            temporary = self._names_path.with_suffix(".new")
            temporary.write_text(json.dumps(merged, indent=1, sort_keys=True))
            temporary.replace(self._names_path)
            self._names = merged

    def resolve(self, repo: str, *, registered: bool = True) -> str:
        """Return the source that ``repo`` means. Raises UnknownRepo."""
        source = self._names.get(repo, repo) if registered else repo
        if registered and repo not in self._names and not self._is_allowed(repo):
            raise UnknownRepo(
                f"repo must be a registered name or begin with one of {list(self._allowed)}, got {repo!r}; "
                "register names with PUT /repos"
            )
        parts = urlsplit(source)
        if parts.scheme == "https" and parts.hostname and not parts.username:
            return source
        path = Path(parts.path if parts.scheme == "file" and not parts.netloc else source)
        if not path.is_absolute():
            raise UnknownRepo(
                f"repo must be a registered name, an absolute path, or a file:// or https:// URL, got {repo!r}; "
                "register names with PUT /repos"
            )
        if not path.exists():
            raise UnknownRepo(f"repo {repo!r} does not exist on this machine")
        return str(path)

    def _is_allowed(self, source: str) -> bool:
        if not self._allowed:
            return True
        parts = urlsplit(source).path.split("/")
        return not {".", ".."} & set(parts) and any(source.startswith(prefix) for prefix in self._allowed)

    async def check(self, repo: str, commit: str) -> None:
        """Make sure that ``commit`` is there, fetching if need be. Raises as `tree_of` does."""
        source = self.resolve(repo)
        if (source, commit.lower()) not in self._commits:
            threads = self._remote if source.startswith("https:") else self._local
            await asyncio.get_running_loop().run_in_executor(threads, self.tree_of, repo, commit.lower())

    def tree_of(self, repo: str, commit: str) -> tuple[Path, str]:
        """Return (bare repository, tree id) that has ``commit``, cloning or fetching as needed.

        Raises: UnknownRepo, MissingCommit, FetchFailed.
        """
        source = self.resolve(repo)
        bare = self._directory / hashlib.sha256(source.encode()).hexdigest()[:24]
        key = (source, commit)
        if key not in self._commits:
            with locked(bare.with_suffix(".lock")):
                tree = self._find_tree(bare, commit)
                if tree is None:
                    self._fetch(bare, source, commit)
                    tree = self._find_tree(bare, commit)
            if tree is None:
                raise MissingCommit(f"commit {commit} is not in {repo!r}")
            self._commits[key] = tree
        return bare, self._commits[key]

    def _find_tree(self, bare: Path, commit: str) -> str | None:
        if not bare.exists():
            return None
        try:
            return (
                self._git.run("rev-parse", "--verify", "--quiet", f"{commit}^{{tree}}", git_dir=bare).decode().strip()
            )
        except GitFailed:
            return None

    def _fetch(self, bare: Path, source: str, commit: str) -> None:
        is_new = not bare.exists()
        try:
            self._initialise(bare)
            fetch = ("fetch", "--quiet", "--force", "--no-tags", "--no-write-fetch-head", source)
            try:
                self._git.run(*fetch, "+refs/*:refs/*", git_dir=bare, timeout_s=CLONE_TIMEOUT_S, may_be_long=True)
            except GitFailed:
                if not _remove_stale_locks(bare):
                    raise
                self._git.run(*fetch, "+refs/*:refs/*", git_dir=bare, timeout_s=CLONE_TIMEOUT_S, may_be_long=True)
            for reference in (commit, "HEAD"):  # commits that no branch or tag holds
                if self._find_tree(bare, commit) is not None:
                    return
                try:
                    target = f"+{reference}:refs/dockyard/{commit}"
                    self._git.run(*fetch, target, git_dir=bare, timeout_s=CLONE_TIMEOUT_S, may_be_long=True)
                except GitFailed:
                    continue  # tree_of reports the commit as missing
        except (GitFailed, subprocess.TimeoutExpired) as error:
            absent = _ABSENT.search(error.stderr) if isinstance(error, GitFailed) else None
            if absent is not None:
                if is_new:
                    shutil.rmtree(bare, ignore_errors=True)
                what = f"{source!r} is no repository, or none without a login: git says '{absent.group()}'"
                raise UnknownRepo(what) from error
            raise FetchFailed(f"cannot fetch {source!r}: {error}") from error

    def _initialise(self, bare: Path) -> None:
        """Make ``bare`` a repository, whole or not at all: a server may be killed at any moment."""
        if (bare / "HEAD").exists():
            return
        shutil.rmtree(bare, ignore_errors=True)
        temporary = bare.with_suffix(".new")
        shutil.rmtree(temporary, ignore_errors=True)
        self._git.run("init", "--quiet", "--bare", str(temporary))
        temporary.replace(bare)


def _remove_stale_locks(bare: Path) -> bool:
    """Remove what a killed git left; whoever holds this mirror's lock is alone with it."""
    stale = [*bare.glob("*.lock"), *(bare / "refs").rglob("*.lock")]
    for path in stale:
        path.unlink(missing_ok=True)
    return bool(stale)


@contextmanager
def locked(path: Path) -> Iterator[None]:
    """Exclude other threads and other servers on the same root."""
    with path.open("w") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield
