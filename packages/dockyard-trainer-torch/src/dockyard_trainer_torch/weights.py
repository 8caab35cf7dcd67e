"""Weights under their Hugging Face names: the manifest, the stream, and the export.

A tied output embedding appears once, under the name of the input embedding, as it does in a saved
checkpoint.
"""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from dockyard_core.policy import WeightChunk, WeightSink
from dockyard_core.refit import TensorSpec
from dockyard_trainer_torch.ranks import Ranks, whole

if TYPE_CHECKING:
    from torch import nn

    from dockyard_trainer_torch.policy import TorchPolicy

_TOKENIZER_FILES = ("tokenizer", "vocab", "merges", "special_tokens_map", "added_tokens", "chat_template")


def named_weights(model: nn.Module) -> Iterator[tuple[str, nn.Parameter]]:
    """Every parameter once, in the model's own order, which is the order of the manifest."""
    return iter(model.named_parameters(remove_duplicate=True))


def weight_manifest(policy: TorchPolicy) -> tuple[TensorSpec, ...]:
    """Names, dtypes and whole shapes of what ``policy.stream_weights`` hands out, in its order."""
    return tuple(
        TensorSpec(name, policy.config.dtype, tuple(param.shape)) for name, param in named_weights(policy.causal_lm)
    )


@torch.no_grad()
def stream(model: nn.Module, sink: WeightSink, *, dtype: torch.dtype, ranks: Ranks) -> None:
    """Hand whole tensors to this rank's sink; when any rank's sink raises, every rank raises.

    Raises what the sink raised on the rank where it did, RuntimeError on the others.
    """
    for name, param in named_weights(model):
        tensor = whole(param).detach().to(dtype)
        is_failed = True
        try:
            sink(WeightChunk(name, tuple(tensor.shape), (0,) * tensor.ndim, tensor))
            is_failed = False
        finally:
            is_failed_anywhere = ranks.any(is_failed)
        if is_failed_anywhere:
            raise RuntimeError(f"the weight sink of another rank raised at {name!r}; see that rank's error")


@torch.no_grad()
def gather_weights(model: nn.Module, dtype: torch.dtype) -> dict[str, Tensor]:
    """Every weight as a whole, contiguous CPU tensor (collective)."""
    return {name: whole(param).detach().to("cpu", dtype).contiguous() for name, param in named_weights(model)}


def export_hf(policy: TorchPolicy, directory: Path) -> None:
    """Write config, safetensors and the source's tokenizer files: what AutoModelForCausalLM and engines load.

    Weights are in ``config.dtype``. Collective; rank 0 writes.
    """
    dtype: torch.dtype = getattr(torch, policy.config.dtype)
    weights = gather_weights(policy.causal_lm, dtype)
    if policy.ranks.rank == 0:
        write_hf(policy, directory, weights, dtype)
    policy.ranks.barrier()


def write_hf(policy: TorchPolicy, directory: Path, weights: dict[str, Tensor], dtype: torch.dtype) -> None:
    """Write already gathered weights as a Hugging Face model directory (one rank)."""
    from safetensors.torch import save_file

    directory.mkdir(parents=True, exist_ok=True)
    save_file(weights, directory / "model.safetensors", metadata={"format": "pt"})
    config = policy.causal_lm.config.to_dict() | {"dtype": str(dtype).removeprefix("torch.")}
    type(policy.causal_lm.config).from_dict(config).save_pretrained(directory)
    copied = [*_TOKENIZER_FILES, "generation_config"]
    for path in sorted(policy.model_dir.iterdir()):
        if path.is_file() and path.name.startswith(tuple(copied)):
            shutil.copyfile(path, directory / path.name)
