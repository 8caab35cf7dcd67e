"""From the files of a session to the patch that makes them: on the trusted side, by git's own plumbing.

The patch then takes the way of every other patch: a fresh tree, the same policy, the same limits.
"""

from __future__ import annotations

import shutil
import tempfile
from collections.abc import Mapping
from functools import partial
from pathlib import Path

from dockyard_sandbox.cancellation import Cancellation
from dockyard_sandbox.gitcmd import Bounds, Git
from dockyard_sandbox.live_session import LiveSession
from dockyard_sandbox.private_index import PrivateIndex
from dockyard_sandbox.trees import GITLINK, BaseTree

_BOUNDS = Bounds(memory_mb=1024, cpu_s=60, file_mb=256)
_MAX_CHANGED_BYTES = 64 * 1024 * 1024
_ALL_BINARY = "* -diff\n"


def session_patch(git: Git, scratch: Path, base: BaseTree, live: LiveSession, cancellation: Cancellation) -> str:
    """Return the unified diff from ``base`` to the session's tree. Ends the session's processes.

    Raises: SessionEnded, CallFailed, GitFailed, OSError.
    """
    algorithm = "sha1" if len(base.tree) == 40 else "sha256"
    found = live.list_tree(algorithm, cancellation=cancellation)
    before = {path: (entry.mode, entry.blob) for path, entry in base.entries.items() if entry.mode != GITLINK}
    changed = sorted(path for path, entry in found.items() if before.get(path) != entry)
    deleted = sorted(set(before) - set(found) - _unlisted(before))
    contents = live.fetch(changed, max_bytes=_MAX_CHANGED_BYTES, cancellation=cancellation) if changed else []
    if not changed and not deleted:
        return ""
    files = {path: (found[path][0], content) for path, content in zip(changed, contents, strict=True)}
    work = Path(tempfile.mkdtemp(prefix="session-", dir=scratch))
    try:
        return _diff(git, base, files, deleted, work, cancellation)
    finally:
        shutil.rmtree(work, ignore_errors=True)


def _unlisted(before: Mapping[str, object]) -> set[str]:
    """Paths of the base that a session's listing leaves out: caches, and what git calls its own."""
    skipped = (".git", "__pycache__", ".pytest_cache")
    return {path for path in before if path.endswith(".pyc") or set(path.split("/")) & set(skipped)}


def _diff(
    git: Git,
    base: BaseTree,
    files: Mapping[str, tuple[str, bytes]],
    deleted: list[str],
    work: Path,
    cancellation: Cancellation,
) -> str:
    index = PrivateIndex(git, base, work, bounds=_BOUNDS, cancellation=cancellation)
    run = partial(index.run, may_be_long=True)
    names = []
    for number, (_, content) in enumerate(files.values()):
        (work / f"blob-{number}").write_bytes(content)  # names of ours: none of the session's touches a file system
        names.append(str(work / f"blob-{number}"))
    blobs = run("hash-object", "-w", "--no-filters", "--stdin-paths", stdin="\n".join(names).encode()).split()
    lines = [b"0 " + b"0" * 40 + b"\t" + _bytes(path) for path in deleted]
    lines += [
        mode.encode() + b" " + blob + b"\t" + _bytes(path)
        for (path, (mode, _)), blob in zip(files.items(), blobs, strict=True)
    ]
    # removals first, and of what now lies above or below: a file may have become a directory
    run("update-index", "-z", "--replace", "--index-info", stdin=b"".join(line + b"\0" for line in lines))
    tree = run("write-tree").decode().strip()
    options = ["-r", "-p", "--binary", "--full-index", "--no-renames", "--no-ext-diff", "--no-textconv"]
    try:
        return run("diff-tree", *options, base.tree, tree).decode()
    except UnicodeDecodeError:  # a text file in another encoding: JSON carries it as a binary change
        (work / "attributes").write_text(_ALL_BINARY)
        all_binary = ["-c", f"core.attributesFile={work / 'attributes'}"]
        return run(*all_binary, "diff-tree", *options, base.tree, tree).decode()


def _bytes(path: str) -> bytes:
    return path.encode(errors="surrogateescape")
