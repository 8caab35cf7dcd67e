"""Fills a model that holds no memory yet from safetensors: each process reads what its devices hold, and no more."""

from __future__ import annotations

import itertools
import zlib
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path

import jax
import numpy as np
from flax import nnx

from dockyard_core.errors import ConfigError
from dockyard_core.regions import Region
from dockyard_core.tensor_files import WeightFiles, weight_files
from dockyard_trainer_jax.model import CausalLM, ComputeOptions, abstract_causal_lm
from dockyard_trainer_jax.model_config import ModelConfig, check_divides, read_config
from dockyard_trainer_jax.names import Part, named_parameters, num_stacked, parts_of, shape_of
from dockyard_trainer_jax.sharding import sharding_of

_NUM_SAMPLES = 256
_SAMPLE_BYTES = 4096

Shapes = Mapping[str, tuple[int, ...]]


def sampled_checksum(model_dir: Path) -> int:
    """Of the weights' files, of which it reads a little everywhere: enough to tell two models apart."""
    total = 0
    for path in sorted(model_dir.glob("*.safetensors")):
        total = zlib.crc32(f"{path.name} {path.stat().st_size}".encode(), total)
        with path.open("rb") as file:
            for number in range(_NUM_SAMPLES):
                file.seek(path.stat().st_size * number // _NUM_SAMPLES)
                total = zlib.crc32(file.read(_SAMPLE_BYTES), total)
    return total


def load_causal_lm(model_dir: Path, options: ComputeOptions | None = None) -> CausalLM:
    """The model of a directory, over the mesh of ``options``; no device ever holds more than its part.

    Raises ConfigError for another family or other tensors than config.json says, and for sizes that do not divide.
    """
    config, options = read_config(model_dir), options or ComputeOptions()
    if options.mesh is not None:
        check_divides(config, fsdp=options.mesh.shape["fsdp"], tp=options.mesh.shape["tp"])
    model = abstract_causal_lm(config, options)
    load_weights(model, model_dir)
    return model


def load_weights(model: CausalLM, model_dir: Path) -> None:
    """Give every parameter of an abstract model its values, float32, where the sharding table puts them.

    Raises ConfigError when the files hold other names, shapes or kinds of numbers than the model.
    """
    mesh = model.options.mesh
    state = nnx.state(model, nnx.Param)
    params = named_parameters(state)
    shapes = {name: tuple(param.shape) for name, param in params.items()}
    with weight_files(model_dir, "np") as files:
        _check_same(shapes, files, model.config, model_dir)
        for name, param in params.items():
            param.set_value(load_array(name, shapes[name], sharding_of(name, mesh), files.read))
    nnx.update(model, state)


def load_array(
    name: str, shape: tuple[int, ...], sharding: jax.sharding.Sharding, read: Callable[[str, Region], np.ndarray]
) -> jax.Array:
    """A parameter, or what lies as it does, in float32; each device's part is read by itself.

    Args:
        name: of the parameter.
        shape: its own, with its stacked dimensions.
        sharding: where it is to lie.
        read: gives a block of a Hugging Face tensor.
    """
    part_at = {part.indices: part for part in parts_of(name, shape)}
    num_leading = num_stacked(name)

    # Devices with copies of one block get one each: an array of JAX may share memory with numpy's, and a step takes
    # that of its parameters.
    def block(index: tuple[slice, ...] | None) -> np.ndarray:
        ranges = tuple(one.indices(size) for one, size in zip(index or (), shape, strict=True))
        return _read_block(ranges, num_leading, part_at, read)

    return jax.make_array_from_callback(shape, sharding, block, dtype=np.float32)


def _read_block(
    ranges: tuple[tuple[int, int, int], ...],
    num_leading: int,
    part_at: Mapping[tuple[int, ...], Part],
    read: Callable[[str, Region], np.ndarray],
) -> np.ndarray:
    leading, trailing = ranges[:num_leading], ranges[num_leading:]
    region = Region(tuple(start for start, _, _ in trailing), tuple(stop - start for start, stop, _ in trailing))
    values = np.empty([stop - start for start, stop, _ in ranges], np.float32)
    for indices in itertools.product(*(range(start, stop) for start, stop, _ in leading)):
        target = tuple(number - start for number, (start, _, _) in zip(indices, leading, strict=True))
        values[target] = read(part_at[indices].name, region)
    return values


def _check_same(shapes: Shapes, files: WeightFiles, config: ModelConfig, model_dir: Path) -> None:
    parts = {part.name: (part, shape) for name, shape in shapes.items() for part in parts_of(name, shape)}
    # A tied output embedding may be in the file too; it is the input embedding once more.
    tied = {"lm_head.weight"} if config.tie_word_embeddings else set()
    unknown = {name for name in files.names - parts.keys() - tied if not name.endswith("rotary_emb.inv_freq")}
    wrong = {*(parts.keys() - files.names), *unknown, *_misshapen(parts, files)}
    if wrong:
        first = min(wrong)
        held = files.shape(first) if first in files.names else "none"
        wanted = shape_of(*parts[first]) if first in parts else "none"
        raise ConfigError(
            f"policy.model must hold the tensors its config.json describes, got {len(wrong)} differences in "
            f"{str(model_dir)!r}, first {first} (file: {held}, config: {wanted}); save it again with save_pretrained"
        )
    for name in sorted(parts):
        if (dtype := files.dtype(name)) not in ("F32", "F16", "BF16"):
            raise ConfigError(
                f"policy.model must hold F32, F16 or BF16 tensors, got {dtype} for {name} in {str(model_dir)!r}; "
                "save it again in one of them"
            )


def _misshapen(parts: Mapping[str, tuple[Part, tuple[int, ...]]], files: WeightFiles) -> Iterator[str]:
    for name, (part, shape) in parts.items():
        if name in files.names and files.shape(name) != shape_of(part, shape):
            yield name
