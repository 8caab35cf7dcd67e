"""What the tests of checkpoints step with and compare."""

from __future__ import annotations

import itertools
import resource
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import numpy as np

from dockyard_core.batch import BatchShard, TrainSequence, pack_batch

MOMENTS = ("exp_avg", "exp_avg_sq")
WIDE = {"num_attention_heads": 8, "num_key_value_heads": 8, "head_dim": 8}
"""Of a model that up to eight devices share."""
OPTIONS: dict[str, Any] = {
    "learning_rate": 1e-2,
    "eps": 1e-4,
    "weight_decay": 0.1,
    "schedule": "linear",
    "warmup_steps": 2,
    "total_steps": 9,
}


def make_shard(seed: int, *, num_ranks: int = 1, rank: int = 0) -> BatchShard:
    """Eight rows of 12 tokens, always of one shape."""
    rng = np.random.default_rng(seed)
    mask = np.arange(12) > 3
    sequences = [
        TrainSequence(
            token_ids_T=rng.integers(0, 64, 12),
            loss_mask_T=mask,
            sampled_logprobs_T=np.where(mask, -4.0, 0).astype(np.float32),
            advantage=float(rng.normal()),
        )
        for _ in range(8)
    ]
    return pack_batch(sequences, num_ranks=num_ranks)[rank]


def by_hugging_face_name(tensors: Mapping[str, Any]) -> Iterator[tuple[str, np.ndarray]]:
    """Copies of the tensors that stacked parameters hold, in this file's own words."""
    for name, tensor in tensors.items():
        whole, words = np.array(tensor), name.split(".")
        indexed = [number for number, word in enumerate(words) if word in ("layers", "experts")]
        for indices in itertools.product(*map(range, whole.shape[: len(indexed)])):
            numbers = dict(zip(indexed, map(str, indices), strict=True))
            yield (
                ".".join(f"{word}.{numbers[at]}" if at in numbers else word for at, word in enumerate(words)),
                whole[indices],
            )


def state_of(policy: Any) -> dict[str, np.ndarray]:
    """Copies of a JAX policy's weights and moments under the names of a checkpoint."""
    state = dict(by_hugging_face_name(policy.params))
    for moment in MOMENTS:
        held = by_hugging_face_name(getattr(policy.state, moment))
        state |= {f"{moment}.{name}": array for name, array in held}
    return state


def counters_of(policy: Any) -> tuple[int, int, int]:
    """Of a policy of either trainer."""
    return policy.version, policy.num_updates, policy.num_skipped_steps


def assert_equal(one: Mapping[str, np.ndarray], other: Mapping[str, np.ndarray], *, atol: float = 0.0) -> None:
    """Two states hold the same tensors."""
    assert one.keys() == other.keys()
    for name, array in one.items():
        np.testing.assert_allclose(array, other[name], rtol=0, atol=atol, err_msg=name)


@contextmanager
def files_no_larger_than(num_bytes: int) -> Iterator[None]:
    """The kernel refuses to let any file grow beyond this (EFBIG; Python ignores the signal)."""
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (num_bytes, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
