"""Loading without a whole copy, mixtures of experts, and what saves memory without changing the step."""

import dataclasses
import json
import shutil
from pathlib import Path

import numpy as np
import pytest
import torch
from pydantic import ValidationError
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM, Qwen3MoeConfig

from dockyard_core.batch import BatchShard, TrainSequence, pack_batch
from dockyard_core.errors import ConfigError
from dockyard_core.loss_config import LossConfig
from dockyard_trainer_torch import TorchPolicy, TorchPolicyConfig, export_hf, weight_manifest


def make_shard(seed: int = 0, *, temperature: float = 1.0) -> BatchShard:
    rng = np.random.default_rng(seed)
    sequences = []
    for _ in range(6):
        num_tokens = int(rng.integers(5, 16))
        mask = np.arange(num_tokens) >= 3
        sequences.append(
            TrainSequence(
                token_ids_T=rng.integers(0, 64, num_tokens),
                loss_mask_T=mask,
                sampled_logprobs_T=np.where(mask, -4.0, 0).astype(np.float32),
                advantage=float(rng.normal()),
            )
        )
    return pack_batch(sequences, row_length=40, micro_batch_tokens=80, temperature=temperature)[0]


def assert_equal_weights(one: TorchPolicy, other: TorchPolicy, atol: float = 0.0) -> None:
    for (name, left), right in zip(one.causal_lm.named_parameters(), other.causal_lm.parameters(), strict=True):
        torch.testing.assert_close(left, right, rtol=0, atol=atol, msg=name)


@pytest.fixture(scope="module")
def moe_model(tmp_path_factory) -> Path:
    torch.manual_seed(5)
    config = Qwen3MoeConfig(
        vocab_size=64,
        hidden_size=32,
        intermediate_size=48,
        moe_intermediate_size=24,
        num_experts=4,
        num_experts_per_tok=2,
        mlp_only_layers=[0],
        num_hidden_layers=3,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=8,
        max_position_embeddings=256,
        tie_word_embeddings=False,
        initializer_range=0.2,
    )
    directory = tmp_path_factory.mktemp("qwen3_moe")
    AutoModelForCausalLM.from_config(config, dtype=torch.float32).save_pretrained(directory)
    return directory


@pytest.mark.parametrize("family", ["qwen2", "qwen3", "llama", "qwen3_moe"])
@pytest.mark.parametrize("is_tied", [True, False])
@pytest.mark.parametrize("max_shard_size", ["5GB", "10KB"])
def test_loading_gives_hugging_faces_weights_bit_for_bit(
    tiny_model, moe_model, tmp_path, family, is_tied, max_shard_size
) -> None:
    source = moe_model if family == "qwen3_moe" else tiny_model(family, is_tied=is_tied)
    wanted = AutoModelForCausalLM.from_pretrained(source, dtype=torch.float32)
    wanted.save_pretrained(tmp_path, max_shard_size=max_shard_size)
    assert (len(list(tmp_path.glob("*.safetensors"))) > 1) is (max_shard_size == "10KB")
    loaded = TorchPolicy.from_pretrained(tmp_path, TorchPolicyConfig()).causal_lm
    params = dict(wanted.named_parameters())
    assert {name for name, _ in loaded.named_parameters()} == params.keys()
    for name, param in loaded.named_parameters():
        assert torch.equal(param, params[name]), name
    for name, buffer in loaded.named_buffers():
        assert torch.equal(buffer, wanted.get_buffer(name)), name


def rewrite(source: Path, target: Path, change) -> Path:
    shutil.copytree(source, target)
    tensors = load_file(target / "model.safetensors")
    change(tensors)
    save_file(tensors, target / "model.safetensors", metadata={"format": "pt"})
    return target


def test_a_tied_output_embedding_in_the_file_is_not_in_the_way(tiny_model, tmp_path) -> None:
    def add_twin(tensors) -> None:
        tensors["lm_head.weight"] = tensors["model.embed_tokens.weight"].clone()

    source = tiny_model("qwen2", is_tied=True)
    with_twin = rewrite(source, tmp_path / "model", add_twin)
    assert_equal_weights(*(TorchPolicy.from_pretrained(d, TorchPolicyConfig()) for d in (source, with_twin)))


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda t: t.pop("model.norm.weight"), r"1 differences .* model.norm.weight \(file: none, config: \(32,\)\)"),
        (lambda t: t.update(spare=torch.zeros(2)), r"first spare \(file: \(2,\), config: none\)"),
        (lambda t: t.update({"model.norm.weight": torch.zeros(5)}), r"\(file: \(5,\), config: \(32,\)\)"),
    ],
    ids=["missing", "unknown", "misshapen"],
)
def test_other_tensors_than_the_config_describes_are_refused(tiny_model, tmp_path, change, message) -> None:
    with pytest.raises(ConfigError, match=message):
        TorchPolicy.from_pretrained(rewrite(tiny_model(), tmp_path / "model", change), TorchPolicyConfig())


