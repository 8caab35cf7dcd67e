"""The trainable side. One object per rank; every method is collective over the ranks."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, NamedTuple, Protocol

if TYPE_CHECKING:
    import numpy as np

    from dockyard_core.batch import BatchShard


class WeightChunk(NamedTuple):
    """A block of one tensor, under its Hugging Face name."""

    name: str
    global_shape: tuple[int, ...]
    offset: tuple[int, ...]
    """Index of the block's first element in the whole tensor; all zeros for a whole tensor."""
    array: Any
    """Any object with ``__dlpack__``; valid only until the sink returns."""


WeightSink = Callable[[WeightChunk], None]
"""Takes the chunks of ``Policy.stream_weights``; may raise, and then every rank raises."""


@dataclass(frozen=True, kw_only=True)
class StepMetrics:
    """What the updates on one batch did, equal on every rank."""

    policy_version: int
    """The version after the step; unchanged when ``is_skipped``."""
    loss: float
    grad_norm: float
    """Global norm before clipping."""
    learning_rate: float
    entropy: float
    """Mean entropy of the policy at trained positions, nats."""
    clip_fraction: float
    """Share of trained tokens whose ratio was clipped."""
    kl_ref: float
    """Mean k3 estimate to the reference; 0.0 without a reference."""
    offpolicy_abs_diff_mean: float
    """Mean |trainer logprob now − sampled logprob| over trained tokens, nats."""
    offpolicy_abs_diff_max: float
    num_valid_tokens: int
    is_skipped: bool = False
    """The loss or the gradient of every update was not finite: weights, moments and version are untouched."""
    extra: dict[str, float] = field(default_factory=dict)


class PolicySnapshot(Protocol):
    """One rank's part of the state of a policy at one moment; it never changes and can be written at leisure.

    Its methods are not collective: they may run in another thread while the policy steps, one at a time on
    a rank and at any time on the others. Several ranks are given the same directory, on storage that all of
    them see; each writes files of its own, and what they make together is complete once every rank has
    returned.
    """

    def write(self, directory: Path) -> None:
        """Write what ``Policy.restore`` reads, on any number of ranks: weights, optimizer, RNG and version.

        One rank replaces an existing directory. Several need one without a checkpoint, and refuse another.
        Raises OSError, and then ``directory`` is as it was before, apart from what other ranks have written.
        """
        ...

    def export(self, directory: Path) -> None:
        """Write a Hugging Face model directory, under the same rules. Raises OSError."""
        ...


class Policy(Protocol):
    """A policy that can be stepped, read and moved; PyTorch and JAX implement it."""

    @property
    def version(self) -> int:
        """Batches trained on; names the weights."""
        ...

    def logprobs(self, shard: BatchShard, which: Literal["current", "reference"] = "current") -> tuple[np.ndarray, ...]:
        """log_softmax(logits / shard.temperature) of each token given its past.

        Returns one float32 array [B, L] per micro-batch; 0.0 where ``loss_mask`` is False.
        """
        ...

    def train_step(self, shard: BatchShard) -> StepMetrics:
        """All optimizer updates on this rank's share of a batch; version + 1 unless skipped.

        Raises ValueError for a shard that cannot be trained on; nothing has changed then.
        """
        ...

    def stream_weights(self, sink: WeightSink) -> None:
        """Hand every tensor to ``sink``, in the order of the manifest; tied tensors once."""
        ...

    def snapshot(self) -> PolicySnapshot:
        """Copy this rank's part of the state into host memory; the policy may step at once."""
        ...

    def save(self, directory: Path) -> None:
        """Write weights, optimizer, schedule, RNG and version: snapshot, write, wait for every rank."""
        ...

    def restore(self, directory: Path) -> None:
        """Read what ``save`` or ``PolicySnapshot.write`` wrote; the next step equals the step after the save."""
        ...
