"""Micro-batches in the same number and shape on every process, which is what makes them run the same programs.

A process says what its own need, hears what the others need, and lays them out in a shape that fits all.
"""

from __future__ import annotations

import zlib
from dataclasses import fields, replace
from functools import partial, reduce
from itertools import zip_longest
from typing import TYPE_CHECKING

import numpy as np

from dockyard_core.batch import BatchShard, MicroBatch, pack_batch
from dockyard_core.errors import ConfigError
from dockyard_trainer_jax.layout import LaidOut
from dockyard_trainer_jax.prefixes import plan_of
from dockyard_trainer_jax.shapes import Shape, Shapes

if TYPE_CHECKING:
    from dockyard_trainer_jax.config import JaxPolicyConfig
    from dockyard_trainer_jax.model_config import ModelConfig
    from dockyard_trainer_jax.ranks import Ranks


def check_agreed(ranks: Ranks, shard: BatchShard, call: str, *, num_updates: int) -> None:
    """Raise ValueError on every process when they do not make one call on shards of one batch (collective)."""
    if ranks.world_size == 1:
        return
    facts = {
        "call": call,
        "num_updates": num_updates,
        "num_valid_tokens": shard.num_valid_tokens,
        "num_sequences": shard.num_sequences,
        "num_trained_sequences": shard.num_trained_sequences,
        "temperature": shard.temperature,
        "carries proximal logprobs": _carries_proximal(shard),
    }
    difference = ranks.difference(facts, {"contents with the checksum": _checksum(shard)})
    if difference is not None:
        raise ValueError(
            "the shards of a step must be of one batch, the same for all ranks of a tensor-parallel group, got "
            f"{difference}; take pack_batch(..., num_ranks=policy.num_data_ranks)[policy.data_rank] on every rank"
        )


def check_same_policy(ranks: Ranks, config: JaxPolicyConfig, model: ModelConfig, checksum: int) -> None:
    """Raise ConfigError on every process when they have not loaded one model with one config (collective)."""
    if ranks.world_size == 1:
        return
    own = config.model_dump(mode="json", exclude={"compilation_cache_dir"})
    facts = {f"config.{name}": value for name, value in own.items()}
    facts |= {f"the model's {name}": value for name, value in model.model_dump(mode="json").items()}
    difference = ranks.difference(facts | {"weights with the checksum": checksum}, {})
    if difference is not None:
        raise ConfigError(
            f"all ranks must load one model with one config, got {difference}; start all with the same settings, from "
            "the same files"
        )


def lay_out_together(
    ranks: Ranks, shard: BatchShard, shapes: Shapes, *, share_prefixes: bool, with_untrained: bool
) -> list[LaidOut]:
    """The micro-batches of every process in the same number and shapes, for `Ranks.placed` (collective).

    A process that has fewer than another is given micro-batches of padding. ``num_tokens`` is that of all processes,
    and sequences of different processes have different numbers.

    Args:
        ranks: the processes.
        shard: this process's.
        shapes: those known, alike on every process; those that are met here are added.
        share_prefixes: whether to, where it is worth it and one row of the mesh has all sequences.
        with_untrained: also those in which no process has a token to train.
    """
    plan = partial(
        plan_of,
        num_blocks=ranks.num_row_blocks,
        share_prefixes=share_prefixes and ranks.data_size == ranks.num_row_blocks == 1,
    )
    plans = [plan(micro_batch) for micro_batch in shard.micro_batches]
    told = ranks.gather([[one.needed, one.num_tokens] for one in plans])
    takers = [told[ranks.data_rank_of.index(data_rank)] for data_rank in range(ranks.data_size)]
    laid_out = []
    # One column for each micro-batch; without what ranks say that have no more.
    columns = ([one for one in column if one is not None] for column in zip_longest(*takers))
    for index, column in enumerate(columns):
        num_tokens = sum(said[1] for said in column)
        if num_tokens or with_untrained:
            own = plans[index] if index < len(plans) else plan(_padding_like(shard.micro_batches[0]))
            needed = reduce(Shape.joined, (Shape._make(said[0]) for said in column), own.needed)
            part = own.laid_out(shapes.fit(needed))
            laid_out.append(_among_all(part, num_tokens=num_tokens, first_block=ranks.first_block))
    return laid_out


def _among_all(part: LaidOut, *, num_tokens: int, first_block: int) -> LaidOut:
    """With sequences counted through all blocks, of which those of this process begin at ``first_block``."""
    batch = part.batch
    numbered_FM = (batch.sequence_FM + first_block * batch.mask_FM.shape[1]).astype(np.int32)
    return part._replace(batch=replace(batch, sequence_FM=numbered_FM), num_tokens=num_tokens)


def _padding_like(micro_batch: MicroBatch) -> MicroBatch:
    (padding,) = pack_batch([])[0].micro_batches
    has_proximal = micro_batch.proximal_logprobs_BL is not None
    return replace(padding, proximal_logprobs_BL=np.zeros(padding.shape, np.float32) if has_proximal else None)


def _carries_proximal(shard: BatchShard) -> bool:
    return any(part.proximal_logprobs_BL is not None for part in shard.micro_batches)


def _checksum(shard: BatchShard) -> int:
    total = 0
    for part in shard.micro_batches:
        for field in fields(part):
            array = getattr(part, field.name)
            total = zlib.crc32(b"" if array is None else array.tobytes(), total)
    return total
