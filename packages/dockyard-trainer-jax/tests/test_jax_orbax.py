"""Orbax checkpoints: whole or not at all, restored on any mesh, and refused with one clear line."""

import errno
import json
import shutil
import sys
from collections.abc import Callable
from pathlib import Path

import jax
import numpy as np
import orbax.checkpoint as ocp
import pytest

sys.path.append(str(Path(__file__).parent))

from checkpoint_material import OPTIONS, WIDE, assert_equal, counters_of, files_no_larger_than, make_shard, state_of

from dockyard_core.errors import UserError
from dockyard_core.optimizer_config import LoraConfig
from dockyard_trainer_jax import JaxPolicy, JaxPolicyConfig, restore_orbax, save_orbax


def make(model_dir: Path, fsdp: int = 1, tp: int = 1, **changes) -> JaxPolicy:
    config = JaxPolicyConfig(**OPTIONS, fsdp_size=fsdp, tensor_parallel_size=tp, **changes)
    return JaxPolicy.from_pretrained(model_dir, config)


def moved(policy: JaxPolicy) -> JaxPolicy:
    """As if it had been trained: other weights, and moments that are not zero; nothing is compiled for it."""
    for number, held in enumerate((policy.params, policy.state.exp_avg, policy.state.exp_avg_sq)):
        for name, array in held.items():
            held[name] = array + np.float32(0.25 * number + 0.5)
    policy.resume({"version": 2, "num_updates": 4, "num_skipped_steps": 1})
    return policy


@pytest.fixture(scope="module")
def saved(tiny_model, tmp_path_factory) -> tuple[JaxPolicy, Path]:
    """A policy and its checkpoint."""
    directory = tmp_path_factory.mktemp("orbax") / "saved"
    policy = moved(make(tiny_model("qwen3", **WIDE)))
    save_orbax(policy, directory)
    return policy, directory


@pytest.mark.ci
def test_the_step_after_a_restore_is_the_one_after_the_save(tiny_model, tmp_path) -> None:
    policy, restored = make(tiny_model("qwen3", **WIDE)), make(tiny_model("qwen3", **WIDE), 2, 4)
    policy.train_step(make_shard(0))
    save_orbax(policy, tmp_path / "saved")
    restore_orbax(restored, tmp_path / "saved")
    wanted, found = policy.train_step(make_shard(1)), restored.train_step(make_shard(1))
    assert found.learning_rate == wanted.learning_rate
    assert found.loss == pytest.approx(wanted.loss, abs=1e-5)
    assert_equal(state_of(restored), state_of(policy), atol=1e-5)


def test_a_checkpoint_goes_from_mesh_to_mesh_to_one_device(saved, tiny_model, tmp_path) -> None:
    policy, previous = saved
    for number, (fsdp, tp) in enumerate([(4, 2), (1, 8), (1, 1)]):
        restored = make(tiny_model("qwen3", **WIDE), fsdp, tp)
        places = {name: param.sharding for name, param in restored.params.items()}
        restore_orbax(restored, previous)
        assert_equal(state_of(restored), state_of(policy))
        assert counters_of(restored) == (2, 4, 1)
        assert int(restored.state.count) == 4
        for tree in (restored.params, restored.state.exp_avg, restored.state.exp_avg_sq):
            assert {name: array.sharding for name, array in tree.items()} == places
        previous = tmp_path / str(number)
        save_orbax(restored, previous)


def test_orbax_alone_reads_it(saved) -> None:
    policy, directory = saved
    with ocp.StandardCheckpointer() as checkpointer:
        tree = checkpointer.restore(directory / "state")
    assert tree.keys() == {"params", "exp_avg", "exp_avg_sq"}
    jax.tree.map(np.testing.assert_array_equal, tree["params"], policy.params)
    jax.tree.map(np.testing.assert_array_equal, tree["exp_avg_sq"], policy.state.exp_avg_sq)


