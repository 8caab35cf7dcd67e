"""A sender and ranks in processes of their own, killed or stopped in the middle of an update."""

from __future__ import annotations

import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from dockyard_core.errors import RefitError, RefitTimeout
from dockyard_core.policy import WeightChunk, WeightSink
from dockyard_core.refit import RefitEndpoint, RefitUpdate, TensorSpec
from dockyard_inference import RefitSender
from dockyard_inference.refit.receiver import BucketReceiver

TRANSPORTS = ("collective", "shared_memory", "filesystem")
MANIFEST = tuple(TensorSpec(f"model.layers.{index}.w", "float32", (1001,)) for index in range(6))
HELD = {spec.name: spec.shape for spec in MANIFEST}
UPDATE = RefitUpdate(policy_version=1, manifest=MANIFEST, bucket_bytes=1, timeout_s=60.0)

SENDER = """
import sys, time, torch
from pathlib import Path
from dockyard_core.policy import WeightChunk
from dockyard_core.refit import RefitUpdate, TensorSpec
from dockyard_inference.sender import RefitSender

manifest = tuple(TensorSpec(f"model.layers.{index}.w", "float32", (1001,)) for index in range(6))
sender = RefitSender("127.0.0.1", 0, 2, transport=sys.argv[1], directory=Path(sys.argv[2]))
print(sender.port, flush=True)
sender.connect()

def stream(sink):
    for spec in manifest:
        sink(WeightChunk(spec.name, spec.shape, (0,), torch.ones(spec.shape)))
        if spec is manifest[2]:
            print("in the middle", flush=True)
            time.sleep(600)

sender.send(stream, RefitUpdate(policy_version=1, manifest=manifest, bucket_bytes=1, timeout_s=60.0))
"""

RANK = """
import sys, time, torch
from dockyard_core.refit import RefitEndpoint, RefitUpdate, TensorSpec
from dockyard_inference.refit.receiver import BucketReceiver

manifest = tuple(TensorSpec(f"model.layers.{index}.w", "float32", (1001,)) for index in range(6))
receiver = BucketReceiver(torch.device("cpu"))
receiver.connect(RefitEndpoint(host="127.0.0.1", port=int(sys.argv[1]), world_size=int(sys.argv[3]), rank_offset=1), 1)
num_buckets = int(sys.argv[2])
update = RefitUpdate(policy_version=1, manifest=manifest, bucket_bytes=1, timeout_s=60.0)
receiver.prepare(update, {spec.name: spec.shape for spec in manifest})
buckets = receiver.receive(update)
for _ in range(num_buckets):
    next(buckets)
print("in the middle", flush=True)
time.sleep(600)
"""


def in_default(transport: str) -> Any:
    """The others in ci: each starts a process that imports torch."""
    marks = {one: () if one == transport else pytest.mark.ci for one in TRANSPORTS}
    return pytest.mark.parametrize("transport", [pytest.param(one, marks=marks[one]) for one in TRANSPORTS])


@pytest.fixture
def spawn() -> Iterator[Callable[..., subprocess.Popen[str]]]:
    """``spawn(script, *arguments)``: a Python process that is killed at the latest when the test ends."""
    processes: list[subprocess.Popen[str]] = []

    def start(script: str, *arguments: str) -> subprocess.Popen[str]:
        command = [sys.executable, "-c", script, *arguments]
        processes.append(subprocess.Popen(command, stdout=subprocess.PIPE, text=True))
        return processes[-1]

    yield start
    for process in processes:
        process.kill()
        process.communicate()


def _said(process: subprocess.Popen[str]) -> str:
    assert process.stdout is not None
    return process.stdout.readline().strip()


@pytest.mark.parametrize("transport", TRANSPORTS)
def test_a_sender_that_is_killed_leaves_nothing_and_ends_the_wait_of_its_ranks(
    transport: str, tmp_path: Path, spawn: Callable[..., subprocess.Popen[str]]
) -> None:
    process = spawn(SENDER, transport, str(tmp_path))
    receiver, port = BucketReceiver(torch.device("cpu")), int(_said(process))
    receiver.connect(RefitEndpoint(host="127.0.0.1", port=port, world_size=2, rank_offset=1), 1)
    receiver.prepare(UPDATE, HELD)
    buckets = receiver.receive(UPDATE)
    first = [next(buckets) for _ in range(3)]
    assert _said(process) == "in the middle"
    process.send_signal(signal.SIGKILL)
    killed = time.monotonic()
    with pytest.raises(RefitError, match=r"rank 1(: the sender| was cut off)"), receiver.attesting(UPDATE):
        next(buckets)
    assert time.monotonic() - killed < UPDATE.timeout_s / 2
    assert [float(tensor.sum()) for tensors in first for _, tensor in tensors] == [1001.0] * 3
    process.wait()
    del first, buckets
    receiver.close()
    assert list(tmp_path.iterdir()) == []
    assert "memfd:dockyard" not in Path("/proc/self/maps").read_text()


