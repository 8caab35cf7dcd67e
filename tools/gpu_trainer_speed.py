"""The checks of tools/gpu_check.py that measure the torch trainer. Speeds are reported, and nothing depends on them."""

from __future__ import annotations

import tempfile
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch
from gpu_steps import (  # type: ignore[import-not-found]
    HALF_BILLION,
    TINY,
    Shape,
    batches,
    step_flop,
    utilisation,
)
from torch import Tensor

from dockyard_core.batch import BatchShard
from dockyard_trainer_torch import TorchPolicy, TorchPolicyConfig
from dockyard_trainer_torch.logprobs import chunked_logprobs

EXTRA_BYTES_LIMIT = 1_000_000_000
"""Of log-probabilities and their backward pass at S=4096, V=151,936, H=896, gradients of both inputs included."""
Figures = dict[str, Any]


def random_model(directory: Path, shape: Shape, device: str) -> Path:
    """Save random weights in bfloat16, made on the device."""
    from transformers import Qwen2Config, Qwen2ForCausalLM

    config = Qwen2Config(
        hidden_size=shape.hidden,
        num_hidden_layers=shape.layers,
        num_attention_heads=shape.heads,
        num_key_value_heads=shape.kv_heads,
        intermediate_size=shape.inner,
        vocab_size=shape.vocab,
        max_position_embeddings=4 * shape.length,
        tie_word_embeddings=True,
    )
    torch.manual_seed(0)
    with torch.device(device):
        model = Qwen2ForCausalLM(config)
    model.to(torch.bfloat16).save_pretrained(directory)
    return directory


def matmul_flop_per_s(device: str, size: int) -> float:
    """Of the fastest of a few square bfloat16 products."""
    left, right = torch.randn(2, size, size, device=device).bfloat16()
    return 2 * size**3 / min(seconds_of(device, lambda: torch.mm(left, right)) for _ in range(20))


def seconds_of(device: str, work: Callable[[], object]) -> float:
    """Wall seconds, until the device is done."""
    synchronize(device)
    started = time.perf_counter()
    work()
    synchronize(device)
    return time.perf_counter() - started


def synchronize(device: str) -> None:
    if device == "cuda":
        torch.cuda.synchronize()


def peak_bytes(device: str, work: Callable[[], object]) -> int | None:
    """Most memory that tensors took during the work, beyond what they took before; None on a CPU."""
    if device != "cuda":
        work()
        return None
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    work()
    torch.cuda.synchronize()
    return int(torch.cuda.max_memory_allocated() - before)


def trainer_speed(device: str) -> Figures:
    shape = HALF_BILLION if device == "cuda" else TINY
    peak = matmul_flop_per_s(device, shape.matmul)
    figures: Figures = {"matmul TFLOP/s": round(peak / 1e12, 2)}
    name = torch.cuda.get_device_name() if device == "cuda" else "CPU"
    with tempfile.TemporaryDirectory() as folder:
        model = random_model(Path(folder), shape, device)
        for is_on in (False, True):
            config = TorchPolicyConfig(
                dtype="bfloat16", device=device, activation_checkpointing=is_on, share_prefixes=False
            )
            policy = TorchPolicy.from_pretrained(model, config)
            for label, (sequences, shard) in batches(shape).items():
                measured = measure(policy, shard, device)
                key = f"{label}{' checkpointed' * is_on}"
                if isinstance(measured, str):
                    figures[key] = measured
                    continue
                seconds, num_bytes = measured
                flop_per_s = step_flop(shape, sequences) / seconds
                figures[key] = {
                    "tokens/s": round(sum(sequence.num_tokens for sequence in sequences) / seconds),
                    **utilisation(flop_per_s, matmul=peak, device_name=name),
                    "peak GB": num_bytes and round(num_bytes / 1e9, 2),
                }
            del policy
    return figures


def measure(policy: TorchPolicy, shard: BatchShard, device: str) -> tuple[float, int | None] | str:
    """Seconds of the faster of two steps after a first one, and the most memory, of weights too; or why none."""

    def step() -> None:
        assert not policy.train_step(shard).is_skipped

    try:
        step()
        if device == "cuda":
            torch.cuda.reset_peak_memory_stats()
        seconds = min(seconds_of(device, step) for _ in range(2))
    except torch.OutOfMemoryError:
        torch.cuda.empty_cache()
        return "out of memory"
    return seconds, int(torch.cuda.max_memory_allocated()) if device == "cuda" else None


def naive_logprobs(hidden_MD: Tensor, weight_VD: Tensor, targets_M: Tensor) -> tuple[Tensor, Tensor]:
    """All logits at once, and all log-probabilities."""
    logprobs_MV = (hidden_MD @ weight_VD.to(hidden_MD.dtype).T).float().log_softmax(-1)
    entropy_M = -(logprobs_MV.exp() * logprobs_MV).sum(-1)
    return logprobs_MV.gather(1, targets_M[:, None])[:, 0], entropy_M


def trainer_memory(device: str) -> Figures:
    positions, vocab, hidden = (4096, 151_936, 896) if device == "cuda" else (64, 512, 32)
    figures: Figures = {}
    torch.manual_seed(0)
    made = torch.randn(positions, hidden, device=device)
    weight = (torch.randn(vocab, hidden, device=device) / hidden**0.5).requires_grad_()
    targets_M = torch.randint(vocab, (positions,), device=device)
    methods: dict[str, Callable[[Tensor], tuple[Tensor, Tensor]]] = {
        "chunked": lambda states: chunked_logprobs(states, weight, targets_M, temperature=1.0),
        "naive": lambda states: naive_logprobs(states, weight, targets_M),
    }
    for dtype in (torch.float32, torch.bfloat16):
        kept: dict[str, tuple[Tensor, Tensor, Tensor]] = {}
        kind = str(dtype).removeprefix("torch.")
        for method, logprobs in methods.items():
            states = made.to(dtype, copy=True).requires_grad_()

            def work(states: Tensor = states, logprobs: Callable[[Tensor], tuple[Tensor, Tensor]] = logprobs) -> Tensor:
                states.grad = weight.grad = None
                values_M, entropy_M = logprobs(states)
                (values_M.mean() + 0.01 * entropy_M.mean()).backward()
                return values_M.detach()

            work()  # what the libraries allocate once is no part of it
            states.grad = weight.grad = None
            extra = peak_bytes(device, work)
            figures[f"{kind} {method}"] = {
                "extra GB": extra and round(extra / 1e9, 3),
                "ms": round(1e3 * min(seconds_of(device, work) for _ in range(3)), 2),
            }
            values_M = work()
            assert states.grad is not None
            assert weight.grad is not None
            kept[method] = (values_M.cpu(), states.grad.float().cpu(), weight.grad.cpu())
            if method == "chunked" and extra is not None:
                assert extra <= EXTRA_BYTES_LIMIT, figures
        limit = 1e-4 if dtype == torch.float32 else 5e-2
        for part, ours, theirs in zip(("logprobs", "d_hidden", "d_weight"), *kept.values(), strict=True):
            error = float((ours - theirs).norm() / theirs.norm())
            figures[f"{kind} {part} rel_error"] = error
            assert error <= limit, figures
    return figures


PATHS: Mapping[str, Callable[[str], Figures]] = {"trainer-speed": trainer_speed, "trainer-memory": trainer_memory}
