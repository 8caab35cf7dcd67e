"""Task -> prompt text. A renderer is a callable; `RENDERERS` is the plain dict to choose from."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from types import MappingProxyType
from typing import Literal, NamedTuple

from dockyard_core.errors import ConfigError, DataError
from dockyard_core.task import Task
from dockyard_core.tokenizer import Tokenizer

PromptRenderer = Callable[[Task], str]
PromptTemplate = Literal["auto", "numbered", "plain", "chat"]

_INSTRUCTIONS = """\
Below are a problem statement and files of a Python repository. Change the repository so that the \
problem is solved; hidden tests decide.

Answer with one unified diff inside one ```diff fence:
- paths as `--- a/PATH` and `+++ b/PATH`, relative to the root of the repository
- hunks as `@@ -START,COUNT +START,COUNT @@` with true line counts and up to three lines of context
- each file line is shown as `NUMBER|TEXT`; the diff holds TEXT only
"""


def render_numbered(task: Task) -> str:
    """The statement, then each prompt file with numbered lines, then the mark that asks for a diff.

    Line numbers spare a small model the counting that a hunk header needs.
    """
    lines = [f"{task.problem_statement}\n"]
    for path, text in task.prompt_files:
        lines.append(f"{path}\n")
        lines.extend(f"{number}|{line}\n" for number, line in enumerate(text.splitlines(), 1))
    return "".join(lines) + "<patch>"


def render_instructions(task: Task) -> str:
    """Instructions, statement and files for a general model; the user's turn of a conversation."""
    parts = [_INSTRUCTIONS, f"\n<problem>\n{task.problem_statement.strip()}\n</problem>\n"]
    for path, text in task.prompt_files:
        # Numbered as git counts lines: a form feed does not end one.
        lines = text.removesuffix("\n").split("\n")
        body = "".join(f"{number}|{line}\n" for number, line in enumerate(lines, 1)) if text else ""
        parts.append(f'\n<file path="{path}">\n{body}</file>\n')
    return "".join(parts)


def render_plain(task: Task) -> str:
    """`render_instructions`, then an opened fence, so that a base model goes on with the diff."""
    return f"{render_instructions(task)}\nThe answer:\n```diff\n"


RENDERERS: Mapping[str, PromptRenderer] = MappingProxyType({"numbered": render_numbered, "plain": render_plain})


class Prompt(NamedTuple):
    """A prompt within its token budget."""

    text: str
    token_ids: tuple[int, ...]
    num_files: int
    """How many of the task's files it shows, counted from the first."""


def build_prompt(
    task: Task,
    *,
    template: PromptTemplate = "auto",
    tokenizer: Tokenizer,
    max_prompt_tokens: int | None = None,
) -> str:
    """The prompt text of a task; `fit_prompt` without the token ids."""
    return fit_prompt(task, template=template, tokenizer=tokenizer, max_prompt_tokens=max_prompt_tokens).text


def fit_prompt(
    task: Task,
    *,
    template: PromptTemplate = "auto",
    tokenizer: Tokenizer,
    max_prompt_tokens: int | None = None,
) -> Prompt:
    """Render and encode a task's prompt, dropping files from the end until it fits.

    Args:
        task: the problem; ``test_patch`` and ``gold_patch`` are never shown.
        template: ``chat`` uses the tokenizer's chat template, ``plain`` and ``numbered`` do not;
            ``auto`` is ``chat`` when there is one, else ``plain``.
        tokenizer: the policy's.
        max_prompt_tokens: upper bound in tokens; None = no bound.

    Raises:
        ConfigError: the template is unknown, or ``chat`` is asked of a tokenizer without one.
        DataError: the prompt is too long even without files; names the task.
    """
    num_tokens = 0
    for num_files in range(len(task.prompt_files), -1, -1):
        text = _render(replace(task, prompt_files=task.prompt_files[:num_files]), template, tokenizer)
        token_ids = tuple(tokenizer.encode(text))
        num_tokens = len(token_ids)
        if max_prompt_tokens is None or num_tokens <= max_prompt_tokens:
            return Prompt(text, token_ids, num_files)
    raise DataError(
        f"task {task.instance_id}: problem_statement: the prompt must have at most {max_prompt_tokens} tokens, "
        f"got {num_tokens} without any file; raise max_prompt_tokens or leave the task out"
    )


def _render(task: Task, template: PromptTemplate, tokenizer: Tokenizer) -> str:
    if template in RENDERERS:
        return RENDERERS[template](task)
    if template not in ("auto", "chat"):
        raise ConfigError(f"prompt template must be one of auto, numbered, plain, chat, got {template!r}; choose one")
    text = tokenizer.render_chat([{"role": "user", "content": render_instructions(task)}])
    if text is None and template == "chat":
        raise ConfigError(
            "prompt template chat needs a tokenizer with a chat template, got one without; use auto or plain"
        )
    return render_plain(task) if text is None else text
