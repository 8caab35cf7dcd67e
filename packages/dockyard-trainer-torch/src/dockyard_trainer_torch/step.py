"""Forward and backward over a shard's micro-batches; leaves summed gradients on the parameters.

Shape legend: M = trained tokens of a micro-batch.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from dockyard_core.batch import BatchShard
from dockyard_trainer_torch.config import TorchPolicyConfig
from dockyard_trainer_torch.layout import TensorBatch, tensor_batch
from dockyard_trainer_torch.loss import TokenBatch, policy_loss
from dockyard_trainer_torch.model import TokenScorer
from dockyard_trainer_torch.ranks import Ranks


def precision(config: TorchPolicyConfig) -> AbstractContextManager[Any]:
    """Autocast for bfloat16, nothing for float32."""
    if config.dtype == "float32":
        return nullcontext()
    autocast: AbstractContextManager[Any] = torch.autocast(torch.device(config.device).type, torch.bfloat16)
    return autocast


def _batches(scorer: TokenScorer, shard: BatchShard, config: TorchPolicyConfig, ranks: Ranks) -> Iterator[TensorBatch]:
    # Ranks must call the model equally often, and a shared prefix is one more call.
    share_prefixes = config.share_prefixes and ranks.world_size == 1 and scorer.can_share_prefixes
    for micro_batch in shard.micro_batches:
        yield tensor_batch(micro_batch, config.device, share_prefixes=share_prefixes)


def score(scorer: TokenScorer, shard: BatchShard, config: TorchPolicyConfig, ranks: Ranks) -> Iterator[Tensor]:
    """Yield logprobs_M of each micro-batch, without gradient."""
    for batch in _batches(scorer, shard, config, ranks):
        with torch.no_grad():
            logprobs_M, _ = _forward(scorer, batch, shard.temperature, config, ranks)
        yield logprobs_M


def _forward(
    scorer: TokenScorer, batch: TensorBatch, temperature: float, config: TorchPolicyConfig, ranks: Ranks
) -> tuple[Tensor, Tensor]:
    if ranks.world_size == 1 and not batch.num_tokens:
        nothing = torch.zeros(0, device=config.device)
        return nothing, nothing
    with precision(config):
        logprobs_M, entropy_M = scorer(batch.layout, temperature=temperature)
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
    for batch in _batches(scorer, shard, config, ranks):
        if ranks.world_size == 1 and not batch.num_tokens:
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
