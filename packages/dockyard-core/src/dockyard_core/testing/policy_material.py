"""What the laws of a policy are made of: the two methods to fill in, sequences, and comparisons."""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np

from dockyard_core.batch import BatchShard, TrainSequence, pack_batch
from dockyard_core.policy import Policy, WeightChunk
from dockyard_core.refit import TensorSpec


class PolicyMaterial:
    """What to fill in, and what the laws are stated with."""

    vocab_size: int = 64
    weight_atol: float = 2e-6
    """How far weights may differ where only the order of additions does."""
    logprob_atol: float = 1e-5

    def make_policy(self) -> Policy:
        """Return a fresh float32 policy at version 0, equal at every call.

        The loss must be the default one (clip, token mean, no KL, no entropy bonus), the gradient
        clipped at 1.0 or more, and the optimizer's eps at least 1e-4, so that rounding in a
        gradient is not blown up to a whole learning rate; learning rate about 1e-3.
        """
        raise NotImplementedError

    def manifest(self, policy: Policy) -> Sequence[TensorSpec]:
        """Return the manifest that ``policy.stream_weights`` must follow."""
        raise NotImplementedError

    def sequences(self, seed: int = 0, count: int = 8) -> list[TrainSequence]:
        """Groups of 4: one prompt, completions of 1 to 8 tokens, the last two of them equal.

        The third of a group has advantage 0, and an untrained token inside if it is long enough.
        """
        rng = np.random.default_rng(seed)
        made: list[TrainSequence] = []
        for index in range(count):
            if index % 4 == 0:
                prompt = rng.integers(0, self.vocab_size, int(rng.integers(1, 9)))
            if index % 4 != 3:
                completion = rng.integers(0, self.vocab_size, int(rng.integers(1, 9)))
            token_ids = np.concatenate([prompt, completion])
            mask = np.arange(len(token_ids)) >= len(prompt)
            mask[len(prompt) + 1 : len(prompt) + 2] = index % 4 != 2
            noise = rng.normal(0, 0.1, len(token_ids))
            made.append(
                TrainSequence(
                    token_ids_T=token_ids,
                    loss_mask_T=mask,
                    sampled_logprobs_T=np.where(mask, noise - math.log(self.vocab_size), 0).astype(np.float32),
                    advantage=0.0 if index % 4 == 2 else float(rng.normal()),
                )
            )
        return made

    def shard(self, seed: int = 0, *, micro_batch_tokens: int = 4096, row_length: int | None = None) -> BatchShard:
        """The sequences of a seed, packed for one rank."""
        (shard,) = pack_batch(self.sequences(seed), micro_batch_tokens=micro_batch_tokens, row_length=row_length)
        return shard

    def weights(self, policy: Policy) -> dict[str, np.ndarray]:
        """A copy of every streamed tensor by name."""
        held: dict[str, np.ndarray] = {}

        def sink(chunk: WeightChunk) -> None:
            whole = held.setdefault(chunk.name, np.zeros(chunk.global_shape, np.float32))
            array = np.from_dlpack(chunk.array)
            place = tuple(slice(start, start + size) for start, size in zip(chunk.offset, array.shape, strict=True))
            whole[place] = array

        policy.stream_weights(sink)
        return held

    def assert_equal_weights(self, one: Policy, other: Policy, *, atol: float = 0.0) -> None:
        """Raise AssertionError unless both policies hold the same weights."""
        left, right = self.weights(one), self.weights(other)
        assert left.keys() == right.keys()
        for name, array in left.items():
            np.testing.assert_allclose(array, right[name], rtol=0, atol=atol, err_msg=name)
