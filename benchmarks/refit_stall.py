"""How long a refit holds up requests that are in flight, on a real vLLM engine.

Each request is streamed token by token from vLLM while `VllmGenerator.refit` runs, so that every gap between two
tokens is seen. Of each refit:

stall       from the last token before the pause until the last of the requests has its next one, less the usual gap
transfer    what the worker says that receiving, verifying and loading took
beyond      stall - transfer, less than nothing where a staged transfer stalls nobody: pausing, opening and closing
            the update, committing, resuming, and then
recomputed  from the engine's going on: cached keys and values belong to the old weights and are dropped, so the tokens
            so far of every request are computed again, at the model's speed
"""

from __future__ import annotations

import asyncio
import tempfile
import time
from pathlib import Path
from statistics import median
from typing import Any

import torch

from benchmarks.refit_figures import spread
from benchmarks.refit_subjects import HOST, random_weights, smollm2_manifest, stream
from dockyard_core.refit import RefitUpdate, TensorSpec
from dockyard_inference import RefitSender, VllmConfig, VllmGenerator

_PROMPT_TOKENS = 16
_THREADS = 2
"""Of the engine: in a refit the sender has nothing to compute."""


def write_checkpoint(directory: Path, num_layers: int) -> tuple[TensorSpec, ...]:
    """A checkpoint of SmolLM2-135M's shapes with random weights; returns its manifest."""
    from transformers import LlamaConfig, LlamaForCausalLM
    from transformers.utils import logging

    config = LlamaConfig(
        vocab_size=49152,
        hidden_size=576,
        intermediate_size=1536,
        num_hidden_layers=num_layers,
        num_attention_heads=9,
        num_key_value_heads=3,
        max_position_embeddings=2048,
        tie_word_embeddings=True,
        bos_token_id=0,
        eos_token_id=0,
    )
    logging.disable_progress_bar()
    LlamaForCausalLM(config).save_pretrained(directory)
    return smollm2_manifest(num_layers)


def measure_stall(num_requests: int, num_refits: int, num_layers: int, staging: str) -> dict[str, Any]:
    """Refit ``num_refits`` times with ``num_requests`` always in flight; ``staging`` as of ``RefitSender``."""
    with tempfile.TemporaryDirectory(prefix="dockyard-refit-model-") as folder:
        manifest = write_checkpoint(Path(folder), num_layers)
        return asyncio.run(_measure(folder, manifest, num_requests, num_refits, staging))


async def _measure(
    folder: str, manifest: tuple[TensorSpec, ...], num_requests: int, num_refits: int, staging: str
) -> dict[str, Any]:
    torch.set_num_threads(1)
    weights = random_weights(manifest)
    generator = VllmGenerator(
        VllmConfig(model=folder, max_model_len=512, max_num_seqs=num_requests, num_threads=_THREADS)
    )
    await generator.start()
    sender = RefitSender(HOST, 0, 2, staging=staging)  # type: ignore[arg-type]
    times: list[list[float]] = [[] for _ in range(num_requests)]
    streams = [asyncio.create_task(_stream_forever(generator, index, times[index])) for index in range(num_requests)]
    try:
        await asyncio.gather(asyncio.to_thread(sender.connect), generator.connect_refit(sender.endpoint()))
        refits = []
        for version in range(1, num_refits + 1):
            await _until_all_run(times)
            update = RefitUpdate(policy_version=version, manifest=manifest)
            refits.append(await _one_refit(generator, sender, weights, update, times))
    finally:
        for task in streams:
            task.cancel()
        await asyncio.gather(*streams, return_exceptions=True)
        sender.close()
        await generator.shutdown()
    keys = ("stall_s", "transfer_s", "extra_s", "recompute_s", "usual_gap_s")
    return {
        "engine": "vllm",
        "transport": sender.transport,
        "threads": _THREADS,
        "requests": num_requests,
        "refits": num_refits,
        **{key: spread(one[key] for one in refits) for key in keys},
    }


async def _one_refit(
    generator: VllmGenerator,
    sender: RefitSender,
    weights: dict[str, torch.Tensor],
    update: RefitUpdate,
    times: list[list[float]],
) -> dict[str, float]:
    usual = median(late - early for of_one in times for early, late in zip(of_one[-9:], of_one[-8:], strict=False))
    sent, report = await asyncio.gather(
        asyncio.to_thread(sender.send, stream(weights), update), generator.refit(update)
    )
    resumed = time.perf_counter()
    last = max(max(moment for moment in of_one if moment <= resumed) for of_one in times)
    await _until_all_run(times, since=resumed, num_tokens=1)
    following = max(min(moment for moment in of_one if moment > resumed) for of_one in times)
    transfer = sum(report.seconds[stage] for stage in ("receive", "verify", "load"))
    stall = following - last - usual
    assert sent.num_bytes == report.num_bytes
    return {
        "stall_s": stall,
        "transfer_s": transfer,
        "extra_s": stall - transfer,
        "recompute_s": following - resumed,
        "usual_gap_s": usual,
    }


async def _stream_forever(generator: VllmGenerator, index: int, times: list[float]) -> None:
    """One request after the other, with the time of each token."""
    from vllm import SamplingParams
    from vllm.inputs import tokens_input
    from vllm.sampling_params import RequestOutputKind

    engine, number = generator._running(), 0
    while True:
        number += 1
        prompt = tokens_input([index + 2] * _PROMPT_TOKENS)
        params = SamplingParams(
            temperature=1.0,
            max_tokens=32,
            ignore_eos=True,
            detokenize=False,
            seed=number,
            output_kind=RequestOutputKind.DELTA,
        )
        async for _ in engine.generate(prompt, params, f"stream-{index}-{number}"):
            times.append(time.perf_counter())


async def _until_all_run(times: list[list[float]], since: float | None = None, num_tokens: int = 16) -> None:
    """Wait until every stream has so many new tokens, or any after ``since``."""
    before = [len(of_one) for of_one in times]
    while True:
        if since is None and all(len(of_one) >= n + num_tokens for of_one, n in zip(times, before, strict=True)):
            return
        if since is not None and all(of_one and of_one[-1] > since for of_one in times):
            return
        await asyncio.sleep(0.005)
