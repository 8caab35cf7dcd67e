"""The checks of tools/gpu_check.py that ask whether the JAX trainer is right, on one device and on two.

See `gpu_paths` for the rules of a check, and `gpu_trainer_jax_speed` for speed. Imports no torch, whose CUDA libraries
would be loaded beside JAX's.
"""

from __future__ import annotations

import json
import os
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from inspect import signature
from pathlib import Path
from typing import Any

import jax
import numpy as np
from safetensors.numpy import save_file

from dockyard_core.batch import pack_batch
from dockyard_core.loss_config import LossConfig
from dockyard_core.policy import Policy, WeightChunk, WeightSink
from dockyard_core.refit import TensorSpec
from dockyard_core.testing.policy_contract import PolicyContract
from dockyard_trainer_jax import JaxPolicy, JaxPolicyConfig, weight_manifest
from dockyard_trainer_jax.model import abstract_causal_lm
from dockyard_trainer_jax.model_config import read_config
from dockyard_trainer_jax.names import named_parameters, parts_of, shape_of

VOCAB_SIZE = 64
MODELS = (("qwen2", True), ("qwen3", False))
"""Family, and whether input and output embedding are one."""
TINY_SHAPE = {
    "vocab_size": VOCAB_SIZE,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
}
DTYPES = ("float32", "bfloat16")
SPLIT_LAW = "test_splitting_a_step_into_micro_batches_changes_nothing"
NOT_IN_BFLOAT16 = {SPLIT_LAW: "its metrics must agree to 1e-4, and a bfloat16 has 8 bits"}
MESHES: Mapping[str, Mapping[str, int]] = {"fsdp": {"fsdp_size": 2}, "tensor": {"tensor_parallel_size": 2}}
GRADIENT_RTOL = {"float32": 1e-4, "bfloat16": 0.1}
"""Of each tensor: ||g - g'|| over the larger of ||g|| and a thousandth of the whole gradient's norm."""
WEIGHT_ATOL = {"float32": 1e-5, "bfloat16": 2e-3}
"""After steps that move a weight by at most 3e-3: where a gradient is near 0, its rounding decides the direction."""
Figures = dict[str, Any]
Tensors = dict[str, np.ndarray]


def use(device: str, num_devices: int = 1) -> None:
    """Show JAX so many devices, before it looks for any; it compiles anew, and takes no memory ahead."""
    os.environ["XLA_PYTHON_CLIENT_PREALLOCATE"] = "false"
    jax.config.update("jax_compilation_cache_dir", None)
    jax.config.update("jax_platforms", device)
    if device == "cpu":
        # A rehearsal is not about speed, and most of its time would be the compiler's own optimizations.
        fast = "--xla_backend_optimization_level=0 --xla_llvm_disable_expensive_passes=true"
        os.environ["XLA_FLAGS"] = f"{os.environ.get('XLA_FLAGS', '')} {fast}".strip()
        jax.config.update("jax_num_cpu_devices", num_devices)
    else:
        jax.config.update("jax_cuda_visible_devices", ",".join(map(str, range(num_devices))))
    assert jax.device_count() == num_devices, jax.devices()


def random_model(directory: Path, config: Mapping[str, Any], *, scale: float = 0.2) -> Path:
    """Save random weights; the default is so large that attention matters to the logprobs."""
    directory.mkdir(parents=True)
    (directory / "config.json").write_text(json.dumps(config))
    rng = np.random.default_rng(0)
    tensors: Tensors = {}
    for name, param in named_parameters(abstract_causal_lm(read_config(directory))).items():
        for part in parts_of(name, param.shape):
            drawn = rng.standard_normal(shape_of(part, param.shape), np.float32)
            tensors[part.name] = (scale * drawn + ("norm" in name)).astype(np.float16)
    save_file(tensors, directory / "model.safetensors")
    return directory


def models_for(device: str) -> Sequence[tuple[str, bool]]:
    return MODELS if device == "cuda" else MODELS[:1]  # each is compiled for, and a CPU's check is a rehearsal


def tiny_model(directory: Path, family: str, *, is_tied: bool) -> Path:
    config = {"model_type": family, **TINY_SHAPE, "tie_word_embeddings": is_tied}
    return random_model(directory / f"{family}-{'tied' if is_tied else 'untied'}", config)


def tensors_of(stacked: Mapping[str, jax.Array]) -> Tensors:
    """Whole float32 tensors in host memory by Hugging Face name."""
    return {
        part.name: np.array(param)[part.indices]
        for name, param in stacked.items()
        for part in parts_of(name, param.shape)
    }


class ReadablePolicy(JaxPolicy):
    """Streams what NumPy can read: float32 in host memory."""

    def stream_weights(self, sink: WeightSink) -> None:
        def on_host(chunk: WeightChunk) -> None:
            sink(chunk._replace(array=np.asarray(chunk.array, np.float32)))

        super().stream_weights(on_host)


