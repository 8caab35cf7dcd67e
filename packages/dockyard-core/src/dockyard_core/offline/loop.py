"""The offline run: rows -> steps -> metrics and checkpoints, from the beginning or from where it was.

rows of the plan's next step -> sequences -> one shard per data rank -> Policy.train_step -> metrics.jsonl
                                                                               |
                              checkpoint (policy, place in the plan, length of metrics.jsonl) every so often
"""

from __future__ import annotations

import math
import signal
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from typing import Any, TextIO

import numpy as np

from dockyard_core.batch import TrainSequence, pack_batch
from dockyard_core.errors import ConfigError, UserError
from dockyard_core.offline.backend import OfflineBackend, OfflineSession
from dockyard_core.offline.batches import BatchPlan, StepRows, grpo_sequences, sft_sequences
from dockyard_core.offline.dataset import OfflineDataset
from dockyard_core.offline.options import DEFAULT_BATCH_SIZE, OfflineOptions
from dockyard_core.offline.progress import Progress
from dockyard_core.offline.rows import OfflineRow
from dockyard_core.offline.run_dir import FORMAT, MetricsLog, RunDir
from dockyard_core.offline.signals import StopSignals
from dockyard_core.policy import StepMetrics


def train_offline(options: OfflineOptions, backend: OfflineBackend, stream: TextIO) -> int:
    """Run to the end or to the first signal; returns the exit code.

    Raises:
        UserError: options, data or the output directory are refused, or the disk is.
    """
    vocab_size = backend.vocab_size(options.model)
    with OfflineDataset(options.data, command=options.command, vocab_size=vocab_size) as dataset:
        run = _Run(options, backend, dataset, stream)
        with StopSignals() as signals:
            return run.execute(signals)


class _Run:
    def __init__(
        self, options: OfflineOptions, backend: OfflineBackend, dataset: OfflineDataset, stream: TextIO
    ) -> None:
        batch_size = options.batch_size
        if batch_size is None and not dataset.has_steps:
            batch_size = DEFAULT_BATCH_SIZE
        self._options = options
        self._backend = backend
        self._dataset = dataset
        self._plan = BatchPlan(dataset, batch_size=batch_size, is_shuffled=options.is_shuffled, seed=options.seed)
        self._total = self._plan.num_steps(epochs=options.epochs, steps=options.steps)
        self._config = options.policy_config(
            backend.policy_config, total_steps=self._total, defaults=backend.policy_defaults()
        )
        if dataset.has_proximal and self._config.loss.proximal != "given":
            raise ConfigError(
                f"proximal_logprobs are read under --loss proximal=given, got {self._config.loss.proximal!r}; "
                "set it, or leave the field out"
            )
        if options.command == "grpo" and self._config.loss.can_skip_zero_advantage and not dataset.has_signal:
            raise ConfigError(
                f"{options.data}: some row with a trained token must have an advantage other than 0, got none (rewards "
                "that are equal within every group have none); add rows to learn from"
            )
        self._dir = RunDir(options.out, is_lead=backend.is_lead)
        self._progress = Progress(stream, total_steps=self._total, is_lead=backend.is_lead, is_plain=options.is_plain)
        self._record = self._make_record(batch_size)
        self._position = self._dir.examine(self._record, options.resume)

    def _make_record(self, batch_size: int | None) -> dict[str, Any]:
        """What config.json holds: ``run`` decides the weights, ``execution`` may change when a run goes on."""
        options = self._options
        policy = self._config.model_dump(mode="json")
        free = self._backend.free_policy_fields
        return {
            "format": FORMAT,
            "run": {
                "trainer": self._backend.prog,
                "command": options.command,
                "model": options.model,
                "data_sha256": self._dataset.sha256,
                "batch_size": batch_size,
                "shuffle": options.is_shuffled,
                "seed": options.seed,
                "temperature": options.temperature,
                "baseline": options.baseline,
                "scale": options.scale,
                "policy": {name: value for name, value in policy.items() if name not in free},
            },
            "execution": {
                "data": str(options.data.resolve()),
                "num_rows": len(self._dataset),
                "epochs": options.epochs,
                "steps": options.steps,
                "total_steps": self._total,
                "micro_batch_tokens": options.micro_batch_tokens,
                "save_every": options.save_every,
                "keep": options.keep,
                "policy": {name: value for name, value in policy.items() if name in free},
            },
        }

    def execute(self, signals: StopSignals) -> int:
        has_more = self._position.step < self._total
        if not has_more and self._dir.export_path.is_dir():
            self._progress.say(f"nothing to do: {self._options.out} holds all {self._total} steps")
            return 0
        self._dir.check_writable()
        with self._backend.open(self._options.model, self._config) as session:
            session.any(False)  # every rank has looked at the directory before the lead changes it
            self._record["execution"]["num_data_ranks"] = session.num_data_ranks
            try:
                with _writing():
                    self._dir.begin(self._record, self._position, has_more=has_more)
                session.any(False)
                return self._steps(session, signals)
            finally:
                self._progress.finish()

    def _steps(self, session: OfflineSession, signals: StopSignals) -> int:
        if self._position.step:
            session.policy.restore(self._dir.policy_path(self._position))
            self._progress.say(f"going on after step {self._position.step} of {self._total}")
        with MetricsLog(self._dir) as log:
            for rows in self._plan.steps_from(self._position.epoch, self._position.batch):
                if self._position.step >= self._total:
                    break
                line = self._step(session, rows)
                with _writing():
                    log.append(line)
                self._progress.step(line)
                is_stopped = session.any(signals.received is not None)
                is_last = self._position.step == self._total
                is_due = self._options.save_every and self._position.step % self._options.save_every == 0
                if is_stopped or is_last or is_due:
                    self._save(session, log)
                if is_stopped and not is_last:
                    self._progress.say(
                        f"stopped after step {self._position.step} of {self._total}, which is saved in "
                        f"{self._options.out}; run the same command again to go on"
                    )
                    return 128 + (signals.received or signal.SIGTERM)
        with _writing():
            self._dir.export(session.policy.snapshot().export, barrier=lambda: session.any(False))
        steps = "1 step" if self._total == 1 else f"{self._total} steps"
        self._progress.say(f"done: {steps}; the model is in {self._dir.export_path}")
        return 0

    def _step(self, session: OfflineSession, place: StepRows) -> dict[str, Any]:
        started = time.perf_counter()
        rows = self._dataset.read(place.row_indices)
        shards = pack_batch(
            self._sequences(rows),
            num_ranks=session.num_data_ranks,
            micro_batch_tokens=self._options.micro_batch_tokens,
            skip_zero_advantage=self._config.loss.can_skip_zero_advantage,
            temperature=self._options.temperature,
        )
        metrics = session.policy.train_step(shards[session.data_rank])
        seconds = time.perf_counter() - started
        self._position = replace(self._position, step=self._position.step + 1, epoch=place.epoch, batch=place.batch + 1)
        num_tokens = sum(row.num_tokens for row in rows)
        return {
            "step": self._position.step,
            "epoch": place.epoch,
            "num_rows": len(rows),
            "num_tokens": num_tokens,
            "tokens_per_s": num_tokens / max(seconds, 1e-9),
            **(_sft_fields(metrics) if self._options.command == "sft" else _grpo_fields(metrics, rows)),
        }

    def _sequences(self, rows: Sequence[OfflineRow]) -> list[TrainSequence]:
        if self._options.command == "sft":
            return sft_sequences(rows)
        return grpo_sequences(rows, baseline=self._options.baseline, scale=self._options.scale)

    def _save(self, session: OfflineSession, log: MetricsLog) -> None:
        # The lines reach the disk before a checkpoint that counts on them.
        with _writing():
            self._position = replace(self._position, metrics_bytes=log.sync())
            self._dir.save(
                self._position,
                session.policy.save,
                barrier=lambda: session.any(False),
                keep=self._options.keep,
            )


