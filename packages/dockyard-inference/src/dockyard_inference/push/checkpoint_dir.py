"""Reads a checkpoint in Hugging Face's layout: its headers first, its bytes only when they are sent."""

from __future__ import annotations

import json
import mmap
import struct
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from dockyard_core.refit import TensorSpec
from dockyard_inference.push.errors import CheckpointError

if TYPE_CHECKING:
    import torch

_DTYPES = {"F64": "float64", "F32": "float32", "BF16": "bfloat16", "F16": "float16"}
_TIED = "lm_head.weight"
_COMPUTED = ".rotary_emb.inv_freq"
_MAX_HEADER_BYTES = 100 << 20


@dataclass(frozen=True, kw_only=True)
class Checkpoint:
    """The headers of a directory with ``config.json`` and ``*.safetensors``."""

    path: Path
    """Absolute, without links: a server reads it under this name."""
    config: dict[str, Any]
    specs: tuple[TensorSpec, ...]
    """In the order of the files' bytes; tied tensors once, without tables that a model computes itself."""
    places: dict[str, tuple[Path, int]]
    """Name -> file and offset of the first byte."""

    @property
    def num_bytes(self) -> int:
        """Bytes of all tensors."""
        return sum(spec.num_bytes for spec in self.specs)

    @property
    def shapes(self) -> dict[str, tuple[int, ...]]:
        """By name."""
        return {spec.name: spec.shape for spec in self.specs}

    @property
    def is_tied(self) -> bool:
        """Whether the model uses its embedding as its output layer."""
        return bool(self.config.get("tie_word_embeddings", False))

    def tensors(self) -> Iterator[tuple[TensorSpec, torch.Tensor]]:
        """Every tensor in the order of ``specs``, each a copy of its own."""
        import torch

        for spec in self.specs:
            path, offset = self.places[spec.name]
            with path.open("rb") as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as mapped:
                payload = bytearray(mapped[offset : offset + spec.num_bytes])
            dtype = getattr(torch, spec.dtype)
            empty = torch.empty(spec.shape, dtype=dtype)
            yield spec, torch.frombuffer(payload, dtype=dtype).view(spec.shape) if payload else empty


def read_checkpoint(directory: Path) -> Checkpoint:
    """Read the headers; of a checkpoint of ours, those of its ``hf`` folder.

    Raises:
        CheckpointError: says what the directory lacks.
    """
    if not directory.is_dir():
        raise CheckpointError(f"{directory} is not a directory: name one with config.json and *.safetensors")
    root = directory.resolve()
    if not (root / "config.json").is_file() and (root / "hf" / "config.json").is_file():
        root = (root / "hf").resolve()
    config = _config(root)
    if "quantization_config" in config:
        raise CheckpointError(f"{root} is quantized: push the checkpoint that it was made from")
    files = _files(root)
    specs: list[TensorSpec] = []
    places: dict[str, tuple[Path, int]] = {}
    for file in files:
        for spec, offset in _header(file):
            if spec.name in places:
                raise CheckpointError(f"{file} holds {spec.name}, which another file holds as well")
            places[spec.name] = (file, offset)
            specs.append(spec)
    is_tied = bool(config.get("tie_word_embeddings", False))
    kept = tuple(spec for spec in specs if not _is_left_out(spec.name, is_tied))
    if not kept:
        raise CheckpointError(f"{root} holds no tensors")
    return Checkpoint(path=root, config=config, specs=kept, places=places)


def _is_left_out(name: str, is_tied: bool) -> bool:
    return name.endswith(_COMPUTED) or (is_tied and name == _TIED)


def _config(root: Path) -> dict[str, Any]:
    path = root / "config.json"
    try:
        config = json.loads(path.read_text())
    except FileNotFoundError as error:
        raise CheckpointError(f"{root} has no config.json: name a checkpoint in Hugging Face's layout") from error
    except (OSError, ValueError) as error:
        raise CheckpointError(f"{path} cannot be read: {error}") from error
    if not isinstance(config, dict):
        raise CheckpointError(f"{path} is no JSON object")
    return config


def _files(root: Path) -> list[Path]:
    """The files that the index names, or all of them."""
    index = root / "model.safetensors.index.json"
    if not index.is_file():
        files = sorted(root.glob("*.safetensors"))
        if not files:
            raise CheckpointError(f"{root} has no *.safetensors: save the model with safetensors")
        return files
    try:
        names = sorted(set(json.loads(index.read_text())["weight_map"].values()))
    except (OSError, ValueError, KeyError, AttributeError) as error:
        raise CheckpointError(f"{index} cannot be read: {error!r}") from error
    missing = [name for name in names if not (root / name).is_file()]
    if missing:
        raise CheckpointError(f"{root} lacks {', '.join(missing[:4])}, which its index names")
    return [root / name for name in names]


def _header(path: Path) -> list[tuple[TensorSpec, int]]:
    """Specs in the order of their bytes, with the offset of each in the file."""
    size = path.stat().st_size
    with path.open("rb") as file:
        prefix = file.read(8)
        (length,) = struct.unpack("<Q", prefix) if len(prefix) == 8 else (-1,)
        if not 0 <= length <= min(size - 8, _MAX_HEADER_BYTES):
            raise CheckpointError(f"{path} is not a safetensors file, or is cut short")
        try:
            header = json.loads(file.read(length))
        except ValueError as error:
            raise CheckpointError(f"{path} has a damaged header: {error}") from error
    found = [_entry(path, name, entry, 8 + length, size) for name, entry in header.items() if name != "__metadata__"]
    return sorted(found, key=lambda pair: pair[1])


def _entry(path: Path, name: str, entry: Any, start: int, size: int) -> tuple[TensorSpec, int]:
    try:
        dtype, shape, (begin, end) = entry["dtype"], tuple(map(int, entry["shape"])), entry["data_offsets"]
    except (KeyError, TypeError, ValueError) as error:
        raise CheckpointError(f"{path}: the header of {name} is damaged") from error
    if dtype not in _DTYPES:
        raise CheckpointError(f"{path}: {name} has dtype {dtype}, can push {', '.join(_DTYPES)}")
    spec = TensorSpec(name, _DTYPES[dtype], shape)
    if end - begin != spec.num_bytes or not 0 <= begin <= end <= size - start:
        raise CheckpointError(f"{path} is cut short or damaged at {name}")
    return spec, start + begin