def test_a_damaged_file_or_index_is_refused(tiny_model, tmp_path) -> None:
    shutil.copytree(tiny_model(), tmp_path / "cut")
    weights = tmp_path / "cut" / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:-10])
    with pytest.raises(ConfigError, match="no readable"):
        TorchPolicy.from_pretrained(tmp_path / "cut", TorchPolicyConfig())
    (tmp_path / "cut" / "model.safetensors.index.json").write_text(json.dumps({"weights": {}}))
    with pytest.raises(ConfigError, match=r"no readable .*index\.json"):
        TorchPolicy.from_pretrained(tmp_path / "cut", TorchPolicyConfig())


@pytest.mark.parametrize("temperature", [1.0, 0.7])
def test_packed_logprobs_of_a_mixture_of_experts_are_hugging_faces(moe_model, temperature) -> None:
    policy = TorchPolicy.from_pretrained(moe_model, TorchPolicyConfig())
    model = AutoModelForCausalLM.from_pretrained(moe_model, dtype=torch.float32)
    shard = make_shard(temperature=temperature)
    for micro_batch, logprobs_BL in zip(shard.micro_batches, policy.logprobs(shard), strict=True):
        for index in range(int(micro_batch.sequence_ids_BL.max()) + 1):
            where = micro_batch.sequence_ids_BL == index
            ids_T = torch.from_numpy(micro_batch.token_ids_BL[where])
            with torch.no_grad():
                logits_TV = model(ids_T[None]).logits[0] / temperature
            alone_T = logits_TV[:-1].log_softmax(-1).gather(1, ids_T[1:, None])[:, 0].numpy()
            wanted_T = np.concatenate([[0.0], alone_T]) * micro_batch.loss_mask_BL[where]
            np.testing.assert_allclose(logprobs_BL[where], wanted_T, rtol=0, atol=1e-5)


def test_a_mixture_of_experts_trains_streams_each_expert_and_exports(moe_model, tmp_path) -> None:
    policy = TorchPolicy.from_pretrained(moe_model, TorchPolicyConfig(learning_rate=1e-2))
    before = {name: param.detach().clone() for name, param in policy.causal_lm.named_parameters()}
    metrics = policy.train_step(make_shard())
    assert metrics.grad_norm > 0
    moved = {name for name, param in policy.causal_lm.named_parameters() if not torch.equal(param, before[name])}
    assert any("experts" in name for name in moved)
    assert any("mlp.gate.weight" in name for name in moved), "the router learns too"
    export_hf(policy, tmp_path / "export")
    exported = load_file(tmp_path / "export" / "model.safetensors")
    assert exported.keys() == load_file(moe_model / "model.safetensors").keys()
    streamed = {}
    policy.stream_weights(lambda chunk: streamed.__setitem__(chunk.name, chunk.array.clone()))
    assert list(streamed) == [spec.name for spec in weight_manifest(policy)]
    assert streamed.keys() == exported.keys()
    assert all(torch.equal(streamed[name], exported[name]) for name in exported)
    assert_equal_weights(policy, TorchPolicy.from_pretrained(tmp_path / "export", TorchPolicyConfig()))
    served = AutoModelForCausalLM.from_pretrained(tmp_path / "export", dtype=torch.float32)
    for name, param in policy.causal_lm.named_parameters():
        assert torch.equal(served.get_parameter(name), param), name


def test_a_checkpoint_knows_experts_one_by_one_and_those_of_the_second_format_are_read(moe_model, tmp_path) -> None:
    policy = TorchPolicy.from_pretrained(moe_model, TorchPolicyConfig(learning_rate=1e-2))
    policy.train_step(make_shard())
    policy.save(tmp_path / "third")
    served = AutoModelForCausalLM.from_pretrained(tmp_path / "third", dtype=torch.float32)
    for name, param in policy.causal_lm.named_parameters():
        assert torch.equal(served.get_parameter(name), param), name
    meta = json.loads((tmp_path / "third" / "trainer.json").read_text())
    moments = load_file(tmp_path / "third" / "optimizer.safetensors")
    assert "exp_avg.model.layers.1.mlp.experts.3.up_proj.weight" in moments
    (tmp_path / "second").mkdir()
    (tmp_path / "second" / "trainer.json").write_text(json.dumps(meta | {"format": 2}))
    fused = dict(policy.causal_lm.named_parameters())
    save_file({name: param.detach() for name, param in fused.items()}, tmp_path / "second" / "model.safetensors")
    held = {
        f"{moment}.{name}": policy.optimizer.state[param][moment]
        for moment in ("exp_avg", "exp_avg_sq")
        for name, param in fused.items()
    }
    save_file(held | {"rng.0": moments["rng.0"]}, tmp_path / "second" / "optimizer.safetensors", {"save": meta["save"]})
    policy.train_step(make_shard(1))
    for name in ("third", "second"):
        restored = TorchPolicy.from_pretrained(moe_model, TorchPolicyConfig(learning_rate=1e-2))
        restored.restore(tmp_path / name)
        assert torch.equal(torch.get_rng_state(), moments["rng.0"])
        restored.train_step(make_shard(1))
        assert_equal_weights(policy, restored)


