"""What is measured of a refit: copies, GLOO's own broadcast, each transport alone, and whole updates.

The sender's side runs here and the rank's in one other process, which waits in between. Both have one thread for
tensor work, and GLOO's own.
"""

from __future__ import annotations

import multiprocessing
import time
from collections.abc import Callable, Sequence
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import torch

from dockyard_core.policy import WeightChunk, WeightSink
from dockyard_core.refit import RefitEndpoint, RefitUpdate, TensorSpec, plan_buckets
from dockyard_inference import RefitSender
from dockyard_inference.refit.collective import open_group
from dockyard_inference.refit.group import Board, Deadline
from dockyard_inference.refit.receiver import BucketReceiver
from dockyard_inference.refit.transports import Transport, open_receive_wire, open_send_wire

TRANSPORTS: tuple[Transport, ...] = ("collective", "shared_memory", "filesystem")
CPU = torch.device("cpu")
HOST = "127.0.0.1"
_TIMEOUT_S = 300.0


def smollm2_manifest(num_layers: int = 30, dtype: str = "float32") -> tuple[TensorSpec, ...]:
    """Names and shapes of SmolLM2-135M, a tied llama; fewer layers for a short run."""
    hidden, kv, inner, vocabulary = 576, 192, 1536, 49152
    shapes: dict[str, tuple[int, ...]] = {"model.embed_tokens.weight": (vocabulary, hidden)}
    for index in range(num_layers):
        layer = f"model.layers.{index}"
        for name, rows in (("q_proj", hidden), ("k_proj", kv), ("v_proj", kv), ("o_proj", hidden)):
            shapes[f"{layer}.self_attn.{name}.weight"] = (rows, hidden)
        for name, shape in (
            ("gate_proj", (inner, hidden)),
            ("up_proj", (inner, hidden)),
            ("down_proj", (hidden, inner)),
        ):
            shapes[f"{layer}.mlp.{name}.weight"] = shape
        shapes[f"{layer}.input_layernorm.weight"] = (hidden,)
        shapes[f"{layer}.post_attention_layernorm.weight"] = (hidden,)
    shapes["model.norm.weight"] = (hidden,)
    return tuple(TensorSpec(name, dtype, shape) for name, shape in shapes.items())


def random_weights(manifest: Sequence[TensorSpec]) -> dict[str, torch.Tensor]:
    """Tensors of these shapes: what is in them makes no difference to any subject."""
    return {spec.name: torch.randn(spec.shape).to(getattr(torch, spec.dtype)) for spec in manifest}


def stream(weights: dict[str, torch.Tensor]) -> Callable[[WeightSink], None]:
    """``Policy.stream_weights``."""

    def stream_weights(sink: WeightSink) -> None:
        for name, tensor in weights.items():
            sink(WeightChunk(name, tuple(tensor.shape), (0,) * tensor.dim(), tensor))

    return stream_weights


class Rank:
    """The other process. It does what it is told, as long as this one lives."""

    def __init__(self, update: RefitUpdate) -> None:
        context = multiprocessing.get_context("spawn")
        self._connection, other = context.Pipe()
        self._process = context.Process(target=_serve, args=(other, update), daemon=True)
        self._process.start()
        other.close()

    def start(self, task: str, *arguments: Any) -> None:
        """Begin a task; ``result`` waits for its end."""
        self._connection.send((task, arguments))

    def result(self) -> Any:
        """What the task returned; raises EOFError when the process died of it."""
        return self._connection.recv()

    def close(self) -> None:
        """End the process."""
        self._connection.close()
        self._process.join(10)
        self._process.kill()
        self._process.join()


