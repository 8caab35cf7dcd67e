"""What is compiled, how often, and what it is padded to."""

import dataclasses
import os
import pwd
import subprocess
import sys
import textwrap

import jax
import numpy as np
import pytest

from dockyard_core.batch import BatchShard, TrainSequence, pack_batch
from dockyard_core.loss_config import LossConfig
from dockyard_trainer_jax import JaxPolicy, JaxPolicyConfig
from dockyard_trainer_jax.compiling import keep_programs
from dockyard_trainer_jax.layout import PackedPlan
from dockyard_trainer_jax.shapes import Shape, Shapes, rounded


def make_shard(seed: int, *, longest: int = 60, count: int = 12, budget: int = 240, **kwargs) -> BatchShard:
    rng = np.random.default_rng(seed)
    sequences = []
    for _ in range(count):
        num_tokens = int(rng.integers(8, longest + 1))
        mask = np.arange(num_tokens) >= num_tokens // 2
        sequences.append(
            TrainSequence(
                token_ids_T=rng.integers(0, 64, num_tokens),
                loss_mask_T=mask,
                sampled_logprobs_T=np.where(mask, -4.0, 0.0).astype(np.float32),
                advantage=float(rng.normal()),
            )
        )
    return pack_batch(sequences, micro_batch_tokens=budget, **kwargs)[0]


class Compilations:
    """Counts what XLA compiles in this process."""

    def __init__(self) -> None:
        self.count = 0
        jax.monitoring.register_event_duration_secs_listener(self._on_event)

    def _on_event(self, name: str, duration: float, **_: object) -> None:
        self.count += name == "/jax/core/compile/backend_compile_duration"


@pytest.fixture(scope="module")
def compilations() -> Compilations:
    return Compilations()


@pytest.mark.parametrize(
    ("intermediate_size", "num_batches", "sizes"),
    [
        (40, 3, {"longest": 40, "budget": 160}),
        pytest.param(44, 8, {"longest": 60, "budget": 240}, marks=pytest.mark.ci),
    ],
    ids=str,
)
def test_a_run_compiles_few_programs_however_its_batches_differ(
    tiny_model, compilations, intermediate_size, num_batches, sizes
) -> None:
    # A model that no test before this one has compiled for.
    directory = tiny_model(intermediate_size=intermediate_size)
    policy = JaxPolicy.from_pretrained(directory, JaxPolicyConfig(learning_rate=1e-3, warmup_steps=9))
    given = set()
    for seed in range(num_batches):
        shard = make_shard(seed, temperature=1.0 - seed / 50, **sizes)
        given |= {(*part.shape, int(part.loss_mask_BL.sum())) for part in shard.micro_batches}
        metrics = policy.train_step(shard)
    assert len(given) > 2 * len(policy.shapes), "batches that are alike would prove nothing"
    # The gradient for each shape, the update, and gradients of 0.
    assert metrics.extra["num_compiled_shapes"] == len(policy.shapes) <= num_batches
    assert policy.num_compiled == len(policy.shapes) + 2
    assert policy.compile_s > 0
    before = compilations.count
    for seed in range(num_batches):
        policy.train_step(make_shard(seed, **sizes))
    assert compilations.count == before, "something was compiled that is not counted"
    twin = JaxPolicy.from_pretrained(directory, JaxPolicyConfig(learning_rate=1e-2))
    twin.train_step(make_shard(0, **sizes))
    assert twin.num_compiled == 0, "equal programs are those of the process"


@pytest.mark.ci
def test_other_mathematics_is_another_program(tiny_model) -> None:
    directory = tiny_model(intermediate_size=40)
    shard = make_shard(0, count=2)
    counts = []
    for loss in (LossConfig(), LossConfig(clip_high=0.3), LossConfig()):
        policy = JaxPolicy.from_pretrained(directory, JaxPolicyConfig(loss=loss))
        policy.train_step(shard)
        counts.append(policy.num_compiled)
    assert counts[1:] == [len(policy.shapes), 0]


def test_an_update_takes_the_memory_of_the_weights_before_it(tiny_model) -> None:
    policy = JaxPolicy.from_pretrained(tiny_model(intermediate_size=40), JaxPolicyConfig())
    given = [*policy.params.values(), *policy.state.exp_avg.values(), *policy.state.exp_avg_sq.values()]
    policy.train_step(make_shard(0, longest=40, budget=160))
    assert all(array.is_deleted() for array in given)


