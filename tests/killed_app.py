"""Runs the real app, and kills its driver, or a process of its fleets, with SIGKILL at a chosen point.

    python tests/killed_app.py '{"where": "dockyard_grpo.steps:StepRunner.train", "when": "before"}' apps/grpo key=value

``where`` names a function or method, called for the ``number``-th time (from 1), before or after its body.
``event`` narrows it to calls that book or name that event. ``victim`` is how the command line begins of the
process to kill, the oldest one of this run; without it, it is the driver. Nothing of the app knows of it.
"""

from __future__ import annotations

import functools
import importlib
import inspect
import json
import os
import signal
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any


def kill(victim: str | None) -> None:
    """End the driver, or the oldest process of this run whose command line begins with ``victim``."""
    if victim is None:
        os.kill(os.getpid(), signal.SIGKILL)
    mark = f"DOCKYARD_TEST_APP={os.environ['DOCKYARD_TEST_APP']}".encode()
    found = []
    for entry in (entry for entry in Path("/proc").iterdir() if entry.name.isdigit()):
        try:
            is_ours = mark in (entry / "environ").read_bytes().split(b"\0")
            command = (entry / "cmdline").read_bytes().replace(b"\0", b" ").decode(errors="replace")
        except OSError:  # gone meanwhile, or another user's
            continue
        if is_ours and command.startswith(str(victim)):
            found.append(int(entry.name))
    os.kill(min(found), signal.SIGKILL)


class Counter:
    """Says when the n-th matching call is there."""

    def __init__(self, number: int, event: str | None) -> None:
        self._left = number
        self._event = event

    def hits(self, args: tuple[Any, ...]) -> bool:
        if self._event is not None and not any(self._names(argument) for argument in args):
            return False
        self._left -= 1
        return self._left == 0

    def _names(self, argument: Any) -> bool:
        return argument == self._event or (isinstance(argument, dict) and argument.get("event") == self._event)


def deadly(function: Callable[..., Any], when: str, counter: Counter, victim: str | None) -> Callable[..., Any]:
    """The function, except that somebody does not survive one of its calls."""
    if inspect.iscoroutinefunction(function):

        @functools.wraps(function)
        async def call_async(*args: Any, **kwargs: Any) -> Any:
            is_hit = counter.hits(args)
            if is_hit and when == "before":
                kill(victim)
            answer = await function(*args, **kwargs)
            if is_hit and when == "after":
                kill(victim)
            return answer

        return call_async

    @functools.wraps(function)
    def call(*args: Any, **kwargs: Any) -> Any:
        is_hit = counter.hits(args)
        if is_hit and when == "before":
            kill(victim)
        answer = function(*args, **kwargs)
        if is_hit and when == "after":
            kill(victim)
        return answer

    return call


def plant(where: str, when: str, number: int = 1, event: str | None = None, victim: str | None = None) -> None:
    """Replace a function by its deadly twin, in its own module and wherever it was imported to by name."""
    module_name, _, path = where.partition(":")
    owner: Any = importlib.import_module(module_name)
    *parents, name = path.split(".")
    for parent in parents:
        owner = getattr(owner, parent)
    original = getattr(owner, name)
    twin = deadly(original, when, Counter(number, event), victim)
    setattr(owner, name, twin)
    for module in [module for key, module in sys.modules.items() if key.startswith("dockyard_grpo")]:
        if getattr(module, name, None) is original:
            setattr(module, name, twin)


def main() -> int:
    point = json.loads(sys.argv[1])
    sys.argv = sys.argv[2:]
    from dockyard_grpo.cli import main as app

    importlib.import_module("dockyard_grpo.train")
    plant(**point)
    return app()


if __name__ == "__main__":
    sys.exit(main())
