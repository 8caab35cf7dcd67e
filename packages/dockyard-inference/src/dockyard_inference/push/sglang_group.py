"""The process group that SGLang's workers join; torch only, SGLang is not needed here."""

from __future__ import annotations

import time
from datetime import timedelta
from typing import Any

import torch
from torch import distributed as dist

from dockyard_inference.push.errors import PushTimeout, TransferFailed, Unsuitable
from dockyard_inference.push.http import Background

_POLL_S = 0.002


class BroadcastGroup:
    """Rank 0 of a group that is made the way SGLang makes it, or the two would not meet."""

    def __init__(self, *, host: str, world_size: int, is_gpu: bool, name: str, timeout_s: float) -> None:
        if is_gpu and not torch.cuda.is_available():
            raise Unsuitable("the server is on GPUs: send from a machine with one, or use --transport disk")
        self.host, self.world_size, self.name = host, world_size, name
        self.backend = "nccl" if is_gpu else "gloo"
        self._device = torch.device("cuda" if is_gpu else "cpu")
        self._timeout = timedelta(seconds=timeout_s)
        self._store = dist.TCPStore(host, 0, world_size, True, timeout=self._timeout, wait_for_workers=False)
        self.port = int(self._store.port)
        self._group: Any = None

    def open(self, joining: Background[Any]) -> None:
        """Wait for the workers, who are told to come by ``joining``; returns without a group if that fails."""
        opening = Background(self._open)
        while not (opening.is_done or joining.is_failed):
            time.sleep(_POLL_S)
        if opening.is_done:
            try:
                self._group = opening.result(0)
            except RuntimeError as error:
                raise TransferFailed(f"the server's workers did not reach {self.host}:{self.port}: {error}") from error

    def broadcast(self, payload: torch.Tensor, timeout_s: float, taking: Background[Any]) -> None:
        """Send one run of bytes, which the workers are told to take by ``taking``; returns early if that fails."""
        end = time.monotonic() + timeout_s
        try:
            work = dist.broadcast(payload.to(self._device), src=0, group=self._group, async_op=True)
            while not work.is_completed():
                if taking.is_failed:
                    return
                if time.monotonic() > end:
                    raise PushTimeout(f"the server's workers took no bytes within {timeout_s:.0f} s")
                time.sleep(_POLL_S)
            work.wait()
        except RuntimeError as error:
            raise TransferFailed(f"the bytes did not get across: {error}") from error

    def close(self) -> None:
        """Leave; a broadcast that nobody takes is given up."""
        group, self._group = self._group, None
        if group is not None:
            dist.distributed_c10d._world.pg_group_ranks.pop(group, None)
            group.abort()

    def _open(self) -> Any:
        from torch.distributed.distributed_c10d import Backend, PrefixStore, _new_process_group_helper, _world

        store = PrefixStore(self.name, self._store)
        group, _ = _new_process_group_helper(
            self.world_size, 0, [], Backend(self.backend), store, group_name=self.name, timeout=self._timeout
        )
        _world.pg_group_ranks[group] = {rank: rank for rank in range(self.world_size)}
        return group
