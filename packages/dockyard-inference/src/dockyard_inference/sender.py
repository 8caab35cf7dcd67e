"""The trainer's side of a refit: packs the policy's tensors into buckets and broadcasts them.

Needs torch, not an inference engine; arrays cross by DLPack, so the trainer may use any framework.
"""

from __future__ import annotations

import time
from collections import defaultdict
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from dockyard_core.errors import RefitTimeout, WeightMismatch
from dockyard_core.policy import WeightChunk, WeightSink
from dockyard_core.refit import DIGEST_BYTES, Bucket, RefitEndpoint, RefitUpdate, TensorSpec, plan_buckets
from dockyard_inference.refit.group import NO, OK, Board, Deadline, broadcast, digest_of, open_group, plan_id

if TYPE_CHECKING:
    import torch


@dataclass(frozen=True, kw_only=True)
class SendReport:
    """What one update cost on the sending side; every rank has verified and loaded it."""

    policy_version: int
    num_tensors: int
    num_bytes: int
    num_buckets: int
    seconds: Mapping[str, float] = field(default_factory=dict)
    """Seconds by stage: agree, pack, digest, broadcast, confirm, total."""


def null_sink(chunk: WeightChunk) -> None:
    """The sink of a trainer rank that sends nothing but takes part in ``stream_weights``."""


class CollectiveSender:
    """Rank 0 of the refit group.

    Args:
        host: address under which the engines reach this process.
        port: TCP port of the store; 0 lets the system choose (read ``port``).
        world_size: this sender and every engine worker.
        device: ``"cpu"`` (GLOO) or ``"cuda:N"`` (NCCL).
        timeout_s: deadline of ``connect``.
    """

    def __init__(self, host: str, port: int, world_size: int, device: str = "cpu", timeout_s: float = 60.0) -> None:
        import torch

        if world_size < 2:
            raise ValueError(f"world_size counts the sender and every engine worker: must be >= 2, got {world_size}")
        self.host, self.world_size, self.timeout_s = host, world_size, timeout_s
        self.device = torch.device(device)
        self._board: Board | None = Board(host, port, is_owner=True, timeout_s=timeout_s)
        self.port = self._board.port
        self._group: Any = None
        self._num_updates = 0

    def endpoint(self, rank_offset: int = 1) -> RefitEndpoint:
        """What to give to the ``connect_refit`` of the engine whose first worker is this rank."""
        return RefitEndpoint(
            host=self.host,
            port=self.port,
            world_size=self.world_size,
            rank_offset=rank_offset,
            timeout_s=self.timeout_s,
        )

    def connect(self) -> None:
        """Wait for every engine worker and open the group; blocks, run it beside ``connect_refit``.

        Raises:
            RefitTimeout: names the ranks that did not come before ``timeout_s``.
        """
        board, deadline = self._open(-1), Deadline(self.timeout_s)
        hellos = board.await_ranks(lambda rank: f"hello/{rank}", self._receivers, deadline)
        self._raise_if_late(hellos, "did not join the refit group", self.timeout_s, -1)
        try:
            self._group = open_group(board, self.host, 0, self.world_size, self.device, deadline.left_s)
        except RuntimeError as error:
            raise RefitTimeout(f"the refit group did not form: {error}", wanted_version=-1) from error

    def send(self, stream_weights: Callable[[WeightSink], None], update: RefitUpdate) -> SendReport:
        """Broadcast one policy version; returns when every rank attested that it holds it.

        Args:
            stream_weights: ``Policy.stream_weights``; called once, with a sink.
            update: what the engines were told as well, with the same manifest and order.

        Raises:
            WeightMismatch: an engine refused the manifest or got corrupt bytes, or the policy's
                tensors are not those of the manifest, in its order.
            RefitTimeout: names the ranks that are late. Afterwards this sender is closed: open a
                new one, and let the engines connect to it.
        """
        board, deadline, started = self._open(update.policy_version), Deadline(update.timeout_s), time.perf_counter()
        self._num_updates += 1
        self._agree(board, update, deadline)
        packer = _Packer(self, update, deadline)
        packer.seconds["agree"] = time.perf_counter() - started
        try:
            stream_weights(packer.take)
            packer.finish()
        except Exception:
            self.close()  # ranks that wait for bytes learn at once that none will come
            raise
        confirmed = time.perf_counter()
        done = board.await_ranks(lambda rank: f"{self._num_updates}/done/{rank}", self._receivers, deadline)
        self._raise_if_late(done, "did not attest the load", update.timeout_s, update.policy_version)
        self._raise_if_refused(done, update)
        ended = time.perf_counter()
        seconds = dict(packer.seconds) | {"confirm": ended - confirmed, "total": ended - started}
        return SendReport(
            policy_version=update.policy_version,
            num_tensors=len(update.manifest),
            num_bytes=sum(spec.num_bytes for spec in update.manifest),
            num_buckets=len(packer.buckets),
            seconds=seconds,
        )

    def close(self) -> None:
        """Leave the group and stop the store. Calling it twice is harmless."""
        self._group, self._board = None, None

    @property
    def _receivers(self) -> range:
        return range(1, self.world_size)

    def _agree(self, board: Board, update: RefitUpdate, deadline: Deadline) -> None:
        """Nobody is sent a byte before every rank accepts the manifest."""
        number = self._num_updates
        ready = board.await_ranks(lambda rank: f"{number}/ready/{rank}", self._receivers, deadline)
        wanted = f"{OK} {plan_id(update)}"
        refused = {rank: said for rank, said in ready.items() if said is not None and said != wanted}
        late = [rank for rank, said in ready.items() if said is None]
        if refused or late:
            board.put(f"{number}/go", f"{NO} rank {(*refused, *late)[0]} does not take part")
        else:
            board.put(f"{number}/go", OK)
        self._raise_if_refused(refused, update)
        self._raise_if_late(ready, "did not announce the update", update.timeout_s, update.policy_version)

    def _broadcast(self, buffer: torch.Tensor, update: RefitUpdate, deadline: Deadline, number: int) -> None:
        try:
            broadcast(self._group, buffer, deadline.left_s)
        except RuntimeError as error:
            raise self._stuck(update, number, error) from error

    def _stuck(self, update: RefitUpdate, number: int, error: RuntimeError) -> RefitTimeout:
        board = self._open(update.policy_version)
        taken = {rank: int(board.peek(f"{self._num_updates}/bucket/{rank}") or 0) for rank in self._receivers}
        late = [str(rank) for rank, count in taken.items() if count <= min(taken.values())]
        self.close()
        return RefitTimeout(
            f"bucket {number} was not taken within {update.timeout_s} s; late: rank {', '.join(late)} ({error})",
            wanted_version=update.policy_version,
        )

    def _raise_if_late(self, said: Mapping[int, str | None], what: str, timeout_s: float, version: int) -> None:
        late = [str(rank) for rank, answer in said.items() if answer is None]
        if late:
            self.close()
            raise RefitTimeout(f"rank {', '.join(late)} {what} within {timeout_s} s", wanted_version=version)

    def _raise_if_refused(self, said: Mapping[int, str | None], update: RefitUpdate) -> None:
        for rank, answer in said.items():
            if answer is not None and answer.startswith(NO):
                raise WeightMismatch(f"rank {rank} refused: {answer[3:]}", wanted_version=update.policy_version)
            if answer not in (None, OK) and answer != f"{OK} {plan_id(update)}":
                raise WeightMismatch(
                    f"rank {rank} was told another manifest, bucket size or version than the sender",
                    wanted_version=update.policy_version,
                )

    def _open(self, version: int) -> Board:
        if self._board is None:
            raise RefitTimeout("the sender is closed: open a new one and connect the engines", wanted_version=version)
        return self._board


