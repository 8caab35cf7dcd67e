"""Supervised fine-tuning is the policy's own step: REINFORCE without correction, advantage 1, is masked NLL."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM

from dockyard_core.batch import TrainSequence, pack_batch
from dockyard_core.loss_config import LossConfig
from dockyard_trainer_jax import JaxPolicy, JaxPolicyConfig

LOSS = LossConfig(variant="reinforce", correction="none", aggregation="token")
IGNORED = -100
"""Label that Hugging Face's own loss leaves out."""


def make_sequences(count: int = 7) -> list[TrainSequence]:
    """Prompts of 3 tokens; some tokens of the completions are masked too, as a tool's answers are."""
    rng = np.random.default_rng(0)
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


def hugging_face_step(model_dir: Path, sequences: Sequence[TrainSequence]) -> tuple[float, float]:
    """Masked NLL over all trained tokens in float64, and the norm of its gradient: one padded row per sequence."""
    model = AutoModelForCausalLM.from_pretrained(model_dir, dtype=torch.float64).eval()
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
    return loss.item(), torch.stack([param.grad.norm() for param in model.parameters()]).norm().item()


@pytest.mark.ci
def test_the_nll_is_hugging_faces_and_falls_and_long_rows_weigh_by_their_tokens(tiny_model) -> None:
    """However rows are packed: the mean is over tokens of the whole batch, not over rows or micro-batches."""
    model_dir, sequences = tiny_model("qwen3", is_tied=False), make_sequences()
    wanted_loss, wanted_norm = hugging_face_step(model_dir, sequences)
    for budget in (16, 1000):
        (shard,) = pack_batch(sequences, micro_batch_tokens=budget)
        assert (len(shard.micro_batches) > 1) == (budget == 16)
        policy = JaxPolicy.from_pretrained(model_dir, JaxPolicyConfig(loss=LOSS, learning_rate=1e-2))
        metrics = policy.train_step(shard)
        assert metrics.loss == pytest.approx(wanted_loss, rel=1e-5)
        assert metrics.grad_norm == pytest.approx(wanted_norm, rel=1e-4)
        assert metrics.num_valid_tokens == sum(int(each.loss_mask_T.sum()) for each in sequences)
    assert min(policy.train_step(shard).loss for _ in range(20)) < wanted_loss / 2