def test_sizes_grow_by_less_than_a_quarter() -> None:
    assert [rounded(size) for size in (0, 1, 7, 8, 9, 11, 33, 83, 240, 10000)] == [
        0,
        1,
        7,
        8,
        10,
        12,
        40,
        96,
        256,
        10240,
    ]
    for size in range(1, 3000):
        assert size <= rounded(size) < 1.25 * size
        assert rounded(rounded(size)) == rounded(size)


def packed(num_rows: int, row_length: int, num_slots: int = 1000, num_blocks: int = 1) -> Shape:
    return Shape(num_rows, row_length, num_blocks, num_slots)


def test_a_known_shape_is_taken_where_it_costs_little_more() -> None:
    shapes = Shapes()
    assert shapes.fit(packed(33, 61)) == packed(40, 64, 1024)
    assert shapes.fit(packed(38, 60)) == packed(40, 64, 1024)
    assert shapes.fit(packed(30, 64)) == packed(40, 64, 1024), "less than 1.3 times 32 x 64"
    assert shapes.fit(packed(28, 64)) == packed(28, 64, 1024), "more than 1.3 times that"
    assert shapes.fit(packed(38, 70, 900)) == packed(40, 80, 1024), "grown from the first"
    assert shapes.fit(packed(20, 70, 600)) == packed(20, 80, 640), "28 x 80 would be more than 1.3 times, and 1,600"
    assert shapes.fit(packed(8, 40, 500)) == packed(20, 80, 640), "half of the largest, or less"
    assert shapes.fit(packed(38, 60, 300)) == packed(40, 64, 320), "logits of 1,024 positions would be too many"
    assert len(shapes.known) == 5


def test_few_positions_are_not_worth_a_program() -> None:
    shapes = Shapes()
    assert shapes.fit(packed(2, 17, 9)) == packed(2, 20, 10)
    assert shapes.fit(packed(1, 100, 90)) == packed(2, 112, 96)
    assert shapes.fit(packed(1, 16, 5)) == packed(2, 20, 10), "the smallest that is known"
    assert shapes.fit(packed(3, 100, 90)) == packed(3, 112, 96)
    assert len(shapes.known) == 3


def test_a_shape_depends_on_those_known_and_not_on_their_order() -> None:
    rng = np.random.default_rng(0)
    needs = [packed(*map(int, rng.integers(8, 60, 2)), int(rng.integers(8, 200))) for _ in range(40)]
    shapes = Shapes()
    for need in needs[:20]:
        shapes.fit(need)
    again = Shapes()
    again.known = set(sorted(shapes.known, reverse=True))  # noqa: C414 - put in in another order
    for need in needs[20:]:
        fitted = shapes.fit(need)
        assert fitted == again.fit(need)
        assert fitted.joined(need) == fitted, "it covers what is needed"


def test_a_users_row_lengths_go_before() -> None:
    assert [Shapes().fit(packed(1, length)).row_length for length in (1, 16, 17)] == [16, 16, 20]
    lengths = [Shapes((10, 50)).fit(packed(1, length)).row_length for length in (1, 10, 11, 50, 51)]
    assert lengths == [10, 10, 50, 50, 56]
    shared = Shape(64, 12, 1, 64, num_prefixes=8, prefix_length=10, num_distinct=64)
    assert Shapes((1000,)).fit(shared).row_length == 16, "suffixes are no rows of many sequences"


def test_shared_and_packed_rows_are_not_mixed() -> None:
    shapes = Shapes()
    shared = Shape(8, 16, 1, 20, num_prefixes=2, prefix_length=8, num_distinct=20)
    assert shapes.fit(shared) == shared
    assert shapes.fit(packed(8, 16, 20)) == packed(8, 16, 20)
    assert shapes.fit(packed(8, 16, 20, num_blocks=4)) == packed(8, 16, 20, num_blocks=4)


@pytest.mark.parametrize("num_blocks", [1, 2, 4])
def test_a_layout_holds_every_trained_token_once_in_the_block_of_its_row(num_blocks) -> None:
    shard = make_shard(3, budget=400, row_length=70)
    for mb in shard.micro_batches:
        plan = PackedPlan(mb, num_blocks=num_blocks)
        shape = Shapes().fit(plan.needed)
        laid_out = plan.laid_out(shape)
        batch = laid_out.batch
        inputs = batch.inputs
        assert inputs.token_ids_BL.shape == (shape.num_rows, shape.row_length)
        blocks, num_slots = batch.mask_FM.shape
        assert (blocks, shape.num_rows % num_blocks) == (num_blocks, 0)
        assert sorted(laid_out.origin_FM[batch.mask_FM]) == np.flatnonzero(mb.loss_mask_BL).tolist()
        held_FN = inputs.token_ids_BL.reshape(num_blocks, -1)
        for block in range(num_blocks):
            mask_M, predictors_M = batch.mask_FM[block], batch.predictors_FU[block]
            assert len(set(predictors_M.tolist())) == num_slots, "a position twice would need a sum"
            # The token that is predicted comes after the predictor, in the same sequence.
            np.testing.assert_array_equal(held_FN[block][predictors_M[mask_M] + 1], batch.target_ids_FU[block][mask_M])
            segments_N = inputs.segment_ids_BL.reshape(num_blocks, -1)[block]
            np.testing.assert_array_equal(segments_N[predictors_M[mask_M]], segments_N[predictors_M[mask_M] + 1])
        again_BL = laid_out.unpadded(batch.advantages_FM, mb.shape)
        np.testing.assert_array_equal(again_BL, np.where(mb.loss_mask_BL, mb.advantages_BL, 0))


