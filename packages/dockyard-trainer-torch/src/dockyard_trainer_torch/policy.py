"""TorchPolicy: the `Policy` seam over a Hugging Face causal language model.

Shape legend: B = rows, L = row length, M = trained positions of a micro-batch.
"""

from __future__ import annotations

import zlib
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Literal

import numpy as np
import torch

from dockyard_core.batch import BatchShard
from dockyard_core.batch_checks import check_shard
from dockyard_core.errors import ConfigError
from dockyard_core.hub import resolve_model_dir
from dockyard_core.optimizer_config import learning_rate_at
from dockyard_core.policy import PolicySnapshot, StepMetrics, WeightSink
from dockyard_trainer_torch import checkpoint, weights
from dockyard_trainer_torch.building import build_scorer
from dockyard_trainer_torch.config import TorchPolicyConfig
from dockyard_trainer_torch.layout import TensorBatch
from dockyard_trainer_torch.lora import adapters_disabled
from dockyard_trainer_torch.model import TokenScorer
from dockyard_trainer_torch.optim import (
    GradientReport,
    apply_gradients,
    build_optimizer,
    zero_gradients,
)
from dockyard_trainer_torch.parallel import reshard
from dockyard_trainer_torch.ranks import Ranks
from dockyard_trainer_torch.snapshot import take
from dockyard_trainer_torch.step import StepSums, forward_backward, score, tensor_batches, with_logprobs

if TYPE_CHECKING:
    from torch import Tensor
    from torch.distributed import ProcessGroup
    from transformers import PreTrainedModel


