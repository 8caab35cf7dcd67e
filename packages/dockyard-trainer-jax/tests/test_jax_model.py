"""The decoder against Hugging Face's, on the same weights: hidden states, logits, and every gradient."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch
from flax import nnx
from transformers import AutoModelForCausalLM

from dockyard_core.errors import ConfigError
from dockyard_trainer_jax.attention import PackedInputs
from dockyard_trainer_jax.loading import load_causal_lm
from dockyard_trainer_jax.model import ComputeOptions, hidden, output_embedding
from dockyard_trainer_jax.model_config import parse_config, read_config
from dockyard_trainer_jax.names import named_parameters, parts_of

FAMILIES = ("llama", "qwen2", "qwen3", "qwen3_moe")
LENGTHS = (7, 5, 4)  # of the sequences packed into a row of 20; the rest is padding
LLAMA3 = {
    "rope_type": "llama3",
    "rope_theta": 10000.0,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 64,
}
MOE_TOP = {"norm_topk_prob": True}
# Each is compiled for. One of a family is left in the default tier, with as many of the options as it can have.
DEFAULT = [
    ("qwen2", True, {}),
    ("llama", False, {"rope_parameters": LLAMA3, "attention_bias": True, "mlp_bias": True, "num_key_value_heads": 1}),
    ("qwen3", False, {"attention_bias": True}),
    ("qwen3_moe", False, MOE_TOP),
]
ALL = [
    (family, is_tied, {}) for family in FAMILIES for is_tied in (True, False) if (family, is_tied) != ("qwen2", True)
]
ALL += [
    ("llama", True, {"rope_parameters": LLAMA3}),
    ("llama", False, {"attention_bias": True, "mlp_bias": True}),
    ("llama", True, {"head_dim": 8, "num_key_value_heads": 4}),
    ("llama", True, {"num_key_value_heads": 1}),
    ("qwen3_moe", True, {"num_experts": 3, "num_experts_per_tok": 3}),
]
CASES = [*DEFAULT, *(pytest.param(*case, marks=pytest.mark.ci) for case in ALL)]


def families(*default: str) -> list:
    return [pytest.param(one, marks=() if one in default else pytest.mark.ci) for one in FAMILIES]


def rows(seed=0, batch=3, length=20):
    """Token ids, and the position and segment ids of whole rows."""
    token_ids = np.random.default_rng(seed).integers(0, 64, (batch, length))
    return token_ids, np.tile(np.arange(length), (batch, 1)), np.zeros((batch, length), int)


def packed(lengths=LENGTHS, length=20):
    """One row of several sequences and padding: positions restart, segments count up, padding is -1."""
    positions, segments = np.zeros((1, length), int), np.full((1, length), -1)
    start = 0
    for number, size in enumerate(lengths):
        positions[0, start : start + size], segments[0, start : start + size] = np.arange(size), number
        start += size
    return positions, segments


def weights_of(model):
    """A fixed vector for each token of the vocabulary: its product with the logits is a loss that sees them all."""
    return np.random.default_rng(1).normal(size=(3, 20, model.config.vocab_size)).astype(np.float32)


def compiled(model, batch, weights):
    """The program of a loss on the logits: its gradient and the hidden states, of a model's state."""
    graph, state = nnx.split(model)

    @jax.jit
    def grad(state):
        def loss(state):
            model = nnx.merge(graph, state)
            hidden_BLD = hidden(model, PackedInputs(*batch))
            return ((hidden_BLD @ output_embedding(model).T) * weights).mean(), hidden_BLD

        return jax.grad(loss, has_aux=True)(state)

    return grad.lower(state).compile()


def by_part(gradients):
    return {
        part.name: np.asarray(value[...][part.indices])
        for name, value in named_parameters(gradients).items()
        for part in parts_of(name, value.shape)
    }


def torch_gradients(theirs, logits, weights):
    (logits * torch.tensor(weights)).mean().backward()
    grads = {name: param.grad.numpy() for name, param in theirs.named_parameters()}
    for name in [name for name in grads if name.endswith("experts.gate_up_proj")]:
        fused, stem = grads.pop(name), name.removesuffix("gate_up_proj")
        for expert, pair in enumerate(fused):
            grads[f"{stem}{expert}.gate_proj.weight"], grads[f"{stem}{expert}.up_proj.weight"] = np.split(pair, 2)
        for expert, one in enumerate(grads.pop(f"{stem}down_proj")):
            grads[f"{stem}{expert}.down_proj.weight"] = one
    return grads


