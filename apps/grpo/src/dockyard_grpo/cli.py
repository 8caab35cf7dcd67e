"""`uv run apps/grpo [train|config] [--config FILE] [key=value ...]`; no arguments train the quickstart.

Exit codes: 0 done, 2 the user's mistake (one clear line), 1 ours, 128 + n stopped by signal n (130 for
Ctrl-C): the first one finishes the step, saves and stops; the second one stops now.
"""

from __future__ import annotations

import argparse
import signal
import sys
from asyncio import CancelledError
from collections.abc import Iterator, Sequence
from importlib.metadata import version
from pathlib import Path

from dockyard_core import DockyardError, UserError

COMMANDS = ("train", "config")
_EXAMPLES = """\
examples:
  uv run apps/grpo                                      train the quickstart (a tiny policy, two CPU cores)
  uv run apps/grpo run.max_steps=20 run.seed=1          the same, shorter, with another seed
  uv run apps/grpo policy.model=DIR data.train=TASKS.jsonl
                                                        train your model on your SWE-bench-style rows
  uv run apps/grpo --config FILE grpo.max_staleness=0   values from a file, synchronous
  uv run apps/grpo config                               print every key with its value
"""


def main(arguments: Sequence[str] | None = None) -> int:
    """Run a command; returns the exit code."""
    options = _parser().parse_intermixed_args(arguments)
    words: list[str] = options.words
    command = words.pop(0) if words and words[0] in COMMANDS else "train"
    try:
        return _run(command, options.config, words)
    except (KeyboardInterrupt, CancelledError):
        return _fail("stopped at once; what the last checkpoint holds is kept", 128 + signal.SIGINT)
    except Exception as error:  # noqa: BLE001  the process boundary: every failure becomes an exit code here
        return _explain(error)


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="uv run apps/grpo",
        description="Asynchronous GRPO whose reward is real test execution.",
        epilog=_EXAMPLES,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("words", nargs="*", metavar="train|config key=value", help="a command, then overrides")
    parser.add_argument("--config", type=Path, metavar="FILE", help="YAML file of values")
    parser.add_argument("--version", action="version", version=f"dockyard-grpo {version('dockyard-grpo')}")
    return parser


def _run(command: str, file: Path | None, overrides: Sequence[str]) -> int:
    from dockyard_grpo.config import dump_config, load_config, uses_quickstart

    config = load_config(file, overrides)
    if command == "config":
        sys.stdout.write(dump_config(config))
        return 0
    from dockyard_grpo.train import train

    if uses_quickstart(file, overrides):
        print("quickstart: a tiny policy learns to fix one-line bugs; its reward is pytest in a sandbox")
    outcome = train(config)
    return 0 if outcome.stopped_by is None else 128 + outcome.stopped_by


def _explain(error: BaseException) -> int:
    """One line for what was raised on purpose, a traceback for what was not."""
    leaves = list(_leaves(error))
    for leaf in leaves:
        if isinstance(leaf, UserError):
            return _fail(str(leaf), 2)
    for leaf in leaves:
        if isinstance(leaf, DockyardError):
            return _fail(f"{type(leaf).__name__}: {leaf}", 1)
    raise error


def _leaves(error: BaseException) -> Iterator[BaseException]:
    """What is inside exception groups and Ray's wrappers."""
    if isinstance(error, BaseExceptionGroup):
        for inner in error.exceptions:
            yield from _leaves(inner)
        return
    yield error
    cause = getattr(error, "cause", None)  # ray.exceptions.RayTaskError carries the actor's exception
    if isinstance(cause, BaseException):
        yield from _leaves(cause)


def _fail(line: str, code: int) -> int:
    kind = "error" if code == 2 else "failed"
    print(f"{kind}: {' '.join(line.split())}", file=sys.stderr)
    return code