@pytest.mark.parametrize(
    "changes",
    [
        {"activation_checkpointing": True},
        {"optimizer_offload": True},
        {"reference_offload": True},
        {"logprob_chunk_tokens": 3},
    ],
    ids=str,
)
@pytest.mark.parametrize("family", ["qwen3", "qwen3_moe"])
def test_what_saves_memory_changes_no_step(tiny_model, moe_model, family, changes) -> None:
    model = moe_model if family == "qwen3_moe" else tiny_model(family)
    loss = LossConfig(kl_coef=0.1, entropy_coef=0.01)
    plain = TorchPolicyConfig(learning_rate=1e-3, eps=1e-4, loss=loss, share_prefixes=False)
    one, other = (TorchPolicy.from_pretrained(model, c) for c in (plain, plain.model_copy(update=changes)))
    for seed in range(2):
        left, right = one.train_step(make_shard(seed)), other.train_step(make_shard(seed))
        assert left.loss == pytest.approx(right.loss, rel=1e-5, abs=1e-7)
        assert left.grad_norm == pytest.approx(right.grad_norm, rel=1e-5)
    assert_equal_weights(one, other, atol=1e-6)


def test_activation_checkpointing_keeps_one_tensor_per_block(tiny_model) -> None:
    kept = []
    for is_on in (False, True):
        config = TorchPolicyConfig(activation_checkpointing=is_on, share_prefixes=False)
        policy = TorchPolicy.from_pretrained(tiny_model(), config)
        sizes: list[int] = []

        def note(tensor: torch.Tensor, sizes: list[int] = sizes) -> torch.Tensor:
            sizes.append(tensor.numel())
            return tensor

        with torch.autograd.graph.saved_tensors_hooks(note, lambda tensor: tensor):
            policy.train_step(make_shard())
        kept.append(sum(sizes))
    assert kept[1] < kept[0] / 2


def test_offloaded_moments_are_dealt_into_parts_that_are_stepped_one_by_one(tiny_model, monkeypatch) -> None:
    monkeypatch.setattr("dockyard_trainer_torch.optim._PART_ELEMENTS", 1500)
    policy = TorchPolicy.from_pretrained(tiny_model(), TorchPolicyConfig(optimizer_offload=True))
    groups = policy.optimizer.param_groups
    assert len(groups) > 4
    assert sum(len(group["params"]) for group in groups) == len(list(policy.causal_lm.parameters()))
    policy.train_step(make_shard())
    assert policy.optimizer.param_groups is groups
    assert all(float(state["step"]) == 1 for state in policy.optimizer.state.values())


def test_a_second_update_is_clipped_against_the_weights_before_the_first(tiny_model) -> None:
    loss = LossConfig(proximal="given", clip_low=0.01, clip_high=0.01)
    config = TorchPolicyConfig(learning_rate=1e-2, eps=1e-4, loss=loss)
    thrice = TorchPolicy.from_pretrained(tiny_model(), config.model_copy(update={"updates_per_batch": 3}))
    by_hand = TorchPolicy.from_pretrained(tiny_model(), config)
    shard = make_shard()
    before = by_hand.logprobs(shard)
    parts = zip(shard.micro_batches, before, strict=True)
    carried = dataclasses.replace(
        shard, micro_batches=tuple(dataclasses.replace(part, proximal_logprobs_BL=array) for part, array in parts)
    )
    metrics = thrice.train_step(shard)
    by_hand_metrics = [by_hand.train_step(carried) for _ in range(3)]
    assert by_hand_metrics[0].clip_fraction == 0
    assert by_hand_metrics[2].clip_fraction > 0, "the law is about updates that clip"
    assert (thrice.version, thrice.num_updates, by_hand.version) == (1, 3, 3)
    assert metrics.loss == pytest.approx(np.mean([m.loss for m in by_hand_metrics]), rel=1e-5, abs=1e-7)
    assert metrics.clip_fraction == pytest.approx(np.mean([m.clip_fraction for m in by_hand_metrics]))
    assert_equal_weights(thrice, by_hand)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"updates_per_batch": 2}, "needs logprobs from before the first update"),
        ({"lora": {"rank": 2}, "tensor_parallel_size": 2}, "lora needs tensor_parallel_size=1, got 2"),
        ({"lora": {"rank": 2, "target_modules": ["lm_head"]}}, "target_modules must be one or more of"),
    ],
    ids=str,
)
def test_settings_that_cannot_go_together_are_refused(options, message) -> None:
    with pytest.raises(ValidationError, match=message):
        TorchPolicyConfig(**options)


def test_sizes_that_do_not_divide_are_refused(tiny_model) -> None:
    with pytest.raises(ConfigError, match="tensor_parallel_size must divide the number of ranks, got 2 for 1"):
        TorchPolicy.from_pretrained(tiny_model(), TorchPolicyConfig(tensor_parallel_size=2))
    with pytest.raises(ConfigError, match="cpu_offload needs several data-parallel ranks, got 1"):
        TorchPolicy.from_pretrained(tiny_model(), TorchPolicyConfig(cpu_offload=True))
