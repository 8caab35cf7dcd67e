"""Tiny models that Hugging Face makes and saves, on eight pretended devices."""

import os
import tempfile

# Before JAX starts: nothing can add devices afterwards, and no test is to write into a user's cache.
os.environ.setdefault("JAX_COMPILATION_CACHE_DIR", tempfile.mkdtemp(prefix="dockyard-jax-"))
os.environ.setdefault("JAX_PLATFORMS", "cpu")

from collections.abc import Callable
from importlib.metadata import version
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM, LlamaConfig, Qwen2Config, Qwen3Config, Qwen3MoeConfig

# Read when JAX first touches a device.
_flags = os.environ.get("XLA_FLAGS", "")
if "xla_force_host_platform_device_count" not in _flags:
    _flags += " --xla_force_host_platform_device_count=8"
# Most of the time of these tests is compiling, and most of that the compiler's own optimizations: without them a
# training step compiles ten times as fast, and rounds a little differently. `test_jax_production.py` asks for them.
if "xla_backend_optimization_level" not in _flags and version("jaxlib").startswith("0.10."):
    _flags += (  # other releases may not know one of them, and end the process
        " --xla_backend_optimization_level=0 --xla_llvm_disable_expensive_passes=true"
        " --xla_cpu_use_fusion_emitters=false --xla_cpu_parallel_codegen_split_count=1"
    )
os.environ["XLA_FLAGS"] = _flags.strip()

CONFIGS = {"qwen2": Qwen2Config, "qwen3": Qwen3Config, "llama": LlamaConfig, "qwen3_moe": Qwen3MoeConfig}
VOCAB_SIZE = 64


@pytest.fixture(autouse=True)
def _one_thread():
    torch.set_num_threads(1)


@pytest.fixture(scope="session")
def tiny_model(tmp_path_factory) -> Callable[..., Path]:
    """Directory of a tiny random model of a family, with a stand-in tokenizer file.

    Heads are wider than hidden_size / heads, and queries share keys. ``overrides`` are values of the
    configuration; equal ones give the same directory.
    """
    made: dict[tuple[Any, ...], Path] = {}

    def make(family: str = "qwen2", *, is_tied: bool = True, **overrides: Any) -> Path:
        key = (family, is_tied, repr(sorted(overrides.items())))
        if key not in made:
            torch.manual_seed(sum(map(ord, family)) + is_tied)
            values: dict[str, Any] = {
                "vocab_size": VOCAB_SIZE,
                "hidden_size": 32,
                "intermediate_size": 48,
                "num_hidden_layers": 2,
                "num_attention_heads": 4,
                "num_key_value_heads": 2,
                "head_dim": 16,
                "max_position_embeddings": 256,
                "tie_word_embeddings": is_tied,
                "initializer_range": 0.2,  # large enough that attention matters to the log-probabilities
            }
            if family == "qwen3_moe":
                values |= {"num_experts": 6, "num_experts_per_tok": 2, "moe_intermediate_size": 24}
            model = AutoModelForCausalLM.from_config(CONFIGS[family](**{**values, **overrides}), dtype=torch.float32)
            with torch.no_grad():  # fresh biases are 0 and fresh norms 1: a model that forgot them would pass
                for name, param in model.named_parameters():
                    if name.endswith("bias") or "norm" in name:
                        param.add_(0.3 * torch.randn_like(param))
            directory = tmp_path_factory.mktemp(f"{family}-{'tied' if is_tied else 'untied'}")
            model.save_pretrained(directory)
            (directory / "tokenizer.json").write_text("{}")
            made[key] = directory
        return made[key]

    return make


@pytest.fixture(scope="session")
def gradients_of() -> Callable[[Any], dict[str, np.ndarray]]:
    """The gradient of a policy's last update by Hugging Face name, if its ``betas`` are 0 and nothing was clipped.

    The first moment then is the gradient.
    """
    from dockyard_trainer_jax.names import parts_of

    def read(policy: Any) -> dict[str, np.ndarray]:
        assert policy.config.betas == (0.0, 0.0)
        return {
            part.name: np.asarray(moment)[part.indices]
            for name, moment in policy.state.exp_avg.items()
            for part in parts_of(name, moment.shape)
        }

    return read