class _Packer:
    """Lays chunks, in the order of the manifest, into buckets and sends each when it is full."""

    def __init__(self, sender: CollectiveSender, update: RefitUpdate, deadline: Deadline) -> None:
        self.buckets = plan_buckets(update.manifest, update.bucket_bytes)
        self.seconds: defaultdict[str, float] = defaultdict(float)
        self._sender, self._update, self._deadline = sender, update, deadline
        self._specs = iter(update.manifest)
        self._number = 0
        self._used = 0
        self._num_in_bucket = 0
        self._num_taken = 0
        self._buffer: torch.Tensor | None = None

    def take(self, chunk: WeightChunk) -> None:
        """The sink."""
        started = time.perf_counter()
        spec = next(self._specs, None)
        tensor = self._checked(chunk, spec)
        bucket = self.buckets[self._number]
        buffer = self._open_bucket(bucket)
        target = buffer[self._used : self._used + tensor.nbytes]
        target.copy_(_as_bytes(tensor))
        self._used += tensor.nbytes
        self._num_taken += 1
        self._num_in_bucket += 1
        self.seconds["pack"] += time.perf_counter() - started
        if self._num_in_bucket == len(bucket.tensors):
            self._send(buffer, bucket)

    def finish(self) -> None:
        """Raise WeightMismatch unless the whole manifest was streamed."""
        missing = next(self._specs, None)
        if missing is not None:
            raise self._mismatch(f"the policy streamed {self._num_taken} tensors and stopped before {missing.name}")

    def _open_bucket(self, bucket: Bucket) -> torch.Tensor:
        import torch

        if self._buffer is None:
            self._buffer = torch.empty(bucket.num_bytes + DIGEST_BYTES, dtype=torch.uint8, device=self._sender.device)
            self._used = self._num_in_bucket = 0
        return self._buffer

    def _send(self, buffer: torch.Tensor, bucket: Bucket) -> None:
        import torch

        started = time.perf_counter()
        digest = digest_of(buffer, bucket.num_bytes)
        buffer[bucket.num_bytes :] = torch.frombuffer(bytearray(digest), dtype=torch.uint8)
        hashed = time.perf_counter()
        self._sender._broadcast(buffer, self._update, self._deadline, self._number)
        self.seconds["digest"] += hashed - started
        self.seconds["broadcast"] += time.perf_counter() - hashed
        self._number += 1
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
