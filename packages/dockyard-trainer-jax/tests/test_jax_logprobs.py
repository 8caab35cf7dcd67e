"""Chunked log-probabilities: values, gradients, memory, padding, and a vocabulary that is sharded."""

import functools
import re
from collections.abc import Iterator

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch
from jax.extend.core import jaxprs_in_params
from jax.sharding import NamedSharding, PartitionSpec
from jax.test_util import check_grads

from dockyard_trainer_jax.logprobs import chunked_logprobs, num_chunks
from dockyard_trainer_torch.logprobs import chunked_logprobs as torch_chunked_logprobs


def random_inputs(num_positions=40, vocab_size=30, width=8, *, dtype=np.float32, seed=0):
    rng = np.random.default_rng(seed)
    hidden_MD, weight_VD = rng.normal(size=(num_positions, width)), rng.normal(size=(vocab_size, width))
    return hidden_MD.astype(dtype), weight_VD.astype(dtype), rng.integers(0, vocab_size, num_positions, dtype=np.int32)


def exact(inputs, temperature, pulls):
    """Log-probabilities, entropies and both gradients, all logits at once in float64."""
    hidden_MD, weight_VD, targets_M = inputs[0].astype(np.float64), inputs[1].astype(np.float64), inputs[2]
    logits_MV = hidden_MD @ weight_VD.T / temperature
    log_p_MV = logits_MV - logits_MV.max(-1, keepdims=True)
    log_p_MV = log_p_MV - np.log(np.exp(log_p_MV).sum(-1, keepdims=True))
    p_MV = np.exp(log_p_MV)
    entropy_M = -(p_MV * log_p_MV).sum(-1)
    chosen_MV = np.arange(len(weight_VD)) == targets_M[:, None]
    grad_MV = pulls[0][:, None] * (chosen_MV - p_MV) - pulls[1][:, None] * p_MV * (log_p_MV + entropy_M[:, None])
    grad_MV = grad_MV / temperature
    return log_p_MV[chosen_MV], entropy_M, grad_MV @ weight_VD, grad_MV.T @ hidden_MD


def run(inputs, pulls, *, mask_M=None, **options):
    """The same four by the function under test, compiled."""

    @jax.jit
    def both(hidden_MD, weight_VD, targets_M, mask_M, pulls):
        def values(hidden_MD, weight_VD):
            return chunked_logprobs(hidden_MD, weight_VD, targets_M, mask_M, **options)

        found, pull_back = jax.vjp(values, hidden_MD, weight_VD)
        return *found, *pull_back(pulls)

    return [np.asarray(array) for array in both(*inputs, mask_M, tuple(map(jnp.asarray, pulls)))]


def random_pulls(num_positions, dtype=np.float32, seed=1):
    return np.random.default_rng(seed).normal(size=(2, num_positions)).astype(dtype)


@pytest.mark.parametrize("temperature", [1.0, 0.7])
@pytest.mark.parametrize("chunk_tokens", [7, *(pytest.param(one, marks=pytest.mark.ci) for one in (1, 20, 64, 1000))])
@pytest.mark.parametrize("use_entropy", [1, 0])
def test_values_and_gradients_are_the_exact_ones_whatever_the_chunks(temperature, chunk_tokens, use_entropy) -> None:
    inputs, pulls = random_inputs(50), random_pulls(50) * np.array([[1], [use_entropy]], np.float32)
    got = run(inputs, pulls, temperature=temperature, chunk_tokens=chunk_tokens)
    for one, other in zip(got, exact(inputs, temperature, pulls), strict=True):
        assert one.dtype == np.float32
        np.testing.assert_allclose(one, other, rtol=1e-5, atol=1e-5)
        assert np.linalg.norm(one - other) <= 1e-6 * np.linalg.norm(other)


@pytest.mark.ci  # in the default tier gradients are those of torch and of the formula
@pytest.mark.parametrize("chunk_tokens", [1, 2, 5])
def test_the_gradient_is_the_finite_difference_in_float64(chunk_tokens) -> None:
    with jax.enable_x64(True):
        hidden_MD, weight_VD, _ = random_inputs(5, 7, 4, dtype=np.float64)
        targets_M = jnp.array([0, 6, 2, 2, 5])

        def values(hidden_MD, weight_VD):
            return chunked_logprobs(hidden_MD, weight_VD, targets_M, temperature=0.7, chunk_tokens=chunk_tokens)

        assert values(hidden_MD, weight_VD)[0].dtype == jnp.float64
        arguments = (jnp.asarray(hidden_MD), jnp.asarray(weight_VD))
        check_grads(values, arguments, order=1, modes=["rev"], eps=1e-6, atol=1e-8, rtol=1e-8)


