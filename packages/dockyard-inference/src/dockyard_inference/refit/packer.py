"""Lays what a policy streams into buckets, in the order of the manifest, and takes it out again."""

from __future__ import annotations

import time
from collections import defaultdict
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

from dockyard_core.errors import WeightMismatch
from dockyard_core.policy import WeightChunk
from dockyard_core.refit import Bucket, RefitUpdate, TensorSpec
from dockyard_inference.refit.wire import SendWire

if TYPE_CHECKING:
    import torch


class Packer:
    """Packs chunks into the buffers of a wire and hands over each full one; ``seal`` says what is in it."""

    def __init__(
        self,
        wire: SendWire,
        buckets: Sequence[Bucket],
        update: RefitUpdate,
        seal: Callable[[int, torch.Tensor], None],
        seconds: defaultdict[str, float],
    ) -> None:
        self.num_put = 0
        """Buckets handed over."""
        self._wire, self._buckets, self._update = wire, buckets, update
        self._seal, self._seconds = seal, seconds
        self._specs = iter(update.manifest)
        self._used = 0
        self._num_in_bucket = 0
        self._num_taken = 0
        self._buffer: torch.Tensor | None = None

    def take(self, chunk: WeightChunk) -> None:
        """The sink."""
        tensor = self._checked(chunk, next(self._specs, None))
        bucket = self._buckets[self.num_put]
        waited = time.perf_counter()
        if self._buffer is None:
            self._buffer = self._wire.buffer(self.num_put)
            self._used = self._num_in_bucket = 0
        started = time.perf_counter()
        self._buffer[self._used : self._used + tensor.nbytes].copy_(_as_bytes(tensor))
        _finish_reading(chunk, tensor)
        self._used += tensor.nbytes
        self._num_taken += 1
        self._num_in_bucket += 1
        self._seconds["wire"] += started - waited
        self._seconds["pack"] += time.perf_counter() - started
        if self._num_in_bucket == len(bucket.tensors):
            self._put(self._buffer)

    def finish(self) -> None:
        """Wait for the wire; raise WeightMismatch unless the whole manifest was streamed."""
        missing = next(self._specs, None)
        if missing is not None:
            raise self._mismatch(f"the policy streamed {self._num_taken} tensors and stopped before {missing.name}")
        started = time.perf_counter()
        self._wire.finish()
        self._seconds["wire"] += time.perf_counter() - started

    def _put(self, buffer: torch.Tensor) -> None:
        started = time.perf_counter()
        self._wire.put(self.num_put)
        put = time.perf_counter()
        self._seal(self.num_put, buffer)
        self._seconds["wire"] += put - started
        self._seconds["digest"] += time.perf_counter() - put
        self.num_put += 1
        self._buffer = None

    def _checked(self, chunk: WeightChunk, spec: TensorSpec | None) -> torch.Tensor:
        import torch

        if spec is None or chunk.name != spec.name:
            wanted = "nothing more" if spec is None else spec.name
            raise self._mismatch(f"the manifest has {wanted} where the policy streams {chunk.name}")
        array = chunk.array
        tensor = array.detach() if isinstance(array, torch.Tensor) else torch.from_dlpack(array)
        if any(chunk.offset) or tuple(tensor.shape) != tuple(chunk.global_shape):
            raise self._mismatch(f"{chunk.name} comes in parts {tuple(tensor.shape)}: stream whole tensors")
        found = (str(tensor.dtype).removeprefix("torch."), tuple(tensor.shape))
        if found != (spec.dtype, tuple(spec.shape)):
            raise self._mismatch(f"{chunk.name} is {found}, the manifest says {(spec.dtype, tuple(spec.shape))}")
        return tensor

    def _mismatch(self, message: str) -> WeightMismatch:
        return WeightMismatch(message, wanted_version=self._update.policy_version)


def _as_bytes(tensor: torch.Tensor) -> torch.Tensor:
    import torch

    return tensor.contiguous().view(-1).view(torch.uint8)


def _finish_reading(chunk: WeightChunk, tensor: torch.Tensor) -> None:
    """Wait for the copy of a GPU array of another framework, which knows nothing of torch's stream.

    It may use the memory again as soon as the sink has returned.
    """
    import torch

    if tensor.is_cuda and not isinstance(chunk.array, torch.Tensor):
        torch.cuda.current_stream(tensor.device).synchronize()


def unpack(buffer: torch.Tensor, bucket: Bucket) -> list[tuple[str, torch.Tensor]]:
    """The tensors of a packed bucket, as views of it where their alignment allows."""
    import torch

    tensors, start = [], 0
    for spec in bucket.tensors:
        dtype = getattr(torch, spec.dtype)
        part = buffer[start : start + spec.num_bytes]
        # Without padding a tensor may start where its dtype cannot be viewed.
        part = part if start % dtype.itemsize == 0 else part.clone()
        tensors.append((spec.name, part.view(dtype).view(spec.shape)))
        start += spec.num_bytes
    return tensors
