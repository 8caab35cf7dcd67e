"""From the seconds of `benchmarks.refit` to figures, tables and targets. Pure functions."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from statistics import median
from typing import Any

MIN_WIRE = 0.85
"""Target of the collective transport alone over GLOO's broadcast of the same bytes."""
MIN_SHARED_MEMORY = 1.3
"""Target of shared memory over the collective transport, end to end."""
MAX_EXTRA_STALL_S = 0.5
"""Target of the stall beyond the transfer, recomputing included."""
STAGINGS = ("none", "host")
STAGES = {
    "gather": "sender pack",
    "hash": "sender digest",
    "verify": "rank verify",
    "load": "rank load",
}
"""Figure -> the seconds it is of."""


def summarize(rounds: Sequence[Mapping[str, Any]], num_bytes: int, transports: Sequence[str]) -> dict[str, Any]:
    """Megabytes (10^6 bytes) per second and ratios within a round, each with its spread over the rounds.

    Args:
        rounds: per round ``memcpy`` and ``raw`` in seconds, ``wire`` by transport in seconds, and
            ``whole`` by transport as seconds by stage.
        num_bytes: that each of them moved.
        transports: names, ``collective`` among them.
    """

    def rates(seconds: Iterable[float]) -> dict[str, float]:
        return spread(num_bytes / 1e6 / one for one in seconds)

    found: dict[str, Any] = {name: rates(one[name] for one in rounds) for name in ("memcpy", "raw")}
    for name in transports:
        wires, wholes = [one["wire"][name] for one in rounds], [one["whole"][name] for one in rounds]
        others = [one["whole"]["collective"] for one in rounds]
        found[name] = {
            "wire": rates(wires),
            "wire_of_raw": spread(one["raw"] / wire for one, wire in zip(rounds, wires, strict=True)),
            "end_to_end": rates(whole["total"] for whole in wholes),
            "of_collective": spread(
                other["total"] / whole["total"] for other, whole in zip(others, wholes, strict=True)
            ),
            "stages": {stage: rates(whole[key] for whole in wholes) for stage, key in STAGES.items()},
            "seconds": {key: round(median(whole[key] for whole in wholes), 4) for key in wholes[0]},
        }
    return found


def spread(values: Iterable[float]) -> dict[str, float]:
    """Median, smallest and largest."""
    known = list(values)
    return {"median": round(median(known), 3), "min": round(min(known), 3), "max": round(max(known), 3)}


def check(results: Mapping[str, Any]) -> list[str]:
    """A line for each target that is missed, or that nothing was measured for."""
    missed, subjects = [], results["subjects"]
    wire = subjects["collective"]["wire_of_raw"]["median"]
    if wire < MIN_WIRE:
        missed.append(f"collective: its wire is {wire} x the raw broadcast, the target is {MIN_WIRE}")
    shared = subjects["shared_memory"]["of_collective"]["median"]
    if shared < MIN_SHARED_MEMORY:
        missed.append(f"shared_memory: {shared} x the collective end to end, the target is {MIN_SHARED_MEMORY}")
    for staging in STAGINGS:
        stall = results.get("stall", {}).get(staging)
        if stall is None:
            missed.append(f"stall, staging {staging}: not measured")
        elif stall["extra_s"]["median"] > MAX_EXTRA_STALL_S:
            extra_s = stall["extra_s"]["median"]
            missed.append(
                f"stall, staging {staging}: {extra_s} s beyond the transfer, the target is {MAX_EXTRA_STALL_S} s"
            )
    return missed


def table(results: Mapping[str, Any]) -> str:
    """Markdown of the result file."""
    subjects = results["subjects"]
    lines = [
        "| MB/s | gather | hash | wire alone | of raw | verify | load | end to end | of collective |",
        "| --- | --- | --- | --- | --- | --- | --- | --- | --- |",
    ]
    for name, one in subjects.items():
        if name in ("memcpy", "raw"):
            lines.append(f"| {name} |  |  | {_range(one, 0)} |  |  |  |  |  |")
            continue
        stages = {stage: _range(value, 0) for stage, value in one["stages"].items()}
        lines.append(
            f"| {name} | {stages['gather']} | {stages['hash']} | {_range(one['wire'], 0)} | "
            f"{_range(one['wire_of_raw'], 2)} | {stages['verify']} | {stages['load']} | "
            f"{_range(one['end_to_end'], 0)} | {_range(one['of_collective'], 2)} |"
        )
    stalls = results.get("stall", {})
    if stalls:
        lines += [
            "",
            "| stall (s) | staging | transport | requests | stall | transfer | beyond it | of that recomputing |",
            "| --- | --- | --- | --- | --- | --- | --- | --- |",
        ]
    lines += [
        f"| {stall['engine']} | {staging} | {stall['transport']} | {stall['requests']} | "
        f"{_range(stall['stall_s'], 2)} | {_range(stall['transfer_s'], 2)} | "
        f"{_range(stall['extra_s'], 2)} | {_range(stall['recompute_s'], 2)} |"
        for staging, stall in stalls.items()
    ]
    return "\n".join(lines)


def _range(values: Mapping[str, float], digits: int) -> str:
    return f"{values['median']:.{digits}f} ({values['min']:.{digits}f} to {values['max']:.{digits}f})"
