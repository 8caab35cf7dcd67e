"""Docstrings are written to be read in the source: what reStructuredText would take amiss is put right here.

A bar is an absolute value or a union, never a substitution, and the text after a one-line label such as
``References:`` may go on with a hanging indent.
"""

from __future__ import annotations

import inspect
import re
from typing import Any

from sphinx.application import Sphinx
from sphinx.util.typing import ExtensionMetadata

_LITERAL = re.compile(r"(``.+?``|`[^`]+`)")
_LABEL = re.compile(r"(?P<indent> *)(?:References|Raises|Returns): \S")
_BEFORE_NAPOLEON, _AFTER_NAPOLEON = 400, 600
_ONE_LINERS = frozenset({"attribute", "data", "property"})
_kept: dict[str, list[str]] = {}
"""Docstrings that napoleon is not shown: it takes what stands before their first colon for a type."""


def adapt(lines: list[str]) -> list[str]:
    """The same docstring as valid reStructuredText."""
    return [_escape_bars(line) for line in _without_hanging_indents(lines)]


def _escape_bars(line: str) -> str:
    parts = _LITERAL.split(line)
    return "".join(part if index % 2 else part.replace("|", r"\|") for index, part in enumerate(parts))


def _without_hanging_indents(lines: list[str]) -> list[str]:
    adapted: list[str] = []
    indent: str | None = None
    for line in lines:
        if label := _LABEL.match(line):
            indent = label["indent"]
            adapted += ["", line]
        elif indent is not None and line.startswith(f"{indent} "):
            adapted.append(indent + line.lstrip())
        else:
            indent = None
            adapted.append(line)
    return adapted


def _process(app: Sphinx, what: str, name: str, documented: Any, options: Any, lines: list[str]) -> None:
    # A value without a docstring of its own answers with that of its type.
    is_own = what != "data" or "\n".join(lines).strip() != inspect.cleandoc(type(documented).__doc__ or "").strip()
    lines[:] = adapt(lines) if is_own else []
    if what in _ONE_LINERS:
        _kept[name] = list(lines)
        lines.clear()


def _give_back(app: Sphinx, what: str, name: str, documented: Any, options: Any, lines: list[str]) -> None:
    if what in _ONE_LINERS:
        lines[:] = _kept.pop(name)


def setup(app: Sphinx) -> ExtensionMetadata:
    """Connect before napoleon reads the docstring, and after."""
    app.connect("autodoc-process-docstring", _process, priority=_BEFORE_NAPOLEON)
    app.connect("autodoc-process-docstring", _give_back, priority=_AFTER_NAPOLEON)
    return {"version": "1", "parallel_read_safe": True, "parallel_write_safe": True}
