"""The result files: what stands in each of them, how it is written, and what the commands say of it."""

from __future__ import annotations

import argparse
import json
import os
import platform
import subprocess
from collections.abc import Callable, Iterable, Mapping
from importlib.metadata import version
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
FOLDER = ROOT / "benchmarks" / "results"


def write_results(path: Path, results: dict[str, Any], packages: Iterable[str]) -> None:
    """Add the machine, versions of ``packages`` and the commit, and replace the file."""
    results["machine"] = {"cores": os.cpu_count(), "python": platform.python_version(), "arch": platform.machine()}
    results["versions"] = {**results.get("versions", {}), **{package: version(package) for package in packages}}
    commit = subprocess.run(["git", "rev-parse", "HEAD"], cwd=ROOT, capture_output=True, text=True).stdout.strip()
    results["commit"] = commit
    path.parent.mkdir(exist_ok=True)
    temporary = path.with_suffix(".new")
    temporary.write_text(json.dumps(results, indent=1) + "\n")
    temporary.replace(path)


def add_report_options(parser: argparse.ArgumentParser) -> None:
    """``--table`` and ``--check``, which read the result file and run nothing."""
    parser.add_argument("--table", action="store_true", help="print the tables of the result file")
    parser.add_argument(
        "--check", action="store_true", help="exit 1 with a line per target that the result file misses"
    )


def report(
    options: argparse.Namespace,
    path: Path,
    table: Callable[[Mapping[str, Any]], str],
    check: Callable[[Mapping[str, Any]], list[str]],
) -> None:
    """Do what `add_report_options` were given for, and end the program then."""
    if options.table or options.check:
        results = json.loads(path.read_text())
        if options.table:
            print(table(results))
        missed = check(results) if options.check else []
        raise SystemExit("\n".join(missed) or 0)
