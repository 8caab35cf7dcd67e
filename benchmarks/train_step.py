"""Measures an optimizer step of our policy beside TRL's and a plain Hugging Face one, and against the GEMM peak.

    uv run python -m benchmarks.train_step                  everything, results/train_step.json
    uv run python -m benchmarks.train_step --small          the same in a few minutes, file left alone
    uv run python -m benchmarks.train_step --table          print the tables of the result file
    uv run python -m benchmarks.train_step --check          exit 1 where it misses a target
    uv run python -m benchmarks.train_step --record RUN     take the rollouts anew from a finished quickstart run

Model: the quickstart's policy, float32. Batches (`benchmarks.train_step_batches`): steps 10 and 60 of a recorded run
of the quickstart, 16 prompts x 16 rollouts, and step 10 with every completion made distinct and no advantage 0.
Loss: clipped ratio to given old logprobs, mean over the batch's tokens, no KL; then clipping of the norm and AdamW.

ours                  `TorchPolicy.train_step`
ours, nothing shared  the same without shared prefixes, and with the sequences whose advantage is 0
ours, JAX             `JaxPolicy.train_step`; "nothing shared" as above
TRL                   the training step of `GRPOTrainer` with its optimizer (`benchmarks.train_step_peer`)
naive                 padded rows, all logits, log_softmax, `torch.optim.AdamW` with its defaults

Each subject is a process of its own with the same number of threads, and has its batch before the clock starts. They
take turns, and each round begins with another; ratios are of two subjects of one round. Before anything is timed, loss
and gradient norm of the first step must agree. tokens/s counts the tokens as they were sampled, whatever a subject
leaves out. TRL and naive run with the micro-batch that was fastest for them, without recomputing activations. Peak
memory is that of the first step, above model and optimizer. The GEMM peak is that of `torch.mm`, in the same round.

The dense step is ours on SmolLM2's layers with a small vocabulary, in rows that are full and share nothing. The 135M
step is both trainers on all of its layers and its vocabulary, in such rows. JAX compiles in its first step, which is
not timed: seconds and programs are reported apart.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from benchmarks import train_step_batches as batches
from benchmarks.result_files import FOLDER, add_report_options, report, write_results
from benchmarks.train_step_figures import (
    JAX,
    OURS,
    PEER,
    REFERENCE,
    check,
    disagreements,
    forward_of,
    jax_table,
    summarize,
    summarize_dense,
    summarize_llama,
    table,
)
from benchmarks.train_step_worker import Worker, peer_python, peer_version

RESULTS = FOLDER / "train_step.json"
PACKAGES = ("torch", "transformers", "numpy", "jax", "jaxlib")
SUBJECTS = (OURS, "ours, nothing shared", JAX, f"{JAX}, nothing shared", PEER, REFERENCE)
DISTINCT = "step 10, all distinct"


@dataclass(frozen=True, kw_only=True)
class Settings:
    """How much is measured, and what every subject is told."""

    rounds: int = 9
    warm_up: int = 2
    num_groups: int = 16
    """Of each recorded step."""
    rows: tuple[int, ...] = (16, 64, 256)
    """Micro-batches that TRL and the plain step are tried with."""
    dense_layers: int = 8
    dense_rows: int = 8
    llama_layers: int = 30
    llama_vocab: int = 49152
    llama_rows: int = 2
    llama_rounds: int = 4
    threads: int = os.cpu_count() or 1
    micro_batch_tokens: int = 32768
    """Ours, as the quickstart sets it."""
    learning_rate: float = 1e-6
    betas: tuple[float, float] = (0.9, 0.95)
    max_grad_norm: float = 1.0
    clip: float = 0.2


SMALL = Settings(
    rounds=1,
    warm_up=1,
    num_groups=2,
    rows=(16,),
    dense_layers=1,
    dense_rows=2,
    llama_layers=1,
    llama_vocab=512,
    llama_rounds=1,
    threads=1,
)


class Bench:
    """Starts subjects and lets them take turns."""

    def __init__(self, settings: Settings, peer: Path, folder: Path) -> None:
        self.settings = settings
        self._peer = peer
        self._folder = folder

    def start(self, subject: str, model: Path, batch: Path, **more: Any) -> Worker:
        """A worker that is ready for its first step."""
        options = asdict(self.settings) | {"row_length": None, "group_size": 16} | more
        options |= {"subject": subject, "model": str(model), "batch": str(batch)}
        if subject == PEER:
            return Worker(self._peer, "benchmarks.train_step_peer", options, self._folder / "log")
        module = "train_step_jax" if subject.startswith(JAX) else "train_step_subjects"
        return Worker(sys.executable, f"benchmarks.{module}", options, self._folder / "log")

    def fastest_rows(self, subject: str, batch: Path) -> int:
        """The micro-batch with the fastest step of a few."""
        seconds = {}
        for rows in self.settings.rows if len(self.settings.rows) > 1 else ():
            worker = self.start(subject, batches.POLICY, batch, rows=rows)
            try:
                worker.ask("first")
                seconds[rows] = min(worker.ask("step")["seconds"] for _ in range(3))
            finally:
                worker.close()
        return min(seconds, key=seconds.__getitem__, default=self.settings.rows[0])

    def compare(self, sequences: Sequence[batches.Sampled], batch: Path, rows: Mapping[str, int]) -> dict[str, Any]:
        """Every subject on one batch of the quickstart's policy.

        Raises SystemExit when they do not compute the same step.
        """
        workers: dict[str, Worker] = {}
        first: dict[str, dict[str, float]] = {}
        try:
            for name in SUBJECTS:
                workers[name] = self.start(name, batches.POLICY, batch, rows=rows.get(name))
                first[name] = workers[name].ask("first")
            wrong = disagreements(first)
            if wrong:
                raise SystemExit("the subjects do not compute the same step; nothing was timed\n" + "\n".join(wrong))
            rounds = self._rounds(workers, self.settings.rounds)
        finally:
            for worker in workers.values():
                worker.close()
        about = batches.describe(sequences)
        config = json.loads((batches.POLICY / "config.json").read_text())
        gflop = batches.gflop(config, sequences)
        return {"about": about} | summarize(rounds, first, num_tokens=about["tokens"], gflop=gflop)

    def dense(self) -> dict[str, Any]:
        """Our step where every token is computed by itself."""
        model = self._folder / "dense"
        config = batches.dense_model(model, self.settings.dense_layers)
        sequences = batches.dense(config["vocab_size"], self.settings.dense_rows)
        batch = self._folder / "dense.npz"
        batches.with_old_logprobs(model, sequences, rows=1).save(batch)
        worker = self.start(OURS, model, batch, row_length=batches.DENSE_ROW)
        try:
            peak_mib = worker.ask("first")["peak_mib"]
            rounds = self._rounds({OURS: worker}, self.settings.rounds)
        finally:
            worker.close()
        about = batches.describe(sequences)
        figures = summarize_dense(
            rounds, num_tokens=about["tokens"], gflop=batches.gflop(config, sequences), peak_mib=peak_mib
        )
        return {"model": config, "about": about} | figures

    def llama(self) -> dict[str, Any]:
        """Both trainers on a model of 135M parameters."""
        settings, model, batch = self.settings, self._folder / "llama", self._folder / "llama.npz"
        config = batches.dense_model(model, settings.llama_layers, settings.llama_vocab)
        sequences = batches.dense(config["vocab_size"], settings.llama_rows)
        batches.with_old_logprobs(model, sequences, rows=1).save(batch)
        workers: dict[str, Worker] = {}
        try:
            for name in (OURS, JAX):
                workers[name] = self.start(name, model, batch, row_length=batches.DENSE_ROW)
            first = {name: worker.ask("first") for name, worker in workers.items()}
            wrong = disagreements(first, OURS)
            if wrong:
                raise SystemExit("the trainers do not compute the same step; nothing was timed\n" + "\n".join(wrong))
            rounds = self._rounds(workers, settings.llama_rounds)
        finally:
            for worker in workers.values():
                worker.close()
        about = batches.describe(sequences)
        return {"model": config, "about": about} | summarize_llama(rounds, first, num_tokens=about["tokens"])

    def _rounds(self, workers: Mapping[str, Worker], count: int) -> list[dict[str, dict[str, float]]]:
        """Each subject's step once a round, both trainers' forward pass, and the matrix product's rate.

        The warm-up is left out.
        """
        names, rounds = list(workers), []
        for number in range(self.settings.warm_up + count):
            first = number % len(names)
            found = {"gemm": workers[OURS].ask("gemm")}
            found |= {name: workers[name].ask("step") for name in (*names[first:], *names[:first])}
            found |= {forward_of(name): workers[name].ask("forward") for name in (OURS, JAX) if name in workers}
            rounds.append(found)
        return rounds[self.settings.warm_up :]


def measure(settings: Settings, peer: Path, folder: Path) -> dict[str, Any]:
    """All batches, then the dense step."""
    load_average = [round(value, 2) for value in os.getloadavg()]
    bench = Bench(settings, peer, folder)
    sequences = {f"step {step}": batches.recorded(step, settings.num_groups) for step in batches.STEPS}
    sequences = {DISTINCT: batches.all_distinct(sequences["step 10"]), **sequences}
    paths = {}
    for name, sampled in sequences.items():
        paths[name] = folder / f"{name.replace(' ', '-').replace(',', '')}.npz"
        batches.with_old_logprobs(batches.POLICY, sampled).save(paths[name])
    rows = {name: bench.fastest_rows(name, paths[DISTINCT]) for name in (PEER, REFERENCE)}
    return {
        "settings": asdict(settings),
        "rows": rows,
        "load_average": load_average,
        "batches": {name: bench.compare(sampled, paths[name], rows) for name, sampled in sequences.items()},
        "dense": bench.dense(),
        "llama": bench.llama(),
    }


def tables(results: Mapping[str, Any]) -> str:
    """Both tables of the result file."""
    return f"{table(results)}\n\n{jax_table(results)}"


def main() -> None:
    """Measure, or read what was measured."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--small", action="store_true", help="short, for a look: the result file stays as it was")
    parser.add_argument("--record", type=Path, metavar="RUN", help="directory of a finished run of the quickstart")
    add_report_options(parser)
    options = parser.parse_args()
    if options.record:
        batches.record(options.record)
        return
    report(options, RESULTS, tables, check)
    peer = peer_python()
    if isinstance(peer, str):
        raise SystemExit(peer)
    with tempfile.TemporaryDirectory(prefix="dockyard-train-step-") as folder:
        results = measure(SMALL if options.small else Settings(), peer, Path(folder))
    if not options.small:
        results["versions"] = {"trl": peer_version(peer)}
        write_results(RESULTS, results, PACKAGES)
    print(tables(results))


if __name__ == "__main__":
    main()
