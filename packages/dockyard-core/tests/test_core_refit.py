"""Laws of the refit's pure parts: bucket plan, bijection, digests, probe."""

from __future__ import annotations

import hashlib
import math
from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dockyard_core.errors import WeightMismatch
from dockyard_core.refit import (
    DTYPE_BYTES,
    TensorSpec,
    bucket_digest,
    check_bijection,
    elements_per_layer,
    layer_of,
    plan_buckets,
    probe_diff,
)

SHAPES = st.lists(st.integers(1, 9), max_size=3).map(tuple)
DTYPES = st.sampled_from(sorted(DTYPE_BYTES))
MANIFESTS = st.lists(st.tuples(DTYPES, SHAPES), max_size=12).map(
    lambda rows: tuple(TensorSpec(f"model.layers.{i}.weight", dtype, shape) for i, (dtype, shape) in enumerate(rows))
)


def _spec(name: str, *shape: int) -> TensorSpec:
    return TensorSpec(name, "float32", shape)


@given(MANIFESTS, st.integers(1, 4000))
def test_a_plan_keeps_every_tensor_once_in_order_and_respects_the_limit(
    manifest: tuple[TensorSpec, ...], bucket_bytes: int
) -> None:
    plan = plan_buckets(manifest, bucket_bytes)
    assert tuple(spec for bucket in plan for spec in bucket.tensors) == manifest
    for bucket in plan:
        assert bucket.num_bytes == sum(spec.num_bytes for spec in bucket.tensors)
        assert bucket.num_bytes <= bucket_bytes or len(bucket.tensors) == 1


@given(MANIFESTS, st.integers(1, 4000))
def test_a_plan_is_greedy_no_bucket_could_take_the_next_ones_first_tensor(
    manifest: tuple[TensorSpec, ...], bucket_bytes: int
) -> None:
    plan = plan_buckets(manifest, bucket_bytes)
    for bucket, following in pairwise(plan):
        assert bucket.num_bytes + following.tensors[0].num_bytes > bucket_bytes


def test_a_plan_by_hand() -> None:
    manifest = (_spec("a", 2), _spec("b", 3), _spec("c", 10), _spec("d", 1))  # 8, 12, 40, 4 bytes
    assert [[spec.name for spec in bucket.tensors] for bucket in plan_buckets(manifest, 20)] == [
        ["a", "b"],
        ["c"],
        ["d"],
    ]
    assert plan_buckets((), 20) == ()


def test_a_bucket_needs_room() -> None:
    with pytest.raises(ValueError, match="bucket_bytes must be >= 1, got 0"):
        plan_buckets((_spec("a", 2),), 0)


@pytest.mark.parametrize(("dtype", "num_bytes"), [("float32", 24), ("bfloat16", 12), ("float16", 12), ("float64", 48)])
def test_bytes_of_a_tensor(dtype: str, num_bytes: int) -> None:
    assert TensorSpec("a", dtype, (2, 3)).num_bytes == num_bytes


def test_a_scalar_has_one_element() -> None:
    assert _spec("a").num_bytes == 4


def test_the_digest_is_sha256_of_the_bytes() -> None:
    assert bucket_digest(b"abc").hex() == "ba7816bf8f01cfea414140de5dae2223b00361a396177a9cb410ff61f20015ad"
    assert len(bucket_digest(b"")) == 32
    assert bucket_digest(memoryview(b"xy")) == hashlib.sha256(b"xy").digest()


def test_equal_sides_pass_in_any_order() -> None:
    check_bijection([_spec("b", 2), _spec("a", 1, 3)], {"a": (1, 3), "b": (2,)}, policy_version=4)


@pytest.mark.parametrize(
    ("sent", "message"),
    [
        ([_spec("a", 2)], r"missing from the update: b"),
        ([_spec("a", 2), _spec("b", 3), _spec("c", 1)], r"unknown to the engine: c"),
        ([_spec("a", 2), _spec("b", 4)], r"misshapen: b \(4,\) != \(3,\)"),
        ([_spec("a", 2), _spec("b", 3, 1)], r"misshapen: b \(3, 1\) != \(3,\)"),
        ([_spec("a", 2), _spec("b", 3), _spec("a", 2)], r"sent twice: a"),
    ],
)
def test_sides_that_differ_are_refused_with_the_names(sent: list[TensorSpec], message: str) -> None:
    with pytest.raises(WeightMismatch, match=message) as caught:
        check_bijection(sent, {"a": (2,), "b": (3,)}, policy_version=9)
    assert caught.value.wanted_version == 9


@pytest.mark.parametrize(
    ("name", "layer"),
    [
        ("model.layers.3.mlp.up_proj.weight", "3"),
        ("transformer.h.11.attn.bias", "11"),
        ("model.layers.2.mlp.experts.7.w1", "2"),
        ("visual.blocks.0.norm.weight", "0"),
        ("model.embed_tokens.weight", "embed_tokens"),
        ("lm_head.weight", "lm_head"),
        ("scale", "scale"),
    ],
)
def test_a_name_belongs_to_a_layer(name: str, layer: str) -> None:
    assert layer_of(name) == layer


@given(MANIFESTS)
def test_elements_per_layer_add_up(manifest: tuple[TensorSpec, ...]) -> None:
    counts = elements_per_layer(manifest)
    assert sum(counts.values()) == sum(math.prod(spec.shape) for spec in manifest)
    assert len(counts) == len(manifest)


def test_probe_by_hand() -> None:
    diff = probe_diff([(-1.0, -2.0), (-3.0,)], [(-1.5, -2.0), (-2.75,)])
    assert diff == (0.25, 0.5, 3)


def test_a_probe_of_a_broken_engine_is_never_small() -> None:
    diff = probe_diff([(-1.0, math.nan)], [(-1.0, -1.0)])
    assert (diff.abs_diff_mean, diff.abs_diff_max) == (math.inf, math.inf)


@pytest.mark.parametrize(("engine", "trainer"), [([], []), ([()], [()]), ([(-1.0,)], []), ([(-1.0,)], [(-1.0, -2.0)])])
def test_a_probe_compares_the_same_tokens_and_at_least_one(
    engine: list[tuple[float, ...]], trainer: list[tuple[float, ...]]
) -> None:
    with pytest.raises(ValueError):
        probe_diff(engine, trainer)
