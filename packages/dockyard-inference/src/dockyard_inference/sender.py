"""The trainer's side of a refit: agrees with every rank on an update, packs the tensors and sends them.

Needs torch, not an inference engine; arrays cross by DLPack, so the trainer may use any framework.
"""

from __future__ import annotations

import time
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Literal

from dockyard_core.errors import RefitError, RefitTimeout, WeightMismatch
from dockyard_core.policy import WeightChunk, WeightSink
from dockyard_core.refit import Bucket, RefitEndpoint, RefitUpdate, Staging, plan_buckets
from dockyard_inference.refit.group import NO, OK, Board, Deadline, plan_id
from dockyard_inference.refit.hashing import digest_of, hashed_part
from dockyard_inference.refit.packer import Packer
from dockyard_inference.refit.ranks import Ranks
from dockyard_inference.refit.ring import Neighbours
from dockyard_inference.refit.transports import Transport, choose, open_send_wire
from dockyard_inference.refit.wire import NoRoom, SendWire, WireError

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
    """Seconds by stage: agree, pack, digest, wire (waits for it only), confirm, total."""


def null_sink(chunk: WeightChunk) -> None:
    """The sink of a trainer rank that sends nothing but takes part in ``stream_weights``."""


class RefitSender:
    """Rank 0 of the refit group.

    Args:
        host: address under which the engines reach this process.
        port: TCP port of the store; 0 lets the system choose (read ``port``).
        world_size: this sender and every engine worker.
        device: of the policy's tensors, ``"cpu"`` or ``"cuda:N"``; the buffers that are sent lie there.
        timeout_s: deadline of ``connect``.
        transport: ``auto`` = shared memory when every rank is on this host and on CPUs, else collective.
        directory: of the transport ``filesystem``: one that every rank sees under this path.
        staging: ``host``: no rank loads before all have verified the whole update in host memory.
    """

    def __init__(
        self,
        host: str,
        port: int,
        world_size: int,
        device: str = "cpu",
        timeout_s: float = 60.0,
        *,
        transport: Transport | Literal["auto"] = "auto",
        directory: Path | None = None,
        staging: Staging = "none",
    ) -> None:
        import torch

        if world_size < 2:
            raise ValueError(f"world_size counts the sender and every engine worker: must be >= 2, got {world_size}")
        if transport == "filesystem" and directory is None:
            raise ValueError("transport filesystem needs a directory that every rank sees, got None")
        self.host, self.world_size, self.timeout_s = host, world_size, timeout_s
        self.staging: Staging = staging
        # Ranks that stage take the bytes on the host, so they go there; also the broadcasts are GLOO's then,
        # which cannot block the collectives of an engine that samples meanwhile.
        self.device = torch.device("cpu" if staging == "host" else device)
        """Of the buffers that are sent."""
        self.transport: Transport | None = None
        """Agreed in ``connect``."""
        self._wanted, self._directory = transport, directory
        self._board: Board | None = Board(host, port, is_owner=True, timeout_s=timeout_s)
        self.port = self._board.port
        self._neighbours = Neighbours()
        self._board.put("memory", self._neighbours.address)
        self._ranks = Ranks(world_size - 1)
        self._board.lost = self._ranks.lost
        self._wire: SendWire | None = None
        self._num_updates = 0

    def endpoint(self, rank_offset: int = 1) -> RefitEndpoint:
        """What to give to the ``connect_refit`` of the engine whose first worker is this rank."""
        return RefitEndpoint(
            host=self.host,
            port=self.port,
            world_size=self.world_size,
            rank_offset=rank_offset,
            timeout_s=self.timeout_s,
            staging=self.staging,
        )

    def connect(self) -> None:
        """Wait for every engine worker and open the group; blocks, run it beside ``connect_refit``.

        Raises:
            RefitTimeout: names the ranks that did not come before ``timeout_s``.
            RefitError: the transport that was asked for is not possible.
        """
        board, deadline = self._open(-1), Deadline(self.timeout_s)
        hellos = self._ranks.answers(board, "hello", deadline)
        late = [str(rank) for rank, said in hellos.items() if said is None]
        if late:
            self.close()
            raise RefitTimeout(
                f"rank {', '.join(late)} did not join the refit group within {self.timeout_s} s", wanted_version=-1
            )
        try:
            self._open_wire(board, {rank: str(said).split()[1:] for rank, said in hellos.items()}, deadline)
        except RefitError:
            self.close()
            raise
        except (RuntimeError, OSError) as error:
            self.close()
            raise RefitTimeout(f"the refit group did not form: {error}", wanted_version=-1) from error

    def send(self, stream_weights: Callable[[WeightSink], None], update: RefitUpdate) -> SendReport:
        """Send one policy version; returns when every rank attested that it holds it.

        Args:
            stream_weights: ``Policy.stream_weights``; called once, with a sink.
            update: what the engines were told as well, with the same manifest and order.

        Raises:
            WeightMismatch: an engine refused the manifest or got corrupt bytes, or the policy's
                tensors are not those of the manifest, in its order.
            RefitTimeout: names the ranks that are late. Afterwards this sender is closed: open a
                new one, and let the engines connect to it.
            RefitError: a rank's process has ended, or there is no room for the bytes; closed as well.
        """
        board, deadline, started = self._open(update.policy_version), Deadline(update.timeout_s), time.perf_counter()
        self._num_updates += 1
        buckets, seconds = plan_buckets(update.manifest, update.bucket_bytes), defaultdict[str, float](float)
        wire = self._agree(board, update, buckets, deadline)
        packer = Packer(wire, buckets, update, partial(self._seal, board, update), seconds)
        seconds["agree"] = time.perf_counter() - started
        try:
            stream_weights(packer.take)
            packer.finish()
        except WireError as error:
            raise self._stuck(board, update, packer.num_put, error) from error
        except Exception:
            self.close()  # ranks that wait for bytes learn at once that none will come
            raise
        confirmed = time.perf_counter()
        if self.staging == "host":
            self._let_load(board, update, deadline)
        done = self._ranks.answers(board, f"{self._num_updates}/done", deadline)
        self._raise(self._ranks.failure(done, "did not attest the load", update))
        wire.attested()
        ended = time.perf_counter()
        return SendReport(
            policy_version=update.policy_version,
            num_tensors=len(update.manifest),
            num_bytes=sum(spec.num_bytes for spec in update.manifest),
            num_buckets=len(buckets),
            seconds={**seconds, "confirm": ended - confirmed, "total": ended - started},
        )

    def close(self) -> None:
        """Leave the group and stop the store. Calling it twice is harmless."""
        board, self._board = self._board, None
        if board is not None and self.transport is None:
            # A traceback may keep the store, and ranks would wait for it.
            board.put("transport", f"{NO} the sender was closed")
        wire, self._wire = self._wire, None
        if wire is not None:
            wire.close()
        self._neighbours.close()
        self._ranks.close()

    def _open_wire(self, board: Board, hellos: Mapping[int, Sequence[str]], deadline: Deadline) -> None:
        """By rank what it said of itself: process id, or ``-`` on another host, and the kind of its device."""
        import torch

        if any(kind != self.device.type for _, kind in hellos.values()):
            self.device = torch.device("cpu")  # NCCL and GLOO do not meet: all go over the host
        near = {rank: int(pid) for rank, (pid, _) in hellos.items() if pid.isdigit()}
        self.transport = choose(self._wanted, {rank: rank in near for rank in hellos}, self.device)
        self._ranks.watch(near)
        board.put("transport", f"{self.transport} {self.device.type}")
        self._wire = open_send_wire(
            self.transport, board, self.host, self._ranks.numbers, self.device, self._directory, deadline
        )

    def _agree(self, board: Board, update: RefitUpdate, buckets: Sequence[Bucket], deadline: Deadline) -> SendWire:
        """Nobody is sent a byte before every rank accepts the manifest."""
        number, wire = self._num_updates, self._wire
        assert wire is not None, "connect() comes first"
        ready = self._ranks.answers(board, f"{number}/ready", deadline)
        failure = self._ranks.failure(ready, "did not announce the update", update)
        if failure is not None:
            unready = [rank for rank, said in ready.items() if said != f"{OK} {plan_id(update)}"]
            board.put(f"{number}/go", f"{NO} rank {unready[0]} does not take part")
        self._raise(failure)
        try:
            wire.begin(number, buckets, deadline)
        except WireError as error:
            board.put(f"{number}/go", f"{NO} the sender cannot send")
            raise self._stuck(board, update, 0, error) from error
        board.put(f"{number}/go", OK)
        return wire

    def _let_load(self, board: Board, update: RefitUpdate, deadline: Deadline) -> None:
        """Nobody loads a byte before every rank has verified all of them."""
        number = self._num_updates
        staged = self._ranks.answers(board, f"{number}/staged", deadline)
        unready = [rank for rank, said in staged.items() if said != OK]
        board.put(f"{number}/load", f"{NO} rank {unready[0]} did not stage it" if unready else OK)
        self._raise(self._ranks.failure(staged, "did not stage the update", update))

    def _seal(self, board: Board, update: RefitUpdate, number: int, buffer: torch.Tensor) -> None:
        part = hashed_part(buffer, update, number)
        board.put(f"{self._num_updates}/digest/{number}", digest_of(part, part.numel()).hex())

    def _stuck(self, board: Board, update: RefitUpdate, bucket: int, error: WireError) -> RefitError:
        """Closes the sender; says why ``bucket`` did not get across."""
        if isinstance(error, NoRoom):
            failure: RefitError = RefitError(str(error), wanted_version=update.policy_version)
        else:
            failure = self._ranks.why_stuck(board, self._num_updates, bucket, error, update)
        self.close()
        return failure

    def _raise(self, failure: RefitError | None) -> None:
        """After a WeightMismatch every rank is in step; after anything else the group is of no use."""
        if failure is not None:
            if not isinstance(failure, WeightMismatch):
                self.close()
            raise failure

    def _open(self, version: int) -> Board:
        if self._board is None:
            raise RefitTimeout("the sender is closed: open a new one and connect the engines", wanted_version=version)
        return self._board
