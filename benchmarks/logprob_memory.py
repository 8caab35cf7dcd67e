"""Measures what log-probabilities cost, forward and backward: memory at full size, and time beside PyTorch's own.

    uv run python -m benchmarks.logprob_memory            everything, results/logprob_memory.json
    uv run python -m benchmarks.logprob_memory --small    the same in seconds, file left alone
    uv run python -m benchmarks.logprob_memory --table    print the tables of the result file
    uv run python -m benchmarks.logprob_memory --check    exit 1 where it misses a target

Subjects, all in float32 on random inputs, with a gradient for every position that is not the same for all of them:

naive              logits, log_softmax, gather
cross_entropy      logits, `torch.nn.functional.cross_entropy`
chunked            our `chunked_logprobs`, whose values include the entropy
chunked+entropy    the same, and a gradient flows back from the entropy too
chunked-entropy    the same without entropy

Memory: each subject is called once in a process of its own. There the inputs are made and touched, one tiny call brings
in what the libraries set up, the peak is reset (``/proc/self/clear_refs``), and the extra memory is the peak of the
resident set (``VmHWM``) during the call less the resident set before it. The gradients of the weight and of the hidden
states are part of it; every implementation must return them, so their bytes stand beside it.

Time: all subjects in one process, in rounds that each begin with another; ratios are of two subjects of one round. With
one thread seconds are those of the process's CPU clock, so that what else runs on the machine counts less; with more
threads, which wait for each other actively, they are those of the wall clock. ``scoring`` is the forward pass alone.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import subprocess
import sys
import time
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from statistics import median
from typing import Any

from benchmarks.result_files import add_report_options, report, write_results

ROOT = Path(__file__).resolve().parent.parent
RESULTS = ROOT / "benchmarks" / "results" / "logprob_memory.json"
PACKAGES = ("torch",)
MAX_EXTRA_GB = 1.0
"""Target of `chunked_logprobs` at 4096 positions, a vocabulary of 151,936 and width 896, its gradients included."""
MEMORY_SUBJECTS = ("naive", "chunked+entropy")
TRAINING_SUBJECTS = ("cross_entropy", "naive", "chunked", "chunked+entropy", "chunked-entropy")
SCORING_SUBJECTS = ("cross_entropy", "naive", "chunked", "chunked-entropy")


@dataclass(frozen=True, kw_only=True)
class Shape:
    """Of the inputs, and how often they are used."""

    positions: int
    vocab_size: int
    width: int
    rounds: int = 1


@dataclass(frozen=True, kw_only=True)
class Settings:
    """How much is measured."""

    memory: Shape = Shape(positions=4096, vocab_size=151_936, width=896)
    memory_threads: int = 2
    speed: tuple[Shape, ...] = (
        Shape(positions=128, vocab_size=151_936, width=896, rounds=2),
        Shape(positions=2000, vocab_size=2000, width=128, rounds=15),
        Shape(positions=2000, vocab_size=100, width=128, rounds=60),
    )
    threads: tuple[int, ...] = (1, 2)


SMALL = Settings(
    memory=Shape(positions=1024, vocab_size=20_000, width=64),
    speed=(Shape(positions=64, vocab_size=500, width=16, rounds=2),),
)


def measure(settings: Settings) -> dict[str, Any]:
    """Everything, each part in a process of its own."""
    load_average = [round(value, 2) for value in os.getloadavg()]
    return {
        "settings": asdict(settings),
        "load_average": load_average,
        "memory": {
            subject: _in_child("memory", subject, settings.memory, settings.memory_threads)
            for subject in MEMORY_SUBJECTS
        },
        "speed": [
            asdict(shape) | {"threads": threads} | _in_child("speed", "all", shape, threads)
            for shape in settings.speed
            for threads in settings.threads
        ],
    }


def _in_child(kind: str, subject: str, shape: Shape, threads: int) -> dict[str, Any]:
    order = json.dumps({"kind": kind, "subject": subject, "shape": asdict(shape), "threads": threads})
    command = [sys.executable, "-m", "benchmarks.logprob_memory", "--child", order]
    done = subprocess.run(command, cwd=ROOT, stdout=subprocess.PIPE, text=True, check=True)
    found: dict[str, Any] = json.loads(done.stdout)
    return found


def child_main(order: Mapping[str, Any]) -> dict[str, Any]:
    """What a child of `measure` does."""
    import torch

    torch.set_num_threads(order["threads"])
    shape = Shape(**order["shape"])
    if order["kind"] == "speed":
        return _speed(shape, order["threads"])
    subject = subjects(shape)[order["subject"]]
    subjects(replace(shape, positions=8, vocab_size=16))[order["subject"]](True)
    Path("/proc/self/clear_refs").write_text("5")
    before = _status_kb("VmRSS")
    subject(True)
    return {
        "extra_gb": round((_status_kb("VmHWM") - before) * 1024 / 1e9, 3),
        "weight_gradient_gb": round(shape.vocab_size * shape.width * 4 / 1e9, 3),
        "hidden_gradient_gb": round(shape.positions * shape.width * 4 / 1e9, 3),
    }


def _status_kb(name: str) -> int:
    found = re.search(rf"^{name}:\s+(\d+) kB$", Path("/proc/self/status").read_text(), re.MULTILINE)
    assert found is not None
    return int(found[1])


def subjects(shape: Shape) -> dict[str, Callable[[bool], None]]:
    """By name, a call on inputs of ``shape``: with gradients, which are dropped, or of the values alone."""
    import torch
    from torch.nn.functional import cross_entropy

    from dockyard_trainer_torch.logprobs import chunked_logprobs

    torch.manual_seed(0)
    hidden_MD = torch.randn(shape.positions, shape.width).requires_grad_()
    weight_VD = (torch.randn(shape.vocab_size, shape.width).mul_(shape.width**-0.5)).requires_grad_()
    targets_M = torch.randint(shape.vocab_size, (shape.positions,))
    pull_M = torch.randn(shape.positions)

    def naive() -> Any:
        return (hidden_MD @ weight_VD.T).log_softmax(-1).gather(1, targets_M[:, None])[:, 0] * pull_M

    def library() -> Any:
        return -cross_entropy(hidden_MD @ weight_VD.T, targets_M, reduction="none") * pull_M

    def chunked(*, with_entropy: bool, entropy_coef: float = 0.0) -> Any:
        logprobs_M, entropy_M = chunked_logprobs(
            hidden_MD, weight_VD, targets_M, temperature=1.0, with_entropy=with_entropy
        )
        values_M = logprobs_M * pull_M
        return values_M if entropy_M is None or not entropy_coef else values_M + entropy_coef * entropy_M

    def call(values: Callable[[], Any]) -> Callable[[bool], None]:
        def run(is_training: bool) -> None:
            with torch.set_grad_enabled(is_training):
                total = values().sum()
            if is_training:
                total.backward()
            hidden_MD.grad = weight_VD.grad = None

        return run

    return {
        "naive": call(naive),
        "cross_entropy": call(library),
        "chunked": call(lambda: chunked(with_entropy=True)),
        "chunked+entropy": call(lambda: chunked(with_entropy=True, entropy_coef=0.1)),
        "chunked-entropy": call(lambda: chunked(with_entropy=False)),
    }


def _speed(shape: Shape, threads: int) -> dict[str, Any]:
    clock = time.process_time if threads == 1 else time.perf_counter
    calls = subjects(shape)
    found: dict[str, Any] = {}
    for name, names, is_training in (("training", TRAINING_SUBJECTS, True), ("scoring", SCORING_SUBJECTS, False)):
        seconds: dict[str, list[float]] = {subject: [] for subject in names}
        for number in range(shape.rounds + 1):
            first = number % len(names)
            for subject in (*names[first:], *names[:first]):
                started = clock()
                calls[subject](is_training)
                seconds[subject].append(clock() - started)
        found[name] = {subject: _figures(seconds, subject) for subject in names}
    return found


def _figures(seconds: Mapping[str, list[float]], subject: str) -> dict[str, float]:
    own, others = seconds[subject][1:], seconds["cross_entropy"][1:]  # the first round is the warm-up
    ratios = [one / other for one, other in zip(own, others, strict=True)]
    return {
        "seconds": round(median(own), 5),
        "of_cross_entropy": round(median(ratios), 3),
        "of_cross_entropy_min": round(min(ratios), 3),
        "of_cross_entropy_max": round(max(ratios), 3),
    }


def table(results: Mapping[str, Any]) -> str:
    """Markdown of the result file."""
    lines = ["| subject | extra memory (GB) | of it gradients (GB) |", "| --- | --- | --- |"]
    for name, found in results["memory"].items():
        gradients = found["weight_gradient_gb"] + found["hidden_gradient_gb"]
        lines.append(f"| {name} | {found['extra_gb']:.2f} | {gradients:.2f} |")
    head = "| positions, vocabulary, width | threads | pass | " + " | ".join(TRAINING_SUBJECTS) + " |"
    lines += ["", "Time, as a multiple of cross_entropy's:", "", head, "| --- " * (3 + len(TRAINING_SUBJECTS)) + "|"]
    for row in results["speed"]:
        for kind in ("training", "scoring"):
            ratios = [
                f"{row[kind][name]['of_cross_entropy']:.2f}" if name in row[kind] else "" for name in TRAINING_SUBJECTS
            ]
            shape = f"{row['positions']}, {row['vocab_size']}, {row['width']}"
            lines.append(f"| {shape} | {row['threads']} | {kind} | {' | '.join(ratios)} |")
    return "\n".join(lines)


def check(results: Mapping[str, Any]) -> list[str]:
    """A line per target that is missed."""
    return [
        f"{name}: {results['memory'][name]['extra_gb']} GB of extra memory, target at most {MAX_EXTRA_GB}"
        for name in results["memory"]
        if name.startswith("chunked") and results["memory"][name]["extra_gb"] > MAX_EXTRA_GB
    ]


def main() -> None:
    """Measure, or read what was measured."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--small", action="store_true", help="short, for a look: the result file stays as it was")
    parser.add_argument("--child", type=json.loads, help=argparse.SUPPRESS)
    add_report_options(parser)
    options = parser.parse_args()
    if options.child is not None:
        print(json.dumps(child_main(options.child)))
        return
    report(options, RESULTS, table, check)
    results = measure(SMALL if options.small else Settings())
    if not options.small:
        write_results(RESULTS, results, PACKAGES)
    print(table(results))


if __name__ == "__main__":
    main()
