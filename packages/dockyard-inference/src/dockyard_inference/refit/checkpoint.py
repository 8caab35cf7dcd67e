"""Which tensors an engine holds, by Hugging Face name: read from its checkpoint's headers."""

from __future__ import annotations

import json
import struct
from pathlib import Path
from typing import Any

from dockyard_core.errors import GeneratorError

_TIED = "lm_head.weight"
_COMPUTED = ".rotary_emb.inv_freq"


def held_tensors(model: str, *, is_tied: bool) -> dict[str, tuple[int, ...]]:
    """Name -> shape of every tensor a refit must bring.

    Engines fuse projections under names of their own, so the checkpoint that the engine was started
    from is what fixes the names. Tied tensors count once (without ``lm_head.weight``); tables that
    the model computes itself do not count.

    Args:
        model: a directory with ``*.safetensors``; anything else is built from its configuration,
            without memory, through transformers.
        is_tied: the model uses its embedding as its output layer.

    Raises:
        GeneratorError: the directory holds a damaged safetensors file.
    """
    files = sorted(Path(model).glob("*.safetensors")) if Path(model).is_dir() else []
    shapes: dict[str, tuple[int, ...]] = {}
    for path in files:
        shapes.update(_header_shapes(path))
    if not shapes:
        shapes = _shapes_from_config(model)
    return {
        name: shape
        for name, shape in shapes.items()
        if not name.endswith(_COMPUTED) and not (is_tied and name == _TIED)
    }


def _header_shapes(path: Path) -> dict[str, tuple[int, ...]]:
    with path.open("rb") as file:
        prefix = file.read(8)
        if len(prefix) != 8:
            raise GeneratorError(f"{path}: not a safetensors file: it has {len(prefix)} bytes")
        (length,) = struct.unpack("<Q", prefix)
        if length > path.stat().st_size - 8:
            raise GeneratorError(f"{path}: not a safetensors file: its header claims {length} bytes")
        header: dict[str, Any] = json.loads(file.read(length))
    return {name: tuple(entry["shape"]) for name, entry in header.items() if name != "__metadata__"}


def _shapes_from_config(model: str) -> dict[str, tuple[int, ...]]:
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM

    with torch.device("meta"):
        built = AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(model))
    return {name: tuple(parameter.shape) for name, parameter in built.named_parameters()}
