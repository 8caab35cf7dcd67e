"""Orbax checkpoints: the same state under the model's own names, for tools that read Orbax's files.

<directory>/
  orbax.json    format, version, updates, counters, and the shapes and files of what is in state
  state/        an Orbax checkpoint of the tree {"params", "exp_avg", "exp_avg_sq"}, each by parameter name (`names`)

`JaxPolicy.save` is what the PyTorch trainer reads too.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING, Any

import jax
import orbax.checkpoint as ocp

from dockyard_core.checkpoint_format import COUNTERS, MOMENTS
from dockyard_core.directories import disk_error, write_aside_together
from dockyard_core.errors import UserError
from dockyard_trainer_jax.checkpoint import check_adapters
from dockyard_trainer_jax.optim import AdamState
from dockyard_trainer_jax.state import counted, meta_of

if TYPE_CHECKING:
    from dockyard_trainer_jax.policy import JaxPolicy
    from dockyard_trainer_jax.step import Params

_FORMAT = 1
_META, _STATE = "orbax.json", "state"
_KEYS = {*COUNTERS, "trained", "frozen", "config", "files"}


def save_orbax(policy: JaxPolicy, directory: Path) -> None:
    """Write weights, moments and counters with Orbax; an existing directory is replaced whole (collective).

    Raises OSError when the disk does not take it; ``directory`` is then as it was.
    """
    directory = Path(directory).absolute()  # Orbax takes no other
    meta = meta_of(policy) | {"format": _FORMAT, "trained": _shapes(policy.params)}

    def write(aside: Path) -> None:
        try:
            with _checkpointer() as checkpointer:
                checkpointer.save(aside / _STATE, args=ocp.args.PyTreeSave(_tree(policy)))
        except (ValueError, jax.errors.JaxRuntimeError) as error:  # Orbax has errors of the disk in words only
            raise disk_error(error, directory) from error
        if policy.ranks.rank == 0:  # the files of all processes are there now
            (aside / _META).write_text(json.dumps(meta | {"files": _file_sizes(aside)}, indent=2) + "\n")

    write_aside_together(directory, write, policy.ranks)


def restore_orbax(policy: JaxPolicy, directory: Path) -> None:
    """Read what `save_orbax` wrote from any mesh and any number of processes; the next step is the one after.

    Collective. Raises UserError on every process when the directory is no such checkpoint, is incomplete, or holds
    another model; the policy is then unchanged.
    """
    directory = Path(directory).absolute()
    elsewhere = UserError(f"another rank could not read {str(directory)!r}; see that rank's error")
    with policy.ranks.together(elsewhere):
        meta = _read_meta(directory)
        check_adapters(policy, meta, directory)
        _check_same(policy, meta, directory)
        _check_whole(meta, directory)
    places = jax.tree.map(
        lambda array: jax.ShapeDtypeStruct(array.shape, array.dtype, sharding=array.sharding), _tree(policy)
    )
    arguments = ocp.args.PyTreeRestore(places, restore_args=ocp.checkpoint_utils.construct_restore_args(places))
    with policy.ranks.together(elsewhere):
        tree = _restored(directory, arguments)
    count = counted(int(meta["num_updates"]), policy.state.count.sharding)
    policy.params = tree["params"]
    policy.state = AdamState(count, *(tree[moment] for moment in MOMENTS))
    policy.resume(meta)


def _restored(directory: Path, arguments: ocp.args.PyTreeRestore) -> dict[str, Params]:
    try:
        with _checkpointer() as checkpointer:
            tree: dict[str, Params] = checkpointer.restore(directory / _STATE, args=arguments)
    except (OSError, ValueError, jax.errors.JaxRuntimeError) as error:  # what Orbax and its storage raise for bad bytes
        raise UserError(
            f"an Orbax checkpoint must have every byte as it was written, got {str(directory)!r} "
            f"({str(error).splitlines()[0]}); copy it again, or restore another save"
        ) from error
    return tree


def _checkpointer() -> ocp.Checkpointer:
    return ocp.Checkpointer(ocp.PyTreeCheckpointHandler())


def _tree(policy: JaxPolicy) -> dict[str, Params]:
    return {"params": policy.params} | {moment: getattr(policy.state, moment) for moment in MOMENTS}


def _shapes(params: Params) -> dict[str, list[int]]:
    return {name: list(param.shape) for name, param in params.items()}


def _file_sizes(directory: Path) -> dict[str, int]:
    paths = sorted((directory / _STATE).rglob("*"))
    return {path.relative_to(directory).as_posix(): path.stat().st_size for path in paths if path.is_file()}


def _read_meta(directory: Path) -> dict[str, Any]:
    path = directory / _META
    if not path.is_file():
        raise UserError(
            f"an Orbax checkpoint of ours has {_META}, got {str(directory)!r}; give a directory written by save_orbax"
        )
    try:
        meta: dict[str, Any] = dict(json.loads(path.read_text()))
    except (ValueError, TypeError) as error:
        raise UserError(
            f"{_META} must be as save_orbax wrote it, got {str(path)!r} ({error!r}); copy it again, or restore another"
        ) from error
    if meta.get("format") != _FORMAT:
        raise UserError(
            f"the format of an Orbax checkpoint must be {_FORMAT}, got {meta.get('format')!r}; restore it with its own "
            "release"
        )
    missing = _KEYS - meta.keys()
    if missing:
        raise UserError(
            f"{_META} must be as save_orbax wrote it, got {str(path)!r} without {min(missing)!r}; restore another save"
        )
    return meta


def _check_same(policy: JaxPolicy, meta: dict[str, Any], directory: Path) -> None:
    wanted = {"trained": _shapes(policy.params), "frozen": meta_of(policy)["frozen"]}
    for kind, shapes in wanted.items():
        held = meta[kind]
        different = sorted(name for name in {*held, *shapes} if held.get(name) != shapes.get(name))
        if different:
            raise UserError(
                f"a checkpoint must hold the policy's tensors, got {len(different)} differences in {str(directory)!r}, "
                f"first {different[0]} (file: {held.get(different[0])}, policy: {shapes.get(different[0])}); restore "
                "it with the model it was made from"
            )


def _check_whole(meta: dict[str, Any], directory: Path) -> None:
    held = _file_sizes(directory)
    lost = sorted(name for name, size in meta["files"].items() if held.get(name) != size)
    if lost:
        raise UserError(
            f"an Orbax checkpoint must have every file as it was written, got {len(lost)} lost or cut in "
            f"{str(directory)!r}, first {lost[0]!r}; copy it again, or restore another save"
        )
