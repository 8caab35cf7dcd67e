"""A model over a mesh of eight pretended devices is the model on one."""

import jax
import numpy as np
import pytest
from flax import nnx
from jax.sharding import PartitionSpec

from dockyard_core.errors import ConfigError
from dockyard_trainer_jax.attention import PackedInputs
from dockyard_trainer_jax.loading import load_causal_lm
from dockyard_trainer_jax.model import ComputeOptions, abstract_causal_lm, hidden, output_embedding
from dockyard_trainer_jax.model_config import check_divides, read_config
from dockyard_trainer_jax.names import named_parameters
from dockyard_trainer_jax.sharding import batch_sharding, make_mesh, partition_spec

MESHES = [(8, 1), (4, 2), (2, 4), (1, 8)]
WIDE = {"num_attention_heads": 8, "num_key_value_heads": 8, "head_dim": 8}
CASES = [("qwen3", True, WIDE), ("llama", False, {**WIDE, "attention_bias": True, "mlp_bias": True})]
MOE_CASE = ("qwen3_moe", False, WIDE)
# Each is compiled for; another model is on a mesh in `test_jax_policy.py` in the default tier.
DEFAULT = [("qwen3", (4, 2))]
ON_MESHES = [
    pytest.param(*case, *mesh, marks=() if (case[0], mesh) in DEFAULT else pytest.mark.ci)
    for case in (*CASES, MOE_CASE)
    for mesh in MESHES
]


def rows():
    """Eight rows of two sequences and some padding."""
    token_ids = np.random.default_rng(3).integers(0, 64, (8, 12))
    positions = np.tile([*range(6), *range(4), 0, 1], (8, 1))
    segments = np.tile([0] * 6 + [1] * 4 + [-1] * 2, (8, 1))
    return token_ids, positions, segments


def hidden_and_gradients(model, batch):
    weights = np.random.default_rng(1).normal(size=(8, 12, model.config.vocab_size)).astype(np.float32)
    graph, state = nnx.split(model)

    @jax.jit
    def compute(state, batch):
        def loss(state):
            model = nnx.merge(graph, state)
            hidden_BLD = hidden(model, PackedInputs(*batch))
            return ((hidden_BLD @ output_embedding(model).T) * weights).mean(), hidden_BLD

        return jax.grad(loss, has_aux=True)(state)

    gradients, hidden_BLD = compute(state, batch)
    return np.asarray(hidden_BLD), {name: np.asarray(value[...]) for name, value in named_parameters(gradients).items()}


@pytest.fixture(scope="module")
def on_one_device(tiny_model):
    known = {}

    def compute(family, is_tied, overrides):
        if family not in known:
            model = load_causal_lm(tiny_model(family, is_tied=is_tied, **overrides))
            known[family] = hidden_and_gradients(model, rows())
        return known[family]

    return compute


@pytest.mark.parametrize(("family", "is_tied", "overrides", "fsdp", "tp"), ON_MESHES)
def test_a_mesh_computes_what_one_device_does(tiny_model, on_one_device, family, is_tied, overrides, fsdp, tp):
    mesh = make_mesh(fsdp, tp)
    directory = tiny_model(family, is_tied=is_tied, **overrides)
    model = load_causal_lm(directory, ComputeOptions(mesh=mesh, remat=fsdp == 4))
    hidden_BLD, gradients = hidden_and_gradients(model, jax.device_put(rows(), batch_sharding(mesh)))
    expected_BLD, expected = on_one_device(family, is_tied, overrides)
    np.testing.assert_allclose(hidden_BLD, expected_BLD, atol=1e-5)
    assert gradients.keys() == expected.keys()
    for name, value in expected.items():
        assert np.linalg.norm(gradients[name] - value) <= 1e-5 * np.linalg.norm(value), name


@pytest.mark.parametrize(("fsdp", "tp"), MESHES)
@pytest.mark.parametrize(("family", "is_tied", "overrides"), [*CASES, MOE_CASE])
def test_no_device_holds_the_whole_of_a_matrix(tiny_model, family, is_tied, overrides, fsdp, tp):
    directory = tiny_model(family, is_tied=is_tied, **overrides)
    for name, param in named_parameters(load_causal_lm(directory, ComputeOptions(mesh=make_mesh(fsdp, tp)))).items():
        sharing = 8
        if name.endswith("mlp.gate.weight"):  # a row per expert, whole on the tensor shards
            sharing = fsdp
        elif name.endswith("bias"):
            sharing = 1 if "o_proj" in name or "down_proj" in name else tp
        elif "norm" in name:
            sharing = 1
        sizes = {shard.data.size for shard in param[...].addressable_shards}
        assert sizes == {param[...].size // sharing}, name


def test_layers_and_experts_are_never_dealt():
    assert partition_spec("model.layers.self_attn.o_proj.weight") == PartitionSpec(None, "fsdp", "tp")
    assert partition_spec("model.layers.mlp.experts.up_proj.weight") == PartitionSpec(None, None, "tp", "fsdp")
    assert partition_spec("lm_head.weight") == PartitionSpec("tp", "fsdp")


@pytest.mark.parametrize("family", ["llama", "qwen2", "qwen3", "qwen3_moe"])
def test_the_table_has_an_axis_or_none_for_each_dimension(tiny_model, family):
    for name, param in named_parameters(abstract_causal_lm(read_config(tiny_model(family, is_tied=False)))).items():
        assert len(partition_spec(name)) == len(param.shape), name


def test_a_name_outside_the_table_is_refused():
    with pytest.raises(ValueError, match=r"got 'model\.layers\.new\.weight'; add one"):
        partition_spec("model.layers.new.weight")


def test_a_mesh_uses_every_device():
    with pytest.raises(ConfigError, match="must be the number of devices = 8, got 3 x 2; change one of them"):
        make_mesh(3, 2)


@pytest.mark.parametrize(
    ("fsdp", "tp", "message"),
    [
        (1, 4, "tensor_parallel_size must divide the model's num_key_value_heads = 2, got 4; lower it"),
        (1, 8, "tensor_parallel_size must divide the model's num_attention_heads = 4, got 8; lower it"),
        (3, 1, "fsdp_size must divide the model's hidden_size = 32, got 3; lower it"),
    ],
)
def test_sizes_that_do_not_divide_are_refused(tiny_model, fsdp, tp, message):
    with pytest.raises(ConfigError) as refused:
        check_divides(read_config(tiny_model("llama")), fsdp=fsdp, tp=tp)
    assert str(refused.value) == message


def test_inner_width_and_vocabulary_must_divide_too(tiny_model):
    config = read_config(tiny_model("llama", **WIDE))
    with pytest.raises(ConfigError, match="the model's intermediate_size = 50, got 4"):
        check_divides(config.model_copy(update={"intermediate_size": 50}), fsdp=1, tp=4)
    with pytest.raises(ConfigError, match="the model's vocab_size = 63, got 4"):
        check_divides(config.model_copy(update={"vocab_size": 63}), fsdp=1, tp=4)
    moe = read_config(tiny_model("qwen3_moe", **WIDE, moe_intermediate_size=20))
    with pytest.raises(ConfigError, match="the model's moe_intermediate_size = 20, got 8"):
        check_divides(moe, fsdp=1, tp=8)
