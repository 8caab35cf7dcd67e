"""`uv run apps/grpo [train|config|doctor] [--config FILE] [key=value ...]`; no arguments train the quickstart.

Exit codes: 0 done, 2 the user's mistake (one clear line), 1 ours, 75 saved and stopped in time for
checkpoint.must_save_by (resume it), 128 + n stopped by signal n (130 for Ctrl-C): the first one finishes the
step, saves and stops; the second one stops now.
"""

from __future__ import annotations

import argparse
import difflib
import signal
import sys
from asyncio import CancelledError
from collections.abc import Iterator, Sequence
from importlib.metadata import version
from itertools import pairwise
from pathlib import Path
from typing import NoReturn

from dockyard_core import DockyardError, UserError

COMMANDS = {
    "train": """\
Train a policy; its reward is the verdict of real test execution. Without --config, policy.model and
data.train it trains the bundled quickstart: a tiny policy, two CPU cores, a few minutes.

examples:
  uv run apps/grpo train run.max_steps=20 run.seed=1     the quickstart, shorter, with another seed
  uv run apps/grpo policy.model=DIR data.train=TASKS.jsonl
                                                         your model, your SWE-bench-style rows
  uv run apps/grpo --config FILE grpo.max_staleness=0    values from a file, synchronous
""",
    "config": """\
Show every key. On a terminal, or with --explain: value, default, type, meaning, and where the value
came from. Else, or with --yaml: YAML that --config loads again.

examples:
  uv run apps/grpo config                                every key of the quickstart
  uv run apps/grpo config --config FILE loss.kl_coef=0.01
  uv run apps/grpo config > mine.yaml                    a file to start from
""",
    "doctor": """\
Say what this machine and this configuration give: wheels, devices, engine, Ray, isolation of the
sandbox, git, disk, model and data; a line each, with the command that mends it. Exit code 0 when
nothing fails, else 2.

examples:
  uv run apps/grpo doctor
  uv run apps/grpo doctor --config FILE policy.model=DIR
  uv run apps/grpo doctor --json
""",
}
_OVERVIEW = """\
Asynchronous GRPO whose reward is real test execution.

commands (COMMAND --help says more):
  train       train a policy; the default
  config      show every key: value, default, type, meaning, source
  doctor      say what this machine gives, and how to mend what is missing

examples:
  uv run apps/grpo                                       train the quickstart (a tiny policy, two CPU cores)
  uv run apps/grpo run.max_steps=20 run.seed=1           the same, shorter, with another seed
  uv run apps/grpo policy.model=DIR data.train=TASKS.jsonl
  uv run apps/grpo doctor                                before the first run
"""
OUT_OF_TIME = 75
"""EX_TEMPFAIL of sysexits.h: try again later."""
_ONLY = {"yaml": "config", "explain": "config", "json": "doctor"}


def main(arguments: Sequence[str] | None = None) -> int:
    """Run a command; returns the exit code."""
    try:
        return _run(_Options(arguments))
    except (KeyboardInterrupt, CancelledError):
        return _fail("stopped at once; what the last checkpoint holds is kept", 128 + signal.SIGINT)
    except Exception as error:  # noqa: BLE001  the process boundary: every failure becomes an exit code here
        return _explain(error)


class _Parser(argparse.ArgumentParser):
    """An argparse mistake is one line, like any other."""

    def error(self, message: str) -> NoReturn:
        raise UserError(f"{message}; see: uv run apps/grpo --help")


class _Options:
    """The command line, read. Raises UserError."""

    def __init__(self, arguments: Sequence[str] | None) -> None:
        given = list(sys.argv[1:] if arguments is None else arguments)
        # The command decides which help is shown, wherever it stands; a file's name is not it.
        named = [word for before, word in pairwise(["", *given]) if word in COMMANDS and before != "--config"]
        options = _parser(named[0] if named else None).parse_intermixed_args(given)
        words: list[str] = options.words
        self.command = words.pop(0) if words and "=" not in words[0] else "train"
        if self.command not in COMMANDS:
            raise UserError(f"unknown command {self.command!r}; {_closest_command(self.command)}")
        self.overrides = words
        self.file: Path | None = options.config
        self.as_json: bool = options.json
        self.as_yaml: bool = options.yaml
        self.as_table: bool = options.explain
        for name, owner in _ONLY.items():
            if getattr(options, name) and self.command != owner:
                raise UserError(f"--{name} is for {owner}, got command {self.command!r}; leave it out")
        if self.as_yaml and self.as_table:
            raise UserError("--yaml and --explain exclude each other, got both; choose one")


def _closest_command(word: str) -> str:
    close = difflib.get_close_matches(word, COMMANDS, n=1, cutoff=0.5)
    return f"did you mean {close[0]!r}?" if close else f"commands are {', '.join(COMMANDS)}; an override is key=value"


def _parser(command: str | None) -> argparse.ArgumentParser:
    parser = _Parser(
        prog="uv run apps/grpo",
        usage=f"uv run apps/grpo {command or '[COMMAND]'} [options] [section.key=value ...]",
        description=COMMANDS[command] if command else _OVERVIEW,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    parser.add_argument("words", nargs="*", metavar="section.key=value", help="overrides, e.g. run.max_steps=20")
    parser.add_argument("--config", type=Path, metavar="FILE", help="YAML file of values")

    def flag(name: str, text: str) -> None:
        is_shown = command == _ONLY[name]
        parser.add_argument(f"--{name}", action="store_true", help=text if is_shown else argparse.SUPPRESS)

    flag("explain", "the table, even where the output is no terminal")
    flag("yaml", "YAML, even on a terminal")
    flag("json", "one JSON object")
    parser.add_argument("--version", action="version", version=f"dockyard-grpo {version('dockyard-grpo')}")
    return parser


def _run(options: _Options) -> int:
    if options.command == "doctor":
        from dockyard_grpo.doctor import doctor

        return doctor(options.file, options.overrides, as_json=options.as_json)
    if options.command == "config":
        return _show(options)
    from dockyard_grpo.config import load_config, uses_quickstart

    config = load_config(options.file, options.overrides)
    from dockyard_grpo.train import train

    if uses_quickstart(options.file, options.overrides):
        print("quickstart: a tiny policy learns to fix one-line bugs; its reward is pytest in a sandbox")
    outcome = train(config)
    if outcome.is_out_of_time:
        return OUT_OF_TIME
    return 0 if outcome.stopped_by is None else 128 + outcome.stopped_by


def _show(options: _Options) -> int:
    from dockyard_grpo.config.loading import dump_config, read_layers, validate

    layers = read_layers(options.file, options.overrides)
    config = validate(layers)
    if options.as_yaml or not (options.as_table or sys.stdout.isatty()):
        sys.stdout.write(dump_config(config))
        return 0
    from rich.console import Console

    from dockyard_grpo.config.listing import list_keys, print_keys

    print_keys(list_keys(config, layers), Console(highlight=False))
    return 0


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
    cause = getattr(error, "cause", None)
    if isinstance(cause, BaseException):  # ray.exceptions.RayTaskError: its own text is a remote traceback
        yield from _leaves(cause)
    else:
        yield error


def _fail(line: str, code: int) -> int:
    kind = "error" if code == 2 else "failed"
    print(f"{kind}: {' '.join(line.split())}", file=sys.stderr)
    return code
