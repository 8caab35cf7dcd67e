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
from dockyard_sandbox.patched import PatchedTree
from dockyard_sandbox.repos import RepoStore
from dockyard_sandbox.rungs import RunBlocking, apply_on_rungs
from dockyard_sandbox.trees import EXECUTABLE, SYMLINK, BaseTree, Entry, TreeStore
from dockyard_sandbox.wire import ALL_PLUGINS, TaskRequest

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
        modules_of: Callable[[str | None], frozenset[str]],
        run: RunBlocking,
    ) -> None:
        self._git = git
        self._repos = repos
        self._trees = trees
        self._applier = applier
        self._isolation = isolation
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
            base_directories=base.directories,
            installed=self._modules_of(request.environment),
            model_changes=model.changes,
            exempt=frozenset(request.exempt_paths),
        )
        kept, restored = restore(
            plane,
            model.changes,
            read_base=lambda blob: self._git.run("cat-file", "blob", blob, git_dir=base.bare),
            contents=model.contents,
        )
        tree = PatchedTree(base=base, changes={**kept, **tests.changes}, contents={**model.contents, **tests.contents})
        flags += (*restored, *scan(kept, model.contents, lambda path: _of_base(base, path)))
        violation = _violation(request, tree)
        if violation is not None:
            return self._early(request, VerdictStatus.POLICY_VIOLATION, violation, flags)
        arguments = _pytest_arguments(request, tree)
        if not arguments:
            return self._early(request, VerdictStatus.NO_TESTS_RAN, "no file of a deciding test exists", flags)
        return Prepared(
            workload=Workload(
                lower=base.directory,
                files={
                    path: (entry.mode == EXECUTABLE, tree.contents[entry.blob])
                    for path, entry in tree.changes.items()
                    if entry is not None
                },
                deleted=[path for path, entry in tree.changes.items() if entry is None],
                readonly=_readonly(plane, tree),
                pytest_arguments=[*request.plugin_arguments, *arguments],
                loads_all_plugins=ALL_PLUGINS in request.plugins,
                timeout_s=request.timeout_s,
                limits=request.limits,
                environment=request.environment,
            ),
            xfail_files=_xfail_files(request, tree),
            test_files=_test_files(request, tree),
            flags=flags,
            tree_key=tree.key(),
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


def _test_files(request: TaskRequest, tree: PatchedTree) -> dict[str, tuple[bool, bytes]]:
    entries = {path: tree.get(path) for path in _deciding_files(request)}
    return {
        path: (entry.mode == EXECUTABLE, tree.read(path))
        for path, entry in entries.items()
        if entry is not None and entry.mode in REGULAR
    }


def _of_base(base: BaseTree, path: str) -> bytes:
    """A file of the base tree; b"" when it has no regular file there."""
    return PatchedTree(base=base, changes={}, contents={}).read(path)


def _pytest_arguments(request: TaskRequest, tree: PatchedTree) -> list[str]:
    """pytest on the files of the deciding tests, in the order of the ids; [] = none of them exists."""
    present = [path for path in _deciding_files(request) if path in tree or tree.base.resolve(path) in tree]
    if present and request.test_command is not None:
        return list(request.pytest_arguments)
    return present


def _violation(request: TaskRequest, tree: PatchedTree) -> str | None:
    """What about the combined tree no run could be given, in a sentence. Restoring may cause it, too."""
    clash, size = tree.clash(), tree.size()
    if clash is not None:
        return f"the patch makes {clash!r} both a file and a directory"
    if size > request.limits.disk_mb * 1024 * 1024:
        return f"the changed files must fit into limits.disk_mb={request.limits.disk_mb}, got {size} bytes"
    return None


def _readonly(plane: ControlPlane, tree: PatchedTree) -> list[str]:
    """Files that even running code must not change: what decides, and all of the test directories."""
    protected = {path for path in plane.files if path in tree} | tree.named(CONFIG_NAMES)
    beside = sorted(tree.below(plane.directories) - protected)
    if len(beside) > _MAX_BOUND_FILES:  # every bind is a mount of its own: code before data
        beside = sorted(beside, key=lambda path: not path.endswith(".py"))[:_MAX_BOUND_FILES]
    # a symlink cannot be bound; its target lies elsewhere in the tree
    return sorted(path for path in {*protected, *beside} if tree.base.entries.get(path, _NO_ENTRY).mode != SYMLINK)


def _xfail_files(request: TaskRequest, tree: PatchedTree) -> frozenset[str]:
    """Deciding test files that speak of expected failures: in no other can a test end as one."""

    def speaks(path: str) -> bool:
        text = tree.read(tree.base.resolve(path))
        return any(word in text for word in _EXPECTED_FAILURE)

    files = _deciding_files(request)
    marking = {str(parent) for path in files for parent in PurePosixPath(path).parents}
    if any(speaks(str(PurePosixPath(directory) / "conftest.py")) for directory in marking):
        return frozenset(files)
    return frozenset(path for path in files if speaks(path))
