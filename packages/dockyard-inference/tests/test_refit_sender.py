"""Sender and receivers without an engine, over every transport: agreement, deadlines, order, ranks, dtypes."""

from __future__ import annotations

import gc
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from dockyard_core.errors import RefitError, RefitTimeout, WeightMismatch
from dockyard_core.policy import WeightChunk, WeightSink
from dockyard_core.refit import RefitUpdate, TensorSpec
from dockyard_inference import RefitSender, null_sink
from dockyard_inference.refit.load_counter import LoadCounter
from dockyard_inference.refit.receiver import BucketReceiver

CPU = torch.device("cpu")
# An odd number of 2-byte elements before 4-byte ones: the second tensor starts unaligned.
TENSORS: dict[str, torch.Tensor] = {
    "model.embed.weight": torch.arange(15, dtype=torch.bfloat16).view(3, 5),
    "model.layers.0.weight": torch.linspace(-1, 1, 12).view(4, 3),
    "model.layers.1.scale": torch.tensor(2.5),
    "model.layers.1.odd": torch.arange(7, dtype=torch.float64),
    "model.layers.2.half": torch.arange(3, dtype=torch.float16),
    "lm_head.weight": torch.arange(6, dtype=torch.float32).view(2, 3),
}
MANIFEST = tuple(TensorSpec(n, str(t.dtype).removeprefix("torch."), tuple(t.shape)) for n, t in TENSORS.items())
HELD = {spec.name: spec.shape for spec in MANIFEST}


def _update(version: int = 1, **changes: Any) -> RefitUpdate:
    return replace(RefitUpdate(policy_version=version, manifest=MANIFEST, timeout_s=20.0), **changes)


def _stream(names: list[str] | None = None) -> Callable[[WeightSink], None]:
    def stream_weights(sink: WeightSink) -> None:
        for name in names or list(TENSORS):
            tensor = TENSORS[name]
            sink(WeightChunk(name, tuple(tensor.shape), (0,) * tensor.dim(), tensor))

    return stream_weights


OpenSender = Callable[..., RefitSender]


