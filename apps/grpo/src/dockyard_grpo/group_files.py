"""Finished groups in files: one `RolloutGroup` per line, read back equal to what was written.

The floats of a line are exact. NaN and the infinities are written as Python's ``json`` writes them.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from functools import cache
from itertools import islice
from pathlib import Path
from typing import Any

from dockyard_core import RolloutGroup


@cache
def _adapter() -> Any:
    from pydantic import TypeAdapter

    return TypeAdapter(RolloutGroup)


def dump_group(group: RolloutGroup) -> str:
    """One line of JSON without its end."""
    # Not dump_json: it has no NaN. A verdict's read-only mappings are left as they are, which it warns of.
    values = _adapter().dump_python(group, warnings=False)
    return json.dumps(values, separators=(",", ":"), default=_plain)


def _plain(value: object) -> dict[Any, Any]:
    if isinstance(value, Mapping):
        return dict(value)
    raise TypeError(f"a group holds values of its own types only, got {type(value).__name__}")


def parse_group(line: str | bytes) -> RolloutGroup:
    """What `dump_group` made a line of. Raises ValueError for anything else."""
    group: RolloutGroup = _adapter().validate_python(json.loads(line))
    return group


def write_groups(path: Path, groups: Iterable[RolloutGroup]) -> None:
    """Write one line per group. Raises OSError."""
    with path.open("w", encoding="ascii", newline="\n") as file:
        for group in groups:
            file.write(dump_group(group) + "\n")


def read_group(path: Path, index: int) -> RolloutGroup:
    """The group of one line, counted from 0. Raises OSError, ValueError, and IndexError past the end."""
    with path.open("rb") as file:
        for line in islice(file, index, index + 1):
            return parse_group(line)
    raise IndexError(f"{path} has no group {index}")
