"""Request to workload: apply, restore, patch the tests in. Everything before the sandbox."""

from __future__ import annotations

import hashlib
import threading
from collections import OrderedDict
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import PurePosixPath

from dockyard_core import Verdict, VerdictStatus
from dockyard_sandbox.apply import Applier, Delta, PatchRejected, PolicyViolation
from dockyard_sandbox.control_plane import CONFIG_NAMES, control_plane, restore
from dockyard_sandbox.gitcmd import Git
from dockyard_sandbox.jailer import Workload
from dockyard_sandbox.judge import early_verdict
from dockyard_sandbox.repos import RepoStore
from dockyard_sandbox.trees import EXECUTABLE, SYMLINK, BaseTree, Entry, TreeStore
from dockyard_sandbox.wire import TaskRequest

_MAX_TEST_PATCHES = 1024


@dataclass(frozen=True, kw_only=True)
class Prepared:
    """A workload and what its judge must know."""

    workload: Workload
    trusted_files: frozenset[str]
    flags: tuple[str, ...]
    tree_key: str
    """Names the patched tree: the base tree's id and every changed path with its blob."""


class Preparer:
    """The trusted side of a run, up to the sandbox."""

    def __init__(self, git: Git, repos: RepoStore, trees: TreeStore, applier: Applier, isolation: str) -> None:
        self._git = git
        self._repos = repos
        self._trees = trees
        self._applier = applier
        self._isolation = isolation
        self._lock = threading.Lock()
        self._test_deltas: OrderedDict[tuple[str, str], Delta] = OrderedDict()

    def prepare(self, request: TaskRequest) -> Prepared | Verdict:
        """Return the workload, or the verdict where no test needs to run.

        Raises: UnknownRepo, MissingCommit, FetchFailed, GitFailed, OSError.
        """
        bare, tree = self._repos.tree_of(request.repo, request.base_commit.lower())
        base = self._trees.get(bare, tree)
        try:
            test_delta = self._test_delta(base, request.test_patch)
        except (PatchRejected, PolicyViolation) as error:
            return self._early(request, VerdictStatus.TEST_PATCH_FAILED, f"test_patch: {error}")
        try:
            model_delta = self._applier.apply(base, request.model_patch)
        except PatchRejected as error:
            return self._early(request, VerdictStatus.APPLY_FAILED, str(error))
        except PolicyViolation as error:
            return self._early(request, VerdictStatus.POLICY_VIOLATION, str(error))
        return self._combine(request, base, model_delta, test_delta)

    def close(self) -> None:
        """End the git calls in flight."""
        self._git.close()

    def _combine(self, request: TaskRequest, base: BaseTree, model: Delta, tests: Delta) -> Prepared | Verdict:
        plane = control_plane(base.entries, request.deciding_ids, tests.changes)
        kept, undone = restore(
            plane,
            model.changes,
            read_base=lambda blob: self._git.run("cat-file", "blob", blob, git_dir=base.bare),
            contents=model.contents,
        )
        changes = {**kept, **tests.changes}
        flags = tuple(f"restored:{path}" for path in undone)
        final = {path for path in base.entries if changes.get(path, base) is not None}
        final |= {path for path, entry in changes.items() if entry is not None}
        clash = _file_and_directory(changes, final)
        if clash is not None:
            detail = f"the patch makes {clash!r} both a file and a directory"
            return self._early(request, VerdictStatus.POLICY_VIOLATION, detail, flags)
        arguments = _pytest_arguments(request, final)
        if not arguments:
            return self._early(request, VerdictStatus.NO_TESTS_RAN, "no file of a deciding test exists", flags)
        contents = {**model.contents, **tests.contents}
        configuration = {path for path in final if path.rsplit("/", 1)[-1] in CONFIG_NAMES}
        protected = (plane.files | configuration) & final
        workload = Workload(
            lower=base.directory,
            files={
                path: (entry.mode == EXECUTABLE, contents[entry.blob])
                for path, entry in changes.items()
                if entry is not None
            },
            deleted=[path for path, entry in changes.items() if entry is None],
            readonly=sorted(protected - _symlinks(base.entries, protected)),
            pytest_arguments=arguments,
            timeout_s=request.timeout_s,
            limits=request.limits,
        )
        trusted = plane.files | configuration
        return Prepared(workload=workload, trusted_files=trusted, flags=flags, tree_key=_tree_key(base, changes))

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


def _pytest_arguments(request: TaskRequest, final: set[str]) -> list[str]:
    """pytest on the files of the deciding tests, in the order of the ids; [] = none of them exists."""
    files = dict.fromkeys(test.split("::", 1)[0] for test in request.deciding_ids)
    present = [path for path in files if path in final]
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


def _file_and_directory(changes: Mapping[str, Entry | None], final: set[str]) -> str | None:
    """A path that is a file and has files below it. git forbids it; restoring may create it."""
    for path, entry in changes.items():
        if entry is not None:
            for parent in PurePosixPath(path).parents:
                if str(parent) in final:
                    return str(parent)
    return None


def _symlinks(entries: Mapping[str, Entry], paths: set[str] | frozenset[str]) -> set[str]:
    """Paths that are symlinks themselves; their targets lie elsewhere in the tree."""
    return {path for path in paths if path in entries and entries[path].mode == SYMLINK}