@contextmanager
def _writing() -> Iterator[None]:
    """A full or read-only disk is told in one line."""
    try:
        yield
    except OSError as error:
        raise UserError(
            f"--out must take what is written, got {error.strerror or error} ({error.filename}); "
            "mend that, and run the same command again"
        ) from error


def _common_fields(metrics: StepMetrics) -> dict[str, Any]:
    return {
        "policy_version": metrics.policy_version,
        "loss": metrics.loss,
        "grad_norm": metrics.grad_norm,
        "learning_rate": metrics.learning_rate,
        "entropy": metrics.entropy,
        "kl_ref": metrics.kl_ref,
        "num_valid_tokens": metrics.num_valid_tokens,
        "skipped": metrics.is_skipped,
    }


def _sft_fields(metrics: StepMetrics) -> dict[str, Any]:
    # Rows of sft have 0 for every sampled log-probability, so that the distance from them is the
    # negative log-likelihood, whatever the loss adds to it and however it averages.
    nll = metrics.offpolicy_abs_diff_mean
    perplexity = math.exp(nll) if nll < 700 else math.inf
    return _finite(_common_fields(metrics) | {"nll": nll, "perplexity": perplexity})


def _grpo_fields(metrics: StepMetrics, rows: Sequence[OfflineRow]) -> dict[str, Any]:
    rewards = [row.reward for row in rows if row.reward is not None]
    return _finite(
        _common_fields(metrics)
        | ({"reward_mean": float(np.mean(rewards))} if rewards else {})
        | {
            "clip_fraction": metrics.clip_fraction,
            "offpolicy_abs_diff_mean": metrics.offpolicy_abs_diff_mean,
            "offpolicy_abs_diff_max": metrics.offpolicy_abs_diff_max,
        }
        | metrics.extra
    )


def _finite(fields: Mapping[str, Any]) -> dict[str, Any]:
    """JSON has no NaN: null."""
    return {
        name: None if isinstance(value, float) and not math.isfinite(value) else value for name, value in fields.items()
    }