@pytest.mark.parametrize(("family", "is_tied", "overrides"), CASES, ids=str)
def test_hidden_states_logits_and_every_gradient_are_hugging_faces(tiny_model, family, is_tied, overrides):
    directory = tiny_model(family, is_tied=is_tied, **overrides)
    model, batch = load_causal_lm(directory), rows()
    weights = weights_of(model)
    gradients, hidden_BLD = compiled(model, batch, weights)(nnx.state(model))
    theirs = AutoModelForCausalLM.from_pretrained(directory, dtype=torch.float32, attn_implementation="eager")
    expected = theirs(torch.tensor(batch[0]), output_hidden_states=True)
    np.testing.assert_allclose(hidden_BLD, expected.hidden_states[-1].detach().numpy(), atol=1e-5)
    logits_BLV = hidden_BLD @ output_embedding(model).T
    np.testing.assert_allclose(logits_BLV, expected.logits.detach().numpy(), rtol=1e-5, atol=1e-5)
    mine, theirs = by_part(gradients), torch_gradients(theirs, expected.logits, weights)
    assert mine.keys() == theirs.keys()
    for name, wanted in theirs.items():
        assert np.linalg.norm(mine[name] - wanted) <= 1e-5 * np.linalg.norm(wanted), name


@pytest.mark.parametrize("family", families("qwen2"))  # in `test_jax_policy.py` also experts
def test_a_packed_row_is_each_sequence_alone(tiny_model, family):
    directory = tiny_model(family)
    token_ids, _, _ = rows(batch=1)
    together_LD = jax.jit(hidden)(load_causal_lm(directory), PackedInputs(token_ids, *packed()))[0]
    theirs = AutoModelForCausalLM.from_pretrained(directory, dtype=torch.float32, attn_implementation="eager")
    start = 0
    for size in LENGTHS:
        span = slice(start, start + size)
        with torch.no_grad():
            alone_LD = theirs.model(torch.tensor(token_ids[:, span])).last_hidden_state[0]
        np.testing.assert_allclose(together_LD[span], alone_LD.numpy(), atol=1e-5)
        start += size
    assert bool(jnp.isfinite(together_LD).all())


@pytest.mark.ci  # `test_jax_sharding.py` has one in the default tier
@pytest.mark.parametrize("family", ["llama", "qwen3_moe"])
def test_remat_changes_no_gradient_and_keeps_less(tiny_model, family):
    directory, batch = tiny_model(family, num_hidden_layers=8), rows()
    kept, again = (load_causal_lm(directory, ComputeOptions(remat=remat)) for remat in (False, True))
    programs = [compiled(model, batch, weights_of(model)) for model in (kept, again)]
    expected, found = (by_part(program(nnx.state(kept))[0]) for program in programs)
    for name, value in found.items():
        np.testing.assert_allclose(value, expected[name], rtol=1e-5, atol=1e-7 * np.abs(expected[name]).max())
    peaks = [program.memory_analysis().temp_size_in_bytes for program in programs]
    assert peaks[1] < 0.75 * peaks[0]


@pytest.mark.parametrize("family", ["qwen3", "qwen3_moe"])
def test_no_float32_product_is_shortened_on_an_accelerator(tiny_model, family):
    graph, state = nnx.split(load_causal_lm(tiny_model(family)))
    batch = rows()
    traced = jax.make_jaxpr(jax.grad(lambda state: hidden(nnx.merge(graph, state), PackedInputs(*batch)).sum()))(state)
    products = [equation for equation in _equations(traced.jaxpr) if equation.primitive.name == "dot_general"]
    assert len(products) > 20
    assert {equation.params["precision"] for equation in products} == {(jax.lax.Precision.HIGHEST,) * 2}


def _equations(jaxpr):
    for equation in jaxpr.eqns:
        yield equation
        for inner in jax.tree.leaves(
            list(equation.params.values()), is_leaf=lambda value: hasattr(value, "eqns") or hasattr(value, "jaxpr")
        ):
            if hasattr(inner, "eqns") or hasattr(inner, "jaxpr"):
                yield from _equations(inner if hasattr(inner, "eqns") else inner.jaxpr)


