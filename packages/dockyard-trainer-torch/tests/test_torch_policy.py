import dataclasses
import json
import math

import numpy as np
import pytest
import torch
from pydantic import ValidationError
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM, GPT2Config

from dockyard_core.batch import BatchShard, TrainSequence, pack_batch
from dockyard_core.errors import ConfigError, UserError
from dockyard_core.loss import policy_loss as oracle
from dockyard_core.loss_config import LossConfig
from dockyard_core.optimizer_config import learning_rate_at
from dockyard_trainer_torch import TorchPolicy, TorchPolicyConfig, export_hf, weight_manifest


def make_shard(seed: int = 0, count: int = 6, **kwargs) -> BatchShard:
    rng = np.random.default_rng(seed)
    sequences = []
    for _ in range(count):
        num_tokens = int(rng.integers(6, 16))
        mask = np.arange(num_tokens) >= 3
        sequences.append(
            TrainSequence(
                token_ids_T=rng.integers(0, 64, num_tokens),
                loss_mask_T=mask,
                sampled_logprobs_T=np.where(mask, rng.normal(-4, 0.3, num_tokens), 0).astype(np.float32),
                advantage=float(rng.normal()),
            )
        )
    return pack_batch(sequences, **kwargs)[0]


def full_gradient(model: torch.nn.Module, shard: BatchShard, config: LossConfig, ref_model) -> tuple[float, list]:
    """Loss and gradient by the oracle and Hugging Face's own forward, one unpacked sequence at a time."""
    (mb,) = shard.micro_batches
    rows = []
    for index in range(int(mb.sequence_ids_BL.max()) + 1):
        where = mb.sequence_ids_BL == index
        rows.append({name: getattr(mb, name)[where] for name in ("token_ids_BL", "loss_mask_BL", "advantages_BL")})
        rows[-1]["sampled"] = mb.sampled_logprobs_BL[where]
    width = max(len(row["token_ids_BL"]) for row in rows)
    arrays = {
        name: np.zeros((len(rows), width)) for name in ("logprobs", "ref_logprobs", "entropy", "sampled_logprobs")
    }
    mask, advantages = np.zeros((len(rows), width), bool), np.zeros((len(rows), width))
    graph = []
    for index, row in enumerate(rows):
        ids_T = torch.from_numpy(row["token_ids_BL"])
        log_probs_TV = (model(ids_T[None]).logits[0, :-1] / shard.temperature).log_softmax(-1)
        logprobs_T = log_probs_TV.gather(1, ids_T[1:, None])[:, 0]
        entropy_T = -(log_probs_TV.exp() * log_probs_TV).sum(-1)
        with torch.no_grad():
            ref_TV = (ref_model(ids_T[None]).logits[0, :-1] / shard.temperature).log_softmax(-1)
        span = slice(1, len(ids_T))
        arrays["logprobs"][index, span] = logprobs_T.detach()
        arrays["entropy"][index, span] = entropy_T.detach()
        arrays["ref_logprobs"][index, span] = ref_TV.gather(1, ids_T[1:, None])[:, 0]
        arrays["sampled_logprobs"][index, : len(ids_T)] = row["sampled"]
        mask[index, : len(ids_T)], advantages[index, : len(ids_T)] = row["loss_mask_BL"], row["advantages_BL"]
        graph.append((logprobs_T, entropy_T, index, span))
    out = oracle(config, **arrays, advantages=advantages, loss_mask=mask)
    total = sum(
        (logprobs_T * torch.from_numpy(out.grad[index, span])).sum()
        + (entropy_T * torch.from_numpy(out.entropy_grad[index, span])).sum()
        for logprobs_T, entropy_T, index, span in graph
    )
    return out.loss, torch.autograd.grad(total, list(model.parameters()))


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"aggregation": "sequence", "correction": "is"},
        {"kl_coef": 0.1, "entropy_coef": 0.01, "aggregation": "dr_grpo", "max_tokens": 12},
        {"proximal": "bypass"},
        {"variant": "gspo", "clip_low": 0.05, "clip_high": 0.05},
    ],
    ids=str,
)
@pytest.mark.parametrize("family", ["qwen3", "llama"])
def test_a_step_descends_the_oracles_gradient(tiny_model, options, family) -> None:
    """Every parameter's gradient, through Hugging Face's own forward, not only the loss."""
    directory, loss = tiny_model(family), LossConfig(**options)
    config = TorchPolicyConfig(learning_rate=1e-3, eps=1e-4, max_grad_norm=1e9, loss=loss)
    policy = TorchPolicy.from_pretrained(directory, config)
    with torch.no_grad():  # away from the reference, so that the KL has a gradient
        policy.causal_lm.model.layers[0].mlp.up_proj.weight.mul_(1.2)
    shard = make_shard(row_length=32, temperature=0.9)
    model = AutoModelForCausalLM.from_pretrained(directory, dtype=torch.float32)
    ref_model = AutoModelForCausalLM.from_pretrained(directory, dtype=torch.float32)
    model.load_state_dict(policy.causal_lm.state_dict())
    wanted_loss, gradients = full_gradient(model, shard, loss, ref_model)
    metrics = policy.train_step(shard)
    assert metrics.loss == pytest.approx(wanted_loss, abs=1e-5)
    norm = math.sqrt(sum(float(g.double().square().sum()) for g in gradients))
    assert metrics.grad_norm == pytest.approx(norm, rel=1e-4)
    for param, gradient, after in zip(model.parameters(), gradients, policy.causal_lm.parameters(), strict=True):
        # Adam's first step from zero moments: m = g, v = g².
        wanted = param - 1e-3 * gradient / (gradient.abs() + 1e-4)
        torch.testing.assert_close(after, wanted, rtol=0, atol=2e-6)


