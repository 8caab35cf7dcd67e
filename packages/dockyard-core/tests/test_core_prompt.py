from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace

import pytest

from dockyard_core import ConfigError, DataError, Task
from dockyard_core.prompt import build_prompt, fit_prompt, render_instructions, render_numbered
from dockyard_core.tokenizer import Tokenizer

TASK = Task(
    instance_id="tiny__1",
    repo="tiny",
    base_commit="0" * 40,
    problem_statement="get_price should return the sum",
    test_patch="HELD OUT",
    gold_patch="GOLD",
    fail_to_pass=("test_core.py::test_get_price",),
    prompt_files=(("core.py", "def get_price(a, b):\n    return a - b\n"), ("util.py", "x = 1\n")),
)


class ByteTokenizer:
    """One token per byte; 256 ends a completion."""

    eos_token_id = 256

    def __init__(self, *, has_chat: bool = False) -> None:
        self._has_chat = has_chat

    def encode(self, text: str) -> list[int]:
        return list(text.encode())

    def decode(self, token_ids: Sequence[int]) -> str:
        return bytes(token for token in token_ids if token < 256).decode("utf-8", "replace")

    def render_chat(self, messages: Sequence[Mapping[str, str]]) -> str | None:
        if not self._has_chat:
            return None
        return "".join(f"<|{m['role']}|>{m['content']}" for m in messages) + "<|assistant|>"


PLAIN: Tokenizer = ByteTokenizer()
CHAT: Tokenizer = ByteTokenizer(has_chat=True)


def test_the_numbered_prompt_is_fixed_byte_for_byte() -> None:
    assert render_numbered(TASK) == (
        "get_price should return the sum\n"
        "core.py\n1|def get_price(a, b):\n2|    return a - b\n"
        "util.py\n1|x = 1\n"
        "<patch>"
    )
    assert build_prompt(TASK, template="numbered", tokenizer=CHAT) == render_numbered(TASK)


def test_auto_uses_the_chat_template_when_there_is_one() -> None:
    chat = build_prompt(TASK, template="auto", tokenizer=CHAT)
    assert chat == f"<|user|>{render_instructions(TASK)}<|assistant|>"
    assert chat == build_prompt(TASK, template="chat", tokenizer=CHAT)
    plain = build_prompt(TASK, template="auto", tokenizer=PLAIN)
    assert plain == build_prompt(TASK, template="plain", tokenizer=CHAT)
    assert plain.endswith("```diff\n")


@pytest.mark.parametrize("template", ["numbered", "plain", "chat"])
def test_a_prompt_shows_statement_and_files_and_hides_tests_and_fix(template: str) -> None:
    text = build_prompt(TASK, template=template, tokenizer=CHAT)  # type: ignore[arg-type]
    assert all(part in text for part in ("return the sum", "core.py", "2|    return a - b\n", "util.py", "1|x = 1\n"))
    assert "HELD OUT" not in text
    assert "GOLD" not in text


def test_lines_are_numbered_as_git_counts_them() -> None:
    task = replace(TASK, prompt_files=(("f.py", "a\x0cb\nc"),))
    assert '<file path="f.py">\n1|a\x0cb\n2|c\n</file>' in render_instructions(task)


def test_files_are_dropped_from_the_end_until_the_prompt_fits() -> None:
    full = fit_prompt(TASK, template="plain", tokenizer=PLAIN)
    assert (full.num_files, full.token_ids) == (2, tuple(full.text.encode()))
    exact = fit_prompt(TASK, template="plain", tokenizer=PLAIN, max_prompt_tokens=len(full.token_ids))
    assert exact == full
    fitted = fit_prompt(TASK, template="plain", tokenizer=PLAIN, max_prompt_tokens=len(full.token_ids) - 1)
    assert fitted.num_files == 1
    assert fitted.text == build_prompt(replace(TASK, prompt_files=TASK.prompt_files[:1]), tokenizer=PLAIN)


def test_a_prompt_too_long_without_files_is_refused_by_name() -> None:
    bare = len(build_prompt(replace(TASK, prompt_files=()), template="numbered", tokenizer=PLAIN))
    with pytest.raises(DataError, match=rf"tiny__1.* at most {bare - 1} tokens, got {bare} .*raise max_prompt_tokens"):
        build_prompt(TASK, template="numbered", tokenizer=PLAIN, max_prompt_tokens=bare - 1)


def test_impossible_templates_are_refused() -> None:
    with pytest.raises(ConfigError, match="use auto or plain"):
        build_prompt(TASK, template="chat", tokenizer=PLAIN)
    with pytest.raises(ConfigError, match="got 'fancy'"):
        build_prompt(TASK, template="fancy", tokenizer=PLAIN)  # type: ignore[arg-type]
