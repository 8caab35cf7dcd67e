"""Measures what a verdict costs: pytest alone, a short script with git, the sandbox's cold path and its warm path.

    uv run python -m benchmarks.sandbox_throughput                        everything, results/sandbox_throughput.json,
                                                                          and its tables in the documentation
    uv run python -m benchmarks.sandbox_throughput --small                the same in half a minute, file left alone
    uv run python -m benchmarks.sandbox_throughput --subjects bare,cold   some subjects, file left alone
    uv run python -m benchmarks.sandbox_throughput --table                print the tables of the result file
    uv run python -m benchmarks.sandbox_throughput --check                exit 1 where it misses a target

A block is ``--verdicts`` verdicts of one subject (see `benchmarks.sandbox_subjects`) under one load: as many clients as
cores; for the servers also four times as many, as a trainer asks that never waits; and one client, for the latency.
A round is a block of every subject under every load, and each round begins with another subject. All servers are up all
the time, and idle while others are measured. Every patch is new: a verdict from a cache is an error. ``speed`` is
verdicts per second over those of bare in the same round, under the same load or else with a client per core.

CPU is that of the whole machine by /proc/stat, so nothing else may run. Of it, ``client`` is this process; ``git`` and
``test`` are those processes (a server's: the children it waited for, and what replies say of init and test process);
``server`` and ``launcher`` are those processes themselves. ``rest`` is what is left: a server's supervisors, what the
kernel does to take namespaces down, also after the reply, and the error of /proc/stat, which counts ticks.

The fresh tree: the same task in a repository of a few files and in one of many, one verdict at a time, in turn, on the
last of the servers; beside it ``git worktree`` (add, remove) and a copy (``cp -a``, ``rm -r``) of the same trees.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import subprocess
import tempfile
import time
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from benchmarks.result_files import add_report_options, report, write_results
from benchmarks.sandbox_figures import (
    FRESH_TREE_STAGES,
    LOADS,
    Block,
    Sample,
    check,
    summarize,
    table,
    took_its_path,
    wall_ms,
)
from benchmarks.sandbox_subjects import Bare, BareTree, Project, Server, Subject, Tree, make_project, new_patches, run

ROOT = Path(__file__).resolve().parent.parent
RESULTS = ROOT / "benchmarks" / "results" / "sandbox_throughput.json"
PAGE = ROOT / "docs" / "design-docs" / "sandbox-executor.md"
BEGIN, END = "<!-- throughput: begin -->", "<!-- throughput: end -->"
SUBJECTS = ("bare", "bare+tree", "cold", "warm")
PACKAGES = ("pytest", "uvicorn", "starlette", "httpx")
_OTHER_TREES = 3  # of each size: ten thousand files take seconds
_SETTLE_S = 0.2  # after a block: namespaces are taken down after the reply


@dataclass(frozen=True, kw_only=True)
class Settings:
    """How much is measured."""

    rounds: int = 8
    verdicts: int = 24
    """Of a block."""
    fresh_tree_files: tuple[int, int] = (10, 10_000)
    fresh_tree_verdicts: int = 40
    """Of each size."""


SMALL = Settings(rounds=2, verdicts=6, fresh_tree_files=(10, 500), fresh_tree_verdicts=6)


def measure(settings: Settings, subjects: Sequence[str], folder: Path) -> dict[str, Any]:
    """Run everything once. Raises RuntimeError when a verdict or the path that led to it is not as it must be."""
    cores = len(os.sched_getaffinity(0))
    load_average = [round(value, 2) for value in os.getloadavg()]
    project = make_project(folder / "calc")
    with contextlib.ExitStack() as stack:
        made: dict[str, Subject] = {}
        servers: dict[str, Server] = {}
        for name in subjects:
            if name in ("cold", "warm"):
                made[name] = servers[name] = Server(name, folder / name, workers=cores, is_warm=name == "warm")
                stack.callback(servers[name].close)
            else:
                made[name] = Bare(project, folder, cores) if name == "bare" else BareTree(folder)
        for subject in made.values():  # the warm-up
            subject.judge_all(project, new_patches(4 * cores), cores)
        before = {name: server.runs() for name, server in servers.items()}
        blocks = _measure_rounds(settings, made, project, cores)
        runs = {name: _runs_since(before[name], server) for name, server in servers.items()}
        fresh_tree = {name: _measure_fresh_tree(settings, servers[name], folder) for name in list(servers)[-1:]}
        isolation = {name: server.isolation for name, server in servers.items()}
    return {
        "cores": cores,
        "settings": asdict(settings),
        "load_average": load_average,
        "isolation": isolation,
        "runs": runs,
        "subjects": summarize(blocks, cores),
        "fresh_tree": fresh_tree,
    }


def _measure_rounds(
    settings: Settings, subjects: Mapping[str, Subject], project: Project, cores: int
) -> dict[tuple[str, str], list[Block]]:
    blocks: defaultdict[tuple[str, str], list[Block]] = defaultdict(list)
    names = list(subjects)
    for number in range(settings.rounds):
        for load, per_core in LOADS.items():
            for name in names[number % len(names) :] + names[: number % len(names)]:
                if load != "4 per core" or isinstance(subjects[name], Server):
                    clients = cores * per_core or 1
                    blocks[name, load].append(_measure_block(subjects[name], project, settings.verdicts, clients))
    return blocks


def _measure_block(subject: Subject, project: Project, verdicts: int, clients: int) -> Block:
    patches = new_patches(verdicts)

    def counters() -> dict[str, float]:
        return {"machine": machine_cpu_s(), "client": time.process_time(), **subject.counters()}

    before, began = counters(), time.monotonic()
    samples = subject.judge_all(project, patches, clients)
    seconds = time.monotonic() - began
    time.sleep(_SETTLE_S)
    after = counters()
    cpu_s = defaultdict(float, {stage: after[stage] - before[stage] for stage in after})
    for sample in samples:
        for stage, value in sample.cpu_s.items():
            cpu_s[stage] += value
    return Block(seconds, samples, cpu_s)


def _runs_since(before: Mapping[str, int], server: Server) -> dict[str, int]:
    runs = {path: count - before.get(path, 0) for path, count in server.runs().items()}
    if not took_its_path(runs, is_warm=server.is_warm):
        raise RuntimeError(f"the runs of the {server.name} server must take its path, they took {runs}")
    return runs


def _measure_fresh_tree(settings: Settings, server: Server, folder: Path) -> dict[str, Any]:
    sizes = settings.fresh_tree_files
    projects = {size: make_project(folder / f"files-{size}", size) for size in sizes}
    samples: dict[int, list[Sample]] = {size: [] for size in sizes}
    others: dict[int, list[Sample]] = {size: [] for size in sizes}
    for size, project in projects.items():
        server.judge_all(project, new_patches(2), 1)
        Tree(project, folder / f"source-{size}").add()
    before = server.runs()
    for number in range(settings.fresh_tree_verdicts):
        for size in sizes[:: 1 if number % 2 else -1]:
            samples[size] += server.judge_all(projects[size], new_patches(1), 1)
    runs = _runs_since(before, server)
    for _ in range(_OTHER_TREES):
        for size, project in projects.items():
            others[size].append(_other_trees(project, folder / f"source-{size}"))
    ms = {size: {**wall_ms(samples[size]), **wall_ms(others[size])} for size in sizes}
    ratio = {stage: round(ms[sizes[1]][stage] / ms[sizes[0]][stage], 3) for stage in FRESH_TREE_STAGES}
    return {"ms": {str(size): stages for size, stages in ms.items()}, "ratio": ratio, "runs": runs}


def _other_trees(project: Project, source: Path) -> Sample:
    copy, tree = source.with_name("copy"), Tree(project, source.with_name("worktree"))
    began = time.monotonic()
    tree.add()
    tree.remove()
    between = time.monotonic()
    run(["cp", "-a", str(source), str(copy)], source)
    run(["rm", "-r", str(copy)], source)
    ended = time.monotonic()
    return Sample(ended - began, {"worktree": between - began, "copy": ended - between})


def machine_cpu_s() -> float:
    """CPU seconds of every process and of the kernel since the machine started."""
    with Path("/proc/stat").open() as file:
        user, nice, system, _idle, _iowait, irq, softirq = map(int, file.readline().split()[1:8])
    return (user + nice + system + irq + softirq) / os.sysconf("SC_CLK_TCK")


def with_tables(page: str, results: Mapping[str, Any]) -> str:
    """The page with the tables of ``results`` between its markers."""
    head, _, rest = page.partition(BEGIN)
    return f"{head}{BEGIN}\n{table(results)}\n{END}{rest.partition(END)[2]}"


def _subjects(text: str) -> list[str]:
    names = text.split(",")
    if "bare" not in names or not set(names) <= set(SUBJECTS):
        raise argparse.ArgumentTypeError(f"must be bare and others of {', '.join(SUBJECTS)}, got {text!r}")
    return [name for name in SUBJECTS if name in names]


def main() -> None:
    """Measure, or read what was measured."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--subjects", type=_subjects, default=list(SUBJECTS), help="with commas between them")
    parser.add_argument("--rounds", type=int, help="blocks of each subject under each load")
    parser.add_argument("--verdicts", type=int, help="verdicts of a block")
    parser.add_argument("--small", action="store_true", help="short, for a look: the result file stays as it was")
    add_report_options(parser)
    options = parser.parse_args()
    report(options, RESULTS, table, check)
    settings = SMALL if options.small else Settings()
    changes = {name: getattr(options, name) for name in ("rounds", "verdicts") if getattr(options, name) is not None}
    with tempfile.TemporaryDirectory(prefix="dockyard-throughput-") as folder:
        results = measure(replace(settings, **changes), options.subjects, Path(folder))
    if not options.small and options.subjects == list(SUBJECTS):
        git = subprocess.run(["git", "--version"], capture_output=True, text=True, check=True).stdout.split()[2]
        write_results(RESULTS, results | {"versions": {"git": git}}, PACKAGES)
        PAGE.write_text(with_tables(PAGE.read_text(), results))
    print(table(results))


if __name__ == "__main__":
    main()
