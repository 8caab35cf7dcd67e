"""Completion text -> the unified diff in it, by the grammar of a diff and not by its wrapping.

A diff's own line counts say where a hunk ends, so prose, Markdown fences and tags around it need no
parsing, and a fence or a header *inside* a hunk is content. Nothing is repaired: a malformed diff is
handed on as it was written, and the sandbox says ``apply_failed``.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence

_HUNK = re.compile(r"@@ -[0-9]{1,9}(?:,([0-9]{1,9}))? \+[0-9]{1,9}(?:,([0-9]{1,9}))? @@")
_BINARY_CHUNK = re.compile(r"(literal|delta) [0-9]+$")
_BINARY_DATA = re.compile(r"[A-Za-z][0-9A-Za-z!#$%&()*+;<=>?@^_`{|}~-]+$")
_ESCAPE = re.compile(rb'\\([0-7]{3}|[abfnrtv"\\])')
_ESCAPED = {b"a": b"\a", b"b": b"\b", b"f": b"\f", b"n": b"\n", b"r": b"\r", b"t": b"\t", b"v": b"\v"}
_EXTENDED_HEADERS = (
    "index ",
    "old mode ",
    "new mode ",
    "deleted file mode ",
    "new file mode ",
    "similarity index ",
    "dissimilarity index ",
    "rename from ",
    "rename to ",
    "copy from ",
    "copy to ",
    "Binary files ",
)
_OPEN_TAG, _CLOSE_TAG = "<patch>", "</patch>"


def extract_patch(completion_text: str) -> str:
    """The unified diff written in a completion, or "" when it holds none.

    Takes a raw diff, a fenced one, one between ``<patch>`` tags, and prose around any of them. Every
    line of the result is a line of the text, in the same order; a raw diff passes unchanged. A
    missing final newline is added. Carriage returns are dropped only when the header lines have them
    too (then they come from the transport, not from the patched file).

    Several diffs are joined, except that a later one replaces an earlier one that touches one of
    its files (a draft, then the answer).
    """
    lines = _without_tags(_split_lines(completion_text))
    kept: list[str] = []
    later_paths: set[str] = set()
    for start, end in reversed(_blocks(lines)):
        block = lines[start:end]
        if block[0].endswith("\r"):
            block = [line.removesuffix("\r") for line in block]
        text = "".join(f"{line}\n" for line in block)
        paths = set(touched_paths(text))
        if paths.isdisjoint(later_paths):
            kept.append(text)
            later_paths |= paths
    return "".join(reversed(kept))


def touched_paths(patch: str) -> tuple[str, ...]:
    """Paths on either side of a diff, in order of appearance, ``a/`` and ``b/`` removed."""
    lines = _split_lines(patch)
    paths: dict[str, None] = {}
    for start, end in _file_diffs(lines):
        for path in _header_paths([line.removesuffix("\r") for line in lines[start:end]]):
            paths[path] = None
    return tuple(paths)


def _split_lines(text: str) -> list[str]:
    # Not splitlines(): form feeds and Unicode separators are content of a source line.
    lines = text.split("\n")
    if lines[-1] == "":
        lines.pop()
    return lines


def _without_tags(lines: list[str]) -> list[str]:
    """Free a diff that shares its first or last line with a ``<patch>`` tag."""
    opened = next((index for index, line in enumerate(lines) if line.startswith(_OPEN_TAG)), None)
    if opened is None:
        return lines
    lines = list(lines)
    lines[opened] = lines[opened].removeprefix(_OPEN_TAG)
    if any(line.startswith(_CLOSE_TAG) for line in lines[opened:]):
        return lines
    for index in range(len(lines) - 1, opened - 1, -1):
        if lines[index].rstrip().endswith(_CLOSE_TAG):
            lines[index] = lines[index].rstrip().removesuffix(_CLOSE_TAG)
            break
    return lines


def _blocks(lines: Sequence[str]) -> list[tuple[int, int]]:
    """Runs of file diffs with nothing but blank lines between them, as [start, end)."""
    blocks: list[tuple[int, int]] = []
    for start, end in _file_diffs(lines):
        if blocks and not any(line.strip() for line in lines[blocks[-1][1] : start]):
            blocks[-1] = (blocks[-1][0], end)
        else:
            blocks.append((start, end))
    return blocks


def _file_diffs(lines: Sequence[str]) -> Iterator[tuple[int, int]]:
    index = 0
    while index < len(lines):
        end = _end_of_file_diff(lines, index)
        if end > index:
            yield index, end
        index = max(end, index + 1)


def _end_of_file_diff(lines: Sequence[str], start: int) -> int:
    """Index behind the diff of one file that begins at ``start``; ``start`` when none does."""
    index = start
    if lines[start].startswith("diff --git "):
        index += 1
        while index < len(lines) and lines[index].startswith(_EXTENDED_HEADERS):
            index += 1
        if index < len(lines) and lines[index].rstrip("\r") == "GIT binary patch":
            return _end_of_binary(lines, index + 1)
    if not _is_header_pair(lines, index):
        return index if index > start + 1 else start
    index = _next_hunk(lines, index + 2)
    while index < len(lines) and lines[index].startswith("@@"):
        index = _next_hunk(lines, _end_of_hunk(lines, index))
    return index


def _is_header_pair(lines: Sequence[str], index: int) -> bool:
    return index + 1 < len(lines) and lines[index].startswith("--- ") and lines[index + 1].startswith("+++ ")


def _next_hunk(lines: Sequence[str], index: int) -> int:
    """Step over blank lines only when a hunk follows: git refuses such a diff, and must see it."""
    ahead = index
    while ahead < len(lines) and not lines[ahead].strip():
        ahead += 1
    return ahead if ahead < len(lines) and lines[ahead].startswith("@@ -") else index


def _end_of_hunk(lines: Sequence[str], start: int) -> int:
    match = _HUNK.match(lines[start])
    num_old, num_new = (1 if count is None else int(count) for count in match.groups()) if match else (0, 0)
    index = start + 1
    while index < len(lines):
        kind = lines[index].rstrip("\r")[:1]
        if lines[index].startswith("\\ "):
            pass
        elif num_old <= 0 and num_new <= 0:
            # More lines than counted: still the diff's, so that what was written is what is judged.
            if kind not in ("+", "-", " ") or _is_header_pair(lines, index):
                break
        elif _begins_next_file(lines, index, num_old, num_new):
            break
        elif kind in ("", " ", "+", "-"):
            num_old -= kind != "+"
            num_new -= kind != "-"
        else:
            break
        index += 1
    return index


def _begins_next_file(lines: Sequence[str], index: int, num_old: int, num_new: int) -> bool:
    """Whether a miscounted hunk ran into the next file's header."""
    ends_here = num_old == 1 and num_new == 1
    return (
        not ends_here
        and _is_header_pair(lines, index)
        and index + 2 < len(lines)
        and lines[index + 2].startswith("@@ -")
    )


