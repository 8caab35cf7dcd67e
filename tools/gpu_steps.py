"""The steps that tools/gpu_check.py times, and what they compute; for both trainers, and without either's framework."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from dockyard_core.batch import BatchShard, TrainSequence, pack_batch

DENSE_BFLOAT16 = {"H200": 989e12, "H100 PCIe": 756e12, "H100 NVL": 835e12, "H100": 989e12, "A100": 312e12}
"""FLOP/s that NVIDIA's data sheets give, without sparsity, by what the device's name contains; first match."""


class Shape(NamedTuple):
    """What a Qwen2 model and its micro-batches are made of."""

    hidden: int
    layers: int
    heads: int
    kv_heads: int
    inner: int
    vocab: int
    length: int
    """Tokens of a sequence; the first quarter is not trained."""
    step_tokens: int
    micro_batch_tokens: tuple[int, ...]
    matmul: int
    """Side of the square product that the peak is measured with."""

    @property
    def gemm_parameters(self) -> int:
        """Weights of the linear layers inside the blocks: each token is multiplied by all of them."""
        head = self.hidden // self.heads
        attention = 2 * self.hidden * head * (self.heads + self.kv_heads)
        return self.layers * (attention + 3 * self.hidden * self.inner)


HALF_BILLION = Shape(896, 24, 14, 2, 4864, 151_936, 2048, 65_536, (8192, 32_768), 8192)
"""Qwen2-0.5B."""
TINY = Shape(64, 2, 4, 2, 96, 512, 64, 512, (128, 512), 256)


def step_flop(shape: Shape, sequences: Sequence[TrainSequence]) -> float:
    """Floating-point operations that a step needs: forward, and twice as much backward.

    6 N per token for N weights in matrix products; 6 H V per trained token for the output embedding; and
    6 L H s^2 per sequence of s tokens for causal attention over L layers, which is half of the 12 L H s per token of
    the convention that counts masked pairs too. What is computed twice (activation checkpointing, logits made again
    in the backward pass) counts once: this is model FLOPs utilisation, not the hardware's.
    """
    lengths = np.array([sequence.num_tokens for sequence in sequences], np.float64)
    num_trained = sum(sequence.num_valid_tokens for sequence in sequences)
    products = 6 * shape.gemm_parameters * lengths.sum() + 6 * shape.hidden * shape.vocab * num_trained
    return float(products + 6 * shape.layers * shape.hidden * np.square(lengths).sum())


def random_sequences(shape: Shape, lengths: Sequence[int]) -> list[TrainSequence]:
    rng = np.random.default_rng(0)
    return [
        TrainSequence(
            token_ids_T=rng.integers(0, shape.vocab, length),
            loss_mask_T=np.arange(length) >= max(length // 4, 1),
            sampled_logprobs_T=np.full(length, -np.log(shape.vocab), np.float32),
            advantage=float(rng.normal()),
        )
        for length in lengths
    ]


def batches(shape: Shape) -> dict[str, tuple[list[TrainSequence], BatchShard]]:
    """One step's tokens, cut otherwise: rows of one sequence, which need no mask, and rows packed with several."""
    num_rows = shape.step_tokens // shape.length
    alone = random_sequences(shape, [shape.length] * num_rows)
    packed = random_sequences(shape, [shape.length * part // 16 for part in (16, 7, 5, 4)] * (num_rows // 2))
    made = {}
    for tokens in shape.micro_batch_tokens:
        made[f"{tokens} tokens"] = alone, pack_batch(alone, micro_batch_tokens=tokens)[0]
    fewest = min(shape.micro_batch_tokens)
    shards = pack_batch(packed, micro_batch_tokens=fewest, row_length=shape.length)
    return made | {f"{fewest} tokens packed": (packed, shards[0])}


def utilisation(flop_per_s: float, *, matmul: float, device_name: str) -> dict[str, float | None]:
    """Shares of the rate of a large product in the same run, and of the data sheet's; None = it is not listed."""
    listed = next((value for part, value in DENSE_BFLOAT16.items() if part in device_name), None)
    return {
        "MFU of matmul": round(flop_per_s / matmul, 3),
        "MFU of data sheet": listed and round(flop_per_s / listed, 3),
    }
