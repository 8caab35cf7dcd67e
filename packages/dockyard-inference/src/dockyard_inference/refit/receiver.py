"""The receiving side of a refit, inside an engine worker. Needs torch only."""

from __future__ import annotations

import os
import time
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Literal

from dockyard_core.errors import RefitCalledOff, RefitError, RefitTimeout, WeightMismatch
from dockyard_core.refit import Bucket, RefitEndpoint, RefitUpdate, check_bijection, plan_buckets
from dockyard_inference.refit.group import NO, OK, Board, Deadline, plan_id, refusal
from dockyard_inference.refit.hashing import digest_of, hashed_part
from dockyard_inference.refit.packer import unpack
from dockyard_inference.refit.ring import Neighbours
from dockyard_inference.refit.transports import open_receive_wire
from dockyard_inference.refit.wire import ReceiveWire, WireError

if TYPE_CHECKING:
    import torch

_TICK_S = 0.01
_PATIENCE_S = 1.0
_Stage = Literal["staged", "done"]
"""What a rank attests: that it holds a verified update in host memory, or that it has loaded it."""


class BucketReceiver:
    """One rank of the refit group: accepts a manifest, takes verified buckets, attests the load.

    Args:
        device: of the engine's tensors.
        keeps_views: the engine may look at the tensors of a bucket after it has asked for the next one.
    """

    def __init__(self, device: torch.device, *, keeps_views: bool = True) -> None:
        self.device, self._keeps_views = device, keeps_views
        self.rank = -1
        self.is_staging = False
        """The group verifies whole updates in host memory before any rank loads."""
        self.seconds: defaultdict[str, float] = defaultdict(float)
        self._board: Board | None = None
        self._wire: ReceiveWire | None = None
        self._num_updates = 0
        self._deadline = Deadline(0.0)

    def connect(self, endpoint: RefitEndpoint, rank: int) -> None:
        """Join the group that the sender opens at ``endpoint``; replaces an earlier group.

        Raises:
            RefitTimeout: the sender or another rank did not come in time.
        """
        import torch

        self.close()
        self.is_staging = endpoint.staging == "host"
        device = torch.device("cpu") if self.is_staging else self.device
        deadline = Deadline(endpoint.timeout_s)
        try:
            self._board = Board(endpoint.host, endpoint.port, is_owner=False, timeout_s=endpoint.timeout_s)
            is_near = Neighbours.is_one(self._board.await_key("memory", deadline) or "")
            self._board.put(f"hello/{rank}", f"{OK} {os.getpid() if is_near else '-'} {device.type}")
            agreed = self._board.await_key("transport", deadline)
            if agreed is None or agreed.startswith(NO):
                raise RuntimeError("the sender gave up" if agreed else "no transport was agreed on")
            transport, where = agreed.split()
            device = device if device.type == where else torch.device(where)
            self._wire = open_receive_wire(transport, self._board, endpoint, rank, device, deadline)
        except RuntimeError as error:
            self.close()
            where = f"{endpoint.host}:{endpoint.port}"
            raise RefitTimeout(
                f"rank {rank} could not join the refit group at {where} within {endpoint.timeout_s} s: {error}",
                wanted_version=-1,
            ) from error
        self.rank = rank
        self._num_updates = 0

    def close(self) -> None:
        """Leave the group, if any."""
        wire, self._wire, self._board = self._wire, None, None
        if wire is not None:
            wire.close()

    def prepare(self, update: RefitUpdate, held: Mapping[str, tuple[int, ...]], unable: str = "") -> None:
        """Accept or refuse a manifest, tell the sender which, and wait until every rank accepted.

        No byte has moved when this returns or raises: the engine may go on with what it holds.

        Args:
            update: what is announced.
            held: name -> shape of the engine's tensors.
            unable: why the engine cannot take any weights now; empty if it can.

        Raises:
            WeightMismatch: the manifest and ``held`` are not the same tensors.
            RefitTimeout: the sender did not start before the deadline; the group is left.
            RefitCalledOff: another rank refused, or is late.
            RefitError: the engine is unable; the sender is gone, or ``connect`` was not called.
        """
        self._joined(update)
        # The sender's ends first: a rank that is punctual hears from it whom the update failed by.
        self._deadline = Deadline(update.timeout_s + _PATIENCE_S)
        self._num_updates += 1
        self.seconds = defaultdict(float)
        try:
            if unable:
                raise RefitError(unable, wanted_version=update.policy_version)
            check_bijection(update.manifest, held, policy_version=update.policy_version)
        except RefitError as error:
            self._tell(update, self._key("ready"), refusal(error))
            raise
        self._tell(update, self._key("ready"), f"{OK} {plan_id(update)}")
        self._await_all(update, "go", "the sender did not start")

    def await_load(self, update: RefitUpdate) -> None:
        """Wait until every rank has staged the update; nothing has been loaded when this raises.

        Raises:
            RefitTimeout, RefitCalledOff, RefitError: as ``prepare``.
        """
        self._await_all(update, "load", "not every rank staged the update")

    def receive(self, update: RefitUpdate) -> Iterator[list[tuple[str, torch.Tensor]]]:
        """Yield the named tensors of each bucket after its digest was verified.

        After a corrupt bucket nothing more is yielded, but the rest is taken off the wire, so that
        the group stays in step and the next update can use it.

        Raises:
            WeightMismatch: a bucket's bytes do not have the digest that the sender gave.
            RefitTimeout: rank 0 sent nothing before the deadline.
            RefitError: the sender is gone.
        """
        self._joined(update)
        corrupt: list[int] = []
        keeps_views = self._keeps_views or self.is_staging
        buckets = plan_buckets(update.manifest, update.bucket_bytes)
        wire = self._begun(update, buckets)
        for number, bucket in enumerate(buckets):
            buffer = self._take(wire, update, number, is_kept=keeps_views)
            if keeps_views:
                self._tell(update, self._key("bucket"), str(number + 1))
            if not self._is_intact(update, buffer, number):
                corrupt.append(number)
            if not corrupt:
                yield unpack(buffer, bucket)
            del buffer  # free for a later bucket, unless the engine keeps views
            if not keeps_views:
                wire.release()
                self._tell(update, self._key("bucket"), str(number + 1))
        if corrupt:
            raise WeightMismatch(
                f"rank {self.rank}: SHA-256 of bucket {corrupt[0]} differs from the sender's",
                wanted_version=update.policy_version,
            )

    @contextmanager
    def attesting(self, update: RefitUpdate, stage: _Stage = "done") -> Iterator[None]:
        """Tell the sender how the body ended: well only if it ended without any exception.

        Raises:
            RefitError: the weights could not be staged or loaded, or the sender could not be told.
        """
        failure: RefitError | None = self.unfinished(update.policy_version)
        try:
            yield
            failure = None
        except RefitError as error:
            failure = error
            raise
        except (RuntimeError, MemoryError) as error:
            failure = self.not_loaded(error, update.policy_version)
            raise failure from error
        finally:
            self.report(failure, stage)

    def report(self, failure: RefitError | None, stage: _Stage = "done") -> None:
        """Tell the sender how a stage of the update ended on this rank; leave a group that is out of step.

        Raises:
            RefitError: the load went well and the sender is gone.
        """
        is_in_step = failure is None or isinstance(failure, WeightMismatch)
        said = OK if failure is None else refusal(failure)
        try:
            if self._board is not None:
                self._board.put(self._key(stage), said)
                if not is_in_step:
                    self._board.put(self._key("bucket"), NO)  # a sender that waits for it looks why
        except RuntimeError as error:
            is_in_step = False
            if failure is None:
                raise RefitError(
                    f"rank {self.rank} could not attest the update, rank 0 is gone: {error}", wanted_version=-1
                ) from error
        finally:
            if not is_in_step:
                self.close()

    def unfinished(self, version: int) -> RefitError:
        """What an update ended with until it is known to have ended otherwise."""
        return RefitError(f"rank {self.rank} stopped in the middle of the load", wanted_version=version)

    def not_loaded(self, error: Exception, version: int) -> RefitError:
        """The engine failed while it took verified bytes."""
        why = f"{type(error).__name__}: {str(error).partition(chr(10))[0]}"
        return RefitError(f"rank {self.rank} could not load the weights: {why}", wanted_version=version)

    def _await_all(self, update: RefitUpdate, key: str, otherwise: str) -> None:
        """Wait for the sender's word that every rank is so far."""
        answer = self._joined(update).await_key(f"{self._num_updates}/{key}", self._deadline)
        if answer is None:
            self.close()
            raise self._late(update, otherwise) if self._deadline.is_over else self._gone(update)
        if answer != OK:
            raise RefitCalledOff(
                f"the sender called the update off: {answer[3:]}", wanted_version=update.policy_version
            )

    def _begun(self, update: RefitUpdate, buckets: Sequence[Bucket]) -> ReceiveWire:
        assert self._wire is not None, "connect() comes first"
        try:
            self._wire.begin(self._num_updates, buckets, self._deadline)
        except WireError as error:
            raise self._cut_off(update, str(error)) from error
        return self._wire

    def _take(self, wire: ReceiveWire, update: RefitUpdate, number: int, *, is_kept: bool) -> torch.Tensor:
        started = time.perf_counter()
        try:
            buffer = wire.take(number, is_kept=is_kept)
        except WireError as error:
            raise self._cut_off(update, f"bucket {number} did not arrive ({error})") from error
        self.seconds["receive"] += time.perf_counter() - started
        return buffer

    def _is_intact(self, update: RefitUpdate, buffer: torch.Tensor, number: int) -> bool:
        started = time.perf_counter()
        part = hashed_part(buffer, update, number)
        found = digest_of(part, part.numel()).hex()
        hashed = time.perf_counter()
        wanted = self._joined(update).await_key(f"{self._num_updates}/digest/{number}", self._deadline)
        if wanted is None:
            raise self._cut_off(update, f"the digest of bucket {number} did not arrive")
        self.seconds["verify"] += hashed - started
        self.seconds["receive"] += time.perf_counter() - hashed
        return found == wanted

    def _cut_off(self, update: RefitUpdate, what: str) -> RefitError:
        """Nothing comes any more: late if the deadline is what ended it (GLOO counts in milliseconds)."""
        if self._deadline.left_s < _TICK_S:
            return self._late(update, what)
        return RefitError(
            f"rank {self.rank} was cut off from the sender (rank 0): {what}; open a new one and call connect_refit",
            wanted_version=update.policy_version,
        )

    def _late(self, update: RefitUpdate, what: str) -> RefitTimeout:
        return RefitTimeout(
            f"rank {self.rank} gave up on rank 0 (deadline {update.timeout_s} s): {what}",
            wanted_version=update.policy_version,
        )

    def _gone(self, update: RefitUpdate) -> RefitError:
        return RefitError(
            f"rank {self.rank}: the sender (rank 0) is gone: open a new one and call connect_refit",
            wanted_version=update.policy_version,
        )

    def _tell(self, update: RefitUpdate, key: str, value: str) -> None:
        try:
            self._joined(update).put(key, value)
        except RuntimeError as error:
            self.close()
            raise self._gone(update) from error

    def _joined(self, update: RefitUpdate) -> Board:
        if self._board is None:
            raise RefitError(
                "the engine is in no refit group: call connect_refit first", wanted_version=update.policy_version
            )
        return self._board

    def _key(self, what: str) -> str:
        return f"{self._num_updates}/{what}/{self.rank}"
