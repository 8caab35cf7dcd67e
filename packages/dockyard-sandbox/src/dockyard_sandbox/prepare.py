"""Request to workload: apply, restore, patch the tests in. Everything before the sandbox."""

from __future__ import annotations

import hashlib
import threading
from collections import OrderedDict
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import PurePosixPath

from dockyard_core import Verdict, VerdictStatus
from dockyard_sandbox.apply import REGULAR, Applier, Delta, PatchRejected, PolicyViolation
from dockyard_sandbox.cancellation import Cancellation
from dockyard_sandbox.control_plane import CONFIG_NAMES, ControlPlane, control_plane, restore
from dockyard_sandbox.flags import scan
from dockyard_sandbox.gitcmd import Git
from dockyard_sandbox.jailer import Workload
from dockyard_sandbox.judge import early_verdict
from dockyard_sandbox.repos import RepoStore
from dockyard_sandbox.rungs import RunBlocking, apply_on_rungs
from dockyard_sandbox.trees import EXECUTABLE, SYMLINK, BaseTree, Entry, TreeStore
from dockyard_sandbox.wire import TaskRequest

_MAX_TEST_PATCHES = 1024
_MAX_BOUND_FILES = 2000
_NO_ENTRY = Entry("", "")
_EXPECTED_FAILURE = (b"xfail", b"expectedFailure")


@dataclass(frozen=True, kw_only=True)
class Prepared:
    """A workload and what its judge must know."""

    workload: Workload
    xfail_files: frozenset[str]
    """Deciding test files in which an expected failure is written."""
    test_files: Mapping[str, tuple[bool, bytes]]
    """Deciding test files that are regular files, as the run will find them: (executable, content)."""
    flags: tuple[str, ...]
    tree_key: str
    """Names the patched tree: the base tree's id and every changed path with its blob."""


class Preparer:
    """The trusted side of a run, up to the sandbox."""

    def __init__(
        self,
        git: Git,
        repos: RepoStore,
        trees: TreeStore,
        applier: Applier,
        isolation: str,
        *,
        installed: frozenset[str] = frozenset(),
        modules_of: Callable[[str | None], frozenset[str]] | None = None,
        run: RunBlocking,
    ) -> None:
        self._git = git
        self._repos = repos
        self._trees = trees
        self._applier = applier
        self._isolation = isolation
        self._installed = installed
        self._modules_of = modules_of
        self._run = run
        self._lock = threading.Lock()
        self._test_deltas: OrderedDict[tuple[str, str], Delta] = OrderedDict()

    def prepare(self, request: TaskRequest, cancellation: Cancellation | None = None) -> Prepared | Verdict:
        """Return the workload, or the verdict where no test needs to run; ``cancellation`` ends the apply.

        Raises: UnknownRepo, MissingCommit, FetchFailed, GitFailed, OSError.
        """
        bare, tree = self._repos.tree_of(request.repo, request.base_commit.lower())
        base = self._trees.get(bare, tree)
        try:
            test_delta = self._test_delta(base, request.test_patch)
        except (PatchRejected, PolicyViolation) as error:
            return self._early(request, VerdictStatus.TEST_PATCH_FAILED, f"test_patch: {error}")
        cancellation, flags = cancellation or Cancellation(), tuple[str, ...]()
        try:
            if request.apply == "swebench":
                model_delta, rung = apply_on_rungs(self._applier, self._run, base, request.model_patch, cancellation)
                flags = (f"rung:{rung}",)
            else:
                model_delta = self._applier.apply(base, request.model_patch, cancellation)
        except PatchRejected as error:
            return self._early(request, VerdictStatus.APPLY_FAILED, str(error))
        except PolicyViolation as error:
            return self._early(request, VerdictStatus.POLICY_VIOLATION, str(error))
        return self._combine(request, base, model_delta, test_delta, flags)

    def close(self) -> None:
        """End the git calls in flight."""
        self._git.close()

    def _combine(
        self, request: TaskRequest, base: BaseTree, model: Delta, tests: Delta, flags: tuple[str, ...]
    ) -> Prepared | Verdict:
        plane = control_plane(
            base.entries,
            request.deciding_ids,
            tests.changes,
            resolve=base.resolve,
            installed=self._installed if self._modules_of is None else self._modules_of(request.environment),
            model_changes=model.changes,
        )
        kept, undone = restore(
            plane,
            model.changes,
            read_base=lambda blob: self._git.run("cat-file", "blob", blob, git_dir=base.bare),
            contents=model.contents,
        )
        changes = {**kept, **tests.changes}
        flags += tuple(f"restored:{path}" for path in undone)
        flags += scan(kept, model.contents, lambda path: _read(base, path))
        contents = {**model.contents, **tests.contents}
        final = {path for path in base.entries if changes.get(path, base) is not None}
        final |= {path for path, entry in changes.items() if entry is not None}
        violation = _violation(request, changes, final, contents)
        if violation is not None:
            return self._early(request, VerdictStatus.POLICY_VIOLATION, violation, flags)
        arguments = _pytest_arguments(request, base, final)
        if not arguments:
            return self._early(request, VerdictStatus.NO_TESTS_RAN, "no file of a deciding test exists", flags)
        return Prepared(
            workload=Workload(
                lower=base.directory,
                files={
                    path: (entry.mode == EXECUTABLE, contents[entry.blob])
                    for path, entry in changes.items()
                    if entry is not None
                },
                deleted=[path for path, entry in changes.items() if entry is None],
                readonly=_readonly(plane, base, final),
                pytest_arguments=arguments,
                timeout_s=request.timeout_s,
                limits=request.limits,
                environment=request.environment,
            ),
            xfail_files=_xfail_files(request, base, changes, contents, final),
            test_files=_test_files(request, base, changes, contents),
            flags=flags,
            tree_key=_tree_key(base, changes),
        )

    def _early(self, request: TaskRequest, status: VerdictStatus, detail: str, flags: tuple[str, ...] = ()) -> Verdict:
        return early_verdict(request, status, detail, isolation=self._isolation, flags=flags)

    def _test_delta(self, base: BaseTree, test_patch: str) -> Delta:
        """Apply the test patch; every attempt at a task shares the result."""
        key = (base.tree, hashlib.sha256(test_patch.encode()).hexdigest())
        with self._lock:
            known = self._test_deltas.get(key)
            if known is not None:
                self._test_deltas.move_to_end(key)
                return known
        delta = self._applier.apply(base, test_patch)
        with self._lock:
            self._test_deltas[key] = delta
            if len(self._test_deltas) > _MAX_TEST_PATCHES:
                self._test_deltas.popitem(last=False)
        return delta


