"""Weights under their Hugging Face names: the manifest, the stream, and what else a model directory holds.

A tied output embedding appears once, under the name of the input embedding, as it does in a saved checkpoint.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable, Iterator, Mapping
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import jax
import numpy as np
from jax import Array

from dockyard_core.policy import WeightChunk, WeightSink
from dockyard_core.refit import TensorSpec
from dockyard_trainer_jax.lora import adapters_beside, base_of, merged_part
from dockyard_trainer_jax.names import Part, num_stacked, parts_of, shape_of
from dockyard_trainer_jax.sharding import whole_here

if TYPE_CHECKING:
    from dockyard_core.optimizer_config import LoraConfig
    from dockyard_trainer_jax.policy import JaxPolicy
    from dockyard_trainer_jax.ranks import Ranks
    from dockyard_trainer_jax.step import Params

_COPIED = ("tokenizer", "vocab", "merges", "special_tokens_map", "added_tokens", "chat_template", "generation_config")
_STAGES = ("model.embed_tokens.", "model.layers.", "model.norm.", "lm_head.")
_IN_LAYER: tuple[tuple[str, ...], ...] = (
    *((f".{name}.",) for name in ("q_proj", "k_proj", "v_proj", "o_proj", "q_norm", "k_norm")),
    # Hugging Face's model has gate and up of all experts in one parameter, in front of all down projections.
    (".experts.gate_proj.", ".experts.up_proj."),
    (".experts.down_proj.",),
    (".mlp.gate.",),
    *((f".{name}.",) for name in ("mlp.gate_proj", "mlp.up_proj", "mlp.down_proj")),
    (".input_layernorm.",),
    (".post_attention_layernorm.",),
)
"""What a layer is made of, in the order of Hugging Face's models; those of one entry take turns, expert by expert."""


class Place(NamedTuple):
    """Where a Hugging Face tensor lies."""

    param: str
    part: Part


def ordered_places(params: Mapping[str, Any]) -> list[Place]:
    """Every tensor once, in the order of Hugging Face's own model, which is that of the manifest."""
    places = [Place(name, part) for name, param in params.items() for part in parts_of(name, tuple(param.shape))]
    return sorted(places, key=_rank)


def _rank(place: Place) -> tuple[int, ...]:
    name, indices = place.param, place.part.indices
    stage = next(index for index, prefix in enumerate(_STAGES) if name.startswith(prefix))
    is_bias = name.endswith(".bias")
    if not num_stacked(name):
        return stage, is_bias
    group, turn = next(
        (number, words.index(word)) for number, words in enumerate(_IN_LAYER) for word in words if word in name
    )
    return stage, indices[0], group, *indices[1:], turn, is_bias


def weight_manifest(policy: JaxPolicy) -> tuple[TensorSpec, ...]:
    """Names, dtypes and whole shapes of what ``policy.stream_weights`` hands out, in its order."""
    params = base_of(policy.params | policy.frozen)
    return tuple(
        TensorSpec(place.part.name, policy.config.dtype, shape_of(place.part, tuple(params[place.param].shape)))
        for place in ordered_places(params)
    )


@partial(jax.jit, static_argnames="dtype")
def _part_of(param: Array, indices: Array, dtype: str) -> Array:
    """The tensor at these leading indices: an argument, so that a layer's slice is compiled once."""
    for axis in range(indices.shape[0]):
        param = jax.lax.dynamic_index_in_dim(param, indices[axis], keepdims=False)
    return param.astype(dtype)


def hf_tensors(params: Params, dtype: str, lora: LoraConfig | None) -> Iterator[tuple[str, Array]]:
    """Whole tensors by Hugging Face name on one device, in the manifest's order, adapters merged; one at a time."""
    sharding = next(iter(params.values())).sharding
    for name, part in ordered_places(base_of(params)):
        adapters = adapters_beside(name, params)
        if adapters is None or lora is None:
            tensor = _part_of(params[name], np.asarray(part.indices, np.int32), dtype)
        else:
            tensor = merged_part(params[name], adapters, part, scale=lora.scale, dtype=dtype)
        yield part.name, whole_here(tensor, sharding)


def stream(params: Params, sink: WeightSink, *, dtype: str, lora: LoraConfig | None, ranks: Ranks) -> None:
    """Hand whole tensors to this process's sink; when any process's sink raises, every process raises.

    Raises what the sink raised on the process where it did, RuntimeError on the others.
    """
    for name, tensor in hf_tensors(params, dtype, lora):
        with ranks.together(RuntimeError(f"the weight sink of another rank raised at {name!r}; see that rank's error")):
            sink(WeightChunk(name, tuple(tensor.shape), (0,) * tensor.ndim, tensor))


class ModelSource(NamedTuple):
    """What a Hugging Face directory holds besides weights."""

    config: Mapping[str, Any]
    """config.json as it was read."""
    model_dir: Path
    """Where tokenizer files and the generation config are copied from."""

    @classmethod
    def of(cls, model_dir: Path) -> ModelSource:
        """Of a directory that has been loaded."""
        return cls(json.loads((model_dir / "config.json").read_text()), model_dir)


def write_hf(source: ModelSource, directory: Path, write_weights: Callable[[Path], None], dtype: str) -> None:
    """Fill a Hugging Face model directory.

    Args:
        source: config and tokenizer files.
        directory: made if missing.
        write_weights: puts the weights at the path it is given.
        dtype: the weights', for config.json.
    """
    directory.mkdir(parents=True, exist_ok=True)
    write_weights(directory / "model.safetensors")
    config = {name: value for name, value in source.config.items() if name != "torch_dtype"} | {"dtype": dtype}
    (directory / "config.json").write_text(json.dumps(config, indent=2) + "\n")
    for path in sorted(source.model_dir.iterdir()):
        if path.is_file() and path.name.startswith(_COPIED):
            shutil.copyfile(path, directory / path.name)
