"""Forward and backward over a shard's micro-batches; leaves summed gradients on the parameters.

Shape legend: M = trained tokens of a micro-batch.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from dockyard_core.batch import BatchShard
from dockyard_trainer_torch.config import TorchPolicyConfig
from dockyard_trainer_torch.layout import TensorBatch, tensor_batch
from dockyard_trainer_torch.loss import LossTerms, TokenBatch, policy_loss
from dockyard_trainer_torch.model import TokenScorer
from dockyard_trainer_torch.parallel import complete_gradients, reduce_in_last
from dockyard_trainer_torch.ranks import Ranks


def tensor_batches(
    scorer: TokenScorer, shard: BatchShard, config: TorchPolicyConfig, ranks: Ranks
) -> list[TensorBatch]:
    """The shard's micro-batches on the device."""
    # Ranks must call the model equally often, and a shared prefix is one more call; a block that is computed
    # again would add its keys and values to the prefix's once more.
    share_prefixes = (
        config.share_prefixes
        and ranks.data_size == 1
        and not config.activation_checkpointing
        and scorer.can_share_prefixes
    )
    return [tensor_batch(part, config.device, share_prefixes=share_prefixes) for part in shard.micro_batches]


@torch.no_grad()
def score(
    scorer: TokenScorer, batches: Sequence[TensorBatch], temperature: float, config: TorchPolicyConfig, ranks: Ranks
) -> list[Tensor]:
    """logprobs_M of each micro-batch, without gradient."""
    nothing = torch.zeros(0, device=config.device)
    return [
        nothing if _is_skipped(batch, ranks) else _forward(scorer, batch, temperature, config, with_entropy=False)[0]
        for batch in batches
    ]


def _precision(config: TorchPolicyConfig) -> AbstractContextManager[Any]:
    """Autocast for bfloat16, nothing for float32."""
    if config.dtype == "float32":
        return nullcontext()
    autocast: AbstractContextManager[Any] = torch.autocast(torch.device(config.device).type, torch.bfloat16)
    return autocast


def _is_skipped(batch: TensorBatch, ranks: Ranks) -> bool:
    """Whether nothing is computed for it; ranks with sharded weights take part in every forward pass."""
    return ranks.data_size == 1 and not batch.num_tokens


def _forward(
    scorer: TokenScorer,
    batch: TensorBatch,
    temperature: float,
    config: TorchPolicyConfig,
    *,
    with_entropy: bool = True,
) -> tuple[Tensor, Tensor | None]:
    with _precision(config):
        logprobs_M, entropy_M = scorer(batch.layout, temperature=temperature, with_entropy=with_entropy)
    return logprobs_M, entropy_M


@dataclass(frozen=True, kw_only=True)
class StepSums:
    """What the micro-batches of an update add up to, over all ranks."""

    loss: float
    means: dict[str, float]
    """Means over the tokens that went through the model; 0.0 when there were none."""
    offpolicy_abs_diff_max: float
    mismatch_abs_diff_max: float


def forward_backward(
    scorer: TokenScorer, batches: Sequence[TensorBatch], shard: BatchShard, config: TorchPolicyConfig, ranks: Ranks
) -> StepSums:
    """Add the gradient of the update's loss to the parameters; every rank runs every micro-batch.

    Args:
        scorer: the policy.
        batches: of `tensor_batches`, with the reference's and the proximal logprobs that the loss needs.
        shard: counts of the whole batch, temperature.
        config: loss and precision.
        ranks: those that share the batch.
    """
    loss_sum = torch.zeros((), device=config.device)
    largest = torch.zeros(2, device=config.device)  # off-policy difference, mismatch
    sums: dict[str, Tensor] = {}
    for index, batch in enumerate(batches):
        if _is_skipped(batch, ranks):
            continue
        reduce_in_last(scorer, is_last=config.reduce_every_micro_batch or index == len(batches) - 1)
        terms = _loss_terms(scorer, batch, shard, config)
        # Sharded gradients are averaged over ranks; the loss already holds the global counts.
        (terms.loss * ranks.data_size).backward()
        loss_sum += terms.loss.detach()
        found = torch.stack([terms.offpolicy_abs_diff_max, terms.mismatch_abs_diff_max])
        largest = torch.maximum(largest, found)
        for name, value in terms.sums.items():
            sums[name] = sums.get(name, torch.zeros_like(value)) + value
    complete_gradients(scorer, ranks)
    return _over_ranks(loss_sum, sums, largest, ranks)


def _loss_terms(scorer: TokenScorer, batch: TensorBatch, shard: BatchShard, config: TorchPolicyConfig) -> LossTerms:
    logprobs_M, entropy_M = _forward(scorer, batch, shard.temperature, config)
    tokens = TokenBatch(
        logprobs_M=logprobs_M,
        sampled_logprobs_M=batch.sampled_logprobs_M,
        advantages_M=batch.advantages_M,
        sequence_M=batch.sequence_M,
        num_rows=batch.num_rows,
        proximal_logprobs_M=batch.proximal_logprobs_M,
        ref_logprobs_M=batch.ref_logprobs_M,
        entropy_M=entropy_M,
    )
    is_by_sequence = config.loss.effective_aggregation == "sequence"
    num_sequences = shard.num_trained_sequences if is_by_sequence else shard.num_sequences
    return policy_loss(config.loss, tokens, num_valid_tokens=shard.num_valid_tokens, num_sequences=num_sequences)


def with_logprobs(batches: Sequence[TensorBatch], field: str, logprobs: Sequence[Tensor]) -> list[TensorBatch]:
    """The micro-batches with ``ref_logprobs_M`` or ``proximal_logprobs_M`` filled in."""
    return [replace(batch, **{field: values_M}) for batch, values_M in zip(batches, logprobs, strict=True)]


def _over_ranks(loss_sum: Tensor, sums: dict[str, Tensor], largest: Tensor, ranks: Ranks) -> StepSums:
    names = sorted(sums)
    values = ranks.sum_over_data(torch.stack([loss_sum, *(sums[name] for name in names)])).tolist()
    totals = dict(zip(names, values[1:], strict=True))
    offpolicy_max, mismatch_max = ranks.max(largest).tolist()
    num_tokens = max(totals.pop("num_tokens", 0.0), 1.0)
    return StepSums(
        loss=values[0],
        means={name: total / num_tokens for name, total in totals.items()},
        offpolicy_abs_diff_max=offpolicy_max,
        mismatch_abs_diff_max=mismatch_max,
    )
