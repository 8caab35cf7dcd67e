"""Weights under their Hugging Face names: the manifest, the stream, and the export.

A tied output embedding appears once, under the name of the input embedding, as it does in a saved
checkpoint.
"""

from __future__ import annotations

import shutil
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor

from dockyard_core.policy import WeightChunk, WeightSink
from dockyard_core.refit import TensorSpec
from dockyard_trainer_torch.disk import save_tensors
from dockyard_trainer_torch.ranks import Ranks, whole

if TYPE_CHECKING:
    from torch import nn
    from transformers import PretrainedConfig

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
def gather(tensors: Mapping[str, Tensor], dtype: torch.dtype | None = None, *, is_kept: bool) -> dict[str, Tensor]:
    """Copies of whole tensors in host memory, one tensor at a time (collective).

    Args:
        tensors: equal names in equal order on every rank, sharded or not.
        dtype: None = each tensor's own.
        is_kept: False on ranks that only take part; they get nothing.
    """
    held = {}
    for name, tensor in tensors.items():
        gathered = whole(tensor).detach()
        if is_kept:
            # A tensor of the CPU would otherwise be handed out itself, and change with the next step.
            held[name] = gathered.to("cpu", dtype or gathered.dtype, copy=True).contiguous()
    return held


class ModelSource(NamedTuple):
    """What a Hugging Face directory holds besides weights."""

    config_class: type[PretrainedConfig]
    config: Mapping[str, Any]
    model_dir: Path
    """Where tokenizer files and the generation config are copied from."""

    @classmethod
    def of(cls, policy: TorchPolicy) -> ModelSource:
        """Of a policy, as it is now."""
        config = policy.causal_lm.config
        return cls(type(config), config.to_dict(), policy.model_dir)


def export_hf(policy: TorchPolicy, directory: Path) -> None:
    """Write config, safetensors and the source's tokenizer files: what AutoModelForCausalLM and engines load.

    Weights are in ``config.dtype``. Collective; rank 0 writes. Raises OSError there.
    """
    dtype: torch.dtype = getattr(torch, policy.config.dtype)
    is_writer = policy.ranks.rank == 0
    weights = gather(dict(named_weights(policy.causal_lm)), dtype, is_kept=is_writer)
    try:
        if is_writer:
            write_hf(ModelSource.of(policy), directory, lambda path: save_tensors(weights, path), dtype)
    finally:
        policy.ranks.barrier()


def write_hf(source: ModelSource, directory: Path, write_weights: Callable[[Path], None], dtype: torch.dtype) -> None:
    """Write a Hugging Face model directory (one rank).

    Args:
        source: config and tokenizer files.
        directory: made if missing.
        write_weights: puts the weights at the path it is given.
        dtype: the weights', for config.json.
    """
    directory.mkdir(parents=True, exist_ok=True)
    write_weights(directory / "model.safetensors")
    config = dict(source.config) | {"dtype": str(dtype).removeprefix("torch.")}
    source.config_class.from_dict(config).save_pretrained(directory)
    copied = [*_TOKENIZER_FILES, "generation_config"]
    for path in sorted(source.model_dir.iterdir()):
        if path.is_file() and path.name.startswith(tuple(copied)):
            shutil.copyfile(path, directory / path.name)
