"""Forward and backward over a shard's micro-batches; leaves summed gradients on the parameters.

Shape legend: B = rows, L = row length, M = trained positions of a micro-batch.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from dockyard_core.batch import BatchShard, MicroBatch
from dockyard_trainer_torch.config import TorchPolicyConfig
from dockyard_trainer_torch.loss import TokenBatch, policy_loss
from dockyard_trainer_torch.model import TokenScorer
from dockyard_trainer_torch.ranks import Ranks


@dataclass(frozen=True, kw_only=True)
class TensorBatch:
    """A MicroBatch as tensors: the model's inputs in [B, L], the loss's at trained positions."""

    token_ids_BL: Tensor
    position_ids_BL: Tensor
    targets_M: Tensor  # flat index into [B, L] of each trained token
    sampled_logprobs_M: Tensor
    advantages_M: Tensor
    sequence_M: Tensor
    num_rows: int


def tensor_batch(micro_batch: MicroBatch, device: str) -> TensorBatch:
    """Move a micro-batch to the device; masked slots are left behind here, whatever they hold."""
    used = _used_length(micro_batch)
    mask_BL = micro_batch.loss_mask_BL[:, :used]
    targets_M = np.flatnonzero(mask_BL)
    sequence_M = micro_batch.sequence_ids_BL[:, :used].reshape(-1)[targets_M]

    def at_targets(array_BL: np.ndarray) -> Tensor:
        values_M = array_BL[:, :used].reshape(-1)[targets_M].astype(np.float32)
        return torch.from_numpy(values_M).to(device)

    return TensorBatch(
        token_ids_BL=torch.from_numpy(np.ascontiguousarray(micro_batch.token_ids_BL[:, :used])).to(device),
        position_ids_BL=torch.from_numpy(_position_ids(micro_batch)[:, :used].copy()).to(device),
        targets_M=torch.from_numpy(targets_M).to(device),
        sampled_logprobs_M=at_targets(micro_batch.sampled_logprobs_BL),
        advantages_M=at_targets(micro_batch.advantages_BL),
        sequence_M=torch.from_numpy(sequence_M).to(device),
        num_rows=int(sequence_M.max(initial=-1)) + 1,
    )


def _used_length(micro_batch: MicroBatch) -> int:
    """Columns before the last one that is padding in every row, at least 1."""
    used = np.flatnonzero((micro_batch.sequence_ids_BL >= 0).any(axis=0))
    return int(used[-1]) + 1 if len(used) else 1


def _position_ids(micro_batch: MicroBatch) -> np.ndarray:
    """Position ids, not restarted at the padding when every row holds one sequence.

    Causal attention never looks ahead at padding, so nothing is computed differently; without a
    restart the model takes plain causal attention, which is faster than a mask per sequence.
    """
    ids_BL = micro_batch.sequence_ids_BL
    has_one_each = bool(((ids_BL == ids_BL[:, :1]) | (ids_BL < 0)).all())
    if has_one_each:
        return np.broadcast_to(np.arange(ids_BL.shape[1]), ids_BL.shape)
    return micro_batch.position_ids_BL


def precision(config: TorchPolicyConfig) -> AbstractContextManager[Any]:
    """Autocast for bfloat16, nothing for float32."""
    if config.dtype == "float32":
        return nullcontext()
    autocast: AbstractContextManager[Any] = torch.autocast(torch.device(config.device).type, torch.bfloat16)
    return autocast


def score(scorer: TokenScorer, shard: BatchShard, config: TorchPolicyConfig, ranks: Ranks) -> Iterator[Tensor]:
    """Yield logprobs_M of each micro-batch, without gradient."""
    for micro_batch in shard.micro_batches:
        batch = tensor_batch(micro_batch, config.device)
        with torch.no_grad():
            logprobs_M, _ = _forward(scorer, batch, shard.temperature, config, ranks)
        yield logprobs_M


def _forward(
    scorer: TokenScorer, batch: TensorBatch, temperature: float, config: TorchPolicyConfig, ranks: Ranks
) -> tuple[Tensor, Tensor]:
    if ranks.world_size == 1 and not len(batch.targets_M):
        nothing = torch.zeros(0, device=config.device)
        return nothing, nothing
    with precision(config):
        logprobs_M, entropy_M = scorer(
            batch.token_ids_BL, batch.position_ids_BL, batch.targets_M, temperature=temperature
        )
    return logprobs_M, entropy_M


@dataclass(frozen=True, kw_only=True)
class StepSums:
    """What the micro-batches of a step add up to, over all ranks."""

    loss: float
    means: dict[str, float]
    """Means over the tokens that went through the model; 0.0 when there were none."""
    offpolicy_abs_diff_max: float


def forward_backward(
    scorer: TokenScorer, reference: TokenScorer | None, shard: BatchShard, config: TorchPolicyConfig, ranks: Ranks
) -> StepSums:
    """Add the gradient of the step's loss to the parameters; every rank runs every micro-batch."""
    loss_sum = torch.zeros((), device=config.device)
    drift_max = torch.zeros((), device=config.device)
    sums: dict[str, Tensor] = {}
    for micro_batch in shard.micro_batches:
        batch = tensor_batch(micro_batch, config.device)
        if ranks.world_size == 1 and not len(batch.targets_M):
            continue
        logprobs_M, entropy_M = _forward(scorer, batch, shard.temperature, config, ranks)
        ref_logprobs_M = None
        if reference is not None:
            with torch.no_grad():
                ref_logprobs_M = _forward(reference, batch, shard.temperature, config, ranks)[0]
        terms = policy_loss(
            config.loss,
            TokenBatch(
                logprobs_M=logprobs_M,
                sampled_logprobs_M=batch.sampled_logprobs_M,
                advantages_M=batch.advantages_M,
                sequence_M=batch.sequence_M,
                num_rows=batch.num_rows,
                ref_logprobs_M=ref_logprobs_M,
                entropy_M=entropy_M,
            ),
            num_valid_tokens=shard.num_valid_tokens,
            num_sequences=shard.num_sequences,
        )
        # Sharded gradients are averaged over ranks; the loss already holds the global counts.
        (terms.loss * ranks.world_size).backward()
        loss_sum += terms.loss.detach()
        drift_max = torch.maximum(drift_max, terms.offpolicy_abs_diff_max)
        for name, value in terms.sums.items():
            sums[name] = sums.get(name, torch.zeros_like(value)) + value
    return _over_ranks(loss_sum, sums, drift_max, ranks)


def _over_ranks(loss_sum: Tensor, sums: dict[str, Tensor], drift_max: Tensor, ranks: Ranks) -> StepSums:
    names = sorted(sums)
    values = ranks.sum(torch.stack([loss_sum, *(sums[name] for name in names)])).tolist()
    totals = dict(zip(names, values[1:], strict=True))
    num_tokens = max(totals.pop("num_tokens", 0.0), 1.0)
    return StepSums(
        loss=values[0],
        means={name: total / num_tokens for name, total in totals.items()},
        offpolicy_abs_diff_max=float(ranks.max(drift_max)),
    )