class Bench:
    """Every subject once per call, over groups that stay open; results in seconds."""

    def __init__(self, manifest: Sequence[TensorSpec], bucket_bytes: int, directory: Path) -> None:
        torch.set_num_threads(1)
        self.update = RefitUpdate(
            policy_version=1, manifest=tuple(manifest), bucket_bytes=bucket_bytes, timeout_s=_TIMEOUT_S
        )
        self.num_bytes = sum(spec.num_bytes for spec in manifest)
        self._buckets = plan_buckets(manifest, bucket_bytes)
        self._weights = random_weights(manifest)
        self._copies = {name: torch.zeros_like(tensor) for name, tensor in self._weights.items()}
        self._buffers = [torch.ones(bucket.num_bytes, dtype=torch.uint8) for bucket in self._buckets]
        self._directory = directory
        self._rank = Rank(self.update)
        self._num_wire_updates = 0
        self._open()

    def _open(self) -> None:
        deadline = Deadline(_TIMEOUT_S)
        self._board = Board(HOST, 0, is_owner=True, timeout_s=_TIMEOUT_S)
        self._rank.start("open_raw", self._board.port)
        self._group = open_group(self._board, HOST, 0, 2, CPU, _TIMEOUT_S)
        self._rank.result()
        self._wires, self._wire_boards, self._senders = {}, {}, {}
        for name in TRANSPORTS:
            board = self._wire_boards[name] = Board(HOST, 0, is_owner=True, timeout_s=_TIMEOUT_S)
            self._rank.start("open_wire", name, board.port)
            self._wires[name] = open_send_wire(name, board, HOST, (1,), CPU, self._directory, deadline)
            self._rank.result()
            sender = RefitSender(HOST, 0, 2, timeout_s=_TIMEOUT_S, transport=name, directory=self._directory)
            self._rank.start("open_receiver", name, sender.endpoint())
            sender.connect()
            self._senders[name] = sender
            self._rank.result()

    def memcpy(self) -> float:
        """Each tensor into a tensor of its own, in this process."""
        started = time.perf_counter()
        for name, tensor in self._weights.items():
            self._copies[name].copy_(tensor)
        return time.perf_counter() - started

    def raw(self) -> float:
        """GLOO's broadcast of buffers of the buckets' sizes, one after the other, until the rank has the last."""
        self._rank.start("raw")
        _broadcast(self._group, torch.zeros(1, dtype=torch.uint8), 1)
        started = time.perf_counter()
        for buffer in self._buffers:
            _broadcast(self._group, buffer, 0)
        _broadcast(self._group, torch.zeros(1, dtype=torch.uint8), 1)
        seconds = time.perf_counter() - started
        self._rank.result()
        return seconds

    def wire(self, name: Transport) -> float:
        """A transport alone: nothing is packed, hashed or loaded; until the rank has the last bucket."""
        self._num_wire_updates += 1
        number, board, wire = self._num_wire_updates, self._wire_boards[name], self._wires[name]
        deadline = Deadline(_TIMEOUT_S)
        self._rank.start("wire", name, number)
        wire.begin(number, self._buckets, deadline)
        for bucket in range(min(2, len(self._buckets))):
            wire.buffer(bucket).fill_(1)  # packed before, as far as the machine can tell
        board.await_key(f"{number}/ready/1", deadline)
        started = time.perf_counter()
        for bucket in range(len(self._buckets)):
            wire.buffer(bucket)
            wire.put(bucket)
        wire.finish()
        board.await_key(f"{number}/done/1", deadline)
        seconds = time.perf_counter() - started
        wire.attested()
        self._rank.result()
        return seconds

    def whole(self, name: Transport) -> dict[str, float]:
        """One update from begin to attestation: seconds by stage, both sides."""
        self._rank.start("whole", name)
        started = time.perf_counter()
        report = self._senders[name].send(stream(self._weights), self.update)
        seconds = time.perf_counter() - started
        received = self._rank.result()
        sent = {f"sender {stage}": value for stage, value in report.seconds.items()}
        return sent | {f"rank {stage}": value for stage, value in received.items()} | {"total": seconds}

    def close(self) -> None:
        """End the rank, then the groups."""
        self._rank.close()
        for sender in self._senders.values():
            sender.close()
        for wire in self._wires.values():
            wire.close()


def _broadcast(group: Any, buffer: torch.Tensor, root: int) -> None:
    from torch import distributed as dist

    options = dist.BroadcastOptions()
    options.rootRank = root
    group.broadcast([buffer], options).wait()


class _Tasks:
    """The rank's side of each subject."""

    def __init__(self, update: RefitUpdate) -> None:
        torch.set_num_threads(1)
        self.update = update
        self.buckets = plan_buckets(update.manifest, update.bucket_bytes)
        self.parameters = {s.name: torch.zeros(s.shape, dtype=getattr(torch, s.dtype)) for s in update.manifest}
        self.buffers = [torch.ones(bucket.num_bytes, dtype=torch.uint8) for bucket in self.buckets]
        self.group: Any = None
        self.boards: dict[str, Board] = {}
        self.wires: dict[str, Any] = {}
        self.receivers: dict[str, BucketReceiver] = {}

    def open_raw(self, port: int) -> None:
        self.boards["raw"] = Board(HOST, port, is_owner=False, timeout_s=_TIMEOUT_S)
        self.group = open_group(self.boards["raw"], HOST, 1, 2, CPU, _TIMEOUT_S)

    def open_wire(self, name: str, port: int) -> None:
        board = self.boards[name] = Board(HOST, port, is_owner=False, timeout_s=_TIMEOUT_S)
        endpoint = RefitEndpoint(host=HOST, port=port, world_size=2, rank_offset=1)
        self.wires[name] = open_receive_wire(name, board, endpoint, 1, CPU, Deadline(_TIMEOUT_S))

    def open_receiver(self, name: str, endpoint: RefitEndpoint) -> None:
        self.receivers[name] = BucketReceiver(CPU, keeps_views=False)  # it copies at once
        self.receivers[name].connect(endpoint, 1)

    def raw(self) -> None:
        _broadcast(self.group, torch.ones(1, dtype=torch.uint8), 1)
        for buffer in self.buffers:
            _broadcast(self.group, buffer, 0)
        _broadcast(self.group, torch.ones(1, dtype=torch.uint8), 1)

    def wire(self, name: str, number: int) -> None:
        board, wire = self.boards[name], self.wires[name]
        wire.begin(number, self.buckets, Deadline(_TIMEOUT_S))
        board.put(f"{number}/ready/1", "ok")
        for bucket in range(len(self.buckets)):
            wire.take(bucket, is_kept=True)
            wire.release()
            board.put(f"{number}/bucket/1", str(bucket + 1))
        board.put(f"{number}/done/1", "ok")

    def whole(self, name: str) -> dict[str, float]:
        receiver = self.receivers[name]
        receiver.prepare(self.update, {spec.name: spec.shape for spec in self.update.manifest})
        with receiver.attesting(self.update):
            for tensors in receiver.receive(self.update):
                started = time.perf_counter()
                for tensor_name, tensor in tensors:
                    self.parameters[tensor_name].copy_(tensor)
                receiver.seconds["load"] += time.perf_counter() - started
        return dict(receiver.seconds)


def _serve(connection: Connection, update: RefitUpdate) -> None:
    tasks = _Tasks(update)
    while True:
        try:
            task, arguments = connection.recv()
        except EOFError:
            return
        connection.send(getattr(tasks, task)(*arguments))
