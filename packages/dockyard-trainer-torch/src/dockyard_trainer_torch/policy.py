"""TorchPolicy: the `Policy` seam over a Hugging Face causal language model.

Shape legend: B = rows, L = row length, M = trained positions of a micro-batch.
"""

from __future__ import annotations

import copy
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import numpy as np
import torch

from dockyard_core.batch import BatchShard
from dockyard_core.errors import ConfigError
from dockyard_core.policy import PolicySnapshot, StepMetrics, WeightSink
from dockyard_trainer_torch import checkpoint, weights
from dockyard_trainer_torch.config import TorchPolicyConfig
from dockyard_trainer_torch.model import TokenScorer, load_causal_lm, resolve_model_dir
from dockyard_trainer_torch.optim import apply_gradients, build_optimizer, learning_rate_at, zero_gradients
from dockyard_trainer_torch.ranks import Ranks
from dockyard_trainer_torch.snapshot import take
from dockyard_trainer_torch.step import forward_backward, score

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup
    from transformers import PreTrainedModel


class TorchPolicy:
    """A trainable policy and its optimizer; one object per rank, every method collective.

    Implements ``dockyard_core.policy.Policy``. Build it with `from_pretrained`.
    """

    def __init__(
        self,
        causal_lm: PreTrainedModel,
        config: TorchPolicyConfig,
        *,
        model_dir: Path,
        process_group: ProcessGroup | None = None,
    ) -> None:
        if config.num_threads is not None:
            torch.set_num_threads(config.num_threads)
        torch.manual_seed(config.seed)
        self.config = config
        self.model_dir = model_dir
        self.ranks = Ranks(process_group, device=config.device)
        self.num_skipped_steps = 0
        self._version = 0
        self._reference = (
            self._scorer(copy.deepcopy(causal_lm)).requires_grad_(False) if config.needs_reference else None
        )
        self._policy = self._scorer(causal_lm)
        self.optimizer = build_optimizer(self._policy.parameters(), config)

    @classmethod
    def from_pretrained(
        cls, model: str | Path, config: TorchPolicyConfig, *, process_group: ProcessGroup | None = None
    ) -> TorchPolicy:
        """Load a Qwen2, Qwen3 or Llama checkpoint.

        Args:
            model: a directory with config.json and safetensors, or a hub id.
            config: optimizer, precision and loss.
            process_group: data-parallel ranks over which weights are sharded; None = this process.

        Raises ConfigError for a directory that does not exist, holds no model, or another family.
        """
        model_dir = resolve_model_dir(model)
        return cls(load_causal_lm(model_dir), config, model_dir=model_dir, process_group=process_group)

    def _scorer(self, causal_lm: Any) -> TokenScorer:
        scorer = TokenScorer(causal_lm.to(self.config.device), chunk_tokens=self.config.logprob_chunk_tokens)
        self.ranks.shard(scorer, list(causal_lm.model.layers))
        return scorer

    @property
    def version(self) -> int:
        """Optimizer steps taken; names the weights."""
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
        scorer = self._policy if which == "current" else self._reference
        if scorer is None:
            raise ConfigError(
                "reference logprobs need a reference, got kl_coef=0 and load_reference=False; set load_reference=True"
            )
        arrays = []
        scored = score(scorer, shard, self.config, self.ranks)
        for micro_batch, logprobs_M in zip(shard.micro_batches, scored, strict=True):
            array_BL = np.zeros(micro_batch.shape, np.float32)
            array_BL[micro_batch.loss_mask_BL] = logprobs_M.cpu().numpy()
            arrays.append(array_BL)
        self.ranks.reshard(scorer)
        return tuple(arrays)

    def train_step(self, shard: BatchShard) -> StepMetrics:
        """One optimizer step on this rank's share of the batch; version + 1 unless skipped.

        A step whose loss or gradient is not finite is skipped: weights, moments and version stay
        as they were, and ``num_skipped_steps`` grows.
        """
        zero_gradients(self.optimizer)
        sums = forward_backward(self._policy, self._reference, shard, self.config, self.ranks)
        learning_rate = learning_rate_at(self.config, self._version)
        report = apply_gradients(
            self.optimizer, learning_rate=learning_rate, max_grad_norm=self.config.max_grad_norm, loss=sums.loss
        )
        if report.is_skipped:
            self.num_skipped_steps += 1
        else:
            self._version += 1
        means = dict(sums.means)
        return StepMetrics(
            policy_version=self._version,
            loss=sums.loss,
            grad_norm=report.grad_norm,
            learning_rate=learning_rate,
            entropy=means.pop("entropy", 0.0),
            clip_fraction=means.pop("clip_fraction", 0.0),
            kl_ref=means.pop("kl_ref", 0.0),
            offpolicy_abs_diff_mean=means.pop("offpolicy_abs_diff_mean", 0.0),
            offpolicy_abs_diff_max=sums.offpolicy_abs_diff_max,
            num_valid_tokens=shard.num_valid_tokens,
            is_skipped=report.is_skipped,
            extra=means | {"num_skipped_steps": float(self.num_skipped_steps)},
        )

    def stream_weights(self, sink: WeightSink) -> None:
        """Hand every whole tensor to ``sink`` in the order of ``weight_manifest``, tied ones once."""
        weights.stream(self.causal_lm, sink, dtype=getattr(torch, self.config.dtype), ranks=self.ranks)

    def snapshot(self) -> PolicySnapshot:
        """Weights, moments, RNG and version as they are now, in the host memory of rank 0."""
        return take(self)

    def save(self, directory: Path) -> None:
        """Write weights, moments, RNG and version; atomic, and also a Hugging Face model directory.

        Raises OSError on rank 0 when the disk does not take it; ``directory`` is then as it was.
        """
        try:
            self.snapshot().write(Path(directory))
        finally:
            self.ranks.barrier()

    def restore(self, directory: Path) -> None:
        """Read what ``save`` wrote; the next step equals the step after the save.

        The reference, if any, stays the one this policy was built with.
        """
        counters = checkpoint.restore(self, Path(directory))
        self._version = counters["version"]
        self.num_skipped_steps = counters["num_skipped_steps"]
