"""What each transport must bear: a flipped bit, damaged files, too little room; and which one is chosen."""

from __future__ import annotations

import os
import re
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import pytest
import torch

from dockyard_core.errors import RefitError, WeightMismatch
from dockyard_core.policy import WeightChunk, WeightSink
from dockyard_core.refit import RefitUpdate, TensorSpec
from dockyard_inference import RefitSender
from dockyard_inference.refit.receiver import BucketReceiver
from dockyard_inference.refit.ring import HostRing, Neighbours
from dockyard_inference.refit.transports import choose
from dockyard_inference.refit.wire import BufferPool

CPU = torch.device("cpu")
TRANSPORTS = ("collective", "shared_memory", "filesystem")
NUM_TENSORS = 6
MANIFEST = tuple(TensorSpec(f"model.layers.{index}.w", "float32", (1001,)) for index in range(NUM_TENSORS))
HELD = {spec.name: spec.shape for spec in MANIFEST}
TOTAL = NUM_TENSORS * 500500.0 + 1001.0 * sum(range(NUM_TENSORS))
UPDATE = RefitUpdate(policy_version=1, manifest=MANIFEST, bucket_bytes=1, timeout_s=60.0)


def _stream(sink: WeightSink) -> None:
    for index, spec in enumerate(MANIFEST):
        sink(WeightChunk(spec.name, spec.shape, (0,), torch.arange(1001.0) + index))


def _open(transport: str, world_size: int, directory: Path) -> RefitSender:
    return RefitSender("127.0.0.1", 0, world_size, transport=transport, directory=directory)  # type: ignore[arg-type]


@dataclass
class Rank:
    """A receiver in a thread; ``outcomes`` has a tensor's sum or an error per update."""

    sender: RefitSender
    rank: int
    updates: Sequence[RefitUpdate]
    flipped: tuple[int, ...] = ()
    """Buckets of the first update in which a bit changes on the way."""
    outcomes: list[Any] = field(default_factory=list)

    def __post_init__(self) -> None:
        self._thread = threading.Thread(target=self._run)
        self._thread.start()

    def _run(self) -> None:
        receiver = BucketReceiver(CPU)
        receiver.connect(self.sender.endpoint(), self.rank)
        wire: Any = receiver._wire
        take = wire.take
        for update in self.updates:
            wire.take = take if update != self.updates[0] else lambda number, **kept: self._flip(take, number, **kept)
            try:
                receiver.prepare(update, HELD)
                with receiver.attesting(update):
                    got = [tensor for tensors in receiver.receive(update) for _, tensor in tensors]
                self.outcomes.append(sum(float(tensor.sum()) for tensor in got))
            except RefitError as error:
                self.outcomes.append(error)
        receiver.close()

    def _flip(self, take: Callable[..., torch.Tensor], number: int, **kept: bool) -> torch.Tensor:
        buffer = take(number, **kept)
        if number in self.flipped:
            buffer[17] ^= 1
        return buffer

    def finish(self) -> list[Any]:
        self._thread.join(60)
        assert not self._thread.is_alive()
        return self.outcomes


@pytest.mark.parametrize("transport", TRANSPORTS)
def test_a_flipped_bit_is_refused_and_the_next_update_of_the_same_group_works(transport: str, tmp_path: Path) -> None:
    sender = _open(transport, 3, tmp_path)
    again = replace(UPDATE, policy_version=2)
    ranks = [Rank(sender, 1, [UPDATE, again], flipped=(1, 4)), Rank(sender, 2, [UPDATE, again])]
    sender.connect()
    with pytest.raises(WeightMismatch, match="rank 1 refused: rank 1: SHA-256 of bucket 1 differs"):
        sender.send(_stream, UPDATE)
    assert sender.send(_stream, again).num_buckets == NUM_TENSORS
    sender.close()
    corrupt, total = ranks[0].finish()
    assert isinstance(corrupt, WeightMismatch)
    assert total == TOTAL
    assert ranks[1].finish() == [TOTAL, TOTAL]


