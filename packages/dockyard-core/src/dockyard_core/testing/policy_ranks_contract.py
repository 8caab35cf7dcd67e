"""What several ranks of one policy must do together; part of the policy contract, for processes of your own.

Start the ranks, let each call `report_of_rank` with two equal policies, gather what they return in the order
of the ranks, and give it to `check_ranks`.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any

import numpy as np

from dockyard_core.batch import BatchShard, TrainSequence, pack_batch
from dockyard_core.policy import Policy, StepMetrics, WeightChunk

BAD_RANK = 1
"""The rank on which things go wrong."""
_STREAMED_BEFORE_THE_FAULT = 3


class EngineLost(Exception):
    """Raised by the sink of the bad rank."""


def report_of_rank(
    policy: Policy,
    twin: Policy,
    *,
    rank: int,
    data_rank: int,
    num_data_ranks: int,
    vocab_size: int,
    measured: Collection[str] = (),
) -> dict[str, Any]:
    """Let calls fail on one rank, and say what became of them on this one (collective; JSON values only).

    Args:
        policy: the one that things happen to.
        twin: equal to it; nothing happens to it.
        rank: this process.
        data_rank: which shard of a batch this process takes, of ``num_data_ranks``.
        num_data_ranks: into how many shards a batch is split.
        vocab_size: of both policies.
        measured: names in ``StepMetrics.extra`` that tell of this process, such as seconds, and not of the step.
    """
    good = _shards(vocab_size, num_data_ranks, seed=0)[data_rank]
    bad = _misread(good, vocab_size) if rank == BAD_RANK else good
    streamed: list[str] = []

    def sink(chunk: WeightChunk) -> None:
        streamed.append(chunk.name)
        if rank == BAD_RANK and len(streamed) == _STREAMED_BEFORE_THE_FAULT:
            raise EngineLost(f"rank {rank} lost its engine")

    strange = dataclasses.replace(good, temperature=0.5) if rank == BAD_RANK else good
    said: dict[str, Any] = {
        "disagreement": _outcome(lambda: policy.train_step(strange)),
        "train_step": _outcome(lambda: policy.train_step(bad)),
        "logprobs": _outcome(lambda: policy.logprobs(bad)),
        "stream_weights": _outcome(lambda: policy.stream_weights(sink)),
        "num_streamed": len(streamed),
        "is_as_it_was": _numbers(policy.train_step(good), measured) == _numbers(twin.train_step(good), measured),
    }
    spoiled = _with_infinite_advantages(good) if data_rank == 0 else good
    skipped = policy.train_step(spoiled)
    said["skipped"] = [skipped.is_skipped, skipped.policy_version, policy.version]
    after = _shards(vocab_size, num_data_ranks, seed=1)[data_rank]
    # The counter of skipped steps differs, and nothing else.
    one, other = (dataclasses.replace(p.train_step(after), extra={}) for p in (policy, twin))
    said["is_unmoved_by_the_skip"] = one == other
    return said


def check_ranks(reports: Sequence[Mapping[str, Any]]) -> None:
    """Raise AssertionError unless the ranks agree about every call, and failures left no trace."""
    for rank, said in enumerate(reports):
        for call, rule in (("train_step", "token ids must lie in"), ("logprobs", "token ids must lie in")):
            if rank == BAD_RANK:
                assert said[call].startswith("ValueError: "), said[call]
                assert rule in said[call], said[call]
            else:
                assert said[call].startswith("RuntimeError: "), f"{call} of rank {rank}: {said[call]}"
        assert said["disagreement"].startswith("ValueError: "), f"rank {rank}: {said['disagreement']}"
        wanted = "EngineLost: " if rank == BAD_RANK else "RuntimeError: "
        assert said["stream_weights"].startswith(wanted), said["stream_weights"]
        assert said["num_streamed"] == _STREAMED_BEFORE_THE_FAULT, "the stream ends at the same tensor on every rank"
        assert said["is_as_it_was"], f"a failed call changed rank {rank}"
        assert said["skipped"] == [True, 1, 1], f"rank {rank} did not skip with the others: {said['skipped']}"
        assert said["is_unmoved_by_the_skip"], f"a skipped step changed rank {rank}"


def _outcome(call: Callable[[], object]) -> str:
    try:
        call()
    except (EngineLost, ValueError, RuntimeError) as error:
        return f"{type(error).__name__}: {error}"
    return "nothing was raised"


def _numbers(metrics: StepMetrics, measured: Collection[str]) -> StepMetrics:
    extra = {name: value for name, value in metrics.extra.items() if name not in measured}
    return dataclasses.replace(metrics, extra=extra)


def _shards(vocab_size: int, num_data_ranks: int, *, seed: int) -> tuple[BatchShard, ...]:
    rng = np.random.default_rng(seed)
    mask = np.arange(12) >= 3
    sequences = [
        TrainSequence(
            token_ids_T=rng.integers(0, vocab_size, 12),
            loss_mask_T=mask,
            sampled_logprobs_T=np.where(mask, -np.log(vocab_size), 0.0).astype(np.float32),
            advantage=float(rng.normal()),
        )
        for _ in range(2 * num_data_ranks)
    ]
    return pack_batch(sequences, num_ranks=num_data_ranks, micro_batch_tokens=24)


def _misread(shard: BatchShard, vocab_size: int) -> BatchShard:
    """As if another model's tokenizer had made it."""
    first, *others = shard.micro_batches
    misread = dataclasses.replace(first, token_ids_BL=first.token_ids_BL + vocab_size)
    return dataclasses.replace(shard, micro_batches=(misread, *others))


def _with_infinite_advantages(shard: BatchShard) -> BatchShard:
    parts = (dataclasses.replace(p, advantages_BL=np.full_like(p.advantages_BL, np.inf)) for p in shard.micro_batches)
    return dataclasses.replace(shard, micro_batches=tuple(parts))
