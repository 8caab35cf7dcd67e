"""One rank of the trainer fleet: the policy, and on rank 0 the sending side of the refit.

Everything that touches the policy runs in one thread, in the order in which the calls arrive: torch keeps
thread counts and modes per thread, and collectives need one order. Snapshots are written in another thread,
so that a step never waits for a disk.
"""

from __future__ import annotations

import asyncio
import random
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import ParamSpec, TypeVar

import numpy as np

from dockyard_core import RolloutGroup, StepMetrics
from dockyard_core.batch import TrainSequence, pack_batch, sequence_of
from dockyard_core.policy import PolicySnapshot
from dockyard_core.refit import RefitEndpoint, RefitUpdate, TensorSpec
from dockyard_grpo import compose
from dockyard_grpo.config import Config
from dockyard_grpo.seams import RankPolicy, Sender
from dockyard_grpo.storage_errors import reason_of

Given = ParamSpec("Given")
Made = TypeVar("Made")


class TrainerWorker:
    """Every method is called on every rank.

    Ray starts the calls of an asynchronous actor in the order in which they arrive, and promises no more:
    a caller that needs an order awaits one answer before the next call. Only `write` may be under way
    beside others.
    """

    def __init__(self, config: Config, rank: int, num_ranks: int) -> None:
        self._config = config
        self._rank = rank
        self._num_ranks = num_ranks
        self._built: RankPolicy | None = None
        self._sender: Sender | None = None
        self._snapshot: PolicySnapshot | None = None
        self._policy_thread = ThreadPoolExecutor(1, "policy")
        self._disk_thread = ThreadPoolExecutor(1, "checkpoint")

    async def ping(self) -> None:
        """Answer, whatever the policy's thread does."""

    async def rendezvous(self) -> str:
        """Rank 0: a free address of its node where the ranks meet, as ``tcp://host:port``."""
        return await self._in_order(compose.free_address, self._config)

    async def build(self, rendezvous: str) -> None:
        """Join the other ranks and load the policy."""
        await self._in_order(self._build, rendezvous)

    async def manifest(self) -> tuple[TensorSpec, ...]:
        """Names, dtypes and shapes of what a refit sends."""
        return await self._in_order(lambda: compose.weight_manifest(self._config, self._policy))

    async def open_refit(self, num_engine_ranks: int) -> RefitEndpoint | None:
        """Rank 0 opens the transport; engines then join by the endpoint while `connect_refit` waits."""
        return await self._in_order(self._open_refit, num_engine_ranks)

    async def connect_refit(self) -> None:
        """Wait for every engine worker. Raises RefitTimeout naming the late rank."""
        await self._in_order(self._connect_refit)

    async def train(self, advantages: Sequence[Sequence[float]], *groups: RolloutGroup) -> StepMetrics:
        """One optimizer step on whole groups; invalid rollouts stay out of loss and counts."""
        return await self._in_order(self._train, advantages, groups)

    async def send_weights(self, update: RefitUpdate) -> None:
        """Stream the weights to the engines; every rank takes part in the gather."""
        await self._in_order(self._send_weights, update)

    async def probe(self, probes: Sequence[Sequence[int]]) -> tuple[tuple[float, ...], ...]:
        """Logprobs at temperature 1 of tokens 1.. of each probe, as an engine's ``score`` gives them."""
        return await self._in_order(self._probe, probes)

    async def snapshot(self) -> None:
        """Copy the policy's state for `write`; once this has answered, the policy may step."""
        self._snapshot = await self._in_order(lambda: self._policy.snapshot())

    async def write(self, directory: Path) -> str | None:
        """Write the snapshot as ``policy`` and ``hf`` into an existing directory, while the policy steps.

        Returns None, or why the disk did not take it; then what was written of it may still be there.
        """
        snapshot, self._snapshot = self._snapshot, None
        assert snapshot is not None, "snapshot() comes first, once for each write"
        return await asyncio.get_running_loop().run_in_executor(self._disk_thread, _write, snapshot, directory)

    async def restore(self, directory: Path) -> None:
        """Read what `write` wrote."""
        await self._in_order(lambda: self._policy.restore(directory / "policy"))

    async def close(self) -> None:
        """Leave the refit group."""
        await self._in_order(self._close)

    async def _in_order(self, function: Callable[Given, Made], *args: Given.args, **kwargs: Given.kwargs) -> Made:
        """Run in the policy's thread, after every call that began before."""
        return await asyncio.get_running_loop().run_in_executor(self._policy_thread, lambda: function(*args, **kwargs))

    def _build(self, rendezvous: str) -> None:
        random.seed(self._config.run.seed)
        self._built = compose.build_policy(
            self._config, rank=self._rank, num_ranks=self._num_ranks, rendezvous=rendezvous
        )

    @property
    def _policy(self) -> RankPolicy:
        assert self._built is not None, "build() comes first"
        return self._built

    def _open_refit(self, num_engine_ranks: int) -> RefitEndpoint | None:
        if self._rank != 0:
            return None
        self._close()
        self._sender = compose.build_sender(self._config, num_engine_ranks)
        return self._sender.endpoint()

    def _connect_refit(self) -> None:
        if self._sender is not None:
            self._sender.connect()

    def _close(self) -> None:
        if self._sender is not None:
            self._sender.close()

    def _train(self, advantages: Sequence[Sequence[float]], groups: Sequence[RolloutGroup]) -> StepMetrics:
        sequences = [
            sequence_of(rollout, advantage)
            for group, values in zip(groups, advantages, strict=True)
            for rollout, advantage in zip(group.rollouts, values, strict=True)
            if rollout.is_valid
        ]
        section = self._config.policy
        # Rows without signal cost time and move nothing; but a step of nothing else would have no token to
        # tell entropy and mismatch from.
        has_signal = any(sequence.advantage != 0.0 for sequence in sequences)
        shards = pack_batch(
            sequences,
            num_ranks=self._policy.num_data_ranks,
            micro_batch_tokens=section.micro_batch_tokens,
            row_length=section.row_length,
            skip_zero_advantage=has_signal and self._config.loss.can_skip_zero_advantage,
            temperature=self._config.generation.temperature,
        )
        metrics = self._policy.train_step(shards[self._policy.data_rank])
        # Not the policy's to report: they differ from rank to rank, and from one run of the same steps to another.
        return replace(metrics, extra=metrics.extra | compose.process_metrics(self._config, self._policy))

    def _send_weights(self, update: RefitUpdate) -> None:
        if self._sender is not None:
            self._sender.send(self._policy.stream_weights, update)
        else:
            self._policy.stream_weights(compose.null_sink)

    def _probe(self, probes: Sequence[Sequence[int]]) -> tuple[tuple[float, ...], ...]:
        sequences = [
            TrainSequence(
                token_ids_T=np.asarray(tokens, np.int64),
                loss_mask_T=np.arange(len(tokens)) > 0,
                sampled_logprobs_T=np.zeros(len(tokens), np.float32),
                advantage=0.0,
            )
            for tokens in probes
        ]
        # One probe per call of pack_batch keeps their order; they are few and short. Every rank scores
        # all of them, because a forward pass of sharded weights is collective.
        return tuple(self._probe_one(sequence) for sequence in sequences)

    def _probe_one(self, sequence: TrainSequence) -> tuple[float, ...]:
        (shard,) = pack_batch([sequence])
        (logprobs_BL,) = self._policy.logprobs(shard)
        return tuple(float(value) for value in logprobs_BL[0, 1 : sequence.num_tokens])


def _write(snapshot: PolicySnapshot, directory: Path) -> str | None:
    try:
        snapshot.write(directory / "policy")
        snapshot.export(directory / "hf")
    except OSError as error:
        return reason_of(error)
    return None
