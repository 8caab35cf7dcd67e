"""LoRA: the base at step 0, a base that nothing is spent on, meshes, and which layers are adapted."""

import re
import sys
from pathlib import Path

import jax
import numpy as np
import pytest

sys.path.append(str(Path(__file__).parent))

from jax_adapters import LORA, UPDATES, Arrays, adapters, by_layer, distance, fill, make_shard, moments, streamed

from dockyard_core.errors import ConfigError
from dockyard_core.loss_config import LossConfig
from dockyard_trainer_jax import JaxPolicy, JaxPolicyConfig, LoraConfig, compiling, weight_manifest
from dockyard_trainer_jax.loading import load_causal_lm
from dockyard_trainer_jax.lora import apply_lora, is_adapter
from dockyard_trainer_jax.names import named_parameters

ATTENTION = LoraConfig(rank=2, target_modules=("v_proj", "o_proj", "q_proj"))


@pytest.mark.parametrize(
    ("family", "lora", "overrides"),
    [
        ("qwen2", LORA, {}),
        pytest.param("qwen3", LORA, {}, marks=pytest.mark.ci),
        pytest.param("llama", LORA, {"attention_bias": True, "mlp_bias": True}, marks=pytest.mark.ci),
        pytest.param("qwen3_moe", ATTENTION, {}, marks=pytest.mark.ci),
    ],
)
def test_the_first_logprobs_and_weights_are_the_bases_bit_for_bit(tiny_model, family, lora, overrides) -> None:
    directory = tiny_model(family, **overrides)
    base = JaxPolicy.from_pretrained(directory, JaxPolicyConfig())
    policy = JaxPolicy.from_pretrained(directory, JaxPolicyConfig(lora=lora))
    np.testing.assert_array_equal(policy.logprobs(make_shard())[0], base.logprobs(make_shard())[0])
    assert weight_manifest(policy) == weight_manifest(base)
    held = streamed(base)
    assert list(streamed(policy)) == list(held)
    for name, array in streamed(policy).items():
        np.testing.assert_array_equal(array, held[name], err_msg=name)


def test_a_reference_and_moments_cost_no_copy_of_the_base(tiny_model) -> None:
    def held_bytes() -> int:
        return sum(array.nbytes for array in jax.live_arrays())

    before = held_bytes()
    policy = JaxPolicy.from_pretrained(tiny_model("qwen2"), JaxPolicyConfig(lora=LORA, load_reference=True))
    base, trained = (sum(array.nbytes for array in held.values()) for held in (policy.frozen, policy.params))
    assert held_bytes() - before < base + 3 * trained + 1000 < 2.5 * base


def test_an_update_takes_the_memory_of_the_adapters_and_leaves_the_base(tiny_model) -> None:
    policy = JaxPolicy.from_pretrained(tiny_model("qwen2"), JaxPolicyConfig(lora=LORA, loss=LossConfig(kl_coef=0.1)))
    given, base = list(policy.params.values()), list(policy.frozen.values())
    policy.train_step(make_shard())
    assert all(array.is_deleted() for array in given)
    assert not any(array.is_deleted() for array in base)


@pytest.mark.ci
def test_no_gradient_of_the_base_is_computed(tiny_model) -> None:
    directory = tiny_model("qwen3_moe", is_tied=False)
    products = {}
    for lora in (None, LoraConfig(rank=1, target_modules=("q_proj",))):
        known = set(compiling._PROGRAMS)
        JaxPolicy.from_pretrained(directory, JaxPolicyConfig(lora=lora)).train_step(make_shard())
        (key,) = [key for key in compiling._PROGRAMS.keys() - known if key[0] == "added"]
        text = compiling._PROGRAMS[key].as_text()
        made = re.findall(r' dot\(.*op_name="[^"]*transpose[^"]*/([a-z.]*,[a-z.]*->[a-z.]*)/', text)
        # Gradients of the output embedding, of experts, and of plain layers; those of rank 1 are no matrix products.
        products[lora is None] = [made.count(name) for name in ("cv,cd->vd", "so,si->oi", "...o,...i->oi")]
    assert all(products[True])
    assert products[False] == [0, 0, 0]