@pytest.mark.parametrize("part", ["length", "data", "end"])
def test_a_file_that_is_damaged_anywhere_is_refused(part: str, tmp_path: Path) -> None:
    sender = _open("filesystem", 2, tmp_path)
    rank = Rank(sender, 1, [UPDATE])
    sender.connect()
    wire: Any = sender._wire
    announce = wire._counts.put

    def damage(count: int) -> None:
        (path,) = tmp_path.glob("refit-*/update-1/bucket-00000.safetensors")
        content = bytearray(path.read_bytes())
        at = {"length": 0, "data": -4000, "end": -1}[part]
        content[at] ^= 1
        if count == 1:
            path.write_bytes(content[:-1] if part == "end" else content)
        announce(count)

    wire._counts.put = damage
    with pytest.raises(WeightMismatch, match="SHA-256 of bucket 0 differs"):
        sender.send(_stream, UPDATE)
    sender.close()
    assert isinstance(rank.finish()[0], WeightMismatch)


@pytest.mark.parametrize("transport", TRANSPORTS)
def test_ranks_learn_at_once_that_the_policy_failed_in_the_middle(transport: str, tmp_path: Path) -> None:
    sender = _open(transport, 2, tmp_path)
    rank = Rank(sender, 1, [UPDATE])
    sender.connect()

    def stream(sink: WeightSink) -> None:
        sink(WeightChunk(MANIFEST[0].name, (1001,), (0,), torch.ones(1001)))
        raise ZeroDivisionError

    started = time.monotonic()
    with pytest.raises(ZeroDivisionError):
        sender.send(stream, UPDATE)
    assert re.search("was cut off from the sender|the sender .* is gone", str(rank.finish()[0]))
    assert time.monotonic() - started < UPDATE.timeout_s / 2


def test_a_version_on_disk_goes_when_every_rank_has_the_next_and_the_folder_goes_with_the_sender(
    tmp_path: Path,
) -> None:
    safetensors = pytest.importorskip("safetensors.torch")
    sender = _open("filesystem", 2, tmp_path)
    updates = [replace(UPDATE, policy_version=version) for version in (1, 2, 3)]
    rank = Rank(sender, 1, updates)
    sender.connect()
    for number, update in enumerate(updates, start=1):
        sender.send(_stream, update)
        (root,) = tmp_path.iterdir()
        assert sorted(path.name for path in root.iterdir()) == ["latest.json", "owner.lock", f"update-{number}"]
    pointer = (root / "latest.json").read_text()
    assert '"folder": "update-3"' in pointer
    read = safetensors.load_file(root / "update-3" / "bucket-00004.safetensors")
    assert torch.equal(read["model.layers.4.w"], torch.arange(1001.0) + 4)
    sender.close()
    assert rank.finish() == [TOTAL] * 3
    assert list(tmp_path.iterdir()) == []


