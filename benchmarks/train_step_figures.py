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
MAX_OF_TORCH = {"quickstart": 1.6, "llama": 1.2}
"""Target of the JAX trainer's step, in steps of the PyTorch trainer."""
MAX_FORWARD_OF_TORCH = 1.0
"""Target of its forward pass."""
OURS, JAX, PEER, REFERENCE = "ours", "ours, JAX", "TRL", "naive"
SHARES = (OURS, JAX)
"""Subjects that leave work out, so that a share of the peak would count what they never do."""

Round = Mapping[str, Mapping[str, float]]
"""By subject what its step reported, and under ``gemm`` the rates of the matrix product."""


def disagreements(first: Mapping[str, Mapping[str, float]], reference: str = REFERENCE) -> list[str]:
    """A line for each subject whose first step is not that of the plain one."""
    found = []
    for name, step in first.items():
        for key in ("loss", "grad_norm"):
            want, got = first[reference][key], step[key]
            # Written so that a value that is not a number disagrees.
            if not abs(got - want) <= TOLERANCE * abs(want):
                found.append(f"{name}: {key} is {got:.6g}, that of {reference} is {want:.6g}")
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
    for name in set(first) & {JAX, f"{JAX}, nothing shared"}:
        subjects[name] |= compiled(first[name])
    return {
        "subjects": subjects,
        "gemm_gflops": spread((one["gemm"]["gflops"] for one in rounds), 1),
        "ours_over": {name: spread(one[name]["seconds"] / one[OURS]["seconds"] for one in rounds) for name in others},
        "ours_over_cpu": {
            name: spread(one[name]["cpu_seconds"] / one[OURS]["cpu_seconds"] for one in rounds) for name in others
        },
        "jax_over_torch": of_torch(rounds),
    }


def compiled(first: Mapping[str, float]) -> dict[str, float]:
    """What compiling the step and the forward pass took."""
    return {"compile_s": round(first["compile_s"], 1), "num_compiled": int(first["num_compiled"])}


def of_torch(rounds: Sequence[Round]) -> dict[str, dict[str, float]]:
    """Seconds of the JAX trainer over those of the PyTorch trainer, in one round."""
    pairs = {"step": (JAX, OURS), "forward": (forward_of(JAX), forward_of(OURS))}
    return {
        what: spread(one[ours]["seconds"] / one[theirs]["seconds"] for one in rounds)
        for what, (ours, theirs) in pairs.items()
    }


def forward_of(subject: str) -> str:
    """The name of a subject's forward pass in a round."""
    return f"{subject}: forward"


def summarize_llama(
    rounds: Sequence[Round], first: Mapping[str, Mapping[str, float]], *, num_tokens: int
) -> dict[str, Any]:
    """Figures of both trainers on a model of 135M parameters."""
    names = (OURS, JAX, forward_of(OURS), forward_of(JAX))
    return {
        "tokens_per_s": {name: spread((num_tokens / one[name]["seconds"] for one in rounds), 0) for name in names},
        "jax_over_torch": of_torch(rounds),
        **compiled(first[JAX]),
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
        missed += _missed_by_jax(name, batch, MAX_OF_TORCH["quickstart"])
    missed += _missed_by_jax("135M", results["llama"], MAX_OF_TORCH["llama"])
    share = results["dense"]["of_gemm"]["median"]
    if share < MIN_OF_GEMM:
        missed.append(f"dense step: {share} of the matrix product's rate, the target is {MIN_OF_GEMM}")
    return missed


def _missed_by_jax(name: str, figures: Mapping[str, Any], most: float) -> Iterable[str]:
    for what, target in (("step", most), ("forward", MAX_FORWARD_OF_TORCH)):
        ratio = figures["jax_over_torch"][what]["median"]
        if ratio > target:
            yield f"{name}: JAX's {what} takes {ratio} times torch's, the target is {target}"


def jax_table(results: Mapping[str, Any]) -> str:
    """Markdown: both trainers side by side."""
    lines = [
        "| batch | step, JAX / PyTorch | forward, JAX / PyTorch | compiled programs | compiling (s) |",
        "| --- | --- | --- | --- | --- |",
    ]
    parts = {name: (batch, batch["subjects"][JAX]) for name, batch in results["batches"].items()}
    for name, (figures, counts) in (parts | {"135M Llama": (results["llama"], results["llama"])}).items():
        ratios = figures["jax_over_torch"]
        lines.append(
            f"| {name} | {_range(ratios['step'], 2)} | {_range(ratios['forward'], 2)} | {counts['num_compiled']} | "
            f"{counts['compile_s']:.1f} |"
        )
    return "\n".join(lines)


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
