"""Tiny models that Hugging Face makes and saves, on eight pretended devices."""

import os
import tempfile

# Before JAX starts: nothing can add devices afterwards, and no test is to write into a user's cache.
os.environ.setdefault("JAX_COMPILATION_CACHE_DIR", tempfile.mkdtemp(prefix="dockyard-jax-"))
os.environ.setdefault("JAX_PLATFORMS", "cpu")
if "xla_force_host_platform_device_count" not in os.environ.get("XLA_FLAGS", ""):
    os.environ["XLA_FLAGS"] = (os.environ.get("XLA_FLAGS", "") + " --xla_force_host_platform_device_count=8").strip()

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM, LlamaConfig, Qwen2Config, Qwen3Config, Qwen3MoeConfig

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