class TorchPolicy:
    """A trainable policy and its optimizer; one object per rank, every method collective.

    Implements ``dockyard_core.policy.Policy``. Build it with `from_pretrained`.
    """

    def __init__(
        self, model: str | Path, config: TorchPolicyConfig, *, process_group: ProcessGroup | None = None
    ) -> None:
        if config.num_threads is not None:
            torch.set_num_threads(config.num_threads)
        torch.manual_seed(config.seed)
        self.config = config
        self.ranks = Ranks(process_group, device=config.device, tensor_parallel_size=config.tensor_parallel_size)
        if config.cpu_offload and self.ranks.data_size == 1:
            raise ConfigError("cpu_offload needs several data-parallel ranks, got 1; use optimizer_offload")
        self.num_skipped_steps = 0
        self.num_updates = 0
        """Optimizer steps taken: `updates_per_batch` for each version."""
        self._version = 0
        self._is_torn = False
        """An error ended the middle of a step: FSDP2 still holds the gradients of its first micro-batches."""
        self._reference: TokenScorer | None = None
        with self.ranks.together(ConfigError("another rank could not load policy.model; see that rank's error")):
            self.model_dir = resolve_model_dir(model)
            self._policy = build_scorer(self.model_dir, config, self.ranks)
            if config.needs_reference and config.lora is None:  # with adapters, the base is the reference
                self._reference = build_scorer(self.model_dir, config, self.ranks, is_reference=True)
        self.optimizer = build_optimizer(self._policy.parameters(), config)

    @classmethod
    def from_pretrained(
        cls, model: str | Path, config: TorchPolicyConfig, *, process_group: ProcessGroup | None = None
    ) -> TorchPolicy:
        """Load a Qwen2, Qwen3, Llama or Qwen3-MoE checkpoint; each rank reads its own part of it.

        Args:
            model: a directory with config.json and safetensors, or a hub id.
            config: optimizer, precision, parallelism and loss.
            process_group: the ranks that share the model; None = this process. Ranks of one
                tensor-parallel group follow each other, and take the same shard of a batch.

        Raises ConfigError on every rank for a directory that does not exist, holds no model, another family or other
        tensors than its config.json says, and for sizes that do not divide.
        """
        return cls(model, config, process_group=process_group)

    @property
    def data_rank(self) -> int:
        """Which of ``num_data_ranks`` shards of a batch this rank takes."""
        return self.ranks.data_rank

    @property
    def num_data_ranks(self) -> int:
        """Into how many shards a batch is split."""
        return self.ranks.data_size

    @property
    def version(self) -> int:
        """Batches trained on; names the weights."""
        return self._version

    @property
    def causal_lm(self) -> PreTrainedModel:
        """The model being trained, for reading."""
        return self._policy.causal_lm

    def logprobs(self, shard: BatchShard, which: Literal["current", "reference"] = "current") -> tuple[np.ndarray, ...]:
        """log_softmax(logits / shard.temperature) of each trained token given its past.

        Returns one float32 array [B, L] per micro-batch; 0.0 where ``loss_mask`` is False.
        Raises ConfigError when the reference is asked for and was not kept.
        """
        batches = self._laid_out(shard)
        if which == "reference" and not self.config.needs_reference:
            raise ConfigError(
                "reference logprobs need a reference, got kl_coef=0 and load_reference=False; set load_reference=True"
            )
        scored = self._score(batches, shard) if which == "current" else self._score_reference(batches, shard)
        arrays = []
        for micro_batch, logprobs_M in zip(shard.micro_batches, scored, strict=True):
            array_BL = np.zeros(micro_batch.shape, np.float32)
            array_BL[micro_batch.loss_mask_BL] = logprobs_M.cpu().numpy()
            arrays.append(array_BL)
        return tuple(arrays)

    def _laid_out(self, shard: BatchShard) -> list[TensorBatch]:
        """The micro-batches on the device; a shard that one rank refuses ends the step on all before it begins."""
        with self.ranks.together(RuntimeError("another rank could not read its shard; see that rank's error")):
            if self._is_torn:
                raise RuntimeError(
                    "an error ended a step of sharded weights half-way, got another call; build a new policy and "
                    "restore it"
                )
            check_shard(shard, vocab_size=self.causal_lm.config.vocab_size)
            batches = tensor_batches(self._policy, shard, self.config, self.ranks)
        if self.ranks.world_size > 1:
            self._check_agreed(shard)
        return batches

    def _check_agreed(self, shard: BatchShard) -> None:
        """Raise ValueError on every rank when their shards are of different batches: they would wait for each other."""
        counts = (shard.num_valid_tokens, shard.num_sequences, shard.num_trained_sequences)
        carries = any(part.proximal_logprobs_BL is not None for part in shard.micro_batches)
        tokens = b"".join(part.token_ids_BL.tobytes() for part in shard.micro_batches)
        shared = (len(shard.micro_batches), *counts, shard.temperature, carries)
        if not self.ranks.agree(shared, zlib.crc32(tokens)):
            raise ValueError(
                "the shards of a step must be of one batch, the same for all ranks of a tensor-parallel group, got "
                f"{shared} and others (micro-batches, counts, temperature, whether proximal logprobs are carried); "
                "take pack_batch(..., num_ranks=policy.num_data_ranks)[policy.data_rank] on every rank"
            )

    def _score(self, batches: Sequence[TensorBatch], shard: BatchShard) -> list[Tensor]:
        logprobs: list[Tensor] = score(self._policy, batches, shard.temperature, self.config, self.ranks)
        reshard(self._policy)
        return logprobs

    def _score_reference(self, batches: Sequence[TensorBatch], shard: BatchShard) -> list[Tensor]:
        if self._reference is None:
            with adapters_disabled(self._policy):
                return self._score(batches, shard)
        with self._on_device(self._reference):
            logprobs: list[Tensor] = score(self._reference, batches, shard.temperature, self.config, self.ranks)
        reshard(self._reference)
        return logprobs

    @contextmanager
    def _on_device(self, reference: TokenScorer) -> Iterator[None]:
        """Bring an offloaded reference to the device; sharded ones come block by block by themselves."""
        is_moved = self.config.reference_offload and self.ranks.data_size == 1
        held = {param: param.data for param in reference.parameters()} if is_moved else {}
        try:
            for param, on_host in held.items():
                param.data = on_host.to(self.ranks.device)
            yield
        finally:
            for param, on_host in held.items():  # frozen: what is on the host is still right
                param.data = on_host

    def train_step(self, shard: BatchShard) -> StepMetrics:
        """All updates on this rank's share of a batch; version + 1 unless skipped.

        Under ``proximal="given"`` the ratio is taken to the logprobs that the shard carries, or else to
        those of the weights before the first update. An update whose loss or gradient is not finite is
        skipped: weights and moments stay as they were, and ``num_skipped_steps`` grows. A step all of
        whose updates are skipped leaves the version as it was.

        Metrics are the first update's, except ``grad_norm``, ``loss`` and ``clip_fraction``, which are
        means over the updates that were not skipped.
        """
        zero_gradients(self.optimizer)
        batches = self._laid_out(shard)
        with self._torn_by_an_error():
            return self._updates(self._with_targets(batches, shard), shard)

    @contextmanager
    def _torn_by_an_error(self) -> Iterator[None]:
        """One rank's gradients are dropped by the next step; those inside FSDP2 are out of reach."""
        self._is_torn = self.ranks.data_size > 1
        yield
        self._is_torn = False

    def _updates(self, batches: list[TensorBatch], shard: BatchShard) -> StepMetrics:
        learning_rate = learning_rate_at(self.config, self._version)
        taken: list[tuple[StepSums, GradientReport]] = []
        for _ in range(self.config.updates_per_batch):
            sums = forward_backward(self._policy, batches, shard, self.config, self.ranks)
            report = apply_gradients(
                self.optimizer, self.config, self.ranks, learning_rate=learning_rate, loss=sums.loss
            )
            self.num_skipped_steps += report.is_skipped
            self.num_updates += not report.is_skipped
            taken.append((sums, report))
        is_skipped = all(report.is_skipped for _, report in taken)
        self._version += not is_skipped
        return self._metrics(shard, taken, learning_rate, is_skipped=is_skipped)

    def _with_targets(self, batches: list[TensorBatch], shard: BatchShard) -> list[TensorBatch]:
        """Add what the loss compares with: the reference's logprobs, and those before the first update."""
        if self.config.needs_reference:
            batches = with_logprobs(batches, "ref_logprobs_M", self._score_reference(batches, shard))
        if self.config.loss.proximal == "given" and any(batch.proximal_logprobs_M is None for batch in batches):
            batches = with_logprobs(batches, "proximal_logprobs_M", self._score(batches, shard))
        return batches

    def _metrics(
        self,
        shard: BatchShard,
        taken: Sequence[tuple[StepSums, GradientReport]],
        learning_rate: float,
        *,
        is_skipped: bool,
    ) -> StepMetrics:
        first = taken[0][0]
        counted = [pair for pair in taken if is_skipped or not pair[1].is_skipped]
        count = len(counted)
        means = dict(first.means)
        means["clip_fraction"] = sum(sums.means.get("clip_fraction", 0.0) for sums, _ in counted) / count
        return StepMetrics(
            policy_version=self._version,
            loss=sum(sums.loss for sums, _ in counted) / count,
            grad_norm=sum(report.grad_norm for _, report in counted) / count,
            learning_rate=learning_rate,
            entropy=means.pop("entropy", 0.0),
            clip_fraction=means.pop("clip_fraction"),
            kl_ref=means.pop("kl_ref", 0.0),
            offpolicy_abs_diff_mean=means.pop("offpolicy_abs_diff_mean", 0.0),
            offpolicy_abs_diff_max=first.offpolicy_abs_diff_max,
            num_valid_tokens=shard.num_valid_tokens,
            is_skipped=is_skipped,
            extra=means
            | {
                "mismatch_abs_diff_max": first.mismatch_abs_diff_max,
                "num_skipped_steps": float(self.num_skipped_steps),
            },
        )

    def stream_weights(self, sink: WeightSink) -> None:
        """Hand every whole tensor to ``sink`` in the order of ``weight_manifest``, tied ones once."""
        weights.stream(self.causal_lm, sink, dtype=getattr(torch, self.config.dtype), ranks=self.ranks)

    def snapshot(self) -> PolicySnapshot:
        """Copy this rank's part of weights, moments and RNG into its host memory (collective)."""
        return take(self)

    def save(self, directory: Path) -> None:
        """Write weights, moments, RNG and version, atomically.

        On one rank that trains every parameter it is a Hugging Face model directory too. Raises OSError on
        every rank when the disk does not take it; ``directory`` is then as it was.
        """
        checkpoint.save(self, Path(directory))

    def restore(self, directory: Path) -> None:
        """Read what ``save`` wrote; the next step equals the step after the save.

        The reference, if any, stays the one this policy was built with.
        """
        counters = checkpoint.restore(self, Path(directory))
        self._version = counters["version"]
        self.num_updates = counters["num_updates"]
        self.num_skipped_steps = counters["num_skipped_steps"]
