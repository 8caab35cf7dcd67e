"""Names and files: a bijection with Hugging Face's tensors, bit-exact values, and refusals."""

import json

import jax
import numpy as np
import pytest
import torch
from flax import nnx
from safetensors.numpy import load_file, save_file
from transformers import AutoModelForCausalLM

from dockyard_core.errors import ConfigError
from dockyard_trainer_jax import loading
from dockyard_trainer_jax.loading import load_causal_lm
from dockyard_trainer_jax.model import ComputeOptions, abstract_causal_lm
from dockyard_trainer_jax.model_config import read_config
from dockyard_trainer_jax.names import named_parameters, parts_of, shape_of
from dockyard_trainer_jax.sharding import make_mesh

FAMILIES = ("llama", "qwen2", "qwen3", "qwen3_moe")


def tensors_of(model):
    return {
        part.name: np.asarray(value[...][part.indices])
        for name, value in named_parameters(model).items()
        for part in parts_of(name, value.shape)
    }


def rewritten(directory, target, change):
    """The directory's files in ``target``, with tensors as ``change`` leaves them."""
    tensors = load_file(directory / "model.safetensors")
    change(tensors)
    target.joinpath("config.json").write_text((directory / "config.json").read_text())
    save_file(tensors, target / "model.safetensors")
    return target


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("is_tied", [True, False])
def test_names_and_shapes_are_those_of_the_saved_model(tiny_model, family, is_tied):
    directory = tiny_model(family, is_tied=is_tied)
    params = named_parameters(abstract_causal_lm(read_config(directory)))
    parts = [
        (part.name, shape_of(part, param.shape))
        for name, param in params.items()
        for part in parts_of(name, param.shape)
    ]
    assert len(dict(parts)) == len(parts)
    assert dict(parts) == {name: value.shape for name, value in load_file(directory / "model.safetensors").items()}


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("is_tied", [True, False])
def test_values_are_the_files_bit_for_bit(tiny_model, family, is_tied):
    directory = tiny_model(family, is_tied=is_tied)
    loaded, saved = tensors_of(load_causal_lm(directory)), load_file(directory / "model.safetensors")
    assert loaded.keys() == saved.keys()
    assert all(loaded[name].tobytes() == saved[name].tobytes() for name in saved)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_short_floats_become_float32_without_loss(tiny_model, tmp_path, dtype):
    theirs = AutoModelForCausalLM.from_pretrained(tiny_model("qwen3"), dtype=dtype)
    theirs.save_pretrained(tmp_path)
    loaded, expected = tensors_of(load_causal_lm(tmp_path)), theirs.state_dict()
    assert {value.dtype for value in loaded.values()} == {np.dtype("float32")}
    for name, value in loaded.items():
        np.testing.assert_array_equal(value, expected[name].float().numpy())


def test_shards_with_an_index_are_the_same_model(tiny_model, tmp_path):
    directory = tiny_model("qwen3_moe", is_tied=False)
    AutoModelForCausalLM.from_pretrained(directory, dtype=torch.float32).save_pretrained(
        tmp_path, max_shard_size="40KB"
    )
    assert len(list(tmp_path.glob("*.safetensors"))) > 2
    expected = tensors_of(load_causal_lm(directory))
    for name, value in tensors_of(load_causal_lm(tmp_path)).items():
        np.testing.assert_array_equal(value, expected[name])


def test_a_model_is_described_without_memory(tiny_model):
    config = read_config(tiny_model("llama")).model_copy(update={"hidden_size": 1 << 20, "vocab_size": 1 << 30})
    model = abstract_causal_lm(config)
    leaves = jax.tree.leaves(nnx.state(model, nnx.Param))
    assert all(isinstance(leaf, jax.ShapeDtypeStruct) for leaf in leaves)


def test_a_device_reads_its_block_of_a_tensor_once_and_no_more(tiny_model, monkeypatch):
    read = []
    original = loading.WeightFiles.read

    def recording(files, name, region):
        block = original(files, name, region)
        read.append((name, region, block.size))
        return block

    monkeypatch.setattr(loading.WeightFiles, "read", recording)
    directory = tiny_model("qwen2", is_tied=False)
    load_causal_lm(directory, ComputeOptions(mesh=make_mesh(4, 2)))
    for name, value in load_file(directory / "model.safetensors").items():
        sizes = [size for entry, _, size in read if entry == name]
        sharing = 1 if "norm" in name else 2 if name.endswith("bias") else 8
        assert set(sizes) == {value.size // sharing}, name
        assert len({region for entry, region, _ in read if entry == name}) == sharing <= len(sizes) <= 8, name


def test_a_tied_copy_and_old_frequencies_in_the_file_are_no_difference(tiny_model, tmp_path):
    def change(tensors):
        tensors["lm_head.weight"] = tensors["model.embed_tokens.weight"]
        tensors["model.layers.0.self_attn.rotary_emb.inv_freq"] = np.zeros(4, np.float32)

    assert load_causal_lm(rewritten(tiny_model("llama"), tmp_path, change)).lm_head is None


Q = "model.layers.1.self_attn.q_proj.weight"


@pytest.mark.parametrize(
    ("change", "named"),
    [
        (lambda tensors: tensors.pop(Q), f"first {Q} (file: none, config: (64, 32))"),
        (lambda tensors: tensors.update({Q: tensors[Q].T.copy()}), f"first {Q} (file: (32, 64), config: (64, 32))"),
        (lambda tensors: tensors.update(extra=np.zeros(3, np.float32)), "first extra (file: (3,), config: none)"),
        (lambda tensors: tensors.update({Q: tensors[Q].astype(np.int32)}), f"got I32 for {Q}"),
    ],
)
def test_other_tensors_than_the_configuration_says_are_refused(tiny_model, tmp_path, change, named):
    with pytest.raises(ConfigError, match=r"policy\.model must hold") as refused:
        load_causal_lm(rewritten(tiny_model("llama"), tmp_path, change))
    assert named in str(refused.value)
    assert "; save it again" in str(refused.value)


def test_an_untied_model_needs_its_output_embedding(tiny_model, tmp_path):
    with pytest.raises(ConfigError, match=r"first lm_head.weight \(file: none, config: \(64, 32\)\)"):
        load_causal_lm(
            rewritten(tiny_model("qwen3", is_tied=False), tmp_path, lambda tensors: tensors.pop("lm_head.weight"))
        )


@pytest.mark.parametrize("damage", ["none", "cut", "index", "no index", "shard", "promise"])
def test_unreadable_files_are_refused(tiny_model, tmp_path, damage):
    directory = rewritten(tiny_model("llama"), tmp_path, lambda tensors: None)
    single, index = directory / "model.safetensors", directory / "model.safetensors.index.json"
    names = list(load_file(single))
    if damage == "none":
        single.unlink()
    elif damage == "cut":
        single.write_bytes(single.read_bytes()[:-8])
    elif damage == "index":
        index.write_text("{}")
    elif damage == "no index":
        index.write_text('{"weight_map": []}')
    else:
        file = "absent.safetensors" if damage == "shard" else single.name
        index.write_text(json.dumps({"weight_map": dict.fromkeys([*names, "promised"], file)}))
    with pytest.raises(
        ConfigError,
        match=r"policy.model has no readable \*.safetensors, got .*; complete the download, or save it with",
    ):
        load_causal_lm(directory)
