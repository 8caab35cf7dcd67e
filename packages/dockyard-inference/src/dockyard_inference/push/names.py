"""Compares a checkpoint with what a server says that it serves, before anything is changed."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from pathlib import Path

from dockyard_core.errors import WeightMismatch
from dockyard_core.refit import check_bijection
from dockyard_inference.push.checkpoint_dir import Checkpoint, read_checkpoint
from dockyard_inference.push.errors import CheckpointError, NamesDiffer

_FUSED = {
    r"\.self_attn\.[qkv]_proj\.": ".self_attn.qkv_proj.",
    r"\.mlp\.(gate|up)_proj\.": ".mlp.gate_up_proj.",
}
_FAMILIES = ("llama", "mistral", "qwen2", "qwen3")
"""Model types whose parameters both engines name as above. Others are not compared by name alone."""
_COMPUTED = ("inv_freq", "cos_sin_cache", "_k_scale", "_v_scale", "_q_scale", "_prob_scale")


def check_against_directory(checkpoint: Checkpoint, served: str) -> str:
    """Compare names and shapes with the checkpoint that the server was started from.

    Returns:
        What was compared; empty if the directory cannot be read here.

    Raises:
        NamesDiffer: nothing was changed.
    """
    try:
        held = read_checkpoint(Path(served))
    except (CheckpointError, OSError):
        return ""
    try:
        check_bijection(checkpoint.specs, held.shapes, policy_version=-1)
    except WeightMismatch as error:
        raise NamesDiffer(f"{checkpoint.path} is not a checkpoint of the served {served}: {_plain(error)}") from error
    return "names and shapes"


def check_against_parameters(checkpoint: Checkpoint, served: Iterable[str]) -> str:
    """Compare names with those of the server's own parameters, which are fused.

    Returns:
        What was compared; empty for a family whose parameters are not known by name.

    Raises:
        NamesDiffer: nothing was changed.
    """
    if checkpoint.config.get("model_type") not in _FAMILIES:
        return ""
    wanted = {_fused(spec.name): () for spec in checkpoint.specs}
    ignored = ("lm_head.weight",) if checkpoint.is_tied else ()
    held = {name for name in served if not name.endswith(_COMPUTED) and name not in ignored}
    extra, missing = sorted(wanted.keys() - held), sorted(held - wanted.keys())
    if extra or missing:
        found = {"unknown to the server": extra, "missing from the directory": missing}
        said = "; ".join(f"{what}: {', '.join(names[:4])}" for what, names in found.items() if names)
        raise NamesDiffer(f"{checkpoint.path} is not a checkpoint of the served model: {said}")
    return "names"


def parameter_names(checksums: Iterable[Mapping[str, object]]) -> set[str]:
    """Names out of the checksums of all ranks; vLLM puts ``dp0:pp0:pcp0:tp0:`` before each."""
    return {name.rsplit(":", 1)[-1] for of_rank in checksums for name in of_rank}


def _fused(name: str) -> str:
    for pattern, replacement in _FUSED.items():
        name = re.sub(pattern, replacement, name)
    return name


def _plain(error: WeightMismatch) -> str:
    return str(error).rpartition(" (wanted policy version")[0]
