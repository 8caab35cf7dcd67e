"""Two subjects of `benchmarks.train_step`: our policy, and a plain Hugging Face step without any trainer.

    python -m benchmarks.train_step_subjects OPTIONS     serve one of them; OPTIONS as JSON

Shape legend: B = sequences, L = padded length, V = vocabulary.
"""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from benchmarks.train_step_shards import optimizer_of, shard_of
from benchmarks.train_step_worker import Step, Subject, claim_stdout, serve

GEMM_SIZE = 2048
GEMM_REPETITIONS = 5


def gemm() -> dict[str, float]:
    """GFLOP per second, and per second of CPU time, of a square float32 product: the best of a few."""
    left, right = torch.randn(2, GEMM_SIZE, GEMM_SIZE)
    torch.mm(left, right)
    seconds, cpu_seconds = [], []
    for _ in range(GEMM_REPETITIONS):
        started, cpu_started = time.perf_counter(), time.process_time()
        torch.mm(left, right)
        cpu_seconds.append(time.process_time() - cpu_started)
        seconds.append(time.perf_counter() - started)
    gflop = 2 * GEMM_SIZE**3 / 1e9
    return {"gflops": gflop / min(seconds), "gflops_cpu": gflop / min(cpu_seconds)}


def ours(options: Mapping[str, Any], batch: Mapping[str, np.ndarray], *, shares: bool) -> Subject:
    """`TorchPolicy.train_step`, with or without what it leaves out because it is there already or has no gradient."""
    from dockyard_trainer_torch import TorchPolicy, TorchPolicyConfig

    config = TorchPolicyConfig(**optimizer_of(options), share_prefixes=shares, num_threads=options["threads"])
    policy = TorchPolicy.from_pretrained(options["model"], config)
    shard = shard_of(options, batch, shares=shares)

    def step() -> Step:
        metrics = policy.train_step(shard)
        return Step(metrics.loss, metrics.grad_norm)

    return Subject(step, gemm, forward=lambda: policy.logprobs(shard))


def padded(batch: Mapping[str, np.ndarray]) -> dict[str, Tensor]:
    """Whole sequences [B, L], padded on the right; ``old`` and ``trained`` belong to the token of the same index."""
    lengths, prompts = batch["lengths"], batch["prompt_lengths"]
    shape = (len(lengths), int(lengths.max()))
    columns_L = np.arange(shape[1])
    is_real_BL = columns_L < lengths[:, None]
    is_trained_BL = is_real_BL & (columns_L >= prompts[:, None])
    token_ids_BL, old_BL = np.zeros(shape, np.int64), np.zeros(shape, np.float32)
    token_ids_BL[is_real_BL] = batch["token_ids"]
    old_BL[is_trained_BL] = batch["old_logprobs"]
    arrays = {"token_ids": token_ids_BL, "real": is_real_BL.astype(np.int64), "trained": is_trained_BL, "old": old_BL}
    return {name: torch.from_numpy(array) for name, array in (*arrays.items(), ("advantages", batch["advantages"]))}


def naive(options: Mapping[str, Any], batch: Mapping[str, np.ndarray]) -> Subject:
    """Padded micro-batches, all logits, one log_softmax: what one writes first."""
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(options["model"], dtype=torch.float32)
    optimizer = torch.optim.AdamW(
        model.parameters(), lr=options["learning_rate"], betas=tuple(options["betas"]), weight_decay=0.0
    )
    # Moments exist before memory is looked at, as they do in our policy.
    for parameter in model.parameters():
        parameter.grad = torch.zeros_like(parameter)
    optimizer.step()
    optimizer.zero_grad()
    whole = padded(batch)
    num_trained = int(whole["trained"].sum())
    clip = options["clip"]

    def loss_of(part: Mapping[str, Tensor]) -> Tensor:
        logits_BLV = model(input_ids=part["token_ids"], attention_mask=part["real"], use_cache=False).logits[:, :-1]
        logprobs_BL = logits_BLV.log_softmax(-1).gather(-1, part["token_ids"][:, 1:, None])[..., 0]
        ratio_BL = (logprobs_BL - part["old"][:, 1:]).exp()
        advantages_B1 = part["advantages"][:, None]
        surrogate_BL = torch.min(ratio_BL * advantages_B1, ratio_BL.clamp(1 - clip, 1 + clip) * advantages_B1)
        return -(surrogate_BL * part["trained"][:, 1:]).sum() / num_trained

    def step() -> Step:
        total = 0.0
        for start in range(0, len(batch["lengths"]), options["rows"]):
            loss = loss_of({name: tensor[start : start + options["rows"]] for name, tensor in whole.items()})
            loss.backward()
            total += loss.item()
        norm = torch.nn.utils.clip_grad_norm_(model.parameters(), options["max_grad_norm"])
        optimizer.step()
        optimizer.zero_grad()
        return Step(total, float(norm))

    return Subject(step, gemm)


def main() -> None:
    """Serve the subject that the options name."""
    channel, options = claim_stdout(), json.loads(sys.argv[1])
    torch.set_num_threads(options["threads"])
    with np.load(Path(options["batch"])) as arrays:
        batch = dict(arrays)
    subjects: Mapping[str, Callable[[], Subject]] = {
        "ours": lambda: ours(options, batch, shares=True),
        "ours, nothing shared": lambda: ours(options, batch, shares=False),
        "naive": lambda: naive(options, batch),
    }
    serve(subjects[options["subject"]](), channel)


if __name__ == "__main__":
    main()