def test_kl_to_the_reference_is_zero_at_the_start_and_grows(tiny_model) -> None:
    policy = TorchPolicy.from_pretrained(
        tiny_model(), TorchPolicyConfig(learning_rate=1e-2, loss=LossConfig(kl_coef=0.01))
    )
    shard = make_shard()
    first, second = policy.train_step(shard), policy.train_step(shard)
    assert first.kl_ref == pytest.approx(0.0, abs=1e-9)
    assert second.kl_ref > 1e-3
    (current,), (reference,) = policy.logprobs(shard), policy.logprobs(shard, "reference")
    fresh = TorchPolicy.from_pretrained(tiny_model(), TorchPolicyConfig())
    np.testing.assert_array_equal(reference, fresh.logprobs(shard)[0])
    assert np.abs(current - reference).max() > 0.01


def test_a_reference_that_was_not_kept_is_refused(tiny_model) -> None:
    policy = TorchPolicy.from_pretrained(tiny_model(), TorchPolicyConfig())
    with pytest.raises(ConfigError, match="load_reference=True"):
        policy.logprobs(make_shard(), "reference")
    kept = TorchPolicy.from_pretrained(tiny_model(), TorchPolicyConfig(load_reference=True))
    np.testing.assert_array_equal(kept.logprobs(make_shard(), "reference")[0], kept.logprobs(make_shard())[0])


def test_metrics_are_those_of_the_tokens(tiny_model) -> None:
    policy = TorchPolicy.from_pretrained(tiny_model(), TorchPolicyConfig())
    shard = make_shard()
    (before_BL,), (mb,) = policy.logprobs(shard), shard.micro_batches
    metrics = policy.train_step(shard)
    drift = np.abs(before_BL - mb.sampled_logprobs_BL)[mb.loss_mask_BL]
    assert metrics.offpolicy_abs_diff_mean == pytest.approx(drift.mean(), rel=1e-5)
    assert metrics.offpolicy_abs_diff_max == pytest.approx(drift.max(), rel=1e-5)
    assert metrics.num_valid_tokens == mb.loss_mask_BL.sum()
    assert 0 < metrics.entropy <= math.log(64)


def test_a_skipped_step_is_counted_and_survives_a_restore(tiny_model, tmp_path) -> None:
    policy = TorchPolicy.from_pretrained(tiny_model(), TorchPolicyConfig())
    shard = make_shard()
    (mb,) = shard.micro_batches
    broken = dataclasses.replace(
        shard, micro_batches=(dataclasses.replace(mb, advantages_BL=np.full_like(mb.advantages_BL, np.nan)),)
    )
    metrics = policy.train_step(broken)
    assert metrics.is_skipped
    assert metrics.extra["num_skipped_steps"] == 1
    policy.save(tmp_path / "checkpoint")
    other = TorchPolicy.from_pretrained(tiny_model(), TorchPolicyConfig())
    other.restore(tmp_path / "checkpoint")
    assert (other.num_skipped_steps, other.version) == (1, 0)


@pytest.mark.parametrize("is_tied", [True, False])
def test_an_export_is_a_hugging_face_model_with_the_same_weights(tiny_model, tmp_path, is_tied) -> None:
    source = tiny_model("qwen2", is_tied=is_tied)
    policy = TorchPolicy.from_pretrained(source, TorchPolicyConfig(learning_rate=1e-2))
    policy.train_step(make_shard())
    export_hf(policy, tmp_path / "export")
    model = AutoModelForCausalLM.from_pretrained(tmp_path / "export")
    ids = torch.arange(12)[None]
    with torch.no_grad():
        assert torch.equal(model(ids).logits, policy.causal_lm(ids).logits)
    held = load_file(tmp_path / "export" / "model.safetensors")
    assert held.keys() == {spec.name for spec in weight_manifest(policy)}
    assert ("lm_head.weight" in held) is not is_tied
    assert (tmp_path / "export" / "tokenizer.json").read_bytes() == (source / "tokenizer.json").read_bytes()
    again = TorchPolicy.from_pretrained(tmp_path / "export", TorchPolicyConfig())
    assert weight_manifest(again) == weight_manifest(policy)


