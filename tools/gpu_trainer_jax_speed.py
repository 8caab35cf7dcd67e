"""The check of tools/gpu_check.py that measures the JAX trainer. Speeds are reported, and nothing depends on them."""

from __future__ import annotations

import tempfile
import time
from collections.abc import Callable, Mapping
from pathlib import Path

import jax
import jax.numpy as jnp
from gpu_steps import (  # type: ignore[import-not-found]
    HALF_BILLION,
    TINY,
    Shape,
    batches,
    step_flop,
    utilisation,
)
from gpu_trainer_jax import Figures, random_model, use  # type: ignore[import-not-found]

from dockyard_core.batch import BatchShard
from dockyard_trainer_jax import JaxPolicy, JaxPolicyConfig


def matmul_flop_per_s(size: int) -> float:
    """Of the fastest of a few square bfloat16 products."""
    factors = jax.random.normal(jax.random.key(0), (2, size, size), jnp.bfloat16)
    product = jax.jit(lambda both: both[0] @ both[1])
    product(factors).block_until_ready()
    return 2 * size**3 / min(seconds_of(lambda: product(factors).block_until_ready()) for _ in range(20))


def seconds_of(work: Callable[[], object]) -> float:
    started = time.perf_counter()
    work()
    return time.perf_counter() - started


def measure(policy: JaxPolicy, shard: BatchShard) -> float | str:
    """Seconds of the faster of two steps after the one that compiles; or why none."""

    def step() -> None:
        assert not policy.train_step(shard).is_skipped  # metrics are fetched: a step that has returned is done

    try:
        return min([seconds_of(step) for _ in range(3)][1:])
    except jax.errors.JaxRuntimeError as error:
        if "RESOURCE_EXHAUSTED" not in str(error):
            raise
        return "out of memory"


def jax_speed(device: str) -> Figures:
    use(device)
    shape: Shape = HALF_BILLION if device == "cuda" else TINY
    peak, kind = matmul_flop_per_s(shape.matmul), jax.devices()[0].device_kind
    figures: Figures = {"matmul TFLOP/s": round(peak / 1e12, 2)}
    config = {
        "model_type": "qwen2",
        "hidden_size": shape.hidden,
        "num_hidden_layers": shape.layers,
        "num_attention_heads": shape.heads,
        "num_key_value_heads": shape.kv_heads,
        "intermediate_size": shape.inner,
        "vocab_size": shape.vocab,
        "tie_word_embeddings": True,
    }
    with tempfile.TemporaryDirectory() as folder:
        model = random_model(Path(folder) / "model", config, scale=0.02)
        # What takes least memory comes first: JAX knows the peak since the process began, and no other.
        for is_on in (True, False):
            options = JaxPolicyConfig(
                dtype="bfloat16", activation_checkpointing=is_on, share_prefixes=False, compilation_cache_dir=None
            )
            policy = JaxPolicy.from_pretrained(model, options)
            for label, (sequences, shard) in batches(shape).items():
                seconds, key = measure(policy, shard), f"{label}{' checkpointed' * is_on}"
                if isinstance(seconds, str):
                    figures[key] = seconds
                    continue
                stats = jax.devices()[0].memory_stats() or {}
                figures[key] = {
                    "tokens/s": round(sum(sequence.num_tokens for sequence in sequences) / seconds),
                    **utilisation(step_flop(shape, sequences) / seconds, matmul=peak, device_name=kind),
                    "peak GB so far": round(stats["peak_bytes_in_use"] / 1e9, 2) if stats else None,
                }
            figures[f"compiled{' checkpointed' * is_on}"] = {
                "programs": policy.num_compiled,
                "seconds": round(policy.compile_s, 1),
            }
            del policy
    return figures


PATHS: Mapping[str, Callable[[str], Figures]] = {"jax-speed": jax_speed}
