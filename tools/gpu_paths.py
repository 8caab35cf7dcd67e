"""The checks of tools/gpu_check.py: each takes ``cuda`` (or ``cpu``, a rehearsal), asserts, and returns figures.

Every one runs in a process of its own; nothing here guards against a crash or a hang.
"""

from __future__ import annotations

import asyncio
import hashlib
import multiprocessing
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch

from dockyard_core.generator import GenerateRequest, SamplingParams
from dockyard_core.policy import WeightChunk, WeightSink
from dockyard_core.refit import RefitEndpoint, RefitUpdate, TensorSpec, plan_buckets
from dockyard_inference import RefitSender, load_generator

POLICY = Path(__file__).resolve().parent.parent / "apps/grpo/src/dockyard_grpo/quickstart/policy"
TIMEOUT_S = 120.0
Figures = dict[str, Any]


def tensors_on(device: str, num_bytes: int) -> dict[str, torch.Tensor]:
    """Random tensors of two dtypes and odd shapes, of about so many bytes."""
    torch.manual_seed(0)
    rows = max(1, num_bytes // (8 * 3 * 1024))
    made: dict[str, torch.Tensor] = {"model.norm.weight": torch.randn(1021, device=device)}
    for index in range(8):
        dtype = torch.bfloat16 if index % 2 else torch.float32
        made[f"model.layers.{index}.weight"] = torch.randn(rows + index, 1024, device=device).to(dtype)
    return made


def manifest_of(tensors: Mapping[str, torch.Tensor]) -> tuple[TensorSpec, ...]:
    """What a refit announces."""
    return tuple(TensorSpec(n, str(t.dtype).removeprefix("torch."), tuple(t.shape)) for n, t in tensors.items())


def streamed(tensors: Mapping[str, torch.Tensor]) -> Callable[[WeightSink], None]:
    """``Policy.stream_weights``."""

    def stream_weights(sink: WeightSink) -> None:
        for name, tensor in tensors.items():
            sink(WeightChunk(name, tuple(tensor.shape), (0,) * tensor.dim(), tensor))

    return stream_weights


def sha_of(tensors: Mapping[str, torch.Tensor]) -> str:
    """Of all bytes, in order, as they are on the CPU."""
    digest = hashlib.sha256()
    for tensor in tensors.values():
        digest.update(tensor.cpu().contiguous().view(-1).view(torch.uint8).numpy().tobytes())
    return digest.hexdigest()


class KeepingWire:
    """A ``SendWire`` that keeps every bucket."""

    def __init__(self, buckets: Sequence[Any], device: str) -> None:
        self.buffers = [torch.empty(bucket.num_bytes, dtype=torch.uint8, device=device) for bucket in buckets]

    def begin(self, number: int, buckets: Sequence[Any], deadline: Any) -> None:
        """See ``SendWire``."""

    def buffer(self, number: int) -> torch.Tensor:
        """See ``SendWire``."""
        return self.buffers[number]

    def put(self, number: int) -> None:
        """See ``SendWire``."""

    def finish(self) -> None:
        """See ``SendWire``."""

    def attested(self) -> None:
        """See ``SendWire``."""

    def close(self) -> None:
        """See ``SendWire``."""


def packing(device: str) -> Figures:
    from dockyard_inference.refit.hashing import digest_of
    from dockyard_inference.refit.packer import Packer

    num_bytes = 256 << 20 if device == "cuda" else 4 << 20
    tensors = tensors_on(device, num_bytes)
    update = RefitUpdate(policy_version=1, manifest=manifest_of(tensors), bucket_bytes=num_bytes // 8)
    buckets, seconds = plan_buckets(update.manifest, update.bucket_bytes), defaultdict[str, float](float)
    wire = KeepingWire(buckets, device)
    digests: dict[int, bytes] = {}

    def seal(number: int, buffer: torch.Tensor) -> None:
        digests[number] = digest_of(buffer, buffer.numel())

    packer = Packer(wire, buckets, update, seal, seconds)
    streamed(tensors)(packer.take)
    packer.finish()
    assert sorted(digests) == list(range(len(buckets))), "not every bucket was handed over"
    whole = hashlib.sha256()
    for number, buffer in enumerate(wire.buffers):
        payload = buffer.cpu().numpy().tobytes()
        assert hashlib.sha256(payload).digest() == digests[number], (
            f"the digest of bucket {number} is not that of its bytes"
        )
        whole.update(payload)
    assert whole.hexdigest() == sha_of(tensors), "the packed bytes are not those of the tensors"
    megabytes = sum(bucket.num_bytes for bucket in buckets) / 1e6
    return {"MB": round(megabytes, 1), "buckets": len(buckets)} | {k: round(v, 4) for k, v in seconds.items()}


def nccl_alone(device: str) -> Figures:
    from dockyard_inference.refit.collective import open_group
    from dockyard_inference.refit.group import Board

    where = torch.device(f"{device}:0" if device == "cuda" else device)
    board = Board("127.0.0.1", 0, is_owner=True, timeout_s=TIMEOUT_S)
    group = open_group(board, "127.0.0.1", 0, 1, where, TIMEOUT_S)
    values = torch.arange(1 << 20, dtype=torch.float32, device=where)
    before = values.clone()
    group.broadcast([values], torch.distributed.BroadcastOptions()).wait()
    group.allreduce([values], torch.distributed.AllreduceOptions()).wait()
    assert torch.equal(values, before), "one rank's all-reduce changed the values"
    return {"group": type(group).__name__}


def receive(endpoint: RefitEndpoint, update: RefitUpdate, num_rounds: int, device: str, answers: Any) -> None:
    """The other process: takes the weights as an engine's worker does."""
    from dockyard_inference.refit.receiver import BucketReceiver

    receiver = BucketReceiver(torch.device(device))
    receiver.connect(endpoint, 1)
    for _ in range(num_rounds):
        receiver.prepare(update, {spec.name: spec.shape for spec in update.manifest})
        with receiver.attesting(update):
            taken = {name: tensor.clone() for bucket in receiver.receive(update) for name, tensor in bucket}
        answers.put((sha_of(taken), dict(receiver.seconds)))
    receiver.close()


def refit_between(sender_device: str, receiver_device: str, transport: Any, num_bytes: int) -> Figures:
    """Three updates to another process; its bytes must be ours."""
    tensors, num_rounds = tensors_on(sender_device, num_bytes), 3
    update = RefitUpdate(policy_version=1, manifest=manifest_of(tensors), timeout_s=TIMEOUT_S)
    context = multiprocessing.get_context("spawn")
    answers = context.Queue()
    sender = RefitSender("127.0.0.1", 0, 2, sender_device, TIMEOUT_S, transport=transport)
    arguments = (sender.endpoint(), update, num_rounds, receiver_device, answers)
    process = context.Process(target=receive, args=arguments, daemon=True)
    process.start()
    sender.connect()
    wanted, best = sha_of(tensors), float("inf")
    for _ in range(num_rounds):
        report = sender.send(streamed(tensors), update)
        assert answers.get(timeout=TIMEOUT_S)[0] == wanted, "the other process holds other bytes"
        best = min(best, report.seconds["total"])
    sender.close()
    process.join(TIMEOUT_S)
    assert process.exitcode == 0, f"the other process ended with {process.exitcode}"
    seconds = {key: round(value, 4) for key, value in report.seconds.items()}
    megabytes = report.num_bytes / 1e6
    return {"transport": sender.transport, "MB": round(megabytes, 1), "MB/s": round(megabytes / best)} | seconds


def nccl_refit(device: str) -> Figures:
    first, second = ("cuda:0", "cuda:1") if device == "cuda" else ("cpu", "cpu")
    return refit_between(first, second, "collective", 1 << 30 if device == "cuda" else 8 << 20)


def ipc_refit(device: str) -> Figures:
    where = "cuda:0" if device == "cuda" else "cpu"
    return refit_between(where, where, "shared_memory", 1 << 30 if device == "cuda" else 8 << 20)


def vllm_refit(device: str, dtype: str, sender_device: str, transport: Any) -> Figures:
    """Start, refit to changed weights, and compare greedy tokens and their logprobs with transformers."""
    from transformers import AutoModelForCausalLM

    torch.set_num_threads(1 if device == "cpu" else torch.get_num_threads())
    kind = getattr(torch, dtype)
    model = AutoModelForCausalLM.from_pretrained(POLICY, dtype=kind).to(sender_device).eval()
    rng = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for parameter in model.parameters():
            noise = torch.randn(parameter.shape, generator=rng)
            parameter.add_((0.02 * noise).to(parameter.device, parameter.dtype))
    weights = {name: parameter.detach() for name, parameter in model.named_parameters()}
    config = {"model": str(POLICY), "dtype": dtype, "max_model_len": 128, "kv_cache_gib": 0.5}
    sampled, figures = asyncio.run(_sampled(config, weights, sender_device, transport))
    diffs, gaps = [], []
    for prompt, completion in sampled:
        ids = torch.tensor([[*prompt, *completion.token_ids]], device=sender_device)
        with torch.no_grad():
            rows = model(ids).logits[0, len(prompt) - 1 : -1].float().log_softmax(-1)
        picked = rows.gather(-1, ids[0, len(prompt) :, None])[:, 0]
        gaps += (rows.max(-1).values - picked).tolist()
        diffs.append((picked.cpu() - torch.tensor(completion.logprobs)).abs())
    mean = float(torch.cat(diffs).mean())
    equal = sum(gap == 0 for gap in gaps)
    figures |= {"tokens": len(gaps), "logprob_diff_mean": mean, "greedy_equal": equal, "greedy_gap_max": max(gaps)}
    # bfloat16 rounds differently in each engine: there the tokens are reported, and the mean is what must hold.
    limit, gap = (1e-4, 1e-3) if dtype == "float32" else (0.1, float("inf"))
    assert mean <= limit, figures
    assert max(gaps) <= gap, figures
    return figures


async def _sampled(
    config: Mapping[str, Any], weights: Mapping[str, torch.Tensor], sender_device: str, transport: Any
) -> tuple[list[tuple[tuple[int, ...], Any]], Figures]:
    generator: Any = load_generator("vllm", config)
    await generator.start()
    try:
        sender = RefitSender("127.0.0.1", 0, 2, sender_device, TIMEOUT_S, transport=transport)
        await asyncio.gather(asyncio.to_thread(sender.connect), generator.connect_refit(sender.endpoint()))
        update = RefitUpdate(policy_version=1, manifest=manifest_of(weights), timeout_s=TIMEOUT_S)
        sent = asyncio.to_thread(sender.send, streamed(weights), update)
        _, held = await asyncio.gather(sent, generator.refit(update))
        greedy = SamplingParams(temperature=0.0, max_new_tokens=32, stop_token_ids=(1,))
        prompts = [tuple(range(5 + index, 13 + index)) for index in range(8)]
        requests = [
            GenerateRequest(request_id=str(i), prompt_token_ids=p, sampling=greedy) for i, p in enumerate(prompts)
        ]
        done = await asyncio.gather(*map(generator.generate, requests))
        figures = {"transport": sender.transport, "MB": round(held.num_bytes / 1e6, 2)}
        sender.close()
        return list(zip(prompts, done, strict=True)), figures
    finally:
        await generator.shutdown()


def vllm_on_one(dtype: str) -> Callable[[str], Figures]:
    """Sender and engine on one device: CUDA IPC, since NCCL refuses two ranks on one GPU."""

    def check(device: str) -> Figures:
        return vllm_refit(device, dtype, "cuda:0" if device == "cuda" else "cpu", "shared_memory")

    return check


def vllm_nccl(device: str) -> Figures:
    return vllm_refit(
        device, "bfloat16" if device == "cuda" else "float32", "cuda:1" if device == "cuda" else "cpu", "collective"
    )


PATHS: Mapping[str, Callable[[str], Figures]] = {
    "packing": packing,
    "nccl-alone": nccl_alone,
    "nccl-refit": nccl_refit,
    "ipc-refit": ipc_refit,
    "vllm-float32": vllm_on_one("float32"),
    "vllm-bfloat16": vllm_on_one("bfloat16"),
    "vllm-nccl": vllm_nccl,
}
