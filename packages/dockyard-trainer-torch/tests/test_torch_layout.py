import dataclasses

import numpy as np
import pytest
import torch

from dockyard_core.batch import TrainSequence, pack_batch
from dockyard_core.loss_config import LossConfig
from dockyard_trainer_torch import TorchPolicy, TorchPolicyConfig
from dockyard_trainer_torch.layout import PackedLayout, PrefixLayout, tensor_batch


def make_group(prompt_length: int, completions: list[list[int]], seed: int = 0) -> list[TrainSequence]:
    rng = np.random.default_rng(seed)
    prompt = rng.integers(0, 64, prompt_length)
    made = []
    for completion in completions:
        token_ids = np.concatenate([prompt, completion])
        mask = np.arange(len(token_ids)) >= prompt_length
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
    (shard,) = pack_batch(GROUPS)
    layout = tensor_batch(shard.micro_batches[0], "cpu", share_prefixes=True).layout
    assert isinstance(layout, PrefixLayout)
    assert sorted(layout.prefix_lengths_P.tolist()) == [9, 20]
    assert layout.suffix_ids_NS.shape == (
        5,
        5,
    )  # 3 + 2 distinct sequences; the longest has 6 tokens, 5 of which predict
    assert len(layout.predictors_U) == 4 + 4 + 1 + 2 + 6
    assert len(layout.distinct_M) == shard.num_valid_tokens


def test_without_anything_to_share_rows_stay_packed() -> None:
    different = [sequence for seed in range(4) for sequence in make_group(5, [[1, 2, 3]], seed)]
    (shard,) = pack_batch(different)
    assert isinstance(tensor_batch(shard.micro_batches[0], "cpu", share_prefixes=True).layout, PackedLayout)


@pytest.mark.parametrize("family", ["qwen2", "qwen3", "llama"])
@pytest.mark.parametrize("row_length", [None, 60])
@pytest.mark.parametrize("temperature", [1.0, 0.8])
def test_sharing_prefixes_changes_neither_logprobs_nor_the_step(tiny_model, family, row_length, temperature) -> None:
    config = TorchPolicyConfig(
        learning_rate=1e-3, eps=1e-4, max_grad_norm=1e9, loss=LossConfig(kl_coef=0.1, entropy_coef=0.01)
    )
    shared, plain = (
        TorchPolicy.from_pretrained(tiny_model(family), config.model_copy(update={"share_prefixes": share}))
        for share in (True, False)
    )
    (shard,) = pack_batch(GROUPS, row_length=row_length, temperature=temperature)
    for one, other in zip(shared.logprobs(shard), plain.logprobs(shard), strict=True):
        np.testing.assert_allclose(one, other, rtol=0, atol=1e-5)
    for _ in range(2):
        one, other = dataclasses.asdict(shared.train_step(shard)), dataclasses.asdict(plain.train_step(shard))
        assert one.pop("extra") == pytest.approx(other.pop("extra"), rel=1e-3, abs=1e-6)
        assert one == pytest.approx(other, rel=1e-4, abs=1e-6)
    for (name, left), right in zip(shared.causal_lm.named_parameters(), plain.causal_lm.parameters(), strict=True):
        torch.testing.assert_close(left, right, rtol=0, atol=3e-6, msg=name)


def test_completions_of_one_token_need_no_suffix(tiny_model) -> None:
    (shard,) = pack_batch(make_group(6, [[3], [4], [5], [3]]))
    layout = tensor_batch(shard.micro_batches[0], "cpu", share_prefixes=True).layout
    assert isinstance(layout, PrefixLayout)
    assert layout.suffix_ids_NS.shape == (3, 0)
    shared, plain = (
        TorchPolicy.from_pretrained(tiny_model(), TorchPolicyConfig(share_prefixes=share)) for share in (True, False)
    )
    np.testing.assert_allclose(shared.logprobs(shard)[0], plain.logprobs(shard)[0], rtol=0, atol=1e-5)
    assert shared.train_step(shard).grad_norm == pytest.approx(plain.train_step(shard).grad_norm, rel=1e-4)
