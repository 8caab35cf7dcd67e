"""The batch of `benchmarks.train_step` as our trainers take it. Imports neither torch nor JAX."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np

from dockyard_core.batch import BatchShard, TrainSequence, pack_batch
from dockyard_core.loss_config import LossConfig


def loss_of(options: Mapping[str, Any]) -> LossConfig:
    """The clipped ratio to the old logprobs."""
    return LossConfig(clip_low=options["clip"], clip_high=options["clip"], proximal="bypass", correction="none")


def optimizer_of(options: Mapping[str, Any]) -> dict[str, Any]:
    """Values of an ``OptimizerConfig``."""
    return {
        "learning_rate": options["learning_rate"],
        "betas": tuple(options["betas"]),
        "max_grad_norm": options["max_grad_norm"],
        "loss": loss_of(options),
    }


def shard_of(options: Mapping[str, Any], batch: Mapping[str, np.ndarray], *, shares: bool) -> BatchShard:
    """Packed; with ``shares``, without the sequences that have no gradient."""
    edges = np.cumsum(batch["lengths"])[:-1]
    old = np.split(batch["old_logprobs"], np.cumsum(batch["lengths"] - batch["prompt_lengths"])[:-1])
    sequences = []
    for index, token_ids in enumerate(np.split(batch["token_ids"], edges)):
        prompt_length = int(batch["prompt_lengths"][index])
        sequences.append(
            TrainSequence(
                token_ids_T=token_ids,
                loss_mask_T=np.arange(len(token_ids)) >= prompt_length,
                sampled_logprobs_T=np.concatenate([np.zeros(prompt_length, np.float32), old[index]]),
                advantage=float(batch["advantages"][index]),
            )
        )
    [shard] = pack_batch(
        sequences,
        micro_batch_tokens=options["micro_batch_tokens"],
        row_length=options["row_length"],
        skip_zero_advantage=shares and loss_of(options).can_skip_zero_advantage,
    )
    return shard
