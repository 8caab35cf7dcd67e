"""Measures the period of the loop against its law, with an engine that takes a set time and no CPU.

    uv run python -m benchmarks.loop_period                    all cases, results/loop_period.json
    uv run python -m benchmarks.loop_period --cases S=0        some of them (the others stay as they were)
    uv run python -m benchmarks.loop_period --table            print the table of the result file
    uv run python -m benchmarks.loop_period --profile FOLDER   with a cProfile of the driver per case, which slows it

With G = generate + judge, T = train, F = refit and S = grpo.max_staleness, a step takes

    max(T + F, (G + T + F) / (S + 1)).

Each case is a run of the real app (Ray, trainer, refit over GLOO, sandbox server) with `LatencyGenerator` as engine.
The groups of one version move together, so everything is looked at over S + 1 steps: in each such window, T, F and the
period are means over its steps, and G is the mean over its steps of the step's slowest rollout, by the rollouts' own
timings. Measured, G, T, F and the law of them are medians over all windows. overhead = 1 - law / measured: the driver's
own work, and what waits for a core. The few tasks are judged from the sandbox's cache after the warm-up: the cores are
the loop's.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from collections import defaultdict
from collections.abc import Mapping, Sequence
from pathlib import Path
from statistics import fmean, median
from typing import Any, NamedTuple

from benchmarks.result_files import write_results

ROOT = Path(__file__).resolve().parent.parent
RESULTS = ROOT / "benchmarks" / "results" / "loop_period.json"
PACKAGES = ("torch", "transformers", "ray")
WARM_UP_STEPS = 10
OVERRIDES = [
    "generation.backend=benchmarks.latency_engine:LatencyGenerator",
    "reward.kind=benchmarks.latency_engine:index_reward",
    "data.validation=null",
    "data.limit=4",
    "checkpoint.every_steps=null",
    "logging.console=plain",
]


class Case(NamedTuple):
    """One run."""

    max_staleness: int
    latency_s: float
    """Of a request."""
    num_steps: int
    """That are measured, after the warm-up; a multiple of S + 1."""
    num_prompts: int = 2
    """Groups of a step."""
    num_generations: int = 2
    """Rollouts of a group."""


CASES: dict[str, Case] = {
    "S=0": Case(0, 2.0, 24),
    "S=1": Case(1, 2.0, 40),
    "S=2": Case(2, 2.0, 60),
    "S=4": Case(4, 2.0, 60),
    "S=4, trainer-bound": Case(4, 0.05, 100),
    "S=1, 16 x 16": Case(1, 4.0, 24, num_prompts=16, num_generations=16),
}


def law(generate_s: float, train_s: float, refit_s: float, max_staleness: int) -> float:
    """Seconds per step: the trainer never rests, or every slot is always under way."""
    return max(train_s + refit_s, (generate_s + train_s + refit_s) / (max_staleness + 1))


def measure(case: Case, folder: Path, profile: Path | None = None) -> dict[str, Any]:
    """Run the app once; raises CalledProcessError when it fails.

    Args:
        case: what to run.
        folder: for the run directory.
        profile: file for a cProfile of the driver.
    """
    run_dir, num_steps = folder / "run", WARM_UP_STEPS + case.num_steps
    program = ["apps/grpo"] if profile is None else ["-m", "cProfile", "-o", str(profile), "apps/grpo/__main__.py"]
    command = [sys.executable, *program, f"run.dir={run_dir}", f"run.max_steps={num_steps}"]
    command += [
        f"grpo.max_staleness={case.max_staleness}",
        f"grpo.num_prompts_per_step={case.num_prompts}",
        f"grpo.num_generations_per_prompt={case.num_generations}",
        *OVERRIDES,
    ]
    search_path = os.pathsep.join(filter(None, [str(ROOT), os.environ.get("PYTHONPATH")]))
    environment = {
        **os.environ,
        "PYTHONPATH": search_path,
        "DOCKYARD_LATENCY_S": str(case.latency_s),
        "HF_HUB_OFFLINE": "1",
    }
    with (folder / "log").open("wb") as log:
        app = subprocess.Popen(command, cwd=ROOT, env=environment, stdout=log, stderr=subprocess.STDOUT)
        try:
            before = _cpu_at(app, run_dir, WARM_UP_STEPS)
            after = _cpu_at(app, run_dir, num_steps)
            code = app.wait()
        finally:
            app.terminate()
            app.wait()
    if code != 0:
        sys.stderr.write((folder / "log").read_text(errors="replace")[-4000:])
        raise subprocess.CalledProcessError(code, command)
    found = summarize(_rows(run_dir / "metrics.jsonl"), _rows(run_dir / "rollouts.jsonl"), case.max_staleness)
    return found | {
        "latency_s": case.latency_s,
        "rollouts_per_step": case.num_prompts * case.num_generations,
        "driver_cpu_s_per_step": round((after - before) / case.num_steps, 4),
        "load_average": [round(value, 2) for value in os.getloadavg()],
    }


def summarize(
    metrics: Sequence[Mapping[str, Any]], rollouts: Sequence[Mapping[str, Any]], max_staleness: int
) -> dict[str, Any]:
    """The measured period and the law's, over the steps after the warm-up.

    Args:
        metrics: rows of metrics.jsonl, in order.
        rollouts: rows of rollouts.jsonl.
        max_staleness: S.
    """
    window, measured = max_staleness + 1, metrics[WARM_UP_STEPS:]
    slowest: defaultdict[int, float] = defaultdict(float)
    for row in rollouts:
        if row["step"] is not None:
            seconds = row["timings_s"]["generate"] + row["timings_s"].get("judge", 0.0)
            slowest[row["step"]] = max(slowest[row["step"]], seconds)
    ends = [row["wall_s"] for row in metrics[WARM_UP_STEPS - 1 :]]
    periods = [(late - early) / window for early, late in zip(ends, ends[window:], strict=False)]
    generate_s = _window_means([slowest[row["step"]] for row in measured], window)
    train_s = _window_means([row["time_train_s"] for row in measured], window)
    refit_s = _window_means([row["time_refit_s"] for row in measured], window)
    laws = [law(*durations, max_staleness) for durations in zip(generate_s, train_s, refit_s, strict=True)]
    expected_s, period_s = median(laws), median(periods)
    return {
        "max_staleness": max_staleness,
        "steps": len(measured),
        "G_s": round(median(generate_s), 4),
        "T_s": round(median(train_s), 4),
        "F_s": round(median(refit_s), 4),
        "law_s": round(expected_s, 4),
        "measured_s": round(period_s, 4),
        "ratio": round(period_s / expected_s, 4),
        "overhead": round(1 - expected_s / period_s, 4),
        "measured_s_min_max": [round(min(periods), 4), round(max(periods), 4)],
        "driver_s": round(
            median(row["step_s"] - row["time_train_s"] - row["time_refit_s"] - row["time_wait_s"] for row in measured),
            4,
        ),
        "wait_s": round(median(row["time_wait_s"] for row in measured), 4),
        "staleness_max": max(row["staleness_max"] for row in measured),
        "dropped": metrics[-1]["dropped"],
    }


def _window_means(values: Sequence[float], window: int) -> list[float]:
    return [fmean(values[at : at + window]) for at in range(len(values) - window + 1)]


def table(results: Mapping[str, Any]) -> str:
    """Markdown of the result file."""
    head = "| case | G, T, F (s) | law (s) | measured (s) | ratio | overhead | driver CPU per step (s) |"
    lines = [head, "| --- | --- | --- | --- | --- | --- | --- |"]
    for name, case in results["cases"].items():
        lines.append(
            f"| {name} | {case['G_s']:.3f}, {case['T_s']:.3f}, {case['F_s']:.3f} | {case['law_s']:.3f} | "
            f"{case['measured_s']:.3f} | {case['ratio']:.3f} | {case['overhead']:.1%} | "
            f"{case['driver_cpu_s_per_step']:.3f} |"
        )
    return "\n".join(lines)


def _rows(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text().split("\n")[:-1]] if path.exists() else []


def _cpu_at(app: subprocess.Popen[bytes], run_dir: Path, step: int) -> float:
    """CPU seconds that the driver has used when metrics.jsonl gets the row of ``step``; 0 when it ended before."""
    path = run_dir / "metrics.jsonl"
    while app.poll() is None:
        try:
            if path.read_bytes().count(b"\n") >= step:
                fields = Path(f"/proc/{app.pid}/stat").read_text().rpartition(")")[2].split()
                return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")
        except FileNotFoundError:
            pass  # no step is done yet
        time.sleep(0.02)
    return 0.0


def _write(results: dict[str, Any]) -> None:
    results["overrides"] = OVERRIDES
    results["cases"] = {case: results["cases"][case] for case in CASES if case in results["cases"]}
    write_results(RESULTS, results, PACKAGES)


def main() -> None:
    """Run the cases that were asked for."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--cases", nargs="*", choices=CASES, default=list(CASES))
    parser.add_argument("--table", action="store_true")
    parser.add_argument("--profile", type=Path, help="folder for a cProfile per case; results stay as they were")
    options = parser.parse_args()
    results = json.loads(RESULTS.read_text()) if RESULTS.exists() else {"cases": {}}
    if options.table:
        print(table(results))
        return
    for name in options.cases:
        profile = None if options.profile is None else options.profile / f"{name.replace(' ', '')}.prof"
        with tempfile.TemporaryDirectory(prefix="dockyard-period-") as folder:
            found = measure(CASES[name], Path(folder), profile)
        print(name, json.dumps(found), flush=True)
        if profile is None:
            results["cases"][name] = found
            _write(results)


if __name__ == "__main__":
    main()
