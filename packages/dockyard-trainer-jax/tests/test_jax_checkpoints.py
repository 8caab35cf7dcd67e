"""Checkpoints of the JAX trainer alone: on any mesh, from several files, on disks that refuse, damaged."""

import errno
import json
import os
import shutil
import sys
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from safetensors import safe_open
from safetensors.numpy import load_file, save_file
from transformers import AutoModelForCausalLM

sys.path.append(str(Path(__file__).parent))

from checkpoint_material import (
    OPTIONS,
    WIDE,
    assert_equal,
    counters_of,
    files_no_larger_than,
    make_shard,
    state_of,
)

from dockyard_core.errors import UserError
from dockyard_core.optimizer_config import LoraConfig
from dockyard_trainer_jax import JaxPolicy, JaxPolicyConfig, export_hf
from dockyard_trainer_jax.sharded_files import ShardFiles


def make(model_dir: Path, fsdp: int = 1, tp: int = 1, **changes) -> JaxPolicy:
    config = JaxPolicyConfig(**OPTIONS, fsdp_size=fsdp, tensor_parallel_size=tp, **changes)
    return JaxPolicy.from_pretrained(model_dir, config)


def as_of_ranks(one: Path, many: Path, num_ranks: int = 2) -> None:
    """Write a checkpoint of one rank as several do that each hold some rows of every tensor."""
    many.mkdir()
    meta = json.loads((one / "trainer.json").read_text())
    (many / "trainer.json").write_text(json.dumps(meta | {"world_size": num_ranks}))
    for kind in ("model", "optimizer"):
        parts: list[dict[str, np.ndarray]] = [{} for _ in range(num_ranks)]
        offsets: list[dict[str, dict[str, list[int]]]] = [{} for _ in range(num_ranks)]
        for name, tensor in load_file(one / f"{kind}.safetensors").items():
            start = 0
            for rank, rows in enumerate(np.array_split(tensor, num_ranks)):
                parts[rank][name] = np.ascontiguousarray(rows)
                offsets[rank][name] = {"saved_offsets": [start] + [0] * (tensor.ndim - 1)}
                start += len(rows)
        for rank in range(num_ranks):
            header = {"save": meta["save"], "DCP_SHARDING_INFO": json.dumps(offsets[rank])}
            save_file(parts[rank], many / f"{kind}-{rank + 1:05d}-of-{num_ranks:05d}.safetensors", header)


@pytest.fixture(scope="module")
def stepped(tiny_model, tmp_path_factory) -> tuple[JaxPolicy, Path]:
    """A policy after two steps, and a folder with its one/, the other save other/, and two/ as of two ranks."""
    directory = tmp_path_factory.mktemp("sets")
    policy = make(tiny_model("qwen3", **WIDE))
    for seed in range(2):
        policy.train_step(make_shard(seed))
    policy.num_skipped_steps = 3
    policy.save(directory / "one")
    policy.save(directory / "other-one")
    as_of_ranks(directory / "one", directory / "two")
    as_of_ranks(directory / "other-one", directory / "other")
    return policy, directory


def test_the_files_hold_every_weight_and_moment_by_its_hugging_face_name(stepped) -> None:
    policy, directory = stepped
    held = load_file(directory / "one" / "model.safetensors") | load_file(directory / "one" / "optimizer.safetensors")
    assert_equal(held, state_of(policy))
    assert all(np.abs(array).max() > 0 for array in held.values())
    model = AutoModelForCausalLM.from_pretrained(directory / "one")
    for name, param in model.named_parameters():
        np.testing.assert_array_equal(param.detach().numpy(), held[name])


def test_a_checkpoint_goes_from_mesh_to_mesh_to_one_device(stepped, tiny_model, tmp_path) -> None:
    policy, directory = stepped
    model_dir, wanted, previous = tiny_model("qwen3", **WIDE), state_of(policy), directory / "one"
    for number, (fsdp, tp) in enumerate([(4, 2), (1, 8), (1, 1)]):
        restored = make(model_dir, fsdp, tp)
        restored.restore(previous)
        assert_equal(state_of(restored), wanted)
        assert counters_of(restored) == (2, 2, 3)
        assert int(restored.state.count) == 2
        for name, param in restored.params.items():
            assert restored.state.exp_avg[name].sharding == param.sharding, name
        previous = tmp_path / str(number)
        restored.save(previous)
        assert (previous / "model.safetensors").read_bytes() == (directory / "one/model.safetensors").read_bytes()


