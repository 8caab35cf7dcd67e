"""The check of tools/gpu_check.py that compares two ranks of the torch trainer with one; see `gpu_paths`."""

from __future__ import annotations

import json
import multiprocessing
import os
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from gpu_trainer import (  # type: ignore[import-not-found]
    MODELS,
    VOCAB_SIZE,
    Figures,
    one_group,
    random_sequences,
    tiny_model,
)
from torch import Tensor, distributed

from dockyard_core.batch import pack_batch
from dockyard_core.loss_config import LossConfig
from dockyard_trainer_torch import TorchPolicy, TorchPolicyConfig
from dockyard_trainer_torch.ranks import whole

GRADIENT_RTOL = {"float32": 1e-4, "bfloat16": 0.1}
"""Of each parameter: ||g - g'|| over the larger of ||g|| and a thousandth of the whole gradient's norm."""
WEIGHT_ATOL = {"float32": 1e-5, "bfloat16": 2e-3}
"""After steps that move a weight by at most 3e-3: where a gradient is near 0, its rounding decides the direction."""


class Mesh(NamedTuple):
    """How two ranks share a policy."""

    name: str
    dtype: str = "float32"
    changes: Mapping[str, Any] = {}
    """To the configuration of one rank."""


MESHES = (
    Mesh("fsdp"),
    Mesh("fsdp-offload", changes={"cpu_offload": True, "reference_offload": True}),
    Mesh("tensor", changes={"tensor_parallel_size": 2}),
    Mesh("fsdp", "bfloat16"),
    Mesh("tensor", "bfloat16", changes={"tensor_parallel_size": 2}),
)


class Taken(NamedTuple):
    """What a few steps left."""

    gradients: dict[str, Tensor]
    """Of the first step, whole, in host memory."""
    weights: dict[str, Tensor]
    """After the last one, whole, as the optimizer holds them."""
    metrics: list[list[float]]


def build(model: Path, device: str, mesh: Mesh, group: Any = None) -> TorchPolicy:
    """On one rank, or on those of a group."""
    config = TorchPolicyConfig(
        learning_rate=1e-3,
        eps=1e-2 if mesh.dtype == "bfloat16" else 1e-4,
        max_grad_norm=1e9,
        loss=LossConfig(kl_coef=0.1, entropy_coef=0.01),
        dtype=mesh.dtype,
        device=device,
        **(mesh.changes if group is not None else {}),
    )
    return TorchPolicy.from_pretrained(model, config, process_group=group)


def take_steps(policy: TorchPolicy) -> Taken:
    gradients: dict[str, Tensor] = {}

    def keep_first(*_: Any) -> None:
        if not gradients:
            params = list(policy.causal_lm.named_parameters())
            gradients.update({name: whole(param.grad).to("cpu", copy=True) for name, param in params})

    policy.optimizer.register_step_pre_hook(keep_first)
    metrics = []
    for seed, count in ((0, 7), (1, 1), (2, 7)):  # with one sequence, all data ranks but one have only padding
        sequences = random_sequences(seed, count, (6, 16), VOCAB_SIZE)
        shards = pack_batch(sequences, num_ranks=policy.num_data_ranks, micro_batch_tokens=40)
        step = policy.train_step(shards[policy.data_rank])
        metrics.append([step.loss, step.grad_norm, step.entropy, step.kl_ref])
    return Taken(gradients, streamed_weights(policy), metrics)


def streamed_weights(policy: TorchPolicy) -> dict[str, Tensor]:
    """Whole float32 weights in host memory; what is streamed must be they, rounded to the policy's dtype."""
    streamed: dict[str, Tensor] = {}
    policy.stream_weights(lambda chunk: streamed.update({chunk.name: chunk.array.to("cpu", copy=True)}))
    params = policy.causal_lm.named_parameters()
    weights = {name: whole(param).detach().to("cpu", copy=True) for name, param in params}
    assert streamed.keys() == weights.keys()
    assert all(torch.equal(streamed[name], tensor.to(streamed[name].dtype)) for name, tensor in weights.items())
    return weights


def work_as_rank(rank: int, device: str, folder: Path, models: Sequence[Path]) -> None:
    """The other processes of `trainer_nccl`: every mesh and model in turn, and a checkpoint of each."""
    from safetensors.torch import save_file

    torch.set_num_threads(1 if device == "cpu" else torch.get_num_threads())
    with one_group(rank, 2, device, folder):
        for mesh, model in meshes_and_models(models):
            policy = build(model, device, mesh, distributed.group.WORLD)
            taken = take_steps(policy)
            path = folder / f"{mesh.name}-{mesh.dtype}-{model.name}"
            policy.save(path)
            if rank == 0:
                save_file(taken.gradients, path.with_suffix(".gradients"))
                save_file(taken.weights, path.with_suffix(".weights"))
                path.with_suffix(".json").write_text(json.dumps(taken.metrics))
    # As in the tests: a thread of torch's may abort the interpreter's own end, which says nothing about the ranks.
    os._exit(0)


def meshes_and_models(models: Sequence[Path]) -> Iterator[tuple[Mesh, Path]]:
    return ((mesh, model) for mesh in MESHES for model in models)


def trainer_nccl(device: str) -> Figures:
    from safetensors.torch import load_file

    torch.set_num_threads(1 if device == "cpu" else torch.get_num_threads())
    figures: Figures = {}
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        models = [tiny_model(folder, family, is_tied=is_tied) for family, is_tied in MODELS]
        context = multiprocessing.get_context("spawn")
        ranks = [context.Process(target=work_as_rank, args=(rank, device, folder, models)) for rank in range(2)]
        for process in ranks:
            process.start()
        for process in ranks:
            process.join()
        assert [process.exitcode for process in ranks] == [0, 0], "a rank did not end well"
        for mesh, model in meshes_and_models(models):
            path = folder / f"{mesh.name}-{mesh.dtype}-{model.name}"
            gradients, weights = (load_file(path.with_suffix(suffix)) for suffix in (".gradients", ".weights"))
            theirs = Taken(gradients, weights, json.loads(path.with_suffix(".json").read_text()))
            figures |= compare(path.name, theirs, build(model, device, mesh), mesh.dtype, path)
    return figures


def compare(name: str, theirs: Taken, alone: TorchPolicy, dtype: str, checkpoint: Path) -> Figures:
    """The steps of two ranks with those of one, and their checkpoint restored on one."""
    ours = take_steps(alone)
    total = torch.stack([tensor.norm() for tensor in ours.gradients.values()]).norm()
    errors = {
        key: float((theirs.gradients[key] - tensor).norm() / max(tensor.norm(), 1e-3 * total))
        for key, tensor in ours.gradients.items()
    }
    worst = max(errors, key=errors.__getitem__)
    diff = max(float((theirs.weights[key] - tensor).abs().max()) for key, tensor in ours.weights.items())
    figures = {f"{name} gradient_rel_error": errors[worst], f"{name} weight_diff": diff}
    assert total > 0, figures
    assert errors[worst] <= GRADIENT_RTOL[dtype], (worst, figures)
    assert diff <= WEIGHT_ATOL[dtype], figures
    if dtype == "float32":
        np.testing.assert_allclose(theirs.metrics, ours.metrics, rtol=1e-4, atol=1e-6)
    alone.restore(checkpoint)
    restored = streamed_weights(alone)
    assert all(torch.equal(restored[key], tensor) for key, tensor in theirs.weights.items()), (
        f"{name} restored otherwise"
    )
    return figures


PATHS: Mapping[str, Callable[[str], Figures]] = {"trainer-nccl": trainer_nccl}
