"""From the steps of `benchmarks.train_step` to figures, tables and targets. Pure functions."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from statistics import median
from typing import Any

MIN_OF_TRL = 1.5
"""Target of our tokens/s over TRL's, on each batch."""
MIN_OF_GEMM = 0.7
"""Target of the dense step over the matrix product's rate."""
TOLERANCE = 1e-3
"""Relative difference of loss and gradient norm beyond which subjects do not compute the same step."""
OURS, PEER, REFERENCE = "ours", "TRL", "naive"
SHARES = (OURS,)
"""Subjects that leave work out, so that a share of the peak would count what they never do."""

Round = Mapping[str, Mapping[str, float]]
"""By subject what its step reported, and under ``gemm`` the rates of the matrix product."""


def disagreements(first: Mapping[str, Mapping[str, float]]) -> list[str]:
    """A line for each subject whose first step is not that of the plain one."""
    found = []
    for name, step in first.items():
        for key in ("loss", "grad_norm"):
            want, got = first[REFERENCE][key], step[key]
            # Written so that a value that is not a number disagrees.
            if not abs(got - want) <= TOLERANCE * abs(want):
                found.append(f"{name}: {key} is {got:.6g}, that of {REFERENCE} is {want:.6g}")
    return found


def summarize(
    rounds: Sequence[Round], first: Mapping[str, Mapping[str, float]], *, num_tokens: int, gflop: float
) -> dict[str, Any]:
    """Figures by subject, each with its spread over the rounds; ratios are of two subjects of one round.

    Args:
        rounds: the timed steps.
        first: each subject's first step, with its peak of memory.
        num_tokens: of the batch as it was sampled, padding not counted.
        gflop: of the same tokens, each sequence computed by itself.
    """
    subjects: dict[str, Any] = {}
    for name, step in first.items():
        mine = [one[name] for one in rounds]
        subjects[name] = {
            "tokens_per_s": spread((num_tokens / step["seconds"] for step in mine), 0),
            "seconds": spread(step["seconds"] for step in mine),
            "cpu_seconds": spread(step["cpu_seconds"] for step in mine),
            "peak_mib": round(step["peak_mib"], 1),
            "of_gemm": None
            if name in SHARES
            else spread(gflop / one[name]["seconds"] / one["gemm"]["gflops"] for one in rounds),
            "loss": step["loss"],
            "grad_norm": step["grad_norm"],
        }
    others = [name for name in first if name != OURS]
    return {
        "subjects": subjects,
        "gemm_gflops": spread((one["gemm"]["gflops"] for one in rounds), 1),
        "ours_over": {name: spread(one[name]["seconds"] / one[OURS]["seconds"] for one in rounds) for name in others},
        "ours_over_cpu": {
            name: spread(one[name]["cpu_seconds"] / one[OURS]["cpu_seconds"] for one in rounds) for name in others
        },
    }


def summarize_dense(rounds: Sequence[Round], *, num_tokens: int, gflop: float, peak_mib: float) -> dict[str, Any]:
    """Figures of the dense step of our policy."""
    seconds = [one[OURS]["seconds"] for one in rounds]
    return {
        "gflop": round(gflop, 1),
        "seconds": spread(seconds),
        "tokens_per_s": spread((num_tokens / one for one in seconds), 0),
        "gflops": spread((gflop / one for one in seconds), 1),
        "gemm_gflops": spread((one["gemm"]["gflops"] for one in rounds), 1),
        "of_gemm": spread(gflop / one[OURS]["seconds"] / one["gemm"]["gflops"] for one in rounds),
        # Holds on a machine with other work too, but a core that idles costs it nothing.
        "of_gemm_cpu": spread(gflop / one[OURS]["cpu_seconds"] / one["gemm"]["gflops_cpu"] for one in rounds),
        "peak_mib": round(peak_mib, 1),
    }


def spread(values: Iterable[float], digits: int = 3) -> dict[str, float]:
    """Median, smallest and largest."""
    known = list(values)
    return {
        "median": round(median(known), digits),
        "min": round(min(known), digits),
        "max": round(max(known), digits),
    }


def check(results: Mapping[str, Any]) -> list[str]:
    """A line for each target that is missed."""
    missed = []
    for name, batch in results["batches"].items():
        ratio = batch["ours_over"][PEER]["median"]
        if ratio < MIN_OF_TRL:
            missed.append(f"{name}: {ratio} x TRL's tokens/s, the target is {MIN_OF_TRL}")
    share = results["dense"]["of_gemm"]["median"]
    if share < MIN_OF_GEMM:
        missed.append(f"dense step: {share} of the matrix product's rate, the target is {MIN_OF_GEMM}")
    return missed


def table(results: Mapping[str, Any]) -> str:
    """Markdown of the result file."""
    lines = [
        "| batch | step | tokens/s | ours is faster by | peak memory (MiB) | of GEMM peak |",
        "| --- | --- | --- | --- | --- | --- |",
    ]
    for batch_name, batch in results["batches"].items():
        for name, one in batch["subjects"].items():
            ratio = "" if name == OURS else f"{_range(batch['ours_over'][name], 2)} x"
            share = "" if one["of_gemm"] is None else _range(one["of_gemm"], 2)
            lines.append(
                f"| {batch_name} | {name} | {_range(one['tokens_per_s'], 0)} | {ratio} | "
                f"{one['peak_mib']:.0f} | {share} |"
            )
    dense = results["dense"]
    lines.append(
        f"| dense | {OURS} | {_range(dense['tokens_per_s'], 0)} |  | {dense['peak_mib']:.0f} | "
        f"{_range(dense['of_gemm'], 2)} |"
    )
    return "\n".join(lines)


def _range(values: Mapping[str, float], digits: int) -> str:
    return f"{values['median']:.{digits}f} ({values['min']:.{digits}f} to {values['max']:.{digits}f})"
