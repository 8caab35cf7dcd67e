"""Attention against JAX's own."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from jax.extend.core import jaxprs_in_params

from dockyard_trainer_jax import attending
from dockyard_trainer_jax.attending import Sight, attend
from dockyard_trainer_jax.attention import PackedInputs, SharedInputs, _picked
from dockyard_trainer_jax.model import CausalLM, ComputeOptions, hidden
from dockyard_trainer_jax.model_config import ModelConfig

ROWS, SIZE, ASKED, HEADS, GROUPS, WIDTH = 3, 11, 37, 4, 2, 8


def inputs(dtype=np.float32):
    rng = np.random.default_rng(0)
    queries = rng.normal(size=(ROWS, SIZE, HEADS, WIDTH)).astype(dtype)
    keys, values = (rng.normal(size=(ROWS, ASKED, GROUPS, WIDTH)).astype(dtype) for _ in range(2))
    is_visible = rng.random((ROWS, SIZE, ASKED)) < 0.4
    is_visible[:, :, 5] = True
    return queries, keys, values, is_visible


def plain(queries, keys, values, is_visible):
    return jax.nn.dot_product_attention(queries, keys, values, mask=is_visible[:, None])


def value_and_gradients(function, queries, keys, values, is_visible):
    weights = np.random.default_rng(1).normal(size=queries.shape).astype(np.float32)
    total = jax.jit(
        jax.value_and_grad(lambda *x: (function(*x, is_visible).astype(jnp.float32) * weights).sum(), (0, 1, 2))
    )
    return total(queries, keys, values)


@pytest.fixture(params=["short", "long", "long, in chunks"])
def form(request, monkeypatch) -> str:
    if request.param != "short":
        monkeypatch.setattr(attending, "_LONG", 0)
    if request.param == "long, in chunks":  # of four queries, and the last is filled up
        monkeypatch.setattr(attending, "_CHUNK_SCORES", ROWS * HEADS * ASKED * 4)
    return request.param


def test_values_and_gradients_are_those_of_plain_attention(form) -> None:
    given = inputs()
    for ours, theirs in zip(
        jax.tree.leaves(value_and_gradients(attend, *given)),
        jax.tree.leaves(value_and_gradients(plain, *given)),
        strict=True,
    ):
        np.testing.assert_allclose(ours, theirs, rtol=1e-5, atol=2e-6 * np.abs(theirs).max())


def test_who_sees_whom_may_be_said_by_segments_and_order(form) -> None:
    rng = np.random.default_rng(2)
    queries, keys, values, _ = inputs()
    segments = 1 + np.arange(ROWS)  # none is 0, with which much is filled up
    sight = Sight(
        order_RS=jnp.asarray(rng.integers(0, 9, (ROWS, SIZE))),
        segments_RS=jnp.tile(segments[:, None], SIZE),
        orders_asked_RJ=jnp.asarray(rng.integers(0, 9, (ROWS, ASKED))).at[:, 5].set(0),
        segments_asked_RJ=jnp.tile(segments[:, None], ASKED).at[:, 7:11].set(9),
    )
    mask = np.asarray(sight.mask())
    assert not mask[:, :, 7:11].any()
    assert (mask.sum(-1) < ASKED - 4).any()
    for ours, theirs in zip(
        jax.tree.leaves(value_and_gradients(attend, queries, keys, values, sight)),
        jax.tree.leaves(value_and_gradients(plain, queries, keys, values, mask)),
        strict=True,
    ):
        np.testing.assert_allclose(ours, theirs, rtol=1e-5, atol=2e-6 * np.abs(theirs).max())


def test_bfloat16_rounds_what_it_multiplies_and_no_more(form) -> None:
    exact = value_and_gradients(plain, *inputs())[1]
    queries, keys, values, is_visible = inputs()
    halves = value_and_gradients(attend, *(x.astype(jnp.bfloat16) for x in (queries, keys, values)), is_visible)[1]
    for ours, wanted in zip(halves, exact, strict=True):
        assert ours.dtype == jnp.bfloat16
        np.testing.assert_allclose(ours.astype(np.float32), wanted, atol=0.03 * np.abs(wanted).max())


def test_large_scores_overflow_nothing(form) -> None:
    queries, keys, values, is_visible = inputs()
    mixed = attend(queries * 1000, keys, values, is_visible)
    assert np.isfinite(mixed).all()
    np.testing.assert_allclose(mixed, plain(queries * 1000, keys, values, is_visible), atol=1e-3)


def largest_temporary(function, *given) -> int:
    """Elements of the largest array that the gradient of attention makes."""
    *arrays, is_visible = given
    return largest_of(jax.grad(lambda *x: function(*x, is_visible).sum(), (0, 1, 2)), *arrays)


def largest_of(function, *given) -> int:
    """Elements of the largest array that a function makes."""

    def sizes(jaxpr):
        for equation in jaxpr.eqns:
            yield from (np.prod(var.aval.shape, dtype=int) for var in equation.outvars)
            for inner in jaxprs_in_params(equation.params):
                yield from sizes(inner)

    return max(sizes(jax.make_jaxpr(function)(*given).jaxpr))


def test_long_rows_never_have_all_their_scores_at_one_time(monkeypatch) -> None:
    given = inputs()
    scores = ROWS * HEADS * SIZE * ASKED
    assert largest_temporary(attend, *given) == scores
    monkeypatch.setattr(attending, "_LONG", 0)
    monkeypatch.setattr(attending, "_CHUNK_SCORES", ROWS * HEADS * ASKED * 2)
    assert largest_temporary(attend, *given) < scores / 2


LENGTH = 512
PACKED = PackedInputs(*(np.zeros((1, LENGTH), np.int32) for _ in range(3)))
SHARED = SharedInputs(
    np.zeros((1, LENGTH), np.int32), np.full(1, LENGTH), np.zeros((2, LENGTH), np.int32), np.zeros(2, np.int32)
)


@pytest.mark.parametrize("given", [PACKED, SHARED])
@pytest.mark.parametrize("remat", [False, True])
def test_nothing_in_a_model_grows_with_the_square_of_a_long_row(given, remat, monkeypatch) -> None:
    monkeypatch.setattr(attending, "_CHUNK_SCORES", 8 * LENGTH)
    config = ModelConfig(
        model_type="llama",
        vocab_size=8,
        hidden_size=8,
        intermediate_size=8,
        num_hidden_layers=2,
        num_attention_heads=2,
        num_key_value_heads=1,
        head_dim=8,
        rms_norm_eps=1e-6,
        rope_theta=1e4,
        tie_word_embeddings=True,
    )
    graph, params = nnx.split(CausalLM(config, ComputeOptions(remat=remat)))
    gradient = jax.grad(lambda params, given: hidden(nnx.merge(graph, params), given).sum())
    # What a position has of its own takes less than this.
    assert largest_of(gradient, params, given) < LENGTH * LENGTH // 2, "not even who sees whom"


def test_a_prefix_that_is_not_finite_is_that_of_its_own_suffixes_only() -> None:
    rng = np.random.default_rng(3)
    prefixes, pulls = (jnp.asarray(rng.normal(size=(size, 4, 2, 3)).astype(np.float32)) for size in (3, 5))
    prefix_of = np.array([2, 0, 1, 2, 2])
    is_prefix = jnp.asarray(prefix_of[:, None] == np.arange(3))
    picked = _picked(prefixes.at[1].set(np.nan), is_prefix)
    np.testing.assert_array_equal(np.isnan(picked).any((1, 2, 3)), prefix_of == 1)
    ours, theirs = (
        jax.grad(lambda x, pick=pick: (pick(x) * pulls).sum())(prefixes)
        for pick in (lambda x: _picked(x, is_prefix), lambda x: x[prefix_of])
    )
    np.testing.assert_allclose(ours, theirs, rtol=1e-6, atol=1e-6)