@pytest.mark.ci
def test_the_step_after_a_restore_on_a_mesh_is_that_of_one_device(stepped, tiny_model) -> None:
    _, directory = stepped
    alone, dealt = make(tiny_model("qwen3", **WIDE)), make(tiny_model("qwen3", **WIDE), 2, 4)
    for policy in (alone, dealt):
        policy.restore(directory / "one")
    wanted, found = alone.train_step(make_shard(5)), dealt.train_step(make_shard(5))
    assert found.loss == pytest.approx(wanted.loss, abs=1e-5)
    assert found.learning_rate == wanted.learning_rate
    assert_equal(state_of(dealt), state_of(alone), atol=1e-5)


@pytest.mark.parametrize("sizes", [(1, 1), (2, 4)], ids=str)
def test_the_files_of_two_ranks_are_put_together(stepped, tiny_model, sizes) -> None:
    policy, directory = stepped
    restored = make(tiny_model("qwen3", **WIDE), *sizes)
    restored.restore(directory / "two")
    assert_equal(state_of(restored), state_of(policy))
    assert counters_of(restored) == (2, 2, 3)


def test_a_device_reads_its_own_part_only(stepped, tiny_model, monkeypatch) -> None:
    _, directory = stepped
    restored, largest = make(tiny_model("qwen3", **WIDE), 2, 4), {}
    read = ShardFiles.read

    def counted(files, name, region):
        largest[name] = max(largest.get(name, 0), region.num_elements)
        return read(files, name, region)

    monkeypatch.setattr(ShardFiles, "read", counted)
    restored.restore(directory / "two")
    for name, array in state_of(restored).items():
        assert largest[name] == array.size // (8 if array.ndim == 2 else 1), name


@pytest.mark.parametrize("num_bytes", [100, 20_000, 80_000])
def test_a_disk_that_refuses_leaves_what_was_there_and_says_its_errno(stepped, tmp_path, num_bytes) -> None:
    policy, directory = stepped
    shutil.copytree(directory / "one", tmp_path / "policy")
    before = {path.name: path.read_bytes() for path in (tmp_path / "policy").iterdir()}
    assert num_bytes < len(before["optimizer.safetensors"]), "the limit must bite"
    with files_no_larger_than(num_bytes):
        for write in (policy.save, policy.snapshot().write):
            with pytest.raises(OSError) as caught:
                write(tmp_path / "policy")
            assert caught.value.errno == errno.EFBIG
    assert [path.name for path in tmp_path.iterdir()] == ["policy"]
    assert {path.name: path.read_bytes() for path in (tmp_path / "policy").iterdir()} == before


def test_a_float32_export_takes_no_second_place_on_the_disk(stepped, tmp_path) -> None:
    policy, _ = stepped
    export_hf(policy, tmp_path / "wanted")
    snapshot = policy.snapshot()
    snapshot.write(tmp_path / "policy")
    snapshot.export(tmp_path / "hf")
    assert (tmp_path / "hf" / "model.safetensors").samefile(tmp_path / "policy" / "model.safetensors")
    wanted = {path.name: path.read_bytes() for path in (tmp_path / "wanted").iterdir()}
    assert {path.name: path.read_bytes() for path in (tmp_path / "hf").iterdir()} == wanted
    (tmp_path / "policy" / "model.safetensors").unlink()
    snapshot.export(tmp_path / "again")
    held = load_file(tmp_path / "again" / "model.safetensors")
    assert_equal(held, {name: array for name, array in state_of(policy).items() if name in held})


def test_adapters_are_held_without_their_base_and_of_one_scale(tiny_model, tmp_path) -> None:
    options = {"lora": LoraConfig(rank=2, alpha=4)}
    policy = make(tiny_model("qwen3", **WIDE), **options)
    for name, param in policy.params.items():
        policy.params[name] = param + 1
    policy.save(tmp_path / "policy")
    held = load_file(tmp_path / "policy" / "model.safetensors")
    assert all(name.endswith((".lora_A", ".lora_B")) for name in held)
    assert not (tmp_path / "policy" / "config.json").exists(), "without its base it is no Hugging Face model"
    restored = make(tiny_model("qwen3", **WIDE), **options)
    restored.restore(tmp_path / "policy")
    assert_equal(state_of(restored), state_of(policy))
    for other in (make(tiny_model("qwen3", **WIDE)), make(tiny_model("qwen3", **WIDE), lora=LoraConfig(rank=2))):
        assert_refused(other, tmp_path / "policy", "restored with the adapters it was trained with.*set lora")
    assert_refused(make(tiny_model("llama", **WIDE), **options), tmp_path / "policy", "hold the policy's tensors")


