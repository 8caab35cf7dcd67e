"""Find out what this machine gives, by real runs: the levels, and the control groups."""

from __future__ import annotations

import contextlib
import os
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass, replace
from importlib.util import cache_from_source, find_spec
from pathlib import Path

from dockyard_core import ConfigError
from dockyard_sandbox import cgroups
from dockyard_sandbox.cancellation import Cancellation
from dockyard_sandbox.environments import own_environment
from dockyard_sandbox.isolation import REMEDIES, Isolation, absent, candidates, unsafe
from dockyard_sandbox.jailer import Jailer, Workload
from dockyard_sandbox.judge import RunResult
from dockyard_sandbox.wire import Limits

_PROBE = """\
import os

import pytest

HIDDEN = {hidden!r}


def test_the_tree_is_the_working_directory():
    assert os.path.exists("test_probe.py")


@pytest.mark.parametrize("path", HIDDEN)
def test_the_host_is_out_of_reach(path):
    with pytest.raises(OSError):
        open(path).close()


def test_nothing_outside_can_be_written():
    with pytest.raises(OSError):
        open(pytest.__file__, "a").close()
"""


@dataclass(frozen=True, kw_only=True)
class Finding:
    """What the probe of one level showed."""

    isolation: Isolation
    failure: str | None
    """Why it cannot be had; None = it can."""


def find_jailer(scratch: Path, minimum: str | None, *, with_groups: bool = False) -> Jailer:
    """Probe the levels, strongest first, with a real run; optionally the control groups as well.

    Raises ConfigError when the strongest level is below ``minimum``; None = anything but ``unsafe``.
    """
    reasons = absent()
    with contextlib.ExitStack() as undo:
        groups = cgroups.probe() if with_groups else None  # before a launcher starts: it is born where we are
        if groups is not None:
            undo.callback(groups.close)
        for jailer, failure in _probe_each(scratch, with_unsafe=minimum == "unsafe"):
            found = jailer.isolation
            if failure is None and (minimum is None or found.satisfies(minimum)):
                jailer.isolation = replace(found, notes=(*found.notes, *_why_not_more(found, reasons)))
                if groups is not None:
                    _use_groups(jailer, groups, scratch / "probe")
                undo.pop_all()
                return jailer
            jailer.close()
            if failure is None:
                break
            reasons.setdefault(found.level, failure.removeprefix(f"{found.level}: "))
    needed = minimum or "landlock"
    why = "; ".join(f"{level}: {reason}" for level, reason in reasons.items())
    remedy = f". To have {needed}: {REMEDIES[needed]}" if needed in REMEDIES else ""
    raise ConfigError(f"isolation must be at least {needed}, this machine refuses it ({why}){remedy}")


def _why_not_more(found: Isolation, reasons: dict[str, str]) -> list[str]:
    """Notes on what was tried before ``found`` worked."""
    stronger = [f"not {level}: {why}" for level, why in reasons.items() if not found.satisfies(level)]
    weaker_form = [f"not its strongest form: {reasons[found.level]}"] if found.level in reasons else []
    return stronger + weaker_form


def probe_groups(scratch: Path) -> cgroups.ControlGroups:
    """The control groups that a server would have which is started like this process; they are closed again."""
    try:
        jailer = find_jailer(scratch, None, with_groups=True)
    except ConfigError as error:
        return cgroups.ControlGroups(notes=(str(error),))
    jailer.close()
    return jailer.groups


def probe_levels(scratch: Path) -> list[Finding]:
    """Every level's finding, strongest first: its best form that works, or why none does."""
    found: dict[str, Finding] = {}
    for jailer, failure in _probe_each(scratch, with_unsafe=False, every=True):
        jailer.close()
        level = jailer.isolation.level
        if level not in found or (found[level].failure is not None and failure is None):
            found[level] = Finding(isolation=jailer.isolation, failure=failure)
    for level, reason in absent().items():
        found.setdefault(
            level, Finding(isolation=Isolation(level=level, tree="copy", seccomp=False, uid=0), failure=reason)
        )
    return sorted(found.values(), key=lambda finding: list(REMEDIES).index(finding.isolation.level))


