"""Memory of the sender that ranks on the same host map: two slots, used in turn.

Nothing here has a name in a file system, so nothing can be left behind: host memory is an anonymous
file (memfd) that ranks open as ``/proc/<pid>/fd/<fd>``, device memory is passed by CUDA IPC handle,
and both are freed when the last process that has them open ends, however it ends.
"""

from __future__ import annotations

import base64
import json
import mmap
import os
import secrets
import weakref
from collections.abc import Callable
from functools import cached_property
from typing import TYPE_CHECKING, Any

from dockyard_inference.refit.wire import NUM_BUFFERS

if TYPE_CHECKING:
    import torch

_TOKEN_BYTES = 32


class Neighbours:
    """Tells which ranks can map this process's memory: those that can read a secret from it."""

    def __init__(self) -> None:
        self.address = ""
        """For the ranks; empty where there is no anonymous memory."""
        self._close: Callable[[], object] = _nothing
        if hasattr(os, "memfd_create"):
            fd = os.memfd_create("dockyard-neighbours")
            self._close = weakref.finalize(self, os.close, fd)
            token = secrets.token_hex(_TOKEN_BYTES // 2)
            os.write(fd, token.encode())
            self.address = f"{token} {_path_of(fd)}"

    def close(self) -> None:
        """Free the memory, as the end of this object does. Calling it twice is harmless."""
        self._close()

    @staticmethod
    def is_one(address: str) -> bool:
        """In a rank: whether this process can map the memory of the one that gave ``address``.

        Not so on another host, in another PID namespace and for another user.
        """
        token, _, path = address.partition(" ")
        if not path:
            return False
        try:
            fd = os.open(path, os.O_RDWR | os.O_CLOEXEC)
        except OSError:
            return False
        try:
            return os.pread(fd, _TOKEN_BYTES, 0) == token.encode()
        except OSError:  # something else has that number here
            return False
        finally:
            os.close(fd)


class HostRing:
    """Slots in host memory; made by the sender, opened by the ranks."""

    def __init__(self, fd: int, slot_bytes: int) -> None:
        import torch

        self.slot_bytes = slot_bytes
        self.address = ""
        """For ``open``; the sender has one."""
        self._close: Callable[[], object] = _nothing
        memory = mmap.mmap(fd, NUM_BUFFERS * slot_bytes)
        self._bytes: torch.Tensor = torch.frombuffer(memory, dtype=torch.uint8)

    @classmethod
    def create(cls, slot_bytes: int) -> HostRing:
        """Raises OSError when there is not so much memory."""
        slot_bytes = -(-slot_bytes // mmap.PAGESIZE) * mmap.PAGESIZE
        fd = os.memfd_create("dockyard-refit")
        try:
            os.posix_fallocate(fd, 0, NUM_BUFFERS * slot_bytes)  # fails now, not as SIGBUS in the middle
            ring = cls(fd, slot_bytes)
        except OSError:
            os.close(fd)
            raise
        ring.address = f"{_path_of(fd)} {slot_bytes}"
        ring._close = weakref.finalize(ring, os.close, fd)
        return ring

    @classmethod
    def open(cls, address: str) -> HostRing:
        """The sender's ring, in a rank. Raises OSError when the sender is gone."""
        path, slot_bytes = address.rsplit(" ", 1)
        fd = os.open(path, os.O_RDWR | os.O_CLOEXEC)
        try:
            return cls(fd, int(slot_bytes))
        finally:
            os.close(fd)  # the mapping stays

    def slot(self, number: int, num_bytes: int) -> torch.Tensor:
        """The head of the slot of bucket ``number``."""
        start = number % NUM_BUFFERS * self.slot_bytes
        return self._bytes[start : start + num_bytes]

    def settle(self) -> None:
        """What this process wrote or read is done; on a CPU it always is."""

    def close(self) -> None:
        """Sender: let nobody open it any more. The memory lives as long as somebody maps it."""
        self._close()


class DeviceRing:
    """Slots in the memory of one GPU that sender and ranks share. Never run: no test has a GPU."""

    def __init__(self, ring: torch.Tensor, slot_bytes: int) -> None:
        self._bytes, self.slot_bytes = ring, slot_bytes

    @classmethod
    def create(cls, slot_bytes: int, device: torch.device) -> DeviceRing:
        """Raises RuntimeError when there is not so much memory."""
        import torch

        slot_bytes = -(-slot_bytes // 512) * 512
        return cls(torch.empty(NUM_BUFFERS * slot_bytes, dtype=torch.uint8, device=device), slot_bytes)

    @staticmethod
    def is_one(address: str) -> bool:
        """Whether ``open`` of this class is what opens it."""
        return address.startswith("{")

    @classmethod
    def open(cls, address: str, device: torch.device) -> DeviceRing:
        """The sender's ring, in a rank on the same GPU. Raises RuntimeError when it cannot be opened."""
        import torch

        said: dict[str, Any] = json.loads(address)
        index = torch.cuda.current_device() if device.index is None else device.index
        here = str(torch.cuda.get_device_properties(index).uuid)
        if here != said["gpu"]:
            raise RuntimeError(f"the sender's ring is on GPU {said['gpu']}, this rank is on {here}: use collective")
        share = [base64.b64decode(part["b64"]) if isinstance(part, dict) else part for part in said["share"]]
        storage = torch.UntypedStorage._new_shared_cuda(index, *share[1:])
        ring = torch.empty(0, dtype=torch.uint8, device=device).set_(storage)
        return cls(ring, said["slot_bytes"])

    @cached_property
    def address(self) -> str:
        """For ``open``, the same for every update; the parts of the handle that are bytes in base64."""
        import torch

        share = self._bytes.untyped_storage()._share_cuda_()
        parts = [{"b64": base64.b64encode(part).decode()} if isinstance(part, bytes) else part for part in share]
        gpu = str(torch.cuda.get_device_properties(self._bytes.device).uuid)
        return json.dumps({"gpu": gpu, "slot_bytes": self.slot_bytes, "share": parts})

    def slot(self, number: int, num_bytes: int) -> torch.Tensor:
        """The head of the slot of bucket ``number``."""
        start = number % NUM_BUFFERS * self.slot_bytes
        return self._bytes[start : start + num_bytes]

    def settle(self) -> None:
        """Wait until this process's stream has written or read: others do not see its order."""
        import torch

        torch.cuda.current_stream(self._bytes.device).synchronize()

    def close(self) -> None:
        """Freed with the last reference."""


def _nothing() -> None:
    """There is nothing to close."""


def _path_of(fd: int) -> str:
    return f"/proc/{os.getpid()}/fd/{fd}"
