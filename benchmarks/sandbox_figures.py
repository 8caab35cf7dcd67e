"""From the blocks of `benchmarks.sandbox_throughput` to figures, tables and targets. Pure functions."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from statistics import median
from typing import Any

LOADS = {"1 per core": 1, "4 per core": 4, "one": 0}
"""Clients per core; 0 = one client in all."""
CPU_STAGES = ("machine", "client", "server", "git", "launcher", "test", "rest")
FRESH_TREE_STAGES = ("apply", "start", "total", "worktree", "copy")
MIN_SPEED = {"cold": 1 / 1.3, "warm": 2.0}
"""Targets of ``speed``, with a client per core and with four."""
MAX_COLD_SHARE = 0.05
"""Of the warm server's runs."""
MAX_BARE_REST = 0.1
"""Share of the machine's CPU beside bare's own, above which something else was running."""
MAX_FRESH_TREE_RATIO = 1.2
"""Target of a verdict on the large tree over one on the small tree, and of the run's start: equal, but for noise."""


@dataclass(frozen=True)
class Sample:
    """One verdict."""

    seconds: float
    """From the call to the verdict."""
    wall_s: Mapping[str, float] = field(default_factory=dict)
    """Seconds per stage."""
    cpu_s: Mapping[str, float] = field(default_factory=dict)
    """CPU seconds per stage, as far as the run itself says so."""


@dataclass(frozen=True)
class Block:
    """Verdicts of one subject under one load."""

    seconds: float
    samples: Sequence[Sample]
    cpu_s: Mapping[str, float]
    """CPU seconds of the whole block by stage, and of the whole ``machine``."""


def summarize(blocks: Mapping[tuple[str, str], Sequence[Block]], cores: int) -> dict[str, dict[str, Any]]:
    """Figures by subject and load.

    Args:
        blocks: one per round, by (subject, load); those of bare with a client per core must be there.
        cores: that the verdicts are counted per.
    """
    rates = {key: [len(block.samples) / block.seconds for block in rounds] for key, rounds in blocks.items()}
    found: defaultdict[str, dict[str, Any]] = defaultdict(dict)
    for (name, load), rounds in blocks.items():
        bare = rates.get(("bare", load), rates["bare", "1 per core"])
        samples = [sample for block in rounds for sample in block.samples]
        found[name][load] = {
            "verdicts": len(samples),
            "verdicts_per_s_per_core": spread(rate / cores for rate in rates[name, load]),
            "speed": spread(rate / other for rate, other in zip(rates[name, load], bare, strict=True)),
            "p50_ms": spread(1000 * percentile([one.seconds for one in block.samples], 0.5) for block in rounds),
            "p99_ms": round(1000 * percentile([one.seconds for one in samples], 0.99), 2),
            "cpu_ms": cpu_ms(rounds),
            "wall_ms": wall_ms(samples),
        }
    return dict(found)


def spread(values: Iterable[float]) -> dict[str, float]:
    """Median, smallest and largest."""
    known = list(values)
    return {"median": round(median(known), 3), "min": round(min(known), 3), "max": round(max(known), 3)}


def percentile(values: Iterable[float], share: float) -> float:
    """The smallest value that at least ``share`` of the values do not exceed (nearest rank)."""
    ranked = sorted(values)
    return ranked[max(0, math.ceil(share * len(ranked)) - 1)]


def wall_ms(samples: Sequence[Sample]) -> dict[str, float]:
    """Median milliseconds by stage."""
    return {stage: round(1000 * median(one.wall_s[stage] for one in samples), 2) for stage in samples[0].wall_s}


def cpu_ms(rounds: Sequence[Block]) -> dict[str, float]:
    """CPU milliseconds per verdict by stage, each the median of the rounds; ``rest`` = the machine less the others."""
    stages = list(rounds[0].cpu_s)
    values = {stage: [1000 * one.cpu_s[stage] / len(one.samples) for one in rounds] for stage in stages}
    known = [values[stage] for stage in stages if stage != "machine"]
    values["rest"] = [whole - sum(parts) for whole, *parts in zip(values["machine"], *known, strict=True)]
    return {stage: round(median(of_rounds), 2) for stage, of_rounds in values.items()}


