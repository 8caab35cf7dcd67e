"""Verified weights on their way into a server: a folder of safetensors files, one per bucket.

The server keeps serving the previous version until the folder is whole.
"""

from __future__ import annotations

import json
import shutil
import struct
import tempfile
import time
from collections.abc import Iterator, Sequence
from itertools import groupby
from pathlib import Path
from typing import TYPE_CHECKING

from dockyard_core.errors import RefitError
from dockyard_core.refit import RefitUpdate, TensorSpec
from dockyard_inference.refit.load_counter import LoadCounter
from dockyard_inference.refit.receiver import BucketReceiver

if TYPE_CHECKING:
    import torch

_DTYPES = {"float32": "F32", "bfloat16": "BF16", "float16": "F16", "float64": "F64"}


class StagedWeights:
    """The folder of one version.

    Args:
        preferred: where to put it if there is room.
        fallback: where else.
        update: whose weights are staged.

    Raises:
        RefitError: neither has room for them.
    """

    def __init__(self, preferred: Path, fallback: Path, update: RefitUpdate) -> None:
        needed = sum(spec.num_bytes for spec in update.manifest)
        try:
            parent = preferred if shutil.disk_usage(preferred).free > needed else fallback
            free = shutil.disk_usage(parent).free
            if free < needed:
                raise RefitError(
                    f"no room for {needed} bytes of weights: {free} are free in {parent}; set weights_directory",
                    wanted_version=update.policy_version,
                )
            self.path = Path(tempfile.mkdtemp(prefix="version-", dir=parent))
        except OSError as error:
            raise RefitError(
                f"no folder for the weights: {error}; set weights_directory", wanted_version=update.policy_version
            ) from error
        self.path.chmod(0o755)  # a server of yours may run as another user
        self._files: list[tuple[Path, tuple[TensorSpec, ...]]] = []

    def receive(self, receiver: BucketReceiver, update: RefitUpdate) -> LoadCounter:
        """Write every bucket as it is verified; returns what was written.

        Raises:
            RefitError: see ``BucketReceiver.receive``; or the disk is full.
        """
        counter = LoadCounter()
        for number, tensors in enumerate(receiver.receive(update)):
            started = time.perf_counter()
            path = self.path / f"model-{number:05d}.safetensors"
            try:
                self._files.append((path, write_safetensors(path, tensors)))
            except OSError as error:
                raise receiver.not_loaded(error, update.policy_version) from error
            counter.add(tensors)
            receiver.seconds["stage"] += time.perf_counter() - started
        counter.check(update)
        return counter

    def runs(self) -> Iterator[tuple[list[TensorSpec], torch.Tensor]]:
        """Tensors of one dtype, which keeps each aligned, as one run of mapped bytes."""
        import torch

        for path, specs in self._files:
            size = path.stat().st_size
            mapped = torch.from_file(str(path), shared=False, size=size, dtype=torch.uint8)
            start = size - sum(spec.num_bytes for spec in specs)
            for _, group in groupby(specs, key=lambda spec: spec.dtype):
                run = list(group)
                end = start + sum(spec.num_bytes for spec in run)
                yield run, mapped[start:end]
                start = end

    def remove(self) -> None:
        """The server has read it, or never will."""
        shutil.rmtree(self.path, ignore_errors=True)


def write_safetensors(path: Path, tensors: Sequence[tuple[str, torch.Tensor]]) -> tuple[TensorSpec, ...]:
    """Write a length, a JSON header and the bytes, as the format wants; returns their order.

    Wide elements come first, so that all are aligned, and those of one dtype together.
    """
    import torch

    ordered = sorted(tensors, key=lambda pair: (-pair[1].element_size(), str(pair[1].dtype)))
    specs = tuple(TensorSpec(n, str(t.dtype).removeprefix("torch."), tuple(t.shape)) for n, t in ordered)
    entries, end = {}, 0
    for spec in specs:
        start, end = end, end + spec.num_bytes
        entries[spec.name] = {
            "dtype": _DTYPES[spec.dtype],
            "shape": list(spec.shape),
            "data_offsets": [start, end],
        }
    header = json.dumps(entries).encode()
    header += b" " * (-len(header) % 8)
    with path.open("wb") as file:
        file.write(struct.pack("<Q", len(header)))
        file.write(header)
        for _, tensor in ordered:
            file.write(memoryview(tensor.detach().reshape(-1).view(torch.uint8).cpu().numpy()))
    path.chmod(0o644)
    return specs
