"""Finds or makes an environment with SGLang for tests, and reads the request schema of its wheel.

python tests/sglang_environment.py VENV     write tests/sglang_schema.json from VENV's wheel
"""

from __future__ import annotations

import ast
import functools
import json
import os
import sys
from pathlib import Path
from typing import Any

import pytest

from tools.kept_environment import interpreter_of

ROOT = Path(__file__).resolve().parent.parent
TOOL = ROOT / "tools" / "sglang_env.py"
SCHEMA_PATH = ROOT / "tests" / "sglang_schema.json"
VARIABLE = "DOCKYARD_SGLANG_PYTHON"
_WANTED = {
    "api/v1/api_types.py": (
        "AbortRequest",
        "GenerateMetaInfo",
        "GenerateRequest",
        "GenerateResponse",
        "LogprobEntry",
        "SamplingParams",
        "WeightVersionSpan",
    ),
    "srt/managers/io_struct.py": (
        "ContinueGenerationReqInput",
        "InitWeightsUpdateGroupReqInput",
        "PauseGenerationReqInput",
        "UpdateWeightFromDiskReqInput",
        "UpdateWeightVersionReqInput",
        "UpdateWeightsFromDistributedReqInput",
    ),
}


def sglang_python() -> Path:
    """The interpreter that `DOCKYARD_SGLANG_PYTHON` names, or one of an environment made here and kept.

    Skips the test, with the reason, where none can be made.
    """
    found = _find_or_make()
    if isinstance(found, str):
        pytest.skip(found)
    return found


@functools.cache
def _find_or_make() -> Path | str:
    """The interpreter, or why there is none; tried once."""
    sources = sorted(
        path for path in (TOOL.parent / "sglang_cpu").rglob("*") if path.is_file() and path.suffix != ".pyc"
    )
    content = b"".join(path.read_bytes() for path in (TOOL, *sources))
    found = interpreter_of("sglang", TOOL, VARIABLE, content)
    # Nothing is skipped for a mistake in the variable.
    assert isinstance(found, Path) or not os.environ.get(VARIABLE), found
    return found


def package_folder(python: Path) -> Path:
    """Where the environment's `sglang` is."""
    [found] = python.parent.parent.glob("lib/python3*/site-packages/sglang")
    return found


def read_schema(package: Path) -> dict[str, Any]:
    """Class -> field -> type, as the wheel's sources write them; nothing is imported."""
    classes = {}
    for name, wanted in _WANTED.items():
        for node in ast.parse((package / name).read_text()).body:
            if isinstance(node, ast.ClassDef) and node.name in wanted:
                fields = [part for part in node.body if isinstance(part, ast.AnnAssign)]
                classes[node.name] = {ast.unparse(field.target): ast.unparse(field.annotation) for field in fields}
    [info] = package.parent.glob("sglang-*.dist-info")
    return {"version": info.name.split("-")[1].removesuffix(".dist"), "classes": classes}


def committed_schema() -> dict[str, Any]:
    """What `SCHEMA_PATH` holds."""
    found: dict[str, Any] = json.loads(SCHEMA_PATH.read_text())
    return found


if __name__ == "__main__":
    text = json.dumps(read_schema(package_folder(Path(sys.argv[1]) / "bin" / "python")), indent=1, sort_keys=True)
    SCHEMA_PATH.write_text(text + "\n")
