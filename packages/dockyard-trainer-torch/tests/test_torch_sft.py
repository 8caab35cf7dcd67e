"""Supervised fine-tuning is the policy's own step: REINFORCE without correction, advantage 1, is masked NLL."""

from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM

from dockyard_core.batch import BatchShard, TrainSequence, pack_batch
from dockyard_core.loss_config import LossConfig
from dockyard_trainer_torch import TorchPolicy, TorchPolicyConfig
from dockyard_trainer_torch.step import forward_backward, tensor_batches

FAMILIES = [(family, is_tied) for family in ("qwen2", "qwen3", "llama") for is_tied in (True, False)]
LOSS = LossConfig(variant="reinforce", correction="none", aggregation="token")
IGNORED = -100
"""Label that Hugging Face's own loss leaves out."""


def make_sequences(seed: int = 0, count: int = 7) -> list[TrainSequence]:
    """Prompts of 3 tokens; some tokens of the completions are masked too, as a tool's answers are."""
    rng = np.random.default_rng(seed)
    sequences = []
    for _ in range(count):
        num_tokens = int(rng.integers(6, 16))
        mask = (np.arange(num_tokens) >= 3) & (rng.random(num_tokens) < 0.8)
        mask[-1] = True
        sequences.append(
            TrainSequence(
                token_ids_T=rng.integers(0, 64, num_tokens),
                loss_mask_T=mask,
                # There was no sampler: these must not matter.
                sampled_logprobs_T=np.where(mask, rng.normal(-4, 2, num_tokens), 0).astype(np.float32),
                advantage=1.0,
            )
        )
    return sequences


def hugging_face_nll(
    model_dir: Path, sequences: Sequence[TrainSequence], dtype: torch.dtype
) -> tuple[float, dict[str, torch.Tensor]]:
    """Masked NLL over all trained tokens and its gradients: Hugging Face's loss, one padded row per sequence."""
    model = AutoModelForCausalLM.from_pretrained(model_dir, dtype=dtype).eval()
    width = max(len(sequence.token_ids_T) for sequence in sequences)
    ids = torch.zeros(len(sequences), width, dtype=torch.long)
    labels, attention = torch.full_like(ids, IGNORED), torch.zeros_like(ids)
    for row, sequence in enumerate(sequences):
        size = len(sequence.token_ids_T)
        tokens = torch.from_numpy(sequence.token_ids_T)
        ids[row, :size], attention[row, :size] = tokens, 1
        labels[row, :size] = torch.where(torch.from_numpy(sequence.loss_mask_T), tokens, IGNORED)
    loss = model(input_ids=ids, attention_mask=attention, labels=labels).loss
    loss.backward()
    return loss.item(), {name: param.grad for name, param in model.named_parameters()}


def policy_nll(model_dir: Path, shard: BatchShard, **options: object) -> tuple[float, dict[str, torch.Tensor]]:
    policy = TorchPolicy.from_pretrained(model_dir, TorchPolicyConfig(loss=LOSS, **options))
    batches = tensor_batches(policy._policy, shard, policy.config, policy.ranks)
    sums = forward_backward(policy._policy, batches, shard, policy.config, policy.ranks)
    return sums.loss, {name: param.grad for name, param in policy.causal_lm.named_parameters()}


def assert_same_gradients(got: dict[str, torch.Tensor], wanted: dict[str, torch.Tensor]) -> None:
    assert list(got) == list(wanted)
    everything = torch.stack([gradient.norm() for gradient in wanted.values()]).norm()
    for name, gradient in wanted.items():
        assert gradient.norm() > 0, f"{name} is trained"
        assert (got[name] - gradient).norm() <= 1e-5 * max(gradient.norm(), 1e-3 * everything), name


@pytest.mark.parametrize(("family", "is_tied"), FAMILIES)
@pytest.mark.parametrize("share_prefixes", [True, False])
def test_value_and_gradients_are_those_of_masked_nll(tiny_model, family, is_tied, share_prefixes) -> None:
    model_dir = tiny_model(family, is_tied=is_tied)
    sequences = make_sequences()
    (shard,) = pack_batch(sequences, micro_batch_tokens=48)
    assert len(shard.micro_batches) > 1
    assert any(mb.sequence_ids_BL.max() >= mb.shape[0] for mb in shard.micro_batches), "rows hold several sequences"
    loss, gradients = policy_nll(model_dir, shard, share_prefixes=share_prefixes)
    wanted_loss, wanted = hugging_face_nll(model_dir, sequences, torch.float64)
    assert loss == pytest.approx(wanted_loss, rel=1e-6)
    assert_same_gradients(gradients, wanted)


def test_a_long_row_weighs_by_its_tokens(tiny_model) -> None:
    """The mean is over tokens of the whole batch: not over rows, and not over micro-batches."""
    sequences = make_sequences(count=5)
    (together,) = pack_batch(sequences, micro_batch_tokens=1000)
    (apart,) = pack_batch(sequences, micro_batch_tokens=16)
    assert len(apart.micro_batches) > len(together.micro_batches) == 1
    one_loss, one = policy_nll(tiny_model("qwen3"), together)
    loss, gradients = policy_nll(tiny_model("qwen3"), apart)
    assert loss == pytest.approx(one_loss, rel=1e-6)
    assert_same_gradients(gradients, one)


def test_a_step_lowers_the_nll_and_counts_its_tokens(tiny_model) -> None:
    sequences = make_sequences()
    (shard,) = pack_batch(sequences)
    policy = TorchPolicy.from_pretrained(tiny_model("qwen2"), TorchPolicyConfig(loss=LOSS, learning_rate=1e-2))
    losses = [policy.train_step(shard).loss for _ in range(20)]
    assert losses[0] == pytest.approx(hugging_face_nll(policy.model_dir, sequences, torch.float32)[0], rel=1e-5)
    assert losses[-1] < losses[0] / 2
    assert policy.train_step(shard).num_valid_tokens == sum(int(each.loss_mask_T.sum()) for each in sequences)
