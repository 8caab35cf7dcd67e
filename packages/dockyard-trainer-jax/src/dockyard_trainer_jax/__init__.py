"""Flax NNX policy: exact GRPO steps on Hugging Face causal language models (Qwen2, Qwen3, Llama, Qwen3-MoE).

Importing this package is light; JAX loads with the first public name that needs it.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

from dockyard_core.optimizer_config import LoraConfig
from dockyard_trainer_jax.config import JaxPolicyConfig

if TYPE_CHECKING:
    from dockyard_trainer_jax.exported import export_hf
    from dockyard_trainer_jax.orbax import restore_orbax, save_orbax
    from dockyard_trainer_jax.policy import JaxPolicy
    from dockyard_trainer_jax.weights import weight_manifest

_LAZY = {
    "JaxPolicy": "policy",
    "export_hf": "exported",
    "restore_orbax": "orbax",
    "save_orbax": "orbax",
    "weight_manifest": "weights",
}

__all__ = [
    "JaxPolicy",
    "JaxPolicyConfig",
    "LoraConfig",
    "export_hf",
    "restore_orbax",
    "save_orbax",
    "weight_manifest",
]


def __getattr__(name: str) -> Any:
    if name not in _LAZY:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(f"{__name__}.{_LAZY[name]}"), name)