@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")  # of Orbax's own threads
def test_a_save_replaces_the_one_before_or_leaves_it(saved, tiny_model, tmp_path) -> None:
    policy, directory = saved
    shutil.copytree(directory, tmp_path / "saved")
    other = make(tiny_model("qwen3", **WIDE))
    with files_no_larger_than(2000):
        with pytest.raises(OSError) as caught:
            save_orbax(other, tmp_path / "saved")
    assert caught.value.errno == errno.EFBIG
    assert [path.name for path in tmp_path.iterdir()] == ["saved"]
    restore_orbax(other, tmp_path / "saved")
    assert_equal(state_of(other), state_of(policy))
    save_orbax(make(tiny_model("qwen3", **WIDE)), tmp_path / "saved")
    restore_orbax(other, tmp_path / "saved")
    assert counters_of(other) == (0, 0, 0)
    assert [path.name for path in tmp_path.iterdir()] == ["saved"]


def lose_the_meta(copy: Path) -> None:
    (copy / "orbax.json").unlink()


def cut_the_meta(copy: Path) -> None:
    (copy / "orbax.json").write_text((copy / "orbax.json").read_text()[:-20])


def shorten_the_meta(copy: Path) -> None:
    (copy / "orbax.json").write_text('{"format": 1}')


def come_from_the_future(copy: Path) -> None:
    meta = json.loads((copy / "orbax.json").read_text())
    (copy / "orbax.json").write_text(json.dumps(meta | {"format": 2}))


def lose_the_state(copy: Path) -> None:
    shutil.rmtree(copy / "state")


def lose_the_arrays(copy: Path) -> None:
    shutil.rmtree(copy / "state" / "d")


def lose_an_array(copy: Path) -> None:
    max((copy / "state" / "d").iterdir(), key=lambda path: path.stat().st_size).unlink()


def cut_an_array(copy: Path) -> None:
    path = max((copy / "state").rglob("*"), key=lambda path: path.stat().st_size if path.is_file() else 0)
    path.write_bytes(path.read_bytes()[: path.stat().st_size // 2])


def change_the_index(copy: Path) -> None:
    path = copy / "state" / "manifest.ocdbt"
    path.write_bytes(bytes(255 - byte for byte in path.read_bytes()))


@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")  # of Orbax's own threads
@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (lose_the_meta, "has orbax.json, got .*give a directory written by save_orbax"),
        (cut_the_meta, "must be as save_orbax wrote it, got .*copy it again"),
        (shorten_the_meta, "without 'config'; restore another save"),
        (come_from_the_future, "must be 1, got 2; restore it with its own release"),
        (lose_the_state, "every file as it was written, got .*copy it again"),
        (lose_the_arrays, "every file as it was written, got .*copy it again"),
        (lose_an_array, "every file as it was written, got .*copy it again"),
        (change_the_index, "every byte as it was written, got .*copy it again"),
        (cut_an_array, "every file as it was written, got .*copy it again"),
    ],
    ids=lambda value: getattr(value, "__name__", ""),
)
def test_a_damaged_checkpoint_is_refused_and_the_policy_stays(
    saved, tiny_model, tmp_path, damage: Callable[[Path], None], message: str
) -> None:
    _, directory = saved
    shutil.copytree(directory, tmp_path / "copy")
    damage(tmp_path / "copy")
    assert_refused(make(tiny_model("qwen3", **WIDE)), tmp_path / "copy", message)


def test_another_model_or_kind_of_checkpoint_is_refused(saved, tiny_model, tmp_path) -> None:
    policy, directory = saved
    for other in (tiny_model("llama", **WIDE), tiny_model("qwen3", is_tied=False, **WIDE)):
        assert_refused(make(other), directory, r"policy's tensors, got .*\(file: .*restore it with the model")
    adapted = make(tiny_model("qwen3", **WIDE), lora=LoraConfig(rank=2))
    assert_refused(adapted, directory, "adapters it was trained with")
    policy.save(tmp_path / "safetensors")
    assert_refused(make(tiny_model("qwen3", **WIDE)), tmp_path / "safetensors", "has orbax.json")
    with pytest.raises(UserError, match=r"has trainer\.json"):
        policy.restore(directory)


def assert_refused(policy: JaxPolicy, directory: Path, message: str) -> None:
    before, counters = state_of(policy), counters_of(policy)
    with pytest.raises(UserError, match=message):
        restore_orbax(policy, directory)
    assert_equal(state_of(policy), before)
    assert counters_of(policy) == counters