@pytest.mark.parametrize("chunk_tokens", [3, 16])
def test_values_and_gradients_are_those_of_torch(chunk_tokens) -> None:
    inputs, pulls = random_inputs(dtype=np.float64), random_pulls(40, np.float64)
    with jax.enable_x64(True):
        got = run(inputs, pulls, temperature=0.9, chunk_tokens=chunk_tokens)
    hidden_MD, weight_VD = (torch.from_numpy(array).requires_grad_() for array in inputs[:2])
    values = torch_chunked_logprobs(hidden_MD, weight_VD, torch.from_numpy(inputs[2]).long(), temperature=0.9)
    grads = torch.autograd.grad(values, [hidden_MD, weight_VD], list(torch.from_numpy(pulls)))
    for one, other in zip(got, (*values, *grads), strict=True):
        np.testing.assert_allclose(one, other.detach().numpy(), rtol=1e-11, atol=1e-12)


def sizes(jaxpr) -> Iterator[int]:
    """Elements of every result in a jaxpr, those of loops and calls included."""
    for equation in jaxpr.eqns:
        yield from (int(np.prod(variable.aval.shape)) for variable in equation.outvars)
        for inner in jaxprs_in_params(equation.params):
            yield from sizes(inner)


def test_no_array_is_as_large_as_the_logits() -> None:
    hidden_MD, weight_VD, targets_M = random_inputs(64, 512, 3)

    def total(hidden_MD, weight_VD):
        logprobs_M, entropy_M = chunked_logprobs(hidden_MD, weight_VD, targets_M, temperature=1.0, chunk_tokens=5)
        return (logprobs_M + entropy_M).sum()

    both = jax.jit(jax.grad(total, argnums=(0, 1)))
    largest = max(sizes(both.trace(hidden_MD, weight_VD).jaxpr.jaxpr))
    assert 3 * 512 < largest <= 5 * 512, "a chunk: larger than the gradient of the weight, and the bound asked for"
    # What the compiler makes of it, all arrays that exist at one time together.
    assert both.lower(hidden_MD, weight_VD).compile().memory_analysis().temp_size_in_bytes < 64 * 512 * 4


@pytest.mark.parametrize(("num_positions", "chunk_tokens", "wanted"), [(64, 16, 4), (64, 5, 16), (7, 3, 3), (0, 4, 1)])
def test_chunks_have_equal_lengths_where_that_takes_few_more(num_positions, chunk_tokens, wanted) -> None:
    assert num_chunks(num_positions, chunk_tokens) == wanted
    assert wanted * chunk_tokens >= num_positions


