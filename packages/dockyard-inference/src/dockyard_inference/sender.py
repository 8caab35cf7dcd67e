"""The trainer's side of a refit: agrees with every rank on an update, packs the tensors and sends them.

Needs torch, not an inference engine; arrays cross by DLPack, so the trainer may use any framework.
"""

from __future__ import annotations

import os
import select
import time
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Literal

from dockyard_core.errors import RefitError, RefitTimeout, WeightMismatch
from dockyard_core.policy import WeightChunk, WeightSink
from dockyard_core.refit import Bucket, RefitEndpoint, RefitUpdate, plan_buckets
from dockyard_inference.refit.group import NO, OK, Board, Deadline, digest_of, plan_id
from dockyard_inference.refit.packer import Packer
from dockyard_inference.refit.ring import Neighbours
from dockyard_inference.refit.transports import Transport, choose, open_send_wire
from dockyard_inference.refit.wire import NoRoom, SendWire, WireError

if TYPE_CHECKING:
    import torch

_ENDING_MS = 200


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
        device: of the policy's tensors, ``"cpu"`` or ``"cuda:N"``.
        timeout_s: deadline of ``connect``.
        transport: ``auto`` = shared memory when every rank is on this host and on CPUs, else collective.
        directory: of the transport ``filesystem``: one that every rank sees under this path.
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
    ) -> None:
        import torch

        if world_size < 2:
            raise ValueError(f"world_size counts the sender and every engine worker: must be >= 2, got {world_size}")
        if transport == "filesystem" and directory is None:
            raise ValueError("transport filesystem needs a directory that every rank sees, got None")
        self.host, self.world_size, self.timeout_s = host, world_size, timeout_s
        self.device = torch.device(device)
        self.transport: Transport | None = None
        """Agreed in ``connect``."""
        self._wanted, self._directory = transport, directory
        self._board: Board | None = Board(host, port, is_owner=True, timeout_s=timeout_s)
        self.port = self._board.port
        self._neighbours = Neighbours()
        self._board.put("memory", self._neighbours.address)
        self._processes: dict[int, int] = {}
        """Rank -> pidfd of those that run on this host."""
        self._board.lost = self._lost
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
        )

    def connect(self) -> None:
        """Wait for every engine worker and open the group; blocks, run it beside ``connect_refit``.

        Raises:
            RefitTimeout: names the ranks that did not come before ``timeout_s``.
            RefitError: the transport that was asked for is not possible.
        """
        board, deadline = self._open(-1), Deadline(self.timeout_s)
        hellos = board.await_ranks(lambda rank: f"hello/{rank}", self._receivers, deadline)
        self._raise_if_late(hellos, "did not join the refit group", self.timeout_s, -1)
        pids = {rank: str(said).removeprefix(f"{OK} ") for rank, said in hellos.items()}
        try:
            self.transport = choose(self._wanted, {rank: pid.isdigit() for rank, pid in pids.items()}, self.device)
            self._processes = {rank: os.pidfd_open(int(pid)) for rank, pid in pids.items() if pid.isdigit()}
            board.put("transport", self.transport)
            self._wire = open_send_wire(
                self.transport, board, self.host, self._receivers, self.device, self._directory, deadline
            )
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
        packer = Packer(wire, buckets, update, self._seal, seconds)
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
        done = board.await_ranks(lambda rank: f"{self._num_updates}/done/{rank}", self._receivers, deadline)
        self._raise_if_late(done, "did not attest the load", update.timeout_s, update.policy_version)
        self._raise_if_refused(done, update)
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
        processes, self._processes = self._processes, {}
        for process in processes.values():
            os.close(process)

    @property
    def _receivers(self) -> range:
        return range(1, self.world_size)

    def _agree(self, board: Board, update: RefitUpdate, buckets: Sequence[Bucket], deadline: Deadline) -> SendWire:
        """Nobody is sent a byte before every rank accepts the manifest."""
        number, wire = self._num_updates, self._wire
        assert wire is not None, "connect() comes first"
        ready = board.await_ranks(lambda rank: f"{number}/ready/{rank}", self._receivers, deadline)
        wanted = f"{OK} {plan_id(update)}"
        refused = {rank: said for rank, said in ready.items() if said is not None and said != wanted}
        late = [rank for rank, said in ready.items() if said is None]
        if refused or late:
            board.put(f"{number}/go", f"{NO} rank {(*refused, *self._lost(), *late)[0]} does not take part")
        self._raise_if_refused(refused, update)
        self._raise_if_late(ready, "did not announce the update", update.timeout_s, update.policy_version)
        try:
            wire.begin(number, buckets, deadline)
        except WireError as error:
            board.put(f"{number}/go", f"{NO} the sender cannot send")
            raise self._stuck(board, update, 0, error) from error
        board.put(f"{number}/go", OK)
        return wire

    def _seal(self, number: int, buffer: torch.Tensor) -> None:
        board = self._open(-1)
        board.put(f"{self._num_updates}/digest/{number}", digest_of(buffer, buffer.numel()).hex())

    def _stuck(self, board: Board, update: RefitUpdate, number: int, error: WireError) -> RefitError:
        """Closes the sender; says why bucket ``number`` did not get across."""
        # The connections of a process that ends break a moment before it has ended.
        version, lost = update.policy_version, self._lost(wait_ms=_ENDING_MS)
        taken = {rank: int(board.peek(f"{self._num_updates}/bucket/{rank}") or 0) for rank in self._receivers}
        late = [str(rank) for rank, count in taken.items() if count <= min(taken.values())]
        self.close()
        if isinstance(error, NoRoom):
            return RefitError(str(error), wanted_version=version)
        if lost:
            return RefitError(_gone(lost), wanted_version=version)
        return RefitTimeout(
            f"bucket {number} was not taken within {update.timeout_s} s; late: rank {', '.join(late)} ({error})",
            wanted_version=version,
        )

    def _lost(self, wait_ms: int = 0) -> list[int]:
        """Ranks on this host whose process has ended."""
        ranks, poll = {process: rank for rank, process in self._processes.items()}, select.poll()
        for process in ranks:
            poll.register(process, select.POLLIN)
        return sorted(ranks[process] for process, _ in poll.poll(wait_ms))

    def _raise_if_late(self, said: Mapping[int, str | None], what: str, timeout_s: float, version: int) -> None:
        late = [rank for rank, answer in said.items() if answer is None]
        lost = [rank for rank in self._lost() if rank in late]
        if late:
            self.close()
        if lost:
            raise RefitError(_gone(lost), wanted_version=version)
        if late:
            ranks = ", ".join(map(str, late))
            raise RefitTimeout(f"rank {ranks} {what} within {timeout_s} s", wanted_version=version)

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


def _gone(ranks: Sequence[int]) -> str:
    return f"rank {', '.join(map(str, ranks))} is gone: its process has ended"
