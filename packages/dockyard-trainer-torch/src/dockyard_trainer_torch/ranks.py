"""The ranks of a policy: a (data, tensor) mesh of processes, and collectives that are the identity for one."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from dockyard_core.errors import ConfigError

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup
    from torch.distributed.device_mesh import DeviceMesh


class Ranks:
    """A process group, or one process alone (``process_group=None``).

    Ranks that follow each other share a tensor-parallel group: rank = data_rank * tensor_size + tensor_rank.

    Raises ConfigError when the sizes do not divide.
    """

    def __init__(
        self, process_group: ProcessGroup | None = None, *, device: str = "cpu", tensor_parallel_size: int = 1
    ) -> None:
        self._group = process_group
        self.device = _current(torch.device(device))
        self.rank: int = 0 if process_group is None else process_group.rank()
        self.world_size: int = 1 if process_group is None else process_group.size()
        if self.world_size % tensor_parallel_size:
            raise ConfigError(
                f"tensor_parallel_size must divide the number of ranks, got {tensor_parallel_size} for "
                f"{self.world_size}; start a multiple of it"
            )
        self.tensor_size = tensor_parallel_size
        self.data_size = self.world_size // tensor_parallel_size
        self.data_rank = self.rank // tensor_parallel_size
        self.mesh: DeviceMesh | None = self._mesh()

    def _mesh(self) -> DeviceMesh | None:
        """Dimensions ``dp`` and ``tp``; ``tp`` only where it is more than 1. None for one rank."""
        if self.world_size == 1:
            return None
        from torch.distributed import get_world_size
        from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

        if self.tensor_size == 1:
            return DeviceMesh.from_group(self._group, self.device.type, mesh_dim_names=("dp",))
        if self.world_size != get_world_size():
            raise ConfigError(
                f"tensor_parallel_size={self.tensor_size} needs all {get_world_size()} processes in the group, got "
                f"{self.world_size}; pass torch.distributed.group.WORLD"
            )
        return init_device_mesh(self.device.type, (self.data_size, self.tensor_size), mesh_dim_names=("dp", "tp"))

    @property
    def tensor_group(self) -> ProcessGroup | None:
        """The tensor-parallel group of this rank; None without tensor parallelism."""
        return None if self.mesh is None or self.tensor_size == 1 else self.mesh.get_group("tp")

    def sum_over_data(self, value: Tensor) -> Tensor:
        """Sum over data-parallel ranks, in place; tensor-parallel ranks hold equal values."""
        if self.data_size > 1:
            assert self.mesh is not None
            _all_reduce(value, "SUM", self.mesh.get_group("dp"))
        return value

    def sum(self, value: Tensor) -> Tensor:
        """Sum over all ranks, in place."""
        if self.world_size > 1:
            _all_reduce(value, "SUM", self._group)
        return value

    def max(self, value: Tensor) -> Tensor:
        """Maximum over all ranks, in place."""
        if self.world_size > 1:
            _all_reduce(value, "MAX", self._group)
        return value

    def any(self, flag: bool) -> bool:
        """Whether the flag is set on any rank; equal on every rank."""
        if self.world_size == 1:
            return flag
        return bool(self.max(torch.tensor(float(flag), device=self.device)).item())

    def agree(self, shared: Sequence[float], part: float) -> bool:
        """Whether all ranks give the same ``shared``, and those of a tensor-parallel group the same ``part``.

        Equal on every rank (collective).
        """
        if self.world_size == 1:
            return True
        slots = torch.full((2, len(shared) + self.data_size), -torch.inf, dtype=torch.float64, device=self.device)
        given = slots.new_tensor([*shared, part])
        for row, sign in zip(slots, (1, -1), strict=True):
            row[: len(shared)] = sign * given[:-1]
            row[len(shared) + self.data_rank] = sign * given[-1]
        largest, negated_smallest = self.max(slots)
        return bool((largest == -negated_smallest).all())

    @contextmanager
    def together(self, elsewhere: Exception) -> Iterator[None]:
        """Run this rank's own part of something; when it raises on any rank, every rank raises (collective).

        Raises what the body raised on the rank where it did, ``elsewhere`` on the others.
        """
        is_failed = True
        try:
            yield
            is_failed = False
        finally:
            is_failed_anywhere = self.any(is_failed)
        if is_failed_anywhere:
            raise elsewhere


def _current(device: torch.device) -> torch.device:
    """The device with its index, made this thread's current one, which is what FSDP2 puts tensors on."""
    if device.type != "cuda":
        return device
    if device.index is not None:
        torch.cuda.set_device(device)
    return torch.device("cuda", torch.cuda.current_device())


def _all_reduce(value: Tensor, operation: str, group: Any) -> None:
    from torch import distributed

    distributed.all_reduce(value, op=getattr(distributed.ReduceOp, operation), group=group)


def whole(tensor: Tensor) -> Tensor:
    """The whole tensor of a sharded one (collective); any other tensor as it is."""
    from torch.distributed.tensor import DTensor

    if not isinstance(tensor, DTensor):
        return tensor
    # NCCL takes no tensor of the host, where cpu_offload keeps them.
    return tensor.to(tensor.device_mesh.device_type).full_tensor()


def local(tensor: Tensor) -> Tensor:
    """This rank's part of a sharded tensor, sharing its memory; any other tensor as it is."""
    from torch.distributed.tensor import DTensor

    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def num_replicas(tensor: Tensor, world_size: int) -> int:
    """On how many of ``world_size`` ranks each element of the tensor is held."""
    from torch.distributed.tensor import DTensor

    if not isinstance(tensor, DTensor):
        return world_size
    sizes = zip(tensor.placements, tensor.device_mesh.shape, strict=True)
    num_parts = 1
    for placement, size in sizes:
        num_parts *= 1 if placement.is_replicate() else size  # a strided shard says no to is_shard()
    return world_size // num_parts