def took_its_path(runs: Mapping[str, int], *, is_warm: bool) -> bool:
    """Whether a server's runs are what its figures are said to be of: none warm, or nearly all."""
    cold, warm = runs.get("cold", 0), runs.get("warm", 0)
    return cold <= MAX_COLD_SHARE * (cold + warm) if is_warm else warm == 0


def check(results: Mapping[str, Any]) -> list[str]:
    """A line for each target that is missed, or that nothing was measured for."""
    missed = []
    bare = results["subjects"]["bare"]["1 per core"]["cpu_ms"]
    if bare["rest"] > MAX_BARE_REST * bare["machine"]:
        missed.append(f"bare: {bare['rest']} of {bare['machine']} CPU ms are not its own, the machine was not quiet")
    for name, least in MIN_SPEED.items():
        for load in ("1 per core", "4 per core"):
            found = results["subjects"].get(name, {}).get(load)
            if found is None:
                missed.append(f"{name}, {load}: not measured")
            elif found["speed"]["median"] < round(least, 3):
                missed.append(f"{name}, {load}: {found['speed']['median']} x bare, the target is {least:.3f}")
    ratios = results["fresh_tree"].get("warm", {}).get("ratio")
    if ratios is None:
        missed.append("fresh tree: not measured")
    else:
        missed += [
            f"fresh tree, {stage}: {ratios[stage]} x the small tree's, the target is {MAX_FRESH_TREE_RATIO}"
            for stage in ("start", "total")
            if ratios[stage] > MAX_FRESH_TREE_RATIO
        ]
    return missed


def table(results: Mapping[str, Any]) -> str:
    """Markdown of the result file: rates and latencies, stages, CPU, fresh trees."""
    subjects = results["subjects"]
    rates = ("1 client per core: verdicts/s/core", "x bare", "4 per core: verdicts/s/core", "x bare")
    lines = _head("subject", *rates, "one client: p50, p99 (ms)", "x bare")
    for name, loads in subjects.items():
        cells = [cell for load in LOADS for cell in _rate_cells(loads.get(load))]
        cells[-2] = f"{loads['one']['p50_ms']['median']:.0f}, {loads['one']['p99_ms']:.0f}"
        lines.append(_row(name, *cells))
    lines += ["", *_head("subject", "one client: ms by stage")]
    for name, loads in subjects.items():
        lines.append(_row(name, ", ".join(f"{stage} {value:.1f}" for stage, value in loads["one"]["wall_ms"].items())))
    lines += ["", *_head("CPU ms per verdict, 1 client per core", *CPU_STAGES)]
    for name, loads in subjects.items():
        cpu = loads["1 per core"]["cpu_ms"]
        lines.append(_row(name, *(f"{cpu[stage]:.1f}" if stage in cpu else "" for stage in CPU_STAGES)))
    for name, fresh in results["fresh_tree"].items():
        lines += ["", *_head(f"files ({name}, ms)", *FRESH_TREE_STAGES)]
        lines += [
            _row(size, *(f"{row[stage]:.1f}" for stage in FRESH_TREE_STAGES)) for size, row in fresh["ms"].items()
        ]
        lines.append(_row("ratio", *(f"{fresh['ratio'][stage]:.2f}" for stage in FRESH_TREE_STAGES)))
    return "\n".join(lines)


def _rate_cells(figures: Mapping[str, Any] | None) -> tuple[str, str]:
    if figures is None:
        return "", ""
    speed = figures["speed"]
    return (
        f"{figures['verdicts_per_s_per_core']['median']:.2f}",
        f"{speed['median']:.2f} ({speed['min']:.2f} to {speed['max']:.2f})",
    )


def _head(*cells: str) -> list[str]:
    return [_row(*cells), _row(*("---" for _ in cells))]


def _row(*cells: str) -> str:
    return f"| {' | '.join(cells)} |"
