"""The checkpoint that every trainer writes and every trainer restores, on any number of ranks.

<directory>/
  model.safetensors                        weights in float32, by Hugging Face name: each expert and layer by itself
  optimizer.safetensors                    ``exp_avg.<name>`` and ``exp_avg_sq.<name>`` in float32; random states
  trainer.json                             format, version, updates, counters, and which save the files belong to
  config.json, tokenizer files             where one rank wrote a model that is trained whole

A rank is a process of the PyTorch trainer, or a device of several processes of the JAX one; one process of JAX writes
as one rank, whatever devices it has. Rank r of W > 1 (from 1) writes ``model-0000r-of-0000W.safetensors`` and
``optimizer-0000r-of-0000W.safetensors``: the blocks that it holds, under the names of the whole tensors. The header
says where each block begins, as ``torch.distributed.checkpoint`` does in its safetensors storage, whose
``HuggingFaceStorageReader`` reads these files too.

Only trained tensors are held. Frozen ones (the base under adapters) are named with their shapes in trainer.json,
because a checkpoint fits no other base. A random state, ``rng.<rank>``, is for the trainer that wrote it.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from dockyard_core.errors import UserError
from dockyard_core.regions import BlockIndex, Region

FORMAT = 3
"""1: of one rank only, ``rng`` without its number. 2: a fused tensor of experts under its own name."""
MOMENTS = ("exp_avg", "exp_avg_sq")
COUNTERS = ("version", "num_updates", "num_skipped_steps")
OFFSETS_KEY = "DCP_SHARDING_INFO"
"""Header entry of torch.distributed.checkpoint: ``{name: {"saved_offsets": [...]}}``."""

_KINDS = ("model", "optimizer")
_META_KINDS: Mapping[str, type] = {
    **dict.fromkeys((*COUNTERS, "world_size"), int),
    "save": object,
    "frozen": dict,
}
_RANDOM = ("rng", "cuda_rng")

Shapes = Mapping[str, tuple[int, ...]]


def file_name(kind: str, rank: int, world_size: int) -> str:
    """Name of a rank's file, counted from 1; plain ``<kind>.safetensors`` for one rank."""
    return f"{kind}.safetensors" if world_size == 1 else f"{kind}-{rank + 1:05d}-of-{world_size:05d}.safetensors"


def tensor_files(directory: Path, world_size: int) -> list[Path]:
    """Every file of tensors of a checkpoint of so many ranks."""
    return [directory / file_name(kind, rank, world_size) for kind in _KINDS for rank in range(world_size)]


def with_offsets(metadata: Mapping[str, str], regions: Mapping[str, Region]) -> dict[str, str]:
    """The header of a file of blocks."""
    offsets = {name: {"saved_offsets": list(region.offset)} for name, region in regions.items()}
    return {**metadata, OFFSETS_KEY: json.dumps(offsets)}


def saved_regions(shapes: Shapes, metadata: Mapping[str, str]) -> dict[str, Region]:
    """The blocks that a file holds, of their shapes and its header; one without an offset is its whole tensor."""
    offsets = json.loads(metadata.get(OFFSETS_KEY, "{}"))
    return {
        name: Region(tuple(offsets[name]["saved_offsets"]), shape) if name in offsets else Region.whole(shape)
        for name, shape in shapes.items()
    }