def test_bfloat16_computes_in_bfloat16_and_keeps_float32_weights(tiny_model):
    directory, batch = tiny_model("qwen3"), rows()
    exact, short = (load_causal_lm(directory, ComputeOptions(dtype=dtype)) for dtype in ("float32", "bfloat16"))
    hidden_BLD = jax.jit(hidden)(short, PackedInputs(*batch))
    assert hidden_BLD.dtype == jnp.bfloat16
    assert {param.dtype for param in named_parameters(short).values()} == {jnp.dtype("float32")}
    difference = np.abs(hidden_BLD.astype(jnp.float32) - jax.jit(hidden)(exact, PackedInputs(*batch)))
    assert 1e-4 < difference.mean() < 3e-2


@pytest.mark.parametrize("token_id", [64, -1])
def test_a_token_outside_the_vocabulary_is_not_read_as_another(tiny_model, token_id):
    token_ids, positions, segments = rows(batch=2)
    token_ids[0, -1] = token_id
    hidden_BLD = jax.jit(hidden)(load_causal_lm(tiny_model("llama")), PackedInputs(token_ids, positions, segments))
    assert bool(jnp.isnan(hidden_BLD[0, -1]).all())
    assert bool(jnp.isfinite(hidden_BLD[1]).all())


LLAMA = {
    "model_type": "llama",
    "vocab_size": 64,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
}
MOE = {**LLAMA, "model_type": "qwen3_moe", "num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 8}


@pytest.mark.parametrize(
    ("raw", "rule"),
    [
        ({**LLAMA, "rope_scaling": {"type": "yarn", "factor": 2.0}}, "rope_type must be 'default' or 'llama3', got"),
        ({**LLAMA, "rope_parameters": {"rope_type": "llama3", "factor": 2.0}}, "low_freq_factor"),
        ({**LLAMA, "rope_parameters": {**LLAMA3, "high_freq_factor": 1.0}}, "high_freq_factor must be >"),
        ({**LLAMA, "partial_rotary_factor": 0.5}, "partial_rotary_factor must be 1.0, got 0.5"),
        ({**LLAMA, "hidden_act": "gelu"}, "hidden_act must be 'silu', got 'gelu'"),
        ({**LLAMA, "quantization_config": {"bits": 4}}, "quantization_config must be absent"),
        ({**LLAMA, "num_key_value_heads": 3}, "num_key_value_heads must divide num_attention_heads = 4, got 3"),
        ({**LLAMA, "head_dim": 7}, "head_dim"),
        ({**LLAMA, "vocab_size": None}, "vocab_size: Field required"),
        ({**LLAMA, "model_type": "qwen2", "use_sliding_window": True}, "use_sliding_window must be false"),
        ({**LLAMA, "model_type": "qwen2", "layer_types": ["sliding_attention"]}, "must all be 'full_attention'"),
        ({**MOE, "norm_topk_prob": True, "mlp_only_layers": [0]}, "mlp_only_layers must be empty"),
        ({**MOE, "norm_topk_prob": True, "decoder_sparse_step": 2}, "decoder_sparse_step must be 1"),
        ({**MOE, "norm_topk_prob": True, "num_experts_per_tok": 5}, "num_experts_per_tok must be <= num_experts"),
        (MOE, "norm_topk_prob: Field required"),
    ],
)
def test_what_cannot_be_computed_is_refused(raw, rule):
    with pytest.raises(ConfigError) as refused:
        parse_config(raw)
    message = str(refused.value)
    assert rule in message
    assert "; " in message


@pytest.mark.parametrize("content", [None, "{", "[]", '{"model_type": "gpt2"}'])
def test_a_directory_of_no_known_model_is_refused(tmp_path, content):
    if content is not None:
        (tmp_path / "config.json").write_text(content)
    with pytest.raises(ConfigError, match=r"policy\.model .*, got .*; "):
        read_config(tmp_path)


def test_old_and_new_config_files_mean_the_same():
    old = {**LLAMA, "rope_theta": 5e5, "rope_scaling": {k: v for k, v in LLAMA3.items() if k != "rope_theta"}}
    new = {**LLAMA, "rope_parameters": {**LLAMA3, "rope_theta": 5e5}}
    assert parse_config(old) == parse_config(new)
    assert parse_config(old).llama3_rope.factor == 8.0
    assert parse_config({**LLAMA, "model_type": "qwen3"}).head_dim == 128
    assert parse_config(LLAMA).head_dim == 8