def test_bfloat16_streams_and_exports_bfloat16_but_saves_float32(tiny_model, tmp_path) -> None:
    policy = TorchPolicy.from_pretrained(tiny_model(), TorchPolicyConfig(dtype="bfloat16"))
    dtypes = set()
    policy.stream_weights(lambda chunk: dtypes.add(chunk.array.dtype))
    assert dtypes == {torch.bfloat16}
    assert {spec.dtype for spec in weight_manifest(policy)} == {"bfloat16"}
    export_hf(policy, tmp_path / "export")
    policy.save(tmp_path / "save")
    assert {t.dtype for t in load_file(tmp_path / "export" / "model.safetensors").values()} == {torch.bfloat16}
    assert {t.dtype for t in load_file(tmp_path / "save" / "model.safetensors").values()} == {torch.float32}
    assert json.loads((tmp_path / "export" / "config.json").read_text())["dtype"] == "bfloat16"


def test_saving_again_replaces_and_leaves_no_partial_directory(tiny_model, tmp_path) -> None:
    policy = TorchPolicy.from_pretrained(tiny_model(), TorchPolicyConfig(learning_rate=1e-3))
    policy.save(tmp_path / "latest")
    policy.train_step(make_shard())
    (tmp_path / ".latest.partial").mkdir()  # what a killed writer leaves
    policy.save(tmp_path / "latest")
    assert [path.name for path in tmp_path.iterdir()] == ["latest"]
    other = TorchPolicy.from_pretrained(tiny_model(), TorchPolicyConfig())
    other.restore(tmp_path / "latest")
    assert other.version == 1


def test_a_checkpoint_of_another_model_is_refused_and_changes_nothing(tiny_model, tmp_path) -> None:
    TorchPolicy.from_pretrained(tiny_model("llama"), TorchPolicyConfig()).save(tmp_path / "checkpoint")
    policy = TorchPolicy.from_pretrained(tiny_model("qwen3"), TorchPolicyConfig())
    before = [param.clone() for param in policy.causal_lm.parameters()]
    with pytest.raises(UserError, match="must hold the policy's tensors"):
        policy.restore(tmp_path / "checkpoint")
    assert all(torch.equal(a, b) for a, b in zip(before, policy.causal_lm.parameters(), strict=True))
    with pytest.raises(UserError, match=r"has trainer\.json"):
        policy.restore(tmp_path)


def test_other_families_and_missing_directories_are_refused(tmp_path) -> None:
    with pytest.raises(ConfigError, match="must be a directory"):
        TorchPolicy.from_pretrained(tmp_path / "missing", TorchPolicyConfig())
    with pytest.raises(ConfigError, match=r"has no config\.json"):
        TorchPolicy.from_pretrained(tmp_path, TorchPolicyConfig())
    GPT2Config().save_pretrained(tmp_path)
    with pytest.raises(ConfigError, match="got 'gpt2'"):
        TorchPolicy.from_pretrained(tmp_path, TorchPolicyConfig())


def test_a_directory_without_safetensors_is_refused(tiny_model, tmp_path) -> None:
    (tmp_path / "config.json").write_bytes((tiny_model() / "config.json").read_bytes())
    with pytest.raises(ConfigError, match="no readable"):
        TorchPolicy.from_pretrained(tmp_path, TorchPolicyConfig())


@pytest.mark.parametrize(
    ("options", "wanted"),
    [
        ({"schedule": "constant", "warmup_steps": 4}, {0: 0.25, 1: 0.5, 3: 1.0, 50: 1.0}),
        ({"schedule": "linear", "total_steps": 10}, {0: 1.0, 5: 0.5, 10: 0.0, 20: 0.0}),
        ({"schedule": "linear", "total_steps": 10, "min_lr_ratio": 0.2}, {5: 0.6, 10: 0.2}),
        ({"schedule": "cosine", "total_steps": 12, "warmup_steps": 2}, {0: 0.5, 1: 1.0, 2: 1.0, 7: 0.5, 12: 0.0}),
    ],
    ids=str,
)
def test_the_learning_rate_follows_its_schedule(options, wanted) -> None:
    config = TorchPolicyConfig(learning_rate=2.0, **options)
    for version, share in wanted.items():
        assert learning_rate_at(config, version) == pytest.approx(2.0 * share), version


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"schedule": "cosine"}, "needs total_steps"),
        ({"warmup_steps": 5, "total_steps": 3}, "warmup_steps must be <= total_steps"),
        ({"betas": (0.9, 1.0)}, "betas must lie in"),
        ({"lr": 1e-4}, "Extra inputs"),
        ({"learning_rate": -1.0}, "greater than or equal"),
    ],
)
def test_contradicting_settings_are_refused(options, message) -> None:
    with pytest.raises(ValidationError, match=message):
        TorchPolicyConfig(**options)


def test_importing_the_package_does_not_import_torch() -> None:
    import subprocess
    import sys

    code = "import sys, dockyard_trainer_torch; sys.exit('torch' in sys.modules or 'transformers' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False, timeout=60).returncode == 0
