"""Fills a model that holds no memory yet from safetensors: each rank reads its own part of each tensor."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path

import torch
from torch import Tensor, nn

from dockyard_core.errors import ConfigError
from dockyard_core.tensor_files import WeightFiles, weight_files
from dockyard_trainer_torch.lora import is_adapter
from dockyard_trainer_torch.names import Part, parts_of, shape_of
from dockyard_trainer_torch.ranks import local
from dockyard_trainer_torch.sharded_files import region_of


def materialise(model: nn.Module, device: str) -> None:
    """Give every parameter on the meta device memory of its own, tied ones one; contents are arbitrary."""
    made: dict[nn.Parameter, nn.Parameter] = {}
    for module in model.modules():
        for name, param in list(module.named_parameters(recurse=False)):
            if not param.is_meta:
                continue
            if param not in made:
                made[param] = nn.Parameter(torch.empty_like(param, device=device), requires_grad=param.requires_grad)
            setattr(module, name, made[param])


@torch.no_grad()
def load_weights(model: nn.Module, model_dir: Path) -> None:
    """Read this rank's part of every parameter of a materialised model.

    Raises ConfigError when the files hold other names or shapes than the model.
    """
    params = {name: param for name, param in model.named_parameters() if not is_adapter(name)}
    with weight_files(model_dir, "pt") as files:
        _check_same(params, files, model, model_dir)
        for name, param in params.items():
            _load_one(name, param, files)
        for name, param in model.named_parameters(remove_duplicate=False):
            if name in files.names and name not in params:
                _check_tied(name, param, files)


def _load_one(name: str, param: nn.Parameter, files: WeightFiles) -> None:
    target, region = local(param), region_of(param)
    if not region.num_elements:
        return
    for part in parts_of(name, tuple(param.shape)):
        if part.row is None:
            target.copy_(files.read(part.name, region))
        elif region.offset[0] <= part.row < region.stop[0]:
            target[part.row - region.offset[0], part.start : part.stop] = files.read(part.name)


def _check_tied(name: str, param: nn.Parameter, files: WeightFiles) -> None:
    """Raise ConfigError when the file holds other values for a tied weight: transformers would not tie it then."""
    region = region_of(param)
    is_alike = files.shape(name) == tuple(param.shape)
    if is_alike and (not region.num_elements or torch.equal(local(param), files.read(name, region).to(local(param)))):
        return
    raise ConfigError(
        f"policy.model must hold a tied {name} equal to the input embedding or leave it out, got other values under "
        "tie_word_embeddings=true; set it to false in config.json"
    )


def _check_same(params: Mapping[str, Tensor], files: WeightFiles, model: nn.Module, model_dir: Path) -> None:
    parts = {part.name: (part, param) for name, param in params.items() for part in parts_of(name, tuple(param.shape))}
    # A tied output embedding may be in the file too; it is the input embedding once more.
    tied = {name for name, _ in model.named_parameters(remove_duplicate=False)}
    unknown = {name for name in files.names - parts.keys() - tied if not name.endswith("rotary_emb.inv_freq")}
    wrong = {*(parts.keys() - files.names), *unknown, *_misshapen(parts, files)}
    if wrong:
        first = min(wrong)
        held = files.shape(first) if first in files.names else "none"
        wanted = shape_of(parts[first][0], tuple(parts[first][1].shape)) if first in parts else "none"
        raise ConfigError(
            f"policy.model must hold the tensors its config.json describes, got {len(wrong)} differences in "
            f"{str(model_dir)!r}, first {first} (file: {held}, config: {wanted}); save it again with save_pretrained"
        )


def _misshapen(parts: Mapping[str, tuple[Part, Tensor]], files: WeightFiles) -> Iterator[str]:
    for name, (part, param) in parts.items():
        if name in files.names and files.shape(name) != shape_of(part, tuple(param.shape)):
            yield name
