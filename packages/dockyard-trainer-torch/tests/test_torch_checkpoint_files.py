"""Sets of sharded files that must not be restored from, and reading any block of any set."""

import errno
import itertools
import json
import os
import resource
import shutil
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors import safe_open
from safetensors.torch import load_file, save_file

from dockyard_core.batch import TrainSequence, pack_batch
from dockyard_core.checkpoint_format import file_name
from dockyard_core.errors import UserError
from dockyard_core.regions import Region
from dockyard_trainer_torch import TorchPolicy, TorchPolicyConfig
from dockyard_trainer_torch.sharded_files import ShardFiles, TensorShard, save_shards
from dockyard_trainer_torch.snapshot import ShardedSnapshot


def make(model_dir: Path) -> TorchPolicy:
    policy = TorchPolicy.from_pretrained(model_dir, TorchPolicyConfig(learning_rate=1e-2))
    mask = np.arange(9) > 3
    sequence = TrainSequence(
        token_ids_T=np.arange(9),
        loss_mask_T=mask,
        sampled_logprobs_T=np.where(mask, -4.0, 0).astype(np.float32),
        advantage=1.0,
    )
    policy.train_step(pack_batch([sequence])[0])
    return policy


def state_of(policy: TorchPolicy) -> list[torch.Tensor]:
    moments = [state[name] for state in policy.optimizer.state.values() for name in ("exp_avg", "exp_avg_sq")]
    return [tensor.clone() for tensor in (*policy.causal_lm.parameters(), *moments, torch.get_rng_state())]


def as_of_two_ranks(one: Path, two: Path) -> None:
    """Write a checkpoint of one rank as two ranks do that each hold half of the rows."""
    two.mkdir()
    meta = json.loads((one / "trainer.json").read_text())
    (two / "trainer.json").write_text(json.dumps(meta | {"world_size": 2}))
    for kind in ("model", "optimizer"):
        parts: list[dict[str, TensorShard]] = [{}, {}]
        for name, tensor in load_file(one / f"{kind}.safetensors").items():
            if name == "rng.0":
                parts[0][name] = TensorShard(Region((0,), tuple(tensor.shape)), tensor)
                continue
            start = 0
            for part, rows in zip(parts, tensor.chunk(2), strict=True):
                region = Region((start,) + (0,) * (tensor.ndim - 1), tuple(rows.shape))
                part[name] = TensorShard(region, rows.contiguous())
                start += len(rows)
        for rank, part in enumerate(parts):
            save_shards(part, two / file_name(kind, rank, 2), {"save": meta["save"]})


@pytest.fixture(scope="module")
def sets(tiny_model, tmp_path_factory) -> Path:
    """A folder with two/ and other/: sets of two saves of one policy."""
    torch.set_num_threads(1)
    directory = tmp_path_factory.mktemp("sets")
    policy = make(tiny_model("qwen3"))
    for name in ("two", "other"):
        policy.save(directory / f"one-{name}")
        as_of_two_ranks(directory / f"one-{name}", directory / name)
    return directory


def test_the_set_that_the_others_are_damaged_from_is_restored(sets, tiny_model) -> None:
    one, two = make(tiny_model("qwen3")), make(tiny_model("qwen3"))
    for policy, name in ((one, "one-two"), (two, "two")):
        for param in policy.causal_lm.parameters():
            param.data.zero_()
        policy.restore(sets / name)
    for left, right in zip(state_of(one)[:-1], state_of(two)[:-1], strict=True):
        assert left.abs().sum() > 0
        assert torch.equal(left, right)


def lose_a_file(copy: Path, _: Path) -> None:
    (copy / "model-00002-of-00002.safetensors").unlink()


def lose_the_meta(copy: Path, _: Path) -> None:
    (copy / "trainer.json").unlink()


def mix_two_saves(copy: Path, sets: Path) -> None:
    shutil.copyfile(
        sets / "other" / "optimizer-00001-of-00002.safetensors", copy / "optimizer-00001-of-00002.safetensors"
    )


def declare_three_ranks(copy: Path, _: Path) -> None:
    meta = json.loads((copy / "trainer.json").read_text())
    (copy / "trainer.json").write_text(json.dumps(meta | {"world_size": 3}))


def add_a_file(copy: Path, _: Path) -> None:
    shutil.copyfile(copy / "model-00002-of-00002.safetensors", copy / "model-00004-of-00004.safetensors")


def cut_a_file(copy: Path, _: Path) -> None:
    path = copy / "optimizer-00002-of-00002.safetensors"
    os.truncate(path, path.stat().st_size - 1)


def cut_the_meta(copy: Path, _: Path) -> None:
    (copy / "trainer.json").write_text((copy / "trainer.json").read_text()[:-20])


def shorten_the_meta(copy: Path, _: Path) -> None:
    (copy / "trainer.json").write_text('{"format": 2}')


def be_a_folder(copy: Path, _: Path) -> None:
    (copy / "model-00002-of-00002.safetensors").unlink()
    (copy / "model-00002-of-00002.safetensors").mkdir()


