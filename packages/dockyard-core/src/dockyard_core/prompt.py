"""Task -> prompt text. A renderer is a callable; `RENDERERS` is the plain dict to choose from."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from types import MappingProxyType

from dockyard_core.task import Task

PromptRenderer = Callable[[Task], str]


def render_numbered(task: Task) -> str:
    """The statement, then each prompt file with numbered lines, then the mark that asks for a diff.

    Line numbers spare a small model the counting that a hunk header needs.
    """
    lines = [f"{task.problem_statement}\n"]
    for path, text in task.prompt_files:
        lines.append(f"{path}\n")
        lines.extend(f"{number}|{line}\n" for number, line in enumerate(text.splitlines(), 1))
    return "".join(lines) + "<patch>"


RENDERERS: Mapping[str, PromptRenderer] = MappingProxyType({"numbered": render_numbered})
