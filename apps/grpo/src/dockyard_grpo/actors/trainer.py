"""One rank of the trainer fleet: the policy, and on rank 0 the sending side of the refit."""

from __future__ import annotations

import random
from collections.abc import Sequence
from pathlib import Path

import numpy as np

from dockyard_core import Policy, RolloutGroup, StepMetrics
from dockyard_core.batch import TrainSequence, pack_batch, sequence_of
from dockyard_core.refit import RefitEndpoint, RefitUpdate, TensorSpec
from dockyard_grpo import compose
from dockyard_grpo.config import Config


class TrainerWorker:
    """Every method is called on every rank, in the same order."""

    def __init__(self, config: Config, rank: int, num_ranks: int) -> None:
        self._config = config
        self._rank = rank
        self._num_ranks = num_ranks
        self._built: Policy | None = None
        self._sender: compose.Sender | None = None

    def rendezvous(self) -> str:
        """Rank 0: a free address of its node where the ranks meet, as ``tcp://host:port``."""
        return compose.free_address(self._config)

    def build(self, rendezvous: str) -> None:
        """Join the other ranks and load the policy."""
        random.seed(self._config.run.seed)
        self._built = compose.build_policy(
            self._config, rank=self._rank, num_ranks=self._num_ranks, rendezvous=rendezvous
        )

    @property
    def _policy(self) -> Policy:
        assert self._built is not None, "build() comes first"
        return self._built

    def manifest(self) -> tuple[TensorSpec, ...]:
        """Names, dtypes and shapes of what a refit sends."""
        return compose.weight_manifest(self._policy)

    def open_refit(self, num_engine_ranks: int) -> RefitEndpoint | None:
        """Rank 0 opens the transport; engines then join by the endpoint while `connect_refit` waits."""
        if self._rank != 0:
            return None
        self._sender = compose.build_sender(self._config, num_engine_ranks)
        return self._sender.endpoint()

    def connect_refit(self) -> None:
        """Wait for every engine worker. Raises RefitTimeout naming the late rank."""
        if self._sender is not None:
            self._sender.connect()

    def train(self, advantages: Sequence[Sequence[float]], *groups: RolloutGroup) -> StepMetrics:
        """One optimizer step on whole groups; invalid rollouts stay out of loss and counts."""
        sequences = [
            sequence_of(rollout, advantage)
            for group, values in zip(groups, advantages, strict=True)
            for rollout, advantage in zip(group.rollouts, values, strict=True)
            if rollout.is_valid
        ]
        policy = self._config.policy
        # Rows without signal cost time and move nothing; but a step of nothing else would have no token to
        # tell entropy and mismatch from.
        has_signal = any(sequence.advantage != 0.0 for sequence in sequences)
        shards = pack_batch(
            sequences,
            num_ranks=self._num_ranks,
            micro_batch_tokens=policy.micro_batch_tokens,
            row_length=policy.row_length,
            skip_zero_advantage=has_signal and self._config.loss.can_skip_zero_advantage,
            temperature=self._config.generation.temperature,
        )
        return self._policy.train_step(shards[self._rank])

    def send_weights(self, update: RefitUpdate) -> None:
        """Stream the weights to the engines; every rank takes part in the gather."""
        if self._sender is not None:
            self._sender.send(self._policy.stream_weights, update)
        else:
            self._policy.stream_weights(compose.null_sink)

    def probe(self, probes: Sequence[Sequence[int]]) -> tuple[tuple[float, ...], ...]:
        """Logprobs at temperature 1 of tokens 1.. of each probe, as an engine's ``score`` gives them."""
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

    def save(self, directory: Path) -> None:
        """Write a checkpoint of the policy into an existing directory."""
        self._policy.save(directory / "policy")

    def restore(self, directory: Path) -> None:
        """Read what `save` wrote."""
        self._policy.restore(directory / "policy")

    def export(self, directory: Path) -> None:
        """Write Hugging Face safetensors, config and tokenizer."""
        compose.export_hf(self._policy, directory)

    def close(self) -> None:
        """Leave the refit group."""
        if self._sender is not None:
            self._sender.close()