def test_padding_holds_no_token_of_the_batch(tiny_model) -> None:
    (mb,) = make_shard(0, count=3, row_length=70).micro_batches
    dirty = dataclasses.replace(mb, token_ids_BL=np.where(mb.sequence_ids_BL < 0, 63, mb.token_ids_BL))
    plan = PackedPlan(dirty, num_blocks=1)
    inputs = plan.laid_out(Shapes().fit(plan.needed)).batch.inputs
    assert (inputs.token_ids_BL[inputs.segment_ids_BL < 0] == 0).all()


def test_ids_of_sequences_may_be_any_numbers() -> None:
    (mb,) = make_shard(0, count=3, row_length=70).micro_batches
    wide = np.where(mb.sequence_ids_BL < 0, -1, mb.sequence_ids_BL << 32)  # all alike in 32 bits
    higher = np.where(mb.sequence_ids_BL < 0, -1, mb.sequence_ids_BL + (1 << 31))  # below 0 in 32 bits
    wanted, *others = (
        PackedPlan(dataclasses.replace(mb, sequence_ids_BL=ids), num_blocks=1)
        for ids in (mb.sequence_ids_BL, wide, higher)
    )
    for plan in others:
        for ours, theirs in zip(
            plan.laid_out(plan.needed).batch.inputs, wanted.laid_out(plan.needed).batch.inputs, strict=True
        ):
            is_same_BL = ours[:, :, None] == ours[:, None]
            np.testing.assert_array_equal(is_same_BL, theirs[:, :, None] == theirs[:, None])
            np.testing.assert_array_equal(ours < 0, theirs < 0)


KEPT = """
    import sys
    import jax
    jax.config.update("jax_persistent_cache_min_compile_time_secs", 0.0)
    counted = {}
    jax.monitoring.register_event_listener(lambda name, **_: counted.update({name: counted.get(name, 0) + 1}))
    from dockyard_trainer_jax import JaxPolicy, JaxPolicyConfig
    from dockyard_core.batch import pack_batch
    directory, cache = sys.argv[1], sys.argv[2] or None
    policy = JaxPolicy.from_pretrained(directory, JaxPolicyConfig(compilation_cache_dir=cache))
    policy.train_step(pack_batch([])[0])
    print(counted.get("/jax/compilation_cache/cache_hits", 0))
"""


@pytest.mark.ci
def test_programs_are_kept_for_the_next_process_where_the_user_says(tiny_model, tmp_path) -> None:
    environment = {name: value for name, value in os.environ.items() if name != "JAX_COMPILATION_CACHE_DIR"}

    def hits(cache: str) -> int:
        command = [sys.executable, "-c", textwrap.dedent(KEPT), str(tiny_model()), cache]
        done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=120, check=False)
        assert done.returncode == 0, done.stderr
        return int(done.stdout)

    assert hits(str(tmp_path / "kept")) == 0
    assert any((tmp_path / "kept").iterdir())
    assert hits(str(tmp_path / "kept")) >= 2, "the update, and gradients of 0"
    assert hits("") == 0


def test_a_user_without_a_home_compiles_anew(monkeypatch, caplog) -> None:
    def no_entry(uid: int) -> None:
        raise KeyError(uid)

    monkeypatch.delenv("HOME")
    monkeypatch.setattr(pwd, "getpwuid", no_entry)
    configured = jax.config.jax_compilation_cache_dir
    jax.config.update("jax_compilation_cache_dir", None)
    try:
        keep_programs("~/.cache/dockyard/jax")
        assert jax.config.jax_compilation_cache_dir is None
    finally:
        jax.config.update("jax_compilation_cache_dir", configured)
    assert "compiled programs are not kept in ~/.cache/dockyard/jax" in caplog.text
