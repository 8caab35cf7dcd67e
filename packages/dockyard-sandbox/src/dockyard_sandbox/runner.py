# ruff: noqa: E402, PTH109
# The collector stops before the imports that it would slow down.
"""Runs inside the sandbox: pytest, with every outcome written to the record pipe.

This file is compiled once by the server and executed alone: it must import the standard library
and pytest only, and pytest before any directory of the repository can be imported from.

Records are JSON lines on descriptor 3, numbered from 0 without a gap:
``{"n", "collected": [ids]}``, ``{"n", "collect_error": id}``, ``{"n", "id", "when", "outcome",
"raised", "xfail", "raised_in"}`` and last ``{"n", "end": exit code}``.
"""

from __future__ import annotations

import gc

gc.disable()  # importing pytest allocates much and frees little

import json
import os
import sys
from collections.abc import Callable, Generator
from typing import Any

RECORD_FD = 3


def _open_pipe() -> Callable[..., None]:
    write, dumps, number = os.write, json.dumps, 0

    def record(**fields: Any) -> None:
        nonlocal number
        line = memoryview(dumps({"n": number, **fields}).encode() + b"\n")
        number += 1
        while line:
            line = line[write(RECORD_FD, line) :]

    return record


def _raised_in(excinfo: Any, root: str) -> str | None:
    """File of the innermost frame below ``root``, relative to it."""
    innermost = None
    for entry in excinfo.traceback:
        path = str(entry.path)
        if path.startswith(root + os.sep):
            innermost = path[len(root) + 1 :]
    return innermost


def _plugin(record: Callable[..., None], root: str) -> Any:
    import pytest

    class Recorder:
        def pytest_collection_finish(self, session: Any) -> None:
            record(collected=[item.nodeid for item in session.items])

        def pytest_collectreport(self, report: Any) -> None:
            if report.failed:
                record(collect_error=report.nodeid)

        @pytest.hookimpl(wrapper=True, tryfirst=True)
        def pytest_runtest_makereport(self, item: Any, call: Any) -> Generator[None, Any, Any]:
            report = yield
            excinfo = call.excinfo
            record(
                id=item.nodeid,
                when=call.when,
                outcome=report.outcome,
                raised=None if excinfo is None else excinfo.type.__name__,
                xfail=hasattr(report, "wasxfail"),
                raised_in=None if excinfo is None else _raised_in(excinfo, root),
            )
            return report

    return Recorder()


def main(arguments: list[str], import_paths: list[str]) -> int:
    """Run pytest on ``arguments`` in the current directory and return its exit code."""
    sys.path[:0] = import_paths
    import pytest

    gc.enable()
    gc.freeze()
    root = os.getcwd()
    record = _open_pipe()
    sys.path.insert(0, root)  # what `python -m pytest` does
    code = int(pytest.main(arguments, plugins=[_plugin(record, root)]))
    record(end=code)
    return code


if __name__ == "__main__":
    configuration = json.loads(sys.argv[1])
    exit_code = main(configuration["arguments"], configuration["import_paths"])
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(exit_code)  # nothing left to say: skip the interpreter's teardown and atexit hooks
