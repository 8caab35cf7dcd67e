"""The format of a checkpoint: names of files, blocks, and what is refused before a tensor is read."""

import json
from pathlib import Path

import pytest

from dockyard_core.checkpoint_format import (
    check_same_tensors,
    file_name,
    read_meta,
    saved_regions,
    tensor_files,
    with_offsets,
)
from dockyard_core.errors import UserError
from dockyard_core.model_files import deal_files
from dockyard_core.refit import TensorSpec
from dockyard_core.regions import BlockIndex, Region

META = {"format": 3, "version": 4, "num_updates": 8, "num_skipped_steps": 1, "world_size": 2, "save": "a", "frozen": {}}


def write_meta(directory: Path, **changes) -> Path:
    kept = {name: value for name, value in (META | changes).items() if value is not ...}
    (directory / "trainer.json").write_text(json.dumps(kept))
    return directory


def test_files_are_counted_from_one() -> None:
    assert file_name("model", 0, 1) == "model.safetensors"
    assert [path.name for path in tensor_files(Path("c"), 2)] == [
        "model-00001-of-00002.safetensors",
        "model-00002-of-00002.safetensors",
        "optimizer-00001-of-00002.safetensors",
        "optimizer-00002-of-00002.safetensors",
    ]


def test_a_header_says_where_blocks_begin_and_a_block_without_an_offset_is_whole() -> None:
    header = with_offsets({"save": "a"}, {"w": Region((2, 0), (1, 3))})
    assert json.loads(header["DCP_SHARDING_INFO"]) == {"w": {"saved_offsets": [2, 0]}}
    found = saved_regions({"w": (1, 3), "v": (5,)}, header)
    assert found == {"w": Region((2, 0), (1, 3)), "v": Region((0,), (5,))}
    assert saved_regions({"v": (5,)}, {}) == {"v": Region.whole((5,))}


def test_the_first_format_is_read_in_the_shape_of_the_newest(tmp_path) -> None:
    meta = read_meta(write_meta(tmp_path, format=1, num_updates=..., world_size=..., save=..., frozen=...))
    assert (meta["num_updates"], meta["world_size"], meta["save"], meta["frozen"]) == (4, 1, None, {})


@pytest.mark.parametrize("found", [0, 4, "3", None])
def test_another_format_is_refused(tmp_path, found) -> None:
    with pytest.raises(UserError, match=r"must be at most 3, got .*its own release"):
        read_meta(write_meta(tmp_path, format=found))


@pytest.mark.parametrize(
    ("name", "value"),
    [("version", None), ("num_updates", "8"), ("world_size", [2]), ("frozen", []), ("config", None)],
)
def test_a_value_of_another_kind_is_refused_before_anything_is_read(tmp_path, name, value) -> None:
    with pytest.raises(UserError, match=rf"got .*trainer\.json' with {name} = .*; restore another save"):
        read_meta(write_meta(tmp_path, **{name: value}))
    with pytest.raises(UserError, match=r"without 'version'; restore another save"):
        read_meta(write_meta(tmp_path, version=...))
    with pytest.raises(UserError, match=r"without 'version'; restore another save"):
        read_meta(write_meta(tmp_path, format=1, version=...))


def index(*regions: Region) -> BlockIndex:
    blocks = BlockIndex()
    for number, region in enumerate(regions):
        for prefix in ("", "exp_avg.", "exp_avg_sq."):
            blocks.add(Path(str(number)), f"{prefix}w", region)
    blocks.add(Path("0"), "rng.0", Region((0,), (8,)))
    return blocks


def test_a_set_must_hold_the_policys_tensors_every_element_once() -> None:
    halves = Region((0, 0), (2, 3)), Region((2, 0), (2, 3))
    check_same_tensors({"w": (4, 3)}, {}, index(*halves), META, Path("c"))
    for wanted, frozen, blocks, message in (
        ({"w": (4, 4)}, {}, index(*halves), "policy's tensors, got 6 differences"),
        ({"w": (4, 3)}, {"base": (1,)}, index(*halves), r"first \('base \(frozen\)', \(1,\)\)"),
        ({"w": (4, 3)}, {}, index(*halves, halves[1]), "every element once, got 3 tensors"),
        ({"w": (4, 3)}, {}, index(halves[1]), "every element once, got 3 tensors"),
    ):
        with pytest.raises(UserError, match=message):
            check_same_tensors(wanted, frozen, blocks, META, Path("c"))


def test_the_files_of_a_model_are_those_of_ranks_that_get_any() -> None:
    manifest = [TensorSpec(name, "float32", (size,)) for name, size in (("a", 5), ("b", 4), ("c", 2))]
    dealt = deal_files(manifest, 4)
    assert dealt.weight_map == {name: f"model-0000{rank}-of-00003.safetensors" for rank, name in enumerate("abc", 1)}
    assert (dealt.total_bytes, dealt.file_of(2), dealt.file_of(3)) == (44, "model-00003-of-00003.safetensors", None)
