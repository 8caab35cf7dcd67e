"""Shared prefixes: what goes through the model once, against the PyTorch trainer that shares nothing."""

import dataclasses

import numpy as np
import pytest

from dockyard_core.batch import TrainSequence, pack_batch
from dockyard_core.loss_config import LossConfig
from dockyard_trainer_jax import JaxPolicy, JaxPolicyConfig
from dockyard_trainer_jax.attention import SharedInputs
from dockyard_trainer_jax.layout import PackedPlan
from dockyard_trainer_jax.prefixes import SharedPlan, plan_of
from dockyard_trainer_jax.shapes import Shapes
from dockyard_trainer_torch import TorchPolicy, TorchPolicyConfig


def make_group(prompt_length: int, completions: list[list[int]], seed: int = 0) -> list[TrainSequence]:
    rng = np.random.default_rng(seed)
    prompt = rng.integers(0, 64, prompt_length)
    made = []
    for completion in completions:
        token_ids = np.concatenate([prompt, completion])
        mask = np.arange(len(token_ids)) >= prompt_length
        mask[prompt_length + 1 : prompt_length + 2] &= len(completion) < 4  # a gap: what a tool said is not trained
        made.append(
            TrainSequence(
                token_ids_T=token_ids,
                loss_mask_T=mask,
                sampled_logprobs_T=np.where(mask, rng.normal(-4, 0.2, len(mask)), 0).astype(np.float32),
                advantage=float(rng.normal()),
            )
        )
    return made


GROUPS = [
    *make_group(20, [[1, 2, 3, 4], [1, 2, 3, 5], [7], [7], [1, 2, 3, 4]]),
    *make_group(9, [[5, 6], [8, 9, 10, 11, 12, 13]], seed=1),
]


def test_a_shared_prefix_and_equal_rollouts_are_laid_out_once() -> None:
    (mb,) = pack_batch(GROUPS)[0].micro_batches
    plan = plan_of(mb, num_blocks=1, share_prefixes=True)
    needed = plan.needed
    assert (needed.num_prefixes, needed.prefix_length) == (2, 20)
    assert (needed.num_rows, needed.row_length) == (5, 5), "3 + 2 distinct ones; of 6 tokens, 5 predict"
    assert (needed.num_distinct, needed.num_slots) == (3 + 3 + 1 + 2 + 5, mb.loss_mask_BL.sum())
    laid_out = plan.laid_out(Shapes().fit(needed))
    batch, inputs = laid_out.batch, laid_out.batch.inputs
    assert isinstance(inputs, SharedInputs)
    assert sorted(inputs.prefix_lengths_P[:2]) == [9, 20]
    # Through the distinct tokens and back, every trained token is found, and what predicts it comes right before.
    targets_M = batch.target_ids_FU[0][batch.distinct_FM[0]][batch.mask_FM[0]]
    np.testing.assert_array_equal(targets_M, mb.token_ids_BL[mb.loss_mask_BL])
    predicting = np.concatenate([inputs.prefix_ids_PL.reshape(-1), inputs.suffix_ids_NS.reshape(-1)])
    before_M = np.roll(mb.token_ids_BL, 1, axis=1)[mb.loss_mask_BL]
    held_M = predicting[batch.predictors_FU[0][batch.distinct_FM[0]][batch.mask_FM[0]]]
    np.testing.assert_array_equal(held_M, before_M)
    advantages_BL = laid_out.unpadded(batch.advantages_FM, mb.shape)
    np.testing.assert_array_equal(advantages_BL, np.where(mb.loss_mask_BL, mb.advantages_BL, 0))


def test_without_anything_to_share_rows_stay_packed() -> None:
    different = [sequence for seed in range(4) for sequence in make_group(5, [[1, 2, 3]], seed)]
    (mb,) = pack_batch(different)[0].micro_batches
    assert isinstance(plan_of(mb, num_blocks=1, share_prefixes=True), PackedPlan)
    (shared,) = pack_batch(GROUPS)[0].micro_batches
    assert isinstance(plan_of(shared, num_blocks=1, share_prefixes=True), SharedPlan)
    assert isinstance(plan_of(shared, num_blocks=1, share_prefixes=False), PackedPlan)
    untrained = dataclasses.replace(shared, loss_mask_BL=np.zeros_like(shared.loss_mask_BL))
    assert isinstance(plan_of(untrained, num_blocks=1, share_prefixes=True), PackedPlan)


def streamed(policy) -> dict[str, np.ndarray]:
    held: dict[str, np.ndarray] = {}
    policy.stream_weights(lambda chunk: held.update({chunk.name: np.array(np.from_dlpack(chunk.array))}))
    return held


CI = pytest.mark.ci


@pytest.mark.parametrize(
    ("family", "tp"), [("qwen2", 1), *(pytest.param(*one, marks=CI) for one in (("qwen3_moe", 1), ("llama", 8)))]
)
def test_sharing_changes_neither_logprobs_nor_the_step(tiny_model, family, tp) -> None:
    loss = LossConfig(kl_coef=0.1, entropy_coef=0.01)
    options = {"learning_rate": 1e-3, "eps": 1e-4, "max_grad_norm": 1e9, "loss": loss}
    directory = tiny_model(family, num_attention_heads=8, num_key_value_heads=8)
    shared = JaxPolicy.from_pretrained(directory, JaxPolicyConfig(**options, fsdp_size=1, tensor_parallel_size=tp))
    plain = TorchPolicy.from_pretrained(directory, TorchPolicyConfig(**options, share_prefixes=False))
    for seed, row_length in ((0, None), (1, 60)):
        more = make_group(7, [[3], [3], [4]], seed=seed)  # of one token: nothing goes on after it
        (shard,) = pack_batch([*GROUPS, *more], row_length=row_length, temperature=0.8)
        for one, other in zip(shared.logprobs(shard), plain.logprobs(shard), strict=True):
            np.testing.assert_allclose(one, other, rtol=0, atol=1e-5)
        ours, theirs = dataclasses.asdict(shared.train_step(shard)), dataclasses.asdict(plain.train_step(shard))
        ours["extra"] = {name: ours["extra"][name] for name in theirs["extra"]}
        assert ours.pop("extra") == pytest.approx(theirs.pop("extra"), rel=1e-3, abs=1e-6)
        assert ours == pytest.approx(theirs, rel=1e-4, abs=1e-6)
    assert any(shape.num_prefixes for shape in shared.shapes), "nothing was shared"
    wanted = streamed(plain)
    for name, array in streamed(shared).items():
        np.testing.assert_allclose(array, wanted[name], rtol=0, atol=3e-6, err_msg=name)