@pytest.fixture(params=["collective", "shared_memory", "filesystem"])
def open_sender(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[OpenSender]:
    """``open_sender(world_size)``; in the end nothing may be left of any, in memory or in the directory."""
    senders: list[RefitSender] = []

    def make(world_size: int, timeout_s: float = 60.0) -> RefitSender:
        senders.append(
            RefitSender("127.0.0.1", 0, world_size, "cpu", timeout_s, transport=request.param, directory=tmp_path)
        )
        return senders[-1]

    yield make
    for sender in senders:
        sender.close()
    gc.collect()
    assert list(tmp_path.iterdir()) == []
    assert "memfd:dockyard" not in Path("/proc/self/maps").read_text()
    assert not [path for path in Path("/proc/self/fd").iterdir() if "memfd:dockyard" in _target(path)]


def _target(link: Path) -> str:
    try:
        return str(link.readlink())
    except OSError:  # the listing's own descriptor
        return ""


class Rank(threading.Thread):
    """A receiver in a thread of its own; keeps what it got or how it failed."""

    def __init__(self, sender: RefitSender, rank: int, updates: list[RefitUpdate], held: Any = HELD) -> None:
        super().__init__()
        self.sender, self.rank, self.updates, self.held = sender, rank, updates, held
        self.got: list[dict[str, torch.Tensor]] = []
        self.error: RefitError | None = None
        self.start()

    def run(self) -> None:
        receiver = BucketReceiver(CPU)
        try:
            receiver.connect(self.sender.endpoint(), self.rank)
            for update in self.updates:
                self._take(receiver, update)
        except RefitError as error:
            self.error = error
        finally:
            receiver.close()

    def _take(self, receiver: BucketReceiver, update: RefitUpdate) -> None:
        receiver.prepare(update, self.held)
        counter, got = LoadCounter(), {}
        for tensors in receiver.receive(update):
            got.update({name: tensor.clone() for name, tensor in tensors})
            counter.add(tensors)
        counter.check(update)
        receiver.report(None)
        self.got.append(got)

    def finish(self) -> Rank:
        self.join(60)
        assert not self.is_alive()
        return self


@pytest.mark.parametrize("bucket_bytes", [1, 50, 1 << 20])
def test_every_rank_gets_every_tensor_bit_for_bit(bucket_bytes: int, open_sender: OpenSender) -> None:
    updates = [_update(1, bucket_bytes=bucket_bytes), _update(2, bucket_bytes=bucket_bytes)]
    sender = open_sender(4)
    ranks = [Rank(sender, rank, updates) for rank in (1, 2, 3)]
    sender.connect()
    reports = [sender.send(_stream(), update) for update in updates]
    for rank in ranks:
        assert rank.finish().error is None
        for got in rank.got:
            assert list(got) == list(TENSORS)
            assert all(torch.equal(got[name], TENSORS[name]) for name in TENSORS)
    assert [report.policy_version for report in reports] == [1, 2]
    assert reports[0].num_bytes == sum(spec.num_bytes for spec in MANIFEST)


def test_arrays_of_other_frameworks_cross_by_dlpack(open_sender: OpenSender) -> None:
    array = np.arange(6, dtype=np.float32).reshape(2, 3)
    update = _update(manifest=(TensorSpec("w", "float32", (2, 3)),))
    sender = open_sender(2)
    rank = Rank(sender, 1, [update], {"w": (2, 3)})
    sender.connect()
    sender.send(lambda sink: sink(WeightChunk("w", (2, 3), (0, 0), array)), update)
    assert rank.finish().got[0]["w"].tolist() == array.tolist()


def test_one_refusal_calls_the_update_off_for_every_rank_before_a_byte_moves(open_sender: OpenSender) -> None:
    sender = open_sender(3)
    ranks = [Rank(sender, 1, [_update()]), Rank(sender, 2, [_update()], {"other.weight": (1,)})]
    sender.connect()
    with pytest.raises(WeightMismatch, match="rank 2 refused"):
        sender.send(_never, _update())
    good, bad = (rank.finish() for rank in ranks)
    assert isinstance(bad.error, WeightMismatch)
    assert "called the update off" in str(good.error)
    assert good.got == []


def test_sides_that_were_told_different_things_do_not_start(open_sender: OpenSender) -> None:
    sender = open_sender(2)
    rank = Rank(sender, 1, [_update(bucket_bytes=50)])
    sender.connect()
    with pytest.raises(WeightMismatch, match="rank 1 was told another manifest, bucket size or version"):
        sender.send(_never, _update(bucket_bytes=51))
    assert "called the update off" in str(rank.finish().error)


def test_a_late_rank_is_named_when_the_group_opens(open_sender: OpenSender) -> None:
    sender = open_sender(3, timeout_s=0.5)
    ranks = [Rank(sender, 1, [])]
    with pytest.raises(RefitTimeout, match="rank 2 did not join"):
        sender.connect()
    assert isinstance(ranks[0].finish().error, RefitTimeout)


def test_a_rank_that_does_not_announce_an_update_is_named(open_sender: OpenSender) -> None:
    sender = open_sender(3)
    idle, ready = Rank(sender, 1, []), Rank(sender, 2, [_update()])
    sender.connect()
    with pytest.raises(RefitTimeout, match="rank 1 did not announce the update"):
        sender.send(_never, _update(timeout_s=0.5))
    assert isinstance(ready.finish().error, RefitError)
    assert idle.finish().error is None


def test_a_rank_that_stops_taking_buckets_is_named(open_sender: OpenSender) -> None:
    """Rank 2 takes one bucket and then nothing; buckets are larger than what sockets buffer."""
    size = 4 << 20
    manifest = tuple(TensorSpec(f"model.layers.{i}.w", "float32", (size,)) for i in range(4))
    update = _update(manifest=manifest, bucket_bytes=4 * size, timeout_s=3.0)
    weight = torch.ones(size)
    may_leave = threading.Event()

    class Stuck(Rank):
        def _take(self, receiver: BucketReceiver, update: RefitUpdate) -> None:
            receiver.prepare(update, self.held)
            next(receiver.receive(update))
            may_leave.wait(30)

    held = {spec.name: spec.shape for spec in manifest}
    sender = open_sender(3)
    ranks = [Rank(sender, 1, [update], held), Stuck(sender, 2, [update], held)]
    sender.connect()

    def stream(sink: WeightSink) -> None:
        for spec in manifest:
            sink(WeightChunk(spec.name, spec.shape, (0,), weight))

    started = time.monotonic()
    with pytest.raises(RefitTimeout, match=r"late: rank 2|rank 2 did not attest"):
        sender.send(stream, update)
    assert time.monotonic() - started < 20
    may_leave.set()
    assert [isinstance(rank.finish().error, RefitError | None) for rank in ranks] == [True, True]


@pytest.mark.parametrize(
    ("names", "message"),
    [
        (["model.layers.0.weight"], "manifest has model.embed.weight where the policy streams model.layers.0.weight"),
        (list(TENSORS)[:-1], "stopped before lm_head.weight"),
        ([*TENSORS, "lm_head.weight"], "manifest has nothing more"),
    ],
)
def test_the_policy_must_stream_the_manifest_in_its_order(
    names: list[str], message: str, open_sender: OpenSender
) -> None:
    sender = open_sender(2)
    rank = Rank(sender, 1, [_update(timeout_s=5.0)])
    sender.connect()
    with pytest.raises(WeightMismatch, match=message):
        sender.send(_stream(names), _update(timeout_s=5.0))
    rank.finish()
    with pytest.raises(RefitTimeout, match="sender is closed"):
        sender.send(_stream(), _update(2))


@pytest.mark.parametrize(
    ("chunk", "message"),
    [
        (WeightChunk("w", (4,), (2,), torch.ones(2)), "in parts"),
        (WeightChunk("w", (4,), (0,), torch.ones(4, dtype=torch.bfloat16)), "bfloat16"),
        (WeightChunk("w", (5,), (0,), torch.ones(5)), r"\(5,\)"),
    ],
)
def test_a_chunk_that_is_not_the_announced_tensor_is_refused(
    chunk: WeightChunk, message: str, open_sender: OpenSender
) -> None:
    update = _update(manifest=(TensorSpec("w", "float32", (4,)),), timeout_s=5.0)
    sender = open_sender(2)
    rank = Rank(sender, 1, [update], {"w": (4,)})
    sender.connect()
    with pytest.raises(WeightMismatch, match=message):
        sender.send(lambda sink: sink(chunk), update)
    assert rank.finish().got == []


def test_ranks_that_do_not_send_have_a_sink() -> None:
    _stream()(null_sink)


def test_a_group_of_one_is_refused() -> None:
    with pytest.raises(ValueError, match="must be >= 2, got 1"):
        RefitSender("127.0.0.1", 0, 1)


def _never(sink: WeightSink) -> None:
    raise AssertionError("nothing may be streamed before every rank agreed")