@pytest.mark.ci
@pytest.mark.parametrize(
    "sizes", [(2, 4), *(pytest.param(one, marks=pytest.mark.nightly) for one in ((8, 1), (4, 2), (1, 8)))], ids=str
)
def test_a_step_over_a_mesh_is_that_of_one_device(tiny_model, sizes) -> None:
    # Every dimension that is dealt over tensor-parallel devices divides by 8.
    directory = tiny_model("qwen2", num_attention_heads=8, num_key_value_heads=8)
    drawn, gradients, weights = [], [], []
    for fsdp, tp in [(1, 1), sizes]:
        options = {"betas": (0.0, 0.0), "max_grad_norm": 1e9, "fsdp_size": fsdp, "tensor_parallel_size": tp}
        policy = JaxPolicy.from_pretrained(directory, JaxPolicyConfig(**UPDATES | options, lora=LORA))
        drawn.append(adapters(policy))
        fill(policy)
        policy.train_step(make_shard())
        for name, param in policy.params.items():
            assert policy.state.exp_avg[name].sharding == param.sharding, name
            is_row_layer, is_A = "o_proj" in name or "down_proj" in name, name.endswith("A")
            axis = sizes[1] if is_row_layer == is_A else sizes[0]
            sharing = 1 if fsdp * tp == 1 else axis
            assert {shard.data.size for shard in param.addressable_shards} == {param.size // sharing}, name
        gradients.append(moments(policy))
        weights.append(streamed(policy))
    for name, array in gradients[0].items():
        np.testing.assert_array_equal(drawn[1][name], drawn[0][name], err_msg=name)
        assert distance(gradients[1][name], array) < 1e-5, name
    for name, array in weights[0].items():
        np.testing.assert_allclose(weights[1][name], array, rtol=0, atol=1e-5, err_msg=name)


@pytest.mark.ci
@pytest.mark.parametrize(
    ("options", "tolerance"), [({"dtype": "bfloat16"}, 0.1), ({"activation_checkpointing": True}, 1e-5)], ids=str
)
def test_other_ways_of_computing_change_rounding_only(tiny_model, options, tolerance) -> None:
    gradients = []
    for chosen in ({}, options):
        config = JaxPolicyConfig(**UPDATES | {"betas": (0.0, 0.0), "max_grad_norm": 1e9}, lora=LORA, **chosen)
        policy = JaxPolicy.from_pretrained(tiny_model("qwen2"), config)
        fill(policy)
        policy.train_step(make_shard())
        assert {str(param.dtype) for param in policy.params.values()} == {"float32"}
        gradients.append(moments(policy))
    for name, array in gradients[0].items():
        assert distance(gradients[1][name], array) < tolerance, name


def drawn(directory, *, seed: int, lora: LoraConfig = LORA) -> Arrays:
    model = load_causal_lm(directory)
    apply_lora(model, lora, seed=seed)
    params = {name: param[...] for name, param in named_parameters(model).items()}
    return {name: array for name, array in by_layer(params).items() if is_adapter(name)}


def test_the_seed_alone_decides_the_adapters(tiny_model) -> None:
    first, second, other = (drawn(tiny_model("qwen2"), seed=seed) for seed in (3, 3, 4))
    for name, array in first.items():
        np.testing.assert_array_equal(second[name], array, err_msg=name)
        assert array.any() == name.endswith("lora_A")
        assert np.array_equal(other[name], array) is not name.endswith("lora_A")
    narrow = [array for name, array in first.items() if name.endswith("lora_A") and array.shape == (3, 32)]
    assert all(0.9 * 32**-0.5 < np.abs(array).max() <= 32**-0.5 for array in narrow)
    assert len({float(array.sum()) for array in narrow}) == len(narrow) == 10, "each layer has its own draw"
    policy = JaxPolicy.from_pretrained(tiny_model("qwen2"), JaxPolicyConfig(lora=LORA, seed=4))
    for name, array in adapters(policy).items():
        np.testing.assert_array_equal(array, other[name], err_msg=name)


def test_only_named_targets_are_adapted(tiny_model) -> None:
    assert {name.split(".")[-2] for name in drawn(tiny_model("qwen3_moe"), seed=0, lora=ATTENTION)} == {
        "q_proj",
        "v_proj",
        "o_proj",
    }


def test_targets_that_the_model_lacks_are_refused(tiny_model) -> None:
    model = load_causal_lm(tiny_model("qwen3_moe"))
    with pytest.raises(ConfigError) as refused:
        apply_lora(model, LORA, seed=0)
    assert str(refused.value) == (
        "lora.target_modules must name plain linear layers of the model, got ['down_proj', 'gate_proj', 'up_proj'], "
        "which this 'qwen3_moe' lacks; leave them out"
    )
    apply_lora(model, ATTENTION, seed=0)
    with pytest.raises(ConfigError, match=r"plain linear layers.*'o_proj'.*'qwen3_moe' lacks; leave them out"):
        apply_lora(model, ATTENTION, seed=0)  # a second time