def lose_a_file(copy: Path, _: Path) -> None:
    (copy / "model-00002-of-00002.safetensors").unlink()


def lose_the_meta(copy: Path, _: Path) -> None:
    (copy / "trainer.json").unlink()


def mix_two_saves(copy: Path, sets: Path) -> None:
    shutil.copyfile(
        sets / "other" / "optimizer-00001-of-00002.safetensors", copy / "optimizer-00001-of-00002.safetensors"
    )


def cut_a_file(copy: Path, _: Path) -> None:
    path = copy / "optimizer-00002-of-00002.safetensors"
    os.truncate(path, path.stat().st_size - 1)


def shorten_the_meta(copy: Path, _: Path) -> None:
    (copy / "trainer.json").write_text('{"format": 3}')


def come_from_the_future(copy: Path, _: Path) -> None:
    meta = json.loads((copy / "trainer.json").read_text())
    (copy / "trainer.json").write_text(json.dumps(meta | {"format": 4}))


def be_a_folder(copy: Path, _: Path) -> None:
    (copy / "model-00002-of-00002.safetensors").unlink()
    (copy / "model-00002-of-00002.safetensors").mkdir()


def lose_a_block(copy: Path, _: Path) -> None:
    path = copy / "model-00001-of-00002.safetensors"
    with safe_open(path, "np") as file:
        metadata = file.metadata()
    tensors = load_file(path)
    del tensors["model.embed_tokens.weight"]
    save_file(tensors, path, metadata)


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (lose_a_file, "files of every rank.*'model-00002-of-00002.safetensors'.*copy the whole directory"),
        (lose_the_meta, "has trainer.json, got .*give a directory"),
        (mix_two_saves, "of one save, got 'optimizer-00001-of-00002.safetensors'.*copy one whole directory"),
        (cut_a_file, "whole safetensors, got .*optimizer-00002-of-00002.*copy it again"),
        (shorten_the_meta, "without 'frozen'; restore another"),
        (come_from_the_future, "must be at most 3, got 4; restore it with its own release"),
        (be_a_folder, "whole safetensors, got .*model-00002-of-00002.*copy it again"),
        (lose_a_block, "every element once, got 1 tensors.*embed_tokens.*restore another save"),
    ],
    ids=lambda value: getattr(value, "__name__", ""),
)
def test_a_damaged_set_is_refused_and_the_policy_stays(
    stepped, tiny_model, tmp_path, damage: Callable[[Path, Path], None], message: str
) -> None:
    _, sets = stepped
    shutil.copytree(sets / "two", tmp_path / "copy")
    damage(tmp_path / "copy", sets)
    assert_refused(make(tiny_model("qwen3", **WIDE)), tmp_path / "copy", message)


def test_a_set_of_another_model_is_refused(stepped, tiny_model) -> None:
    _, sets = stepped
    for other in (tiny_model("llama", **WIDE), tiny_model("qwen3", is_tied=False, **WIDE)):
        assert_refused(make(other), sets / "two", "policy's tensors, got .*restore it with the model")


def test_fused_experts_of_an_earlier_format_are_refused_with_the_way_out(tiny_model, tmp_path) -> None:
    policy = make(tiny_model("qwen3_moe", is_tied=False, **WIDE))
    policy.save(tmp_path / "policy")
    for kind in ("model", "optimizer"):
        held = load_file(tmp_path / "policy" / f"{kind}.safetensors")
        experts = {name for name in held if ".experts." in name}
        fused = {f"{name.partition('.experts.')[0]}.experts.down_proj": held[name] for name in experts}
        save = {} if kind == "model" else {"save": json.loads((tmp_path / "policy/trainer.json").read_text())["save"]}
        kept = {name: array for name, array in held.items() if name not in experts}
        save_file(kept | fused, tmp_path / "policy" / f"{kind}.safetensors", save)
    meta = json.loads((tmp_path / "policy" / "trainer.json").read_text())
    (tmp_path / "policy" / "trainer.json").write_text(json.dumps(meta | {"format": 2}))
    assert_refused(policy, tmp_path / "policy", r"one by one, got .*experts.down_proj' of format 2.*PyTorch trainer")


def assert_refused(policy: JaxPolicy, directory: Path, message: str) -> None:
    before, counters = state_of(policy), counters_of(policy)
    with pytest.raises(UserError, match=message):
        policy.restore(directory)
    assert_equal(state_of(policy), before)
    assert counters_of(policy) == counters