def read_meta(directory: Path) -> dict[str, Any]:
    """trainer.json, in the shape of the newest format but for the number of its own.

    Raises UserError when the directory is no checkpoint, or of another format.
    """
    path = directory / "trainer.json"
    if not path.is_file():
        raise UserError(f"a checkpoint has trainer.json, got {str(directory)!r}; give a directory written by save")
    try:
        meta = json.loads(path.read_text())
        found = meta["format"]
    except (ValueError, KeyError, TypeError) as error:
        raise UserError(
            f"trainer.json must be as save wrote it, got {str(path)!r} ({error!r}); copy it again, or restore another"
        ) from error
    if found not in range(1, FORMAT + 1):
        raise UserError(f"checkpoint format must be at most {FORMAT}, got {found!r}; restore it with its own release")
    if found == 1:  # one rank wrote it, one update made a version, everything was trained
        meta = dict(meta) | {"num_updates": meta.get("version"), "world_size": 1, "save": None, "frozen": {}}
    missing = _META_KINDS.keys() - meta.keys()
    if missing:
        raise UserError(
            f"trainer.json must be as save wrote it, got {str(path)!r} without {min(missing)!r}; restore another save"
        )
    meta = {"config": {}, **meta}
    wrong = [name for name, kind in {**_META_KINDS, "config": dict}.items() if not isinstance(meta[name], kind)]
    if wrong:
        raise UserError(
            f"trainer.json must be as save wrote it, got {str(path)!r} with {wrong[0]} = {meta[wrong[0]]!r}; restore "
            "another save"
        )
    return meta


def check_one_save(headers: Mapping[Path, Mapping[str, str]], meta: Mapping[str, Any], directory: Path) -> None:
    """Raise UserError when files of two saves lie in the directory.

    Args:
        headers: of every file of tensors.
        meta: trainer.json.
        directory: of the checkpoint.
    """
    for path, metadata in headers.items():
        # Weights of one rank have no name of a save, so that equal weights are equal files.
        is_named = meta["save"] is not None and path.name != "model.safetensors"
        if is_named and metadata.get("save") != meta["save"]:
            raise UserError(
                f"a checkpoint's files must be of one save, got {path.name!r} of save {metadata.get('save')!r} beside "
                f"trainer.json of {meta['save']!r} in {str(directory)!r}; copy one whole directory"
            )
    declared = {path.name for path in headers}
    others = {path.name for kind in _KINDS for path in directory.glob(f"{kind}*.safetensors")} - declared
    if others:
        raise UserError(
            f"a checkpoint of {meta['world_size']} ranks has {len(declared)} files of tensors, got {min(others)!r} "
            f"beside them in {str(directory)!r}; copy one whole directory"
        )


def check_same_adapters(wanted: Mapping[str, Any] | None, meta: Mapping[str, Any], directory: Path) -> None:
    """Raise UserError for other adapters: of another alpha, the same tensors are another policy."""
    held = meta.get("config", {}).get("lora")
    if held != wanted:
        raise UserError(
            f"a checkpoint must be restored with the adapters it was trained with, got lora={wanted} for "
            f"{held} in {str(directory)!r}; set lora to the checkpoint's"
        )


def check_same_tensors(
    trained: Shapes, frozen: Shapes, blocks: BlockIndex, meta: Mapping[str, Any], directory: Path
) -> None:
    """Raise UserError unless the files hold weights and moments of these tensors, every element once.

    Args:
        trained: whole shapes of the policy's trained tensors, by name.
        frozen: of its other ones.
        blocks: of every file of tensors.
        meta: trainer.json.
        directory: of the checkpoint.
    """
    moments = {f"{moment}.{name}": tuple(shape) for moment in MOMENTS for name, shape in trained.items()}
    wanted = {**trained, **moments, **_marked(frozen)}
    held = {name: shape for name, shape in blocks.shapes.items() if not _is_random(name)}
    held |= _marked(meta["frozen"])
    different = wanted.items() ^ held.items()
    if different:
        raise UserError(
            f"a checkpoint must hold the policy's tensors, got {len(different)} differences in {str(directory)!r}, "
            f"first {min(different)}; restore it with the model it was made from"
        )
    incomplete = blocks.incomplete
    if incomplete:
        raise UserError(
            f"the files of a checkpoint must hold every element once, got {len(incomplete)} tensors that they "
            f"do not, first {min(incomplete)!r} in {str(directory)!r}; restore another save"
        )


def _marked(frozen: Mapping[str, Iterable[int]]) -> dict[str, tuple[int, ...]]:
    return {f"{name} (frozen)": tuple(shape) for name, shape in frozen.items()}


def _is_random(name: str) -> bool:
    return name.startswith(tuple(f"{kind}." for kind in _RANDOM)) or name in _RANDOM