def _probe_each(scratch: Path, *, with_unsafe: bool, every: bool = False) -> Iterator[tuple[Jailer, str | None]]:
    """Yield (jailer, failure) per candidate; what is yielded is the caller's to close."""
    try:
        environment = own_environment()
    except ModuleNotFoundError as error:
        raise ConfigError(str(error)) from error
    tree = scratch / "probe"
    tree.mkdir(exist_ok=True)
    secret = scratch / "secret"
    secret.write_text("out of reach\n")
    secret.chmod(0o644)
    _write_probe(tree, secret)
    _compile_pytest(tree)
    done: set[str] = set()
    for isolation in [*candidates(), *([unsafe()] if with_unsafe else [])]:
        if every and isolation.level in done:
            continue
        jailer = Jailer(scratch, environment, isolation)
        failure = _probe(jailer, tree)
        if failure is None:
            done.add(isolation.level)
        yield jailer, failure


def _write_probe(tree: Path, secret: Path) -> None:
    hidden = [path for path in (str(secret), "/etc/shadow", "/etc/hostname") if Path(path).exists()]
    (tree / "test_probe.py").write_text(_PROBE.format(hidden=hidden))


def probe_environment(jailer: Jailer, scratch: Path, name: str) -> str | None:
    """Why a test cannot run in the environment ``name``, or None. The runner tells, so pytest must be recent."""
    tree = scratch / "probe"
    failure = _probe(jailer, tree, environment=name)
    return failure and " ".join(failure.split())[-300:]


def try_warm_path(jailer: Jailer, scratch: Path) -> tuple[str, ...]:
    """Let runs be warm if one works; returns why they are not."""
    if jailer.isolation.level == "bwrap":
        return ("no warm path: bwrap executes a new interpreter for every run",)
    failure = _probe(jailer, scratch / "probe", is_warm=True)
    jailer.is_warm = failure is None
    return () if failure is None else (f"no warm path: {' '.join(failure.split())[-300:]}",)


def _probe(jailer: Jailer, tree: Path, *, environment: str | None = None, is_warm: bool = False) -> str | None:
    """Why a run fails, or None."""
    text = (tree / "test_probe.py").read_bytes()
    if environment is not None:  # an image has files of these names of its own
        text = b"def test_it_runs():\n    pass\n"
    if jailer.isolation.level == "unsafe":  # it hides nothing, and says so
        text = b"def test_it_runs():\n    pass\n"
    work = Workload(
        lower=tree,
        files={"test_probe.py": (False, text)},
        deleted=[],
        readonly=["test_probe.py"],
        pytest_arguments=["test_probe.py"],
        timeout_s=60.0,
        limits=Limits(),
        environment=environment,
        is_warm=is_warm,
    )
    run: RunResult = jailer.run(work, Cancellation())
    if run.end == "exited" and run.exit_code == 0 and b'"end"' in run.records:
        return None
    output = " ".join(run.output.decode(errors="replace").split())[-200:]
    return run.error or output or f"{run.end}, exit code {run.exit_code}"


def _use_groups(jailer: Jailer, groups: cgroups.ControlGroups, tree: Path) -> None:
    """Give a jailer control groups, if a run in them works."""
    jailer.groups = groups
    failure = _probe(jailer, tree) if groups.parents else None
    if failure is not None:
        groups.close()
        jailer.groups = replace(groups, parents=(), notes=(*groups.notes, f"a run in control groups fails: {failure}"))


def _compile_pytest(tree: Path) -> None:
    """Let pytest write its byte code once: inside the sandbox nothing can, and every run would pay."""
    spec = find_spec("_pytest.main")
    if spec is not None and spec.origin and not Path(cache_from_source(spec.origin)).exists():
        command = [sys.executable, "-P", "-m", "pytest", "-q", "-p", "no:cacheprovider", "test_probe.py"]
        environment = {"PATH": os.defpath, "PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1"}
        subprocess.run(command, cwd=tree, env=environment, capture_output=True, check=False)