def _deciding_files(request: TaskRequest) -> dict[str, None]:
    return dict.fromkeys(test.split("::", 1)[0] for test in request.deciding_ids)


def _test_files(
    request: TaskRequest,
    base: BaseTree,
    changes: Mapping[str, Entry | None],
    contents: Mapping[str, bytes],
) -> dict[str, tuple[bool, bytes]]:
    found = {}
    for path in _deciding_files(request):
        entry = changes.get(path, base.entries.get(path))
        if entry is not None and entry.mode in REGULAR:
            content = contents[entry.blob] if path in changes else _read(base, path)
            found[path] = (entry.mode == EXECUTABLE, content)
    return found


def _read(base: BaseTree, path: str) -> bytes:
    """A file of the base tree; b"" when it has no regular file there."""
    return (base.directory / path).read_bytes() if base.entries.get(path, _NO_ENTRY).mode in REGULAR else b""


def _pytest_arguments(request: TaskRequest, base: BaseTree, final: set[str]) -> list[str]:
    """pytest on the files of the deciding tests, in the order of the ids; [] = none of them exists."""
    files = _deciding_files(request)
    present = [path for path in files if path in final or base.resolve(path) in final]
    if not present:
        return []
    if request.test_command is not None:
        return list(request.pytest_arguments)
    return present


def _tree_key(base: BaseTree, changes: Mapping[str, Entry | None]) -> str:
    digest = hashlib.sha256(base.tree.encode())
    for path, entry in sorted(changes.items()):
        if base.entries.get(path) != entry:
            digest.update(repr((path, entry and (entry.mode, entry.blob))).encode())
    return digest.hexdigest()


def _violation(
    request: TaskRequest, changes: Mapping[str, Entry | None], final: set[str], contents: Mapping[str, bytes]
) -> str | None:
    """What about the combined tree no run could be given, in a sentence. Restoring may cause it, too."""
    directories = {str(parent) for path in final for parent in PurePosixPath(path).parents}
    size = 0
    for path, entry in changes.items():
        if entry is not None:
            size += len(contents[entry.blob])
            clashes = (
                [path] if path in directories else [str(p) for p in PurePosixPath(path).parents if str(p) in final]
            )
            if clashes:
                return f"the patch makes {clashes[0]!r} both a file and a directory"
    if size > request.limits.disk_mb * 1024 * 1024:
        return f"the changed files must fit into limits.disk_mb={request.limits.disk_mb}, got {size} bytes"
    return None


def _readonly(plane: ControlPlane, base: BaseTree, final: set[str]) -> list[str]:
    """Files that even running code must not change: what decides, and all of the test directories."""
    below = tuple(f"{directory}/" for directory in plane.directories)
    protected = {path for path in final if path in plane.files or path.rsplit("/", 1)[-1] in CONFIG_NAMES}
    beside = sorted(path for path in final - protected if path.startswith(below))
    if len(beside) > _MAX_BOUND_FILES:  # every bind is a mount of its own: code before data
        beside = sorted(beside, key=lambda path: not path.endswith(".py"))[:_MAX_BOUND_FILES]
    # a symlink cannot be bound; its target lies elsewhere in the tree
    return sorted(path for path in {*protected, *beside} if base.entries.get(path, _NO_ENTRY).mode != SYMLINK)


def _xfail_files(
    request: TaskRequest,
    base: BaseTree,
    changes: Mapping[str, Entry | None],
    contents: Mapping[str, bytes],
    final: set[str],
) -> frozenset[str]:
    """Deciding test files that speak of expected failures: in no other can a test end as one."""

    def speaks(path: str) -> bool:
        real = base.resolve(path)
        if real not in final:
            return False
        entry = changes.get(real)
        text = contents[entry.blob] if entry is not None else (base.directory / real).read_bytes()
        return any(word in text for word in _EXPECTED_FAILURE)

    files = {test.split("::", 1)[0] for test in request.deciding_ids}
    marking = [str(parent) for path in files for parent in PurePosixPath(path).parents]
    if any(speaks(str(PurePosixPath(directory) / "conftest.py")) for directory in set(marking)):
        return frozenset(files)
    return frozenset(path for path in files if speaks(path))