@pytest.mark.parametrize("chunk_tokens", [3, pytest.param(40, marks=pytest.mark.ci)])
@pytest.mark.parametrize("poison", [np.nan, *(pytest.param(one, marks=pytest.mark.ci) for one in (np.inf, -np.inf))])
def test_what_padding_holds_neither_counts_nor_leaks(chunk_tokens, poison) -> None:
    inputs, pulls, mask_M = random_inputs(), random_pulls(40), np.random.default_rng(2).random(40) < 0.6
    packed = [array[mask_M] for array in (inputs[0], inputs[2])]
    wanted = exact((packed[0], inputs[1], packed[1]), 0.8, pulls[:, mask_M])
    hidden_MD = np.where(mask_M[:, None], inputs[0], poison).astype(np.float32)
    targets_M = np.where(mask_M, inputs[2], -1).astype(np.int32)
    spoiled = np.where(mask_M, pulls, poison).astype(np.float32)
    for pulls_M in (pulls, spoiled):
        got = run((hidden_MD, inputs[1], targets_M), pulls_M, mask_M=mask_M, temperature=0.8, chunk_tokens=chunk_tokens)
        for number in range(3):
            assert not got[number][~mask_M].any()
            np.testing.assert_allclose(got[number][mask_M], wanted[number], rtol=1e-5, atol=1e-5)
        np.testing.assert_allclose(got[3], wanted[3], rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("chunk_tokens", [3, 40])
def test_positions_without_a_gradient_neither_count_nor_spoil_the_others(chunk_tokens) -> None:
    inputs, pulls = random_inputs(), random_pulls(40)
    is_sound_M = ~np.isin(np.arange(40), [4, 17, 30])
    pulls = pulls * is_sound_M
    hidden_MD = inputs[0].copy()
    hidden_MD[4], hidden_MD[17, 2], hidden_MD[30, 0] = np.nan, np.inf, -np.inf
    *values, grad_MD, grad_VD = run((hidden_MD, *inputs[1:]), pulls, temperature=0.8, chunk_tokens=chunk_tokens)
    *wanted, wanted_MD, wanted_VD = exact(inputs, 0.8, pulls)
    for one, other in zip(values, wanted, strict=True):
        assert not np.isfinite(one[~is_sound_M]).any()
        np.testing.assert_allclose(one[is_sound_M], other[is_sound_M], rtol=1e-5, atol=1e-5)
    np.testing.assert_allclose(grad_MD, wanted_MD, rtol=1e-5, atol=1e-5)
    np.testing.assert_allclose(grad_VD, wanted_VD, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize(("scale", "temperature"), [(1e4, 1.0), (1e2, 1e-2), (1.0, 1e-2)])
def test_huge_logits_are_as_exact_as_their_rounding_allows(scale, temperature) -> None:
    # Hidden states pick a column of the weight, so the logits are numbers that float32 holds exactly.
    logits_MV = np.array([[-1.0, 1.0, 0.5, 0.5], [1.0, 1.0, 1.0, 1.0], [-1.0, -1.0, -1.0, -0.5]], np.float32) * scale
    inputs = (np.eye(3, dtype=np.float32), np.ascontiguousarray(logits_MV.T, np.float32), np.array([2, 1, 3]))
    pulls = np.ones((2, 3), np.float32)
    got = run(inputs, pulls, temperature=temperature, chunk_tokens=2)
    wanted = exact(inputs, temperature, pulls)
    for one, other in zip(got[:2], wanted[:2], strict=True):
        np.testing.assert_allclose(one, other, rtol=1e-6, atol=1e-6)
    np.testing.assert_allclose(got[2], wanted[2], rtol=1e-5, atol=1e-5 * scale)


def test_equal_logits_are_uniform_at_any_height() -> None:
    for height in (-1e4, 0.0, 1e4):
        weight_VD = jnp.full((1000, 1), height)
        logprobs_M, entropy_M = chunked_logprobs(
            jnp.ones((2, 1)), weight_VD, jnp.array([0, 999]), temperature=1.0, chunk_tokens=1
        )
        assert logprobs_M.tolist() == pytest.approx([-np.log(1000)] * 2, rel=1e-6)
        assert entropy_M.tolist() == pytest.approx([np.log(1000)] * 2, rel=1e-6)


def test_a_target_outside_the_vocabulary_is_impossible() -> None:
    logprobs_M, _ = chunked_logprobs(
        jnp.ones((2, 1)), jnp.ones((3, 1)), jnp.array([3, -1]), temperature=1.0, chunk_tokens=2
    )
    assert logprobs_M.tolist() == [-np.inf, -np.inf]


def test_no_positions_give_no_values_and_zero_gradients() -> None:
    logprobs_M, entropy_M, grad_MD, grad_VD = run(random_inputs(0), random_pulls(0), temperature=1.0, chunk_tokens=4)
    assert logprobs_M.shape == entropy_M.shape == (0,)
    assert grad_MD.shape == (0, 8)
    assert not grad_VD.any()


@pytest.mark.parametrize("weight_dtype", [jnp.bfloat16, jnp.float32])
def test_the_gradient_of_the_weight_is_summed_in_float32(weight_dtype) -> None:
    """1 + 256 * 2^-9 = 1.5, but a sum of bfloat16 numbers would stay at 1."""
    hidden_MD = jnp.concatenate([jnp.ones((1, 1)), jnp.full((256, 1), 2.0**-9)]).astype(jnp.bfloat16)
    targets_M = jnp.zeros(257, jnp.int32)

    def total(weight_VD):
        logprobs_M, _ = chunked_logprobs(hidden_MD, weight_VD, targets_M, temperature=0.5, chunk_tokens=1)
        assert logprobs_M.dtype == jnp.float32
        return logprobs_M.sum()

    grad_VD = jax.jit(jax.grad(total))(jnp.zeros((2, 1), weight_dtype))
    assert grad_VD.dtype == weight_dtype
    assert grad_VD.ravel().tolist() == [1.5, -1.5]


def test_another_temperature_runs_what_was_compiled_for_the_first() -> None:
    hidden_MD, weight_VD, targets_M = random_inputs()

    @jax.jit
    def score(temperature):
        return chunked_logprobs(hidden_MD, weight_VD, targets_M, temperature=temperature, chunk_tokens=8)[0]

    for temperature in (1.0, 0.6):
        wanted = exact((hidden_MD, weight_VD, targets_M), temperature, np.zeros((2, 40)))[0]
        np.testing.assert_allclose(score(temperature), wanted, rtol=1e-5, atol=1e-5)
    assert score._cache_size() == 1


def test_a_chunk_of_no_tokens_is_refused() -> None:
    with pytest.raises(ValueError, match="chunk_tokens must be >= 1, got 0"):
        chunked_logprobs(*map(jnp.asarray, random_inputs()), temperature=1, chunk_tokens=0)


def test_temperature_zero_is_refused() -> None:
    with pytest.raises(ValueError, match="temperature must be > 0, got 0"):
        chunked_logprobs(*map(jnp.asarray, random_inputs()), temperature=0, chunk_tokens=8)


@functools.cache
def sharded_material():
    """Inputs, a program for them, and its results on one device."""
    rng = np.random.default_rng(0)
    hidden_MD, weight_VD = (rng.normal(size=s).astype(np.float32) for s in ((64, 8), (96, 8)))
    targets_M, mask_M = rng.integers(0, 96, 64, dtype=np.int32), rng.random(64) < 0.8
    hidden_MD[~mask_M] = np.nan
    pulls = jnp.asarray(rng.normal(size=(2, 64)).astype(np.float32))

    def both(hidden_MD, weight_VD, targets_M, mask_M):
        def values(hidden_MD, weight_VD):
            return chunked_logprobs(hidden_MD, weight_VD, targets_M, mask_M, temperature=0.7, chunk_tokens=16)

        found, pull_back = jax.vjp(values, hidden_MD, weight_VD)
        return *found, *pull_back((pulls[0], pulls[1]))

    inputs = (hidden_MD, weight_VD, targets_M, mask_M)
    return inputs, both, jax.jit(both)(*inputs)


@pytest.mark.parametrize(
    "shape", [(2, 4), *(pytest.param(one, marks=pytest.mark.ci) for one in ((1, 8), (4, 2), (8, 1)))], ids=str
)
def test_a_vocabulary_sharded_over_devices_gives_equal_results_and_stays_sharded(shape) -> None:
    inputs, both, alone = sharded_material()
    mesh = jax.make_mesh(shape, ("fsdp", "tp"), axis_types=(jax.sharding.AxisType.Auto,) * 2)
    rows, vocab = NamedSharding(mesh, PartitionSpec("fsdp")), NamedSharding(mesh, PartitionSpec("tp"))
    spread = [jax.device_put(a, place) for a, place in zip(inputs, (rows, vocab, rows, rows), strict=True)]
    compiled = jax.jit(both, out_shardings=(rows, rows, rows, vocab)).lower(*spread).compile()
    for one, other in zip(compiled(*spread), alone, strict=True):
        np.testing.assert_allclose(one, other, rtol=1e-5, atol=1e-5)
        assert np.linalg.norm(one - other) <= 1e-6 * np.linalg.norm(other)
    sizes = [int(np.prod([int(n) for n in m.split(",")])) for m in re.findall(r"f32\[([0-9,]+)\]", compiled.as_text())]
    # A chunk's logits are cut along both axes, so that no device has more of them than its share.
    assert max(sizes) <= max(16 * 96 // 8, 96 * 8 // shape[1], 64 * 8 // shape[0])
