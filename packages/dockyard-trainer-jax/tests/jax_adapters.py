"""Adapters of both trainers under one name each, and batches to train them on."""

from __future__ import annotations

from typing import Any

import jax
import numpy as np

from dockyard_core.batch import BatchShard, TrainSequence, pack_batch
from dockyard_trainer_jax import JaxPolicy, LoraConfig
from dockyard_trainer_jax.lora import is_adapter
from dockyard_trainer_jax.names import parts_of
from dockyard_trainer_torch import TorchPolicy

LORA = LoraConfig(rank=3, alpha=6.0, use_rslora=True)  # a scale that is no power of 2
# A smaller eps would turn the rounding of a gradient near 0 into a full step.
UPDATES: dict[str, Any] = {"learning_rate": 1e-2, "eps": 1e-4, "weight_decay": 0.1}
Arrays = dict[str, np.ndarray]


def make_shard(seed: int = 0, **kwargs: Any) -> BatchShard:
    rng = np.random.default_rng(seed)
    sequences = []
    for _ in range(6):
        num_tokens = int(rng.integers(6, 16))
        mask = np.arange(num_tokens) >= 3
        sequences.append(
            TrainSequence(
                token_ids_T=rng.integers(0, 64, num_tokens),
                loss_mask_T=mask,
                sampled_logprobs_T=np.where(mask, rng.normal(-4, 0.3, num_tokens), 0).astype(np.float32),
                advantage=float(rng.normal()),
            )
        )
    return pack_batch(sequences, row_length=20, micro_batch_tokens=160, **kwargs)[0]


def distance(ours: np.ndarray, theirs: np.ndarray) -> float:
    """Of one array from another, relative to its norm."""
    ours, theirs = ours.astype(np.float64), theirs.astype(np.float64)
    return float(np.linalg.norm(ours - theirs) / max(np.linalg.norm(theirs), 1e-30))


def by_layer(params: dict[str, jax.Array]) -> Arrays:
    """Copies under the names that the PyTorch trainer has."""
    return {
        part.name: np.array(param)[part.indices]
        for name, param in params.items()
        for part in parts_of(name, tuple(param.shape))
    }


def adapters(policy: JaxPolicy | TorchPolicy) -> Arrays:
    if isinstance(policy, JaxPolicy):
        return by_layer(policy.params)
    held = policy.causal_lm.named_parameters()
    return {name: param.detach().numpy().copy() for name, param in held if is_adapter(name)}


def moments(policy: JaxPolicy | TorchPolicy) -> Arrays:
    if isinstance(policy, JaxPolicy):
        return by_layer(policy.state.exp_avg)
    held = policy.causal_lm.named_parameters()
    return {name: policy.optimizer.state[param]["exp_avg"].numpy().copy() for name, param in held if is_adapter(name)}


def fill(policy: JaxPolicy) -> None:
    """Give every A and B values, which do not depend on where they lie."""
    rng = np.random.default_rng(11)
    policy.params = {
        name: jax.device_put(rng.normal(0, 0.1, param.shape).astype(np.float32), param.sharding, may_alias=False)
        for name, param in sorted(policy.params.items())
    }


def streamed(policy: JaxPolicy | TorchPolicy) -> Arrays:
    held: Arrays = {}
    policy.stream_weights(lambda chunk: held.update({chunk.name: np.array(np.from_dlpack(chunk.array))}))
    return held
