"""The data-parallel ranks of a policy: collectives that are the identity when there is one rank."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

if TYPE_CHECKING:
    from torch import nn
    from torch.distributed import ProcessGroup


class Ranks:
    """A process group, or one process alone (``process_group=None``)."""

    def __init__(self, process_group: ProcessGroup | None = None, *, device: str = "cpu") -> None:
        self._group = process_group
        self._device = torch.device(device)
        self.rank: int = 0 if process_group is None else process_group.rank()
        self.world_size: int = 1 if process_group is None else process_group.size()

    def sum(self, value: Tensor) -> Tensor:
        """Sum over ranks, in place."""
        return self._all_reduce(value, "SUM")

    def max(self, value: Tensor) -> Tensor:
        """Maximum over ranks, in place."""
        return self._all_reduce(value, "MAX")

    def any(self, flag: bool) -> bool:
        """Whether the flag is set on any rank; equal on every rank."""
        if self.world_size == 1:
            return flag
        return bool(self.max(torch.tensor(float(flag), device=self._device)).item())

    def barrier(self) -> None:
        """Wait for every rank."""
        self.any(False)

    def _all_reduce(self, value: Tensor, operation: str) -> Tensor:
        if self.world_size > 1:
            from torch import distributed

            distributed.all_reduce(value, op=getattr(distributed.ReduceOp, operation), group=self._group)
        return value

    def shard(self, root: nn.Module, blocks: list[Any]) -> None:
        """Shard parameters over the ranks (FSDP2), block by block; nothing to do for one rank."""
        if self.world_size == 1:
            return
        from torch.distributed.device_mesh import DeviceMesh
        from torch.distributed.fsdp import fully_shard

        mesh = DeviceMesh.from_group(self._group, self._device.type)
        for block in blocks:
            fully_shard(block, mesh=mesh)
        fully_shard(root, mesh=mesh)

    def reshard(self, root: nn.Module) -> None:
        """Free what a forward pass gathered.

        A backward pass does so by itself; after a forward alone the root's parameters would stay
        whole, as other objects than those that the optimizer and the checkpoint know.
        """
        if self.world_size == 1:
            return
        from torch.distributed.fsdp import FSDPModule

        for module in root.modules():
            if isinstance(module, FSDPModule):
                module.reshard()


def whole(tensor: Tensor) -> Tensor:
    """The whole tensor of a sharded one (collective); any other tensor as it is."""
    from torch.distributed.tensor import DTensor

    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor


@torch.no_grad()
def copy_whole(target: Tensor, source: Tensor) -> None:
    """Copy a whole tensor into a possibly sharded one."""
    from torch.distributed.tensor import DTensor, distribute_tensor

    if isinstance(target, DTensor):
        source = distribute_tensor(source.to(target.device), target.device_mesh, target.placements)
    target.copy_(source)