class DeviceContract(PolicyContract):
    """The laws of a policy on a device; see `gpu_trainer.DeviceContract` for what bfloat16 changes."""

    vocab_size = VOCAB_SIZE

    def __init__(self, model: Path, dtype: str) -> None:
        self._model, self._is_rounded = model, dtype == "bfloat16"
        eps = 1e-2 if self._is_rounded else 1e-4
        self._values = {"learning_rate": 1e-3, "eps": eps, "weight_decay": 0.1, "dtype": dtype}
        if self._is_rounded:
            self.logprob_atol, self.weight_atol = 0.05, 2e-4

    def make_policy(self) -> Policy:
        return ReadablePolicy.from_pretrained(self._model, JaxPolicyConfig(**self._values, compilation_cache_dir=None))

    def manifest(self, policy: Policy) -> Sequence[TensorSpec]:
        assert isinstance(policy, JaxPolicy)
        return weight_manifest(policy)

    def weights(self, policy: Policy) -> Tensors:
        assert isinstance(policy, JaxPolicy)
        return tensors_of(policy.params) if self._is_rounded else super().weights(policy)

    def laws(self) -> Iterator[Callable[..., None]]:
        """Those that hold in this precision."""
        for name in dir(self):
            if name.startswith("test_") and not (self._is_rounded and name in NOT_IN_BFLOAT16):
                yield getattr(self, name)


def jax_contract(device: str) -> Figures:
    use(device)
    figures: Figures = {}
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        for family, is_tied in models_for(device):
            model = tiny_model(folder, family, is_tied=is_tied)
            for dtype in DTYPES:
                laws = list(DeviceContract(model, dtype).laws())
                for law in laws:
                    print(family, dtype, law.__name__, flush=True)  # names the law that fails in the log's tail
                    empty = Path(tempfile.mkdtemp(dir=folder))
                    law(*[empty] * ("tmp_path" in signature(law).parameters))
                figures[f"{family} {dtype} laws"] = len(laws)
    return figures | {f"bfloat16 without {law}": reason for law, reason in NOT_IN_BFLOAT16.items()}


def build(model: Path, dtype: str, mesh: Mapping[str, int]) -> JaxPolicy:
    """On the first device, or on a mesh of both. Without decay of its first moment, that is the gradient."""
    config = JaxPolicyConfig(
        learning_rate=1e-3,
        betas=(0.0, 0.0),
        eps=1e-2 if dtype == "bfloat16" else 1e-4,
        max_grad_norm=1e9,
        loss=LossConfig(kl_coef=0.1, entropy_coef=0.01),
        dtype=dtype,
        compilation_cache_dir=None,
        **mesh,
    )
    return JaxPolicy.from_pretrained(model, config)


def take_steps(policy: JaxPolicy) -> tuple[Tensors, list[list[float]]]:
    """Gradients of the first step, and the metrics of all."""
    material, gradients, metrics = PolicyContract(), None, []
    for seed, count in ((0, 8), (1, 1), (2, 8)):  # with one sequence, a device along fsdp has only padding
        (shard,) = pack_batch(material.sequences(seed, count), micro_batch_tokens=40)
        step = policy.train_step(shard)
        gradients = gradients or tensors_of(policy.state.exp_avg)
        metrics.append([step.loss, step.grad_norm, step.entropy, step.kl_ref])
    assert gradients is not None
    return gradients, metrics


def jax_mesh(device: str) -> Figures:
    use(device, 2)
    figures: Figures = {}
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        for family, is_tied in models_for(device):
            model = tiny_model(folder, family, is_tied=is_tied)
            for dtype in DTYPES:
                alone = build(model, dtype, {})
                gradients, metrics = take_steps(alone)
                for mesh, sizes in MESHES.items():
                    policy, label = build(model, dtype, sizes), f"{mesh}-{dtype}-{model.name}"
                    found = compare(label, policy, alone, gradients, metrics, dtype)
                    policy.save(folder / label)
                    again = build(model, dtype, {})
                    again.restore(folder / label)
                    held, wanted = tensors_of(again.params), tensors_of(policy.params)
                    assert all((held[key] == tensor).all() for key, tensor in wanted.items()), (
                        f"{label} restored otherwise"
                    )
                    figures |= found
    return figures


def compare(
    label: str, policy: JaxPolicy, alone: JaxPolicy, wanted: Tensors, metrics: list[list[float]], dtype: str
) -> Figures:
    """The steps of two devices with those that one has taken."""
    gradients, ours = take_steps(policy)
    total = np.sqrt(sum(float((tensor**2).sum()) for tensor in wanted.values()))
    errors = {
        key: float(np.linalg.norm(gradients[key] - tensor) / max(np.linalg.norm(tensor), 1e-3 * total))
        for key, tensor in wanted.items()
    }
    worst = max(errors, key=errors.__getitem__)
    after = tensors_of(policy.params)
    diff = max(float(np.abs(after[key] - tensor).max()) for key, tensor in tensors_of(alone.params).items())
    figures = {f"{label} gradient_rel_error": errors[worst], f"{label} weight_diff": diff}
    assert total > 0, figures
    assert errors[worst] <= GRADIENT_RTOL[dtype], (worst, figures)
    assert diff <= WEIGHT_ATOL[dtype], figures
    if dtype == "float32":
        np.testing.assert_allclose(ours, metrics, rtol=1e-4, atol=1e-6)
    return figures


PATHS: Mapping[str, Callable[[str], Figures]] = {"jax-contract": jax_contract, "jax-mesh": jax_mesh}
