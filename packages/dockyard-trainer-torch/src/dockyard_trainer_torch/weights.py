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
from dockyard_trainer_torch.lora import is_adapter, lora_parents, merged_weight
from dockyard_trainer_torch.names import parts_of, shape_of
from dockyard_trainer_torch.ranks import Ranks, whole

if TYPE_CHECKING:
    from torch import nn
    from transformers import PretrainedConfig

    from dockyard_trainer_torch.policy import TorchPolicy

_TOKENIZER_FILES = ("tokenizer", "vocab", "merges", "special_tokens_map", "added_tokens", "chat_template")


def named_weights(model: nn.Module) -> Iterator[tuple[str, nn.Parameter]]:
    """Every weight once, in the model's own order, which is the order of the manifest; no adapters."""
    return ((name, param) for name, param in model.named_parameters(remove_duplicate=True) if not is_adapter(name))


def weight_manifest(policy: TorchPolicy) -> tuple[TensorSpec, ...]:
    """Names, dtypes and whole shapes of what ``policy.stream_weights`` hands out, in its order."""
    return tuple(
        TensorSpec(part.name, policy.config.dtype, shape_of(part, tuple(param.shape)))
        for name, param in named_weights(policy.causal_lm)
        for part in parts_of(name, tuple(param.shape))
    )


@torch.no_grad()
def hf_tensors(model: nn.Module) -> Iterator[tuple[str, Tensor]]:
    """Whole tensors by Hugging Face name, in the manifest's order, adapters merged (collective).

    One parameter is gathered at a time; a tensor may share its memory, and is valid until the next one.
    """
    adapted = lora_parents(model)
    for name, param in named_weights(model):
        tensor = merged_weight(adapted[name]) if name in adapted else whole(param).detach()
        for part in parts_of(name, tuple(param.shape)):
            yield part.name, tensor if part.row is None else tensor[part.row, part.start : part.stop]


@torch.no_grad()
def stream(model: nn.Module, sink: WeightSink, *, dtype: torch.dtype, ranks: Ranks) -> None:
    """Hand whole tensors to this rank's sink; when any rank's sink raises, every rank raises.

    Raises what the sink raised on the rank where it did, RuntimeError on the others.
    """
    for name, whole_tensor in hf_tensors(model):
        tensor = whole_tensor.to(dtype)
        with ranks.together(RuntimeError(f"the weight sink of another rank raised at {name!r}; see that rank's error")):
            sink(WeightChunk(name, tuple(tensor.shape), (0,) * tensor.ndim, tensor))


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
