"""Pure parts of a refit: what is sent, in which buckets and order, and how it is attested.

The senders and receivers live in dockyard-inference; both sides derive the same bucket plan from
the same manifest, so no plan travels.
"""

from __future__ import annotations

import hashlib
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from math import fsum, inf, isfinite, prod
from typing import Literal, NamedTuple

from dockyard_core.errors import WeightMismatch

PauseMode = Literal["keep", "wait", "abort"]
Staging = Literal["none", "host"]
Hashes = Literal["full", "sampled"]
DTYPE_BYTES: Mapping[str, int] = {"float32": 4, "bfloat16": 2, "float16": 2, "float64": 8}


class TensorSpec(NamedTuple):
    """One tensor of the policy under its Hugging Face name."""

    name: str
    dtype: str
    """A key of ``DTYPE_BYTES``."""
    shape: tuple[int, ...]

    @property
    def num_bytes(self) -> int:
        """Size of the tensor's elements in bytes."""
        return DTYPE_BYTES[self.dtype] * prod(self.shape)


class Bucket(NamedTuple):
    """Tensors that cross the wire as one buffer, in this order, without padding."""

    tensors: tuple[TensorSpec, ...]
    num_bytes: int


@dataclass(frozen=True, kw_only=True)
class RefitEndpoint:
    """Where the trainer's sender (rank 0) waits, and which ranks this engine takes."""

    host: str
    port: int
    world_size: int
    """Sender and every engine worker."""
    rank_offset: int
    """Rank of this engine's first worker; >= 1."""
    timeout_s: float = 60.0
    staging: Staging = "none"
    """``host``: every rank verifies a whole update in host memory, while it serves, before any rank
    loads a byte; and it keeps the version that it serves there, to go back to."""


@dataclass(frozen=True, kw_only=True)
class RefitUpdate:
    """Announces one version's weights to an engine."""

    policy_version: int
    incarnation: int = 0
    """Grows at every restore; salts prefix caches together with the version."""
    manifest: tuple[TensorSpec, ...]
    bucket_bytes: int = 64 << 20
    timeout_s: float = 120.0
    """Of the whole update, draining included."""
    mode: PauseMode = "keep"
    """What becomes of live requests: they go on with the new weights, end before, or return partial."""
    hashes: Hashes = "full"
    """``sampled``: SHA-256 over a part of each bucket's pages, others for every version."""


@dataclass(frozen=True, kw_only=True)
class RefitReport:
    """What an engine attests after a commit."""

    policy_version: int
    num_tensors: int
    num_elements: int
    num_bytes: int
    elements_per_layer: Mapping[str, int] = field(default_factory=dict)
    seconds: Mapping[str, float] = field(default_factory=dict)
    """Seconds by stage: pause, receive, verify, load, commit, resume, total; receive and verify are
    not part of the pause when the update was staged."""


def plan_buckets(manifest: Sequence[TensorSpec], bucket_bytes: int) -> tuple[Bucket, ...]:
    """Cut the manifest, in its order, into buckets of at most ``bucket_bytes``.

    A tensor larger than a bucket gets a bucket of its own; a tensor is never split.
    """
    if bucket_bytes < 1:
        raise ValueError(f"bucket_bytes must be >= 1, got {bucket_bytes}")
    buckets: list[Bucket] = []
    tensors: list[TensorSpec] = []
    size = 0
    for spec in manifest:
        if tensors and size + spec.num_bytes > bucket_bytes:
            buckets.append(Bucket(tuple(tensors), size))
            tensors, size = [], 0
        tensors.append(spec)
        size += spec.num_bytes
    if tensors:
        buckets.append(Bucket(tuple(tensors), size))
    return tuple(buckets)


def bucket_digest(payload: bytes | bytearray | memoryview) -> bytes:
    """SHA-256 of the bytes of one bucket, sent beside it and compared before anything is loaded."""
    return hashlib.sha256(payload).digest()


def check_bijection(sent: Iterable[TensorSpec], held: Mapping[str, tuple[int, ...]], *, policy_version: int) -> None:
    """Raise WeightMismatch unless both sides name the same tensors, once each, with equal shapes.

    Args:
        sent: the manifest, as the trainer names and shapes its tensors.
        held: Hugging Face name -> shape, as the engine expects them.
        policy_version: the version that was to be loaded, for the message.
    """
    specs = list(sent)
    twice = sorted(name for name, count in Counter(spec.name for spec in specs).items() if count > 1)
    shapes = {spec.name: tuple(spec.shape) for spec in specs}
    findings = {
        "sent twice": twice,
        "unknown to the engine": sorted(shapes.keys() - held.keys()),
        "missing from the update": sorted(held.keys() - shapes.keys()),
        "misshapen": [
            f"{name} {shapes[name]} != {tuple(held[name])}"
            for name in sorted(shapes.keys() & held.keys())
            if shapes[name] != tuple(held[name])
        ],
    }
    problems = [f"{what}: {', '.join(names[:4])}" for what, names in findings.items() if names]
    if problems:
        raise WeightMismatch("; ".join(problems), wanted_version=policy_version)


def layer_of(name: str) -> str:
    """The layer a Hugging Face name belongs to: ``model.layers.3.mlp.up_proj.weight`` -> ``3``."""
    parts = name.split(".")
    for before, part in pairwise(parts):
        if before in ("layers", "h", "blocks") and part.isdigit():
            return part
    return parts[0] if len(parts) == 1 else parts[-2]


def elements_per_layer(manifest: Iterable[TensorSpec]) -> dict[str, int]:
    """Number of elements per layer, the figure both sides compare after a load."""
    counts: Counter[str] = Counter()
    for spec in manifest:
        counts[layer_of(spec.name)] += prod(spec.shape)
    return dict(counts)


class ProbeDiff(NamedTuple):
    """How far an engine's logprobs are from the trainer's at the same policy version, nats."""

    abs_diff_mean: float
    abs_diff_max: float
    num_tokens: int


def probe_diff(engine_logprobs: Iterable[Sequence[float]], trainer_logprobs: Iterable[Sequence[float]]) -> ProbeDiff:
    """Compare what both sides give for the same tokens under the same version.

    d_t = |engine_t - trainer_t|, mean and maximum over all tokens of all sequences. Differences
    beyond the numeric noise of the dtype mean that the engine does not hold the trainer's weights.

    Args:
        engine_logprobs: one sequence [T-1] per probe text, from ``Generator.score``.
        trainer_logprobs: the same positions, at temperature 1.

    Raises:
        ValueError: the two sides do not have the same shape, or there is nothing to compare.
    """
    diffs: list[float] = []
    for number, (engine, trainer) in enumerate(zip(engine_logprobs, trainer_logprobs, strict=True)):
        if len(engine) != len(trainer):
            raise ValueError(f"probe {number}: {len(engine)} engine logprobs against {len(trainer)} of the trainer")
        diffs += [abs(a - b) for a, b in zip(engine, trainer, strict=True)]
    if not diffs:
        raise ValueError("a probe needs at least one token, got none")
    is_finite = all(isfinite(diff) for diff in diffs)
    # max() may pass over a NaN; a probe must not.
    return ProbeDiff(fsum(diffs) / len(diffs), max(diffs), len(diffs)) if is_finite else ProbeDiff(inf, inf, len(diffs))
