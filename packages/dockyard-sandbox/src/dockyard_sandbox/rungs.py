"""The `swebench` preset: what git refuses is tried in looser ways, as SWE-bench's harness does.

git_apply        `git apply --cached`             on the trusted side
git_apply_3way   `git apply --cached --3way`      on the trusted side
patch_fuzz       `patch --batch --fuzz=5 -p1`     inside the sandbox, on a tree without `.git`; then indexed again

Each rung starts from the base tree, and the result of each passes the same policy. SWE-bench has `git apply --reject`
before the last one. It succeeds only where the first rung does, and where it fails it leaves half a patch behind: it
is left out.
"""

from __future__ import annotations

import base64
import binascii
import json
import secrets
from collections.abc import Callable
from pathlib import Path

from pydantic import BaseModel, ConfigDict, ValidationError

from dockyard_sandbox.apply import Applier, Delta, IndexedFile, PatchRejected
from dockyard_sandbox.cancellation import Cancellation
from dockyard_sandbox.jailer import Workload
from dockyard_sandbox.judge import RunResult
from dockyard_sandbox.trees import BaseTree
from dockyard_sandbox.wire import Limits

GIT_APPLY, THREE_WAY, FUZZ = "git_apply", "git_apply_3way", "patch_fuzz"
RunBlocking = Callable[[Workload, Cancellation], RunResult]
_LIMITS = Limits(memory_mb=1024, pids=16, disk_mb=512, output_kb=1024)
_TIMEOUT_S = 30.0
_PATCH_PROGRAM = Path("/usr/bin/patch")


class _Change(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True)

    path: str = ""
    mode: str | None = None
    data: str = ""
    end: int | None = None


def apply_on_rungs(
    applier: Applier, run: RunBlocking, base: BaseTree, patch: str, cancellation: Cancellation
) -> tuple[Delta, str]:
    """Return what ``patch`` changes and the rung that applied it.

    Raises:
        PatchRejected: no rung applies it; the message has the reason of the first and the last.
        PolicyViolation: a rung applied it, and it changes what no fix may change.
    """
    try:
        return applier.apply(base, patch, cancellation), GIT_APPLY
    except PatchRejected as error:
        first = error
    try:
        return applier.apply(base, patch, cancellation, options=("--3way",)), THREE_WAY
    except PatchRejected:
        pass  # the first rung's reason is the one that helps
    try:
        return applier.index(base, _fuzz(run, base, patch, cancellation), cancellation), FUZZ
    except PatchRejected as error:
        raise PatchRejected(f"{first}; {FUZZ}: {error}") from error


def _fuzz(run: RunBlocking, base: BaseTree, patch: str, cancellation: Cancellation) -> list[IndexedFile]:
    if not _PATCH_PROGRAM.exists():
        raise PatchRejected(f"{_PATCH_PROGRAM} is not installed, so this rung is missing")
    name = f".dockyard-{secrets.token_hex(8)}.patch"
    text = patch if patch.endswith("\n") else patch + "\n"
    result = run(
        Workload(
            lower=base.directory,
            files={name: (False, text.encode())},
            deleted=[],
            readonly=[],
            pytest_arguments=[],
            timeout_s=_TIMEOUT_S,
            limits=_LIMITS,
            patch_file=name,
        ),
        cancellation,
    )
    if result.end in ("deadline", "memory", "output_limit"):
        raise PatchRejected(f"the patch costs more than a patch may ({result.end})")
    if result.end != "exited":
        raise OSError(f"the sandbox gave no result ({result.end}): {result.error}")
    changes = _read(result.records)
    if not changes or changes[-1].end != 0 or result.exit_code != 0:
        lines = result.output.decode(errors="replace").strip().splitlines()
        raise PatchRejected(lines[-1][:300] if lines else f"exit code {result.exit_code}")
    try:
        return [IndexedFile(one.path, one.mode, base64.b64decode(one.data, validate=True)) for one in changes[:-1]]
    except binascii.Error as error:
        raise PatchRejected("the report of the changed files is malformed") from error


def _read(records: bytes) -> list[_Change]:
    """What the sandbox reported. It is as little trusted as the patch: policy reads what is made of it."""
    try:
        return [_Change.model_validate(json.loads(line)) for line in records.splitlines()]
    except (ValidationError, ValueError) as error:
        raise PatchRejected("the report of the changed files is malformed") from error