def _end_of_binary(lines: Sequence[str], index: int) -> int:
    while index < len(lines):
        line = lines[index].rstrip("\r")
        if line and not _BINARY_CHUNK.match(line) and not _BINARY_DATA.match(line):
            break
        index += 1
    return index


def _header_paths(lines: Sequence[str]) -> Iterator[str]:
    """Paths of one file diff, from its header alone."""
    for line in lines:
        if line.startswith(("@@", "GIT binary patch")):
            return
        if line.startswith(("--- ", "+++ ")):
            # A tab separates the path from a time stamp.
            name = _unquote(line[4:].split("\t")[0])
            if name != "/dev/null":
                yield name.partition("/")[2] or name
        elif line.startswith(("rename from ", "rename to ", "copy from ", "copy to ")):
            yield _unquote(line.split(" ", 2)[2])
        elif line.startswith("diff --git "):
            # Ambiguous when paths hold spaces, so it is trusted only when both sides are equal.
            names = line.removeprefix("diff --git ")
            old, new = _unquote(names[: len(names) // 2]), _unquote(names[len(names) // 2 + 1 :])
            if old.partition("/")[2] and old.partition("/")[2] == new.partition("/")[2]:
                yield old.partition("/")[2]


def _unquote(name: str) -> str:
    """Undo git's C-style quoting of unusual paths."""
    if not (len(name) >= 2 and name[0] == name[-1] == '"'):
        return name

    def plain(match: re.Match[bytes]) -> bytes:
        code = match.group(1)
        return bytes([int(code, 8) & 0xFF]) if len(code) == 3 else _ESCAPED.get(code, code)

    return _ESCAPE.sub(plain, name[1:-1].encode("utf-8", "replace")).decode("utf-8", "replace")
