"""The state of a policy at one moment, held in host memory, and the directory it is written to and restored from.

<directory>/                                         as the PyTorch trainer writes it for one rank
  config.json, model.safetensors, tokenizer files    a Hugging Face model, weights in float32
  optimizer.safetensors                              moments, by weight name
  trainer.json                                       format, version, updates, counters
"""

from __future__ import annotations

import json
import secrets
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import jax.numpy as jnp
import numpy as np
from safetensors import SafetensorError
from safetensors.numpy import load_file

from dockyard_core.errors import UserError
from dockyard_trainer_jax.disk import save_tensors, write_aside
from dockyard_trainer_jax.optim import MOMENTS
from dockyard_trainer_jax.weights import ModelSource, on_host, ordered_places, write_hf

if TYPE_CHECKING:
    from dockyard_trainer_jax.policy import JaxPolicy
    from dockyard_trainer_jax.step import Params

FORMAT = 2
_COUNTERS = ("version", "num_updates", "num_skipped_steps")


class JaxSnapshot:
    """Implements ``dockyard_core.policy.PolicySnapshot`` for one process.

    It shares no memory with the policy. Its methods are for one thread at a time.
    """

    def __init__(self, policy: JaxPolicy) -> None:
        self._weights = on_host(policy.params)
        state = policy.state
        self._moments = {
            f"{moment}.{name}": array for moment in MOMENTS for name, array in on_host(getattr(state, moment)).items()
        }
        self._source: ModelSource = policy.source
        self._export_dtype: str = policy.config.dtype
        self._meta: dict[str, Any] = {
            "format": FORMAT,
            "version": policy.version,
            "num_updates": policy.num_updates,
            "num_skipped_steps": policy.num_skipped_steps,
            "world_size": 1,
            "save": secrets.token_hex(8),
            "frozen": {},
            "shapes": sorted(policy.shapes),
            "config": policy.config.model_dump(mode="json"),
        }

    def write(self, directory: Path) -> None:
        """Write aside, fsync, rename; an existing directory is replaced.

        Raises OSError when the disk does not take it; ``directory`` is then as it was.
        """
        write_aside(Path(directory), self._write_files)

    def export(self, directory: Path) -> None:
        """Write a Hugging Face model in the policy's dtype, aside like `write`. Raises OSError."""
        dtype = self._export_dtype
        weights = {name: array.astype(jnp.dtype(dtype)) for name, array in self._weights.items()}
        write_aside(
            Path(directory),
            lambda aside: write_hf(self._source, aside, lambda path: save_tensors(weights, path), dtype),
        )

    def _write_files(self, aside: Path) -> None:
        write_hf(self._source, aside, lambda path: save_tensors(self._weights, path), "float32")
        save_tensors(self._moments, aside / "optimizer.safetensors", {"save": self._meta["save"]})
        (aside / "trainer.json").write_text(json.dumps(self._meta, indent=2) + "\n")


class Restored(NamedTuple):
    """What a checkpoint holds, in host memory, under the policy's own names."""

    params: dict[str, np.ndarray]
    moments: dict[str, np.ndarray]
    """``<moment>.<parameter>``."""
    counters: Mapping[str, int]
    shapes: list[Any]
    """Shapes that steps were compiled for before."""


def read_checkpoint(directory: Path, params: Params) -> Restored:
    """Read what a snapshot of one rank has written, here or in the PyTorch trainer.

    Raises UserError when the directory is no checkpoint, lacks files, is of another format, or holds other tensors.
    """
    meta = _read_meta(directory)
    held = _read_tensors(directory / "model.safetensors") | _read_tensors(directory / "optimizer.safetensors")
    held = {name: array for name, array in held.items() if not name.startswith(("rng", "cuda_rng"))}
    wanted = _shapes_of(params)
    different = wanted.items() ^ {(name, array.shape) for name, array in held.items()}
    if different:
        raise UserError(
            f"a checkpoint must hold the policy's tensors, got {len(different)} differences in {str(directory)!r}, "
            f"first {min(different)}; restore it with the model it was made from"
        )
    return Restored(
        params=_stacked(params, held, ""),
        moments={
            f"{moment}.{name}": array
            for moment in MOMENTS
            for name, array in _stacked(params, held, f"{moment}.").items()
        },
        counters={name: int(meta[name]) for name in _COUNTERS},
        shapes=meta.get("shapes", []),
    )


def _shapes_of(params: Params) -> dict[str, tuple[int, ...]]:
    weights = {part.name: tuple(params[name].shape)[len(part.indices) :] for name, part in ordered_places(params)}
    moments = {f"{moment}.{name}": shape for moment in MOMENTS for name, shape in weights.items()}
    return weights | moments


def _stacked(params: Params, held: Mapping[str, np.ndarray], prefix: str) -> dict[str, np.ndarray]:
    whole = {name: np.empty(param.shape, np.float32) for name, param in params.items()}
    for name, part in ordered_places(params):
        whole[name][part.indices] = held[prefix + part.name]
    return whole


def _read_meta(directory: Path) -> dict[str, Any]:
    path = directory / "trainer.json"
    if not path.is_file():
        raise UserError(f"a checkpoint has trainer.json, got {str(directory)!r}; give a directory written by save")
    try:
        meta: dict[str, Any] = dict(json.loads(path.read_text()))
    except (ValueError, TypeError) as error:
        raise UserError(
            f"trainer.json must be as save wrote it, got {str(path)!r} ({error!r}); copy it again, or restore another"
        ) from error
    if meta.get("format") != FORMAT:
        raise UserError(
            f"checkpoint format must be {FORMAT}, got {meta.get('format')!r}; restore it with its own release"
        )
    missing = {*_COUNTERS, "world_size", "frozen"} - meta.keys()
    if missing:
        raise UserError(
            f"trainer.json must be as save wrote it, got {str(path)!r} without {min(missing)!r}; restore another save"
        )
    if meta["world_size"] != 1 or meta["frozen"]:
        raise UserError(
            "a JAX policy restores what one rank wrote of a model that is trained whole, got "
            f"{meta['world_size']} ranks and {len(meta['frozen'])} frozen tensors; restore and save it on one rank of "
            "the PyTorch trainer first"
        )
    return meta


def _read_tensors(path: Path) -> dict[str, np.ndarray]:
    try:
        tensors: dict[str, np.ndarray] = load_file(path)
    except (OSError, SafetensorError) as error:
        raise UserError(
            f"a checkpoint's files must be whole safetensors, got {str(path)!r} ({error}); copy it again, or "
            "restore another save"
        ) from error
    return tensors
