"""Models and batches that look ordinary and would be computed wrongly without a word."""

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM, LlamaConfig, PretrainedConfig, Qwen3MoeConfig

from dockyard_core.batch import TrainSequence, pack_batch
from dockyard_core.errors import ConfigError
from dockyard_core.loss_config import LossConfig
from dockyard_trainer_torch import TorchPolicy, TorchPolicyConfig

SIZES = {
    "vocab_size": 64,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "max_position_embeddings": 64,
    "initializer_range": 0.2,
}


def save_model(config: PretrainedConfig, directory: Path) -> Path:
    torch.manual_seed(0)
    AutoModelForCausalLM.from_config(config, dtype=torch.float32).save_pretrained(directory)
    return directory


def policy_of(model: Path, **changes) -> TorchPolicy:
    return TorchPolicy.from_pretrained(model, TorchPolicyConfig(learning_rate=1e-3, **changes))


def group(count: int, prefix: int = 20, suffix: int = 6) -> list[TrainSequence]:
    """Rollouts of one prompt."""
    rng = np.random.default_rng(0)
    prompt = rng.integers(0, 64, prefix)
    mask = np.arange(prefix + suffix) >= prefix
    return [
        TrainSequence(
            token_ids_T=np.concatenate([prompt, rng.integers(0, 64, suffix)]),
            loss_mask_T=mask,
            sampled_logprobs_T=np.where(mask, -4.0, 0).astype(np.float32),
            advantage=float(rng.normal()),
        )
        for _ in range(count)
    ]


def test_a_window_without_layer_types_is_not_lost_by_sharing_prefixes(tmp_path) -> None:
    experts = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 16}
    config = Qwen3MoeConfig(**SIZES, **experts, use_sliding_window=True, sliding_window=5)
    model = save_model(config, tmp_path)
    (shard,) = pack_batch(group(5))
    got, wanted = (policy_of(model, share_prefixes=is_shared).logprobs(shard) for is_shared in (True, False))
    np.testing.assert_allclose(got[0], wanted[0], atol=1e-5)


def test_the_padding_tokens_embedding_has_the_gradient_of_the_loss(tmp_path) -> None:
    config = LlamaConfig(**SIZES, pad_token_id=5, tie_word_embeddings=False)
    policy = policy_of(save_model(config, tmp_path), loss=LossConfig(variant="reinforce", correction="none"))
    (shard,) = pack_batch([replace(group(1)[0], token_ids_T=np.full(26, 5))])
    before = policy.causal_lm.model.embed_tokens.weight.detach().clone()
    policy.train_step(shard)
    assert (policy.causal_lm.model.embed_tokens.weight.detach() != before)[5].any()


@pytest.mark.parametrize("rope_type", ["dynamic", "longrope"])
def test_rotary_frequencies_that_follow_the_batch_are_refused(tmp_path, rope_type) -> None:
    factors = {"short_factor": [1.0] * 4, "long_factor": [2.0] * 4} if rope_type == "longrope" else {}
    rope = {"rope_type": rope_type, "factor": 2.0, "rope_theta": 1e4, **factors}
    LlamaConfig(**SIZES, rope_parameters=rope).save_pretrained(tmp_path)
    with pytest.raises(ConfigError, match="rope_type"):
        policy_of(tmp_path)


def test_a_tied_head_of_other_values_is_refused_and_an_equal_one_is_not(tmp_path) -> None:
    model = save_model(LlamaConfig(**SIZES, tie_word_embeddings=True), tmp_path)
    tensors = load_file(model / "model.safetensors")
    head = tensors["model.embed_tokens.weight"].clone()
    save_file(tensors | {"lm_head.weight": head}, model / "model.safetensors", {"format": "pt"})
    policy_of(model)
    save_file(tensors | {"lm_head.weight": head + 1}, model / "model.safetensors", {"format": "pt"})
    with pytest.raises(ConfigError, match="tie_word_embeddings"):
        policy_of(model)


@pytest.mark.parametrize("count", [1, 4])  # packed, and with a shared prefix
def test_the_integer_type_of_token_ids_does_not_matter(tmp_path, count) -> None:
    policy = policy_of(save_model(LlamaConfig(**SIZES), tmp_path))
    (shard,) = pack_batch(group(count))
    narrow = [replace(part, token_ids_BL=part.token_ids_BL.astype(np.int32)) for part in shard.micro_batches]
    got = policy.logprobs(replace(shard, micro_batches=tuple(narrow)))
    np.testing.assert_array_equal(got, policy.logprobs(shard))


@pytest.mark.parametrize(
    ("field", "change", "match"),
    [
        ("loss_mask_BL", lambda mask, ids: mask | (np.diff(ids, prepend=-1) > 0) & (ids > 0), "first token"),
        ("loss_mask_BL", lambda mask, ids: mask | (ids < 0), "padding"),
        ("sequence_ids_BL", lambda _, ids: np.where(ids == 2, 0, ids), "id of its own"),
        ("position_ids_BL", lambda positions, _: np.broadcast_to(np.arange(positions.shape[1]), positions.shape), "0"),
    ],
)
def test_sequences_that_would_run_into_each_other_are_refused(tmp_path, field, change, match) -> None:
    policy = policy_of(save_model(LlamaConfig(**SIZES), tmp_path))
    (shard,) = pack_batch(group(3), row_length=100)
    (part,) = shard.micro_batches
    wrong = replace(part, **{field: change(getattr(part, field), part.sequence_ids_BL)})
    with pytest.raises(ValueError, match=match):
        policy.train_step(replace(shard, micro_batches=(wrong,)))
    assert policy.version == 0