def lose_a_block(copy: Path, _: Path) -> None:
    path = copy / "model-00001-of-00002.safetensors"
    with safe_open(path, "pt") as file:
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
        (declare_three_ranks, "files of every rank.*'model-00001-of-00003.safetensors'"),
        (add_a_file, "2 ranks has 4 files of tensors, got 'model-00004-of-00004.safetensors'.*copy one"),
        (cut_a_file, "whole safetensors, got .*optimizer-00002-of-00002.*copy it again"),
        (cut_the_meta, "trainer.json must be as save wrote it, got .*copy it again"),
        (shorten_the_meta, "without 'frozen'; restore another"),
        (be_a_folder, "whole safetensors, got .*model-00002-of-00002.*copy it again"),
        (lose_a_block, "every element once, got 1 tensors.*embed_tokens.*restore another save"),
    ],
    ids=lambda value: getattr(value, "__name__", ""),
)
def test_a_damaged_set_is_refused_and_the_policy_stays(sets, tiny_model, tmp_path, damage, message) -> None:
    shutil.copytree(sets / "two", tmp_path / "copy")
    damage(tmp_path / "copy", sets)
    assert_refused(make(tiny_model("qwen3")), tmp_path / "copy", message)


def test_a_set_of_another_model_is_refused(sets, tiny_model) -> None:
    for other in (tiny_model("llama"), tiny_model("qwen3", is_tied=False)):
        assert_refused(make(other), sets / "two", "policy's tensors, got .*restore it with the model")


def test_a_rank_whose_disk_refuses_takes_its_files_back_and_no_other(tiny_model, tmp_path) -> None:
    taken = make(tiny_model()).snapshot()
    state = taken._state._replace(meta=taken._state.meta | {"world_size": 2})
    snapshot = ShardedSnapshot(state, None, source=taken._source, export_dtype=torch.float32, rank=1)
    (tmp_path / "model-00001-of-00002.safetensors").write_bytes(b"of the other rank")
    weights = sum(shard.tensor.nbytes for shard in state.weights.values())
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (weights * 3 // 2, hard))  # the moments are twice the weights
    try:
        with pytest.raises(OSError) as caught:
            snapshot.write(tmp_path)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    assert caught.value.errno == errno.EFBIG
    assert [path.name for path in tmp_path.iterdir()] == ["model-00001-of-00002.safetensors"]
    snapshot.write(tmp_path)
    assert len(list(tmp_path.iterdir())) == 3
    with pytest.raises(FileExistsError, match="give another one"):
        snapshot.write(tmp_path)


def test_a_file_without_a_part_of_the_region_is_not_read(tmp_path) -> None:
    tensor = torch.arange(12.0).reshape(4, 3)
    paths = [tmp_path / file_name("model", rank, 2) for rank in (0, 1)]
    for rank, path in enumerate(paths):
        rows = tensor[2 * rank : 2 * rank + 2].contiguous()
        save_shards({"t": TensorShard(Region((2 * rank, 0), (2, 3)), rows)}, path, {})
    with ShardFiles(paths) as files:
        files._files[paths[1]] = None
        assert torch.equal(files.read("t", Region((1, 1), (1, 2))), tensor[1:2, 1:])


@st.composite
def cut_tensors(draw):
    """A shape, cuts along each dimension, and a region of it that need not follow them."""
    shape = draw(st.lists(st.integers(1, 6), min_size=1, max_size=3))
    cuts = [sorted({0, size, *draw(st.lists(st.integers(0, size), max_size=2))}) for size in shape]
    bounds = [sorted((draw(st.integers(0, size)), draw(st.integers(0, size)))) for size in shape]
    region = Region(tuple(low for low, _ in bounds), tuple(high - low for low, high in bounds))
    return tuple(shape), cuts, region


@settings(max_examples=60, deadline=None)
@given(cut_tensors())
def test_any_region_is_read_from_any_cut(tmp_path_factory, cut) -> None:
    shape, cuts, region = cut
    directory = tmp_path_factory.mktemp("cut")
    tensor = torch.arange(float(np.prod(shape))).reshape(shape)
    blocks = list(itertools.product(*(itertools.pairwise(each) for each in cuts)))
    paths = [directory / file_name("model", index, len(blocks)) for index in range(len(blocks))]
    for path, block in zip(paths, blocks, strict=True):
        held = Region(tuple(low for low, _ in block), tuple(high - low for low, high in block))
        part = tensor[tuple(slice(low, high) for low, high in block)].contiguous()
        save_shards({"t": TensorShard(held, part)}, path, {})
    with ShardFiles(paths) as opened:
        assert opened.blocks.shapes == {"t": shape}
        assert opened.blocks.incomplete == []
        wanted = tensor[region.slices_in(Region((0,) * len(shape), shape))]
        assert torch.equal(opened.read("t", region), wanted)


def assert_refused(policy: TorchPolicy, directory: Path, message: str) -> None:
    before = state_of(policy)
    with pytest.raises(UserError, match=message):
        policy.restore(directory)
    assert all(map(torch.equal, state_of(policy), before))
    assert policy.version == 1