@pytest.mark.parametrize("transport", TRANSPORTS)
def test_a_rank_that_is_killed_is_named_long_before_the_deadline(
    transport: str, tmp_path: Path, spawn: Callable[..., subprocess.Popen[str]]
) -> None:
    sender = RefitSender("127.0.0.1", 0, 2, transport=transport, directory=tmp_path)  # type: ignore[arg-type]
    process = spawn(RANK, str(sender.port), "1", "2")
    sender.connect()

    def stream(sink: WeightSink) -> None:
        for index, spec in enumerate(MANIFEST):
            if index == 2:
                assert _said(process) == "in the middle"
                process.kill()
                process.wait()
            sink(WeightChunk(spec.name, spec.shape, (0,), torch.ones(spec.shape)))

    started = time.monotonic()
    with pytest.raises(RefitError, match="rank 1 is gone: its process has ended"):
        sender.send(stream, UPDATE)
    assert time.monotonic() - started < UPDATE.timeout_s / 2
    assert list(tmp_path.iterdir()) == []


@in_default("collective")
def test_a_rank_that_is_stopped_is_named_at_the_deadline(
    transport: str, tmp_path: Path, spawn: Callable[..., subprocess.Popen[str]]
) -> None:
    sender = RefitSender("127.0.0.1", 0, 2, transport=transport, directory=tmp_path)  # type: ignore[arg-type]
    process = spawn(RANK, str(sender.port), "1", "2")
    sender.connect()

    def stream(sink: WeightSink) -> None:
        for index, spec in enumerate(MANIFEST):
            if index == 2:
                assert _said(process) == "in the middle"
                process.send_signal(signal.SIGSTOP)
            sink(WeightChunk(spec.name, spec.shape, (0,), torch.ones(spec.shape)))

    # Its own deadline is longer: only the sender can find it late.
    with pytest.raises(RefitTimeout, match="rank 1"):
        sender.send(stream, replace(UPDATE, timeout_s=3.0))
    assert list(tmp_path.iterdir()) == []


@in_default("shared_memory")
def test_ranks_that_are_left_learn_it_at_once_while_the_failure_is_kept(
    transport: str, tmp_path: Path, spawn: Callable[..., subprocess.Popen[str]]
) -> None:
    """A traceback keeps frames alive; none may hold what another rank waits at."""
    sender = RefitSender("127.0.0.1", 0, 3, transport=transport, directory=tmp_path)  # type: ignore[arg-type]
    process = spawn(RANK, str(sender.port), "1", "3")
    ended: list[float] = []

    def survive() -> None:
        receiver = BucketReceiver(torch.device("cpu"))
        receiver.connect(sender.endpoint(), 2)
        receiver.prepare(UPDATE, HELD)
        with suppress(RefitError), receiver.attesting(UPDATE):
            for _ in receiver.receive(UPDATE):
                pass
        ended.append(time.monotonic())
        receiver.close()

    survivor = threading.Thread(target=survive)
    survivor.start()
    sender.connect()

    def stream(sink: WeightSink) -> None:
        for index, spec in enumerate(MANIFEST):
            if index == 2:
                assert _said(process) == "in the middle"
                process.kill()
                process.wait()
            sink(WeightChunk(spec.name, spec.shape, (0,), torch.ones(spec.shape)))

    with pytest.raises(RefitError, match="rank 1 is gone: its process has ended") as kept:
        sender.send(stream, UPDATE)
    failed = time.monotonic()
    survivor.join(2 * UPDATE.timeout_s)
    assert ended[0] - failed < UPDATE.timeout_s / 2
    assert kept.value is not None


@in_default("filesystem")
def test_a_rank_that_is_still_loading_is_waited_for_when_another_is_gone(
    transport: str, tmp_path: Path, spawn: Callable[..., subprocess.Popen[str]]
) -> None:
    sender = RefitSender("127.0.0.1", 0, 3, transport=transport, directory=tmp_path)  # type: ignore[arg-type]
    process = spawn(RANK, str(sender.port), str(len(MANIFEST)), "3")
    attested = []

    def load_slowly() -> None:
        receiver = BucketReceiver(torch.device("cpu"))
        receiver.connect(sender.endpoint(), 2)
        receiver.prepare(UPDATE, HELD)
        with receiver.attesting(UPDATE):
            for _ in receiver.receive(UPDATE):
                pass
            assert _said(process) == "in the middle"
            process.kill()
            process.wait()
            time.sleep(0.5)
        attested.append(UPDATE.policy_version)
        receiver.close()

    survivor = threading.Thread(target=load_slowly)
    survivor.start()
    sender.connect()

    def stream(sink: WeightSink) -> None:
        for spec in MANIFEST:
            sink(WeightChunk(spec.name, spec.shape, (0,), torch.ones(spec.shape)))

    with pytest.raises(RefitError, match="rank 1 is gone: its process has ended"):
        sender.send(stream, UPDATE)
    survivor.join(60)
    assert attested == [UPDATE.policy_version]