def test_the_next_sender_removes_what_a_dead_one_left_and_nothing_of_a_live_one(tmp_path: Path) -> None:
    orphan = tmp_path / "refit-orphan"
    (orphan / "update-1").mkdir(parents=True)
    (orphan / "owner.lock").touch()
    live = [_open("filesystem", 2, tmp_path) for _ in range(2)]
    for sender in live:
        rank = Rank(sender, 1, [])
        sender.connect()
        rank.finish()
    assert not orphan.exists()
    assert len(list(tmp_path.iterdir())) == 2
    for sender in live:
        sender.close()
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    ("transport", "target", "message"),
    [
        pytest.param(
            "filesystem",
            "dockyard_inference.refit.filesystem._header",
            "bucket 0 cannot be written",
            marks=pytest.mark.ci,
        ),
        ("shared_memory", "dockyard_inference.refit.shared_memory.HostRing.create", "no shared memory for two buckets"),
    ],
)
def test_a_sender_without_room_says_so_and_blames_no_rank(
    transport: str, target: str, message: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(*_: Any) -> Any:
        raise OSError(28, "No space left on device")

    sender = _open(transport, 2, tmp_path)
    rank = Rank(sender, 1, [UPDATE])
    sender.connect()
    monkeypatch.setattr(target, full)
    with pytest.raises(RefitError, match=message) as caught:
        sender.send(_stream, UPDATE)
    assert type(caught.value) is RefitError
    assert isinstance(rank.finish()[0], RefitError)


def test_the_transport_follows_the_topology_unless_it_is_given(tmp_path: Path) -> None:
    near, mixed = {1: True, 2: True}, {1: True, 2: False}
    assert choose("auto", near, CPU) == "shared_memory"
    assert choose("auto", mixed, CPU) == "collective"
    assert choose("auto", near, torch.device("cuda:0")) == "collective"
    assert [choose(name, mixed, CPU) for name in ("collective", "filesystem")] == ["collective", "filesystem"]
    with pytest.raises(RefitError, match="not so: rank 2; use auto"):
        choose("shared_memory", mixed, CPU)
    with pytest.raises(ValueError, match="transport filesystem needs a directory"):
        RefitSender("127.0.0.1", 0, 2, transport="filesystem")
    sender = RefitSender("127.0.0.1", 0, 2)
    rank = Rank(sender, 1, [UPDATE])
    sender.connect()
    sender.send(_stream, UPDATE)
    assert sender.transport == "shared_memory"
    sender.close()
    assert rank.finish() == [TOTAL]


def test_a_rank_elsewhere_is_not_taken_for_a_neighbour(tmp_path: Path) -> None:
    neighbours = Neighbours()
    token, _, path = neighbours.address.partition(" ")
    other = tmp_path / "something-else"
    other.write_text("not the secret")
    assert Neighbours.is_one(neighbours.address)
    assert not Neighbours.is_one(f"{'0' * len(token)} {path}")
    assert not Neighbours.is_one(f"{token} {other}")
    assert not Neighbours.is_one(f"{token} /proc/{os.getpid()}/fd/1048575")
    assert not Neighbours.is_one("")
    neighbours.close()
    assert not Neighbours.is_one(neighbours.address)


def test_a_rank_whose_engine_keeps_no_views_reads_the_senders_memory_itself() -> None:
    sender = RefitSender("127.0.0.1", 0, 2, transport="shared_memory")
    got: dict[str, float] = {}
    addresses: set[int] = set()

    def work() -> None:
        receiver = BucketReceiver(CPU, keeps_views=False)
        receiver.connect(sender.endpoint(), 1)
        receiver.prepare(UPDATE, HELD)
        with receiver.attesting(UPDATE):
            for tensors in receiver.receive(UPDATE):
                got.update({name: float(tensor.sum()) for name, tensor in tensors})
                addresses.update(tensor.data_ptr() for _, tensor in tensors)
                del tensors
        receiver.close()

    thread = threading.Thread(target=work)
    thread.start()
    sender.connect()
    sender.send(_stream, UPDATE)
    thread.join(60)
    sender.close()
    assert sum(got.values()) == TOTAL
    assert len(addresses) == 2


def test_a_ring_grows_with_the_largest_bucket() -> None:
    sender = RefitSender("127.0.0.1", 0, 2, transport="shared_memory")
    updates = [UPDATE, replace(UPDATE, policy_version=2, bucket_bytes=1 << 20)]
    rank = Rank(sender, 1, updates)
    sender.connect()
    reports = [sender.send(_stream, update) for update in updates]
    sender.close()
    assert [report.num_buckets for report in reports] == [NUM_TENSORS, 1]
    assert rank.finish() == [TOTAL] * 2


def test_a_buffer_is_not_used_again_while_a_view_of_it_lives() -> None:
    pool = BufferPool(16, CPU)
    first = pool.take(16)
    view, where = first[4:6].view(torch.int16), first.data_ptr()
    del first
    assert pool.take(16).data_ptr() != where
    view += 1
    del view
    assert where in [buffer.data_ptr() for buffer in [pool.take(16), pool.take(16)]]


def test_slots_do_not_overlap_and_are_seen_through_the_address() -> None:
    ring = HostRing.create(5000)
    there = HostRing.open(ring.address)
    ring.slot(0, 5000).fill_(1)
    ring.slot(1, 5000).fill_(2)
    assert there.slot(2, 5000).unique().tolist() == [1]
    assert there.slot(3, 5000).unique().tolist() == [2]
    ring.close()
    with pytest.raises(OSError, match="No such file"):
        HostRing.open(ring.address)
    assert there.slot(1, 1).tolist() == [2]
