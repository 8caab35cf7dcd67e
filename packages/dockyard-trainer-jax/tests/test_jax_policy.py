"""The policy against Hugging Face's forward pass and against the PyTorch trainer, step by step."""

import dataclasses
import json
import subprocess
import sys

import numpy as np
import pytest
import torch
from pydantic import ValidationError
from safetensors.numpy import load_file
from transformers import AutoModelForCausalLM

from dockyard_core.batch import BatchShard, TrainSequence, pack_batch
from dockyard_core.errors import ConfigError, UserError
from dockyard_core.loss_config import LossConfig
from dockyard_trainer_jax import JaxPolicy, JaxPolicyConfig, export_hf, weight_manifest
from dockyard_trainer_torch import TorchPolicy, TorchPolicyConfig
from dockyard_trainer_torch import weight_manifest as torch_weight_manifest


def make_shard(seed: int = 0, count: int = 6, *, carries: bool = False, **kwargs) -> BatchShard:
    rng = np.random.default_rng(seed)
    sequences = []
    for _ in range(count):
        num_tokens = int(rng.integers(6, 16))
        mask = np.arange(num_tokens) >= 3
        noise = rng.normal(0, 0.2, num_tokens)
        sampled = np.where(mask, rng.normal(-4, 0.3, num_tokens), 0).astype(np.float32)
        sequences.append(
            TrainSequence(
                token_ids_T=rng.integers(0, 64, num_tokens),
                loss_mask_T=mask,
                sampled_logprobs_T=sampled,
                advantage=float(rng.normal()),
                proximal_logprobs_T=np.where(mask, sampled + noise, 0).astype(np.float32) if carries else None,
            )
        )
    return pack_batch(sequences, **kwargs)[0]


def distance(ours: np.ndarray, theirs: np.ndarray) -> float:
    """Of one array from another, relative to its norm."""
    ours, theirs = ours.astype(np.float64), theirs.astype(np.float64)
    return float(np.linalg.norm(ours - theirs) / max(np.linalg.norm(theirs), 1e-30))


def pair(directory, **options) -> tuple[JaxPolicy, TorchPolicy]:
    ours = JaxPolicy.from_pretrained(directory, JaxPolicyConfig(**options))
    return ours, TorchPolicy.from_pretrained(directory, TorchPolicyConfig(**options))


def streamed(policy) -> dict[str, np.ndarray]:
    held: dict[str, np.ndarray] = {}
    policy.stream_weights(lambda chunk: held.update({chunk.name: np.array(np.from_dlpack(chunk.array))}))
    return held


CI = pytest.mark.ci


@pytest.mark.parametrize("temperature", [0.7, 1.0])
@pytest.mark.parametrize("family", ["qwen2", "qwen3_moe", *(pytest.param(one, marks=CI) for one in ("qwen3", "llama"))])
def test_logprobs_of_packed_rows_are_hugging_faces_of_each_sequence_alone(tiny_model, family, temperature) -> None:
    directory = tiny_model(family, is_tied=False)
    shard = make_shard(row_length=40, temperature=temperature)
    (mb,) = shard.micro_batches
    (found_BL,) = JaxPolicy.from_pretrained(directory, JaxPolicyConfig()).logprobs(shard)
    model = AutoModelForCausalLM.from_pretrained(directory, dtype=torch.float32)
    for index in range(int(mb.sequence_ids_BL.max()) + 1):
        where = mb.sequence_ids_BL == index
        ids_T = torch.from_numpy(mb.token_ids_BL[where])
        with torch.no_grad():
            logprobs_TV = (model(ids_T[None]).logits[0, :-1].double() / temperature).log_softmax(-1)
        wanted_T = logprobs_TV.gather(1, ids_T[1:, None])[:, 0].numpy()
        trained = mb.loss_mask_BL[where][1:]
        np.testing.assert_allclose(found_BL[where][1:][trained], wanted_T[trained], rtol=0, atol=1e-5)


@pytest.mark.parametrize("family", ["qwen2", *(pytest.param(one, marks=CI) for one in ("qwen3", "llama"))])
def test_twenty_steps_end_where_those_of_torch_do(tiny_model, family) -> None:
    options = {
        "learning_rate": 2e-3,
        "eps": 1e-4,
        "weight_decay": 0.1,
        "max_grad_norm": 0.5,
        "schedule": "cosine",
        "warmup_steps": 3,
        "total_steps": 18,
        "min_lr_ratio": 0.1,
        "updates_per_batch": 2,
        "loss": LossConfig(proximal="given", kl_coef=0.05),
    }
    ours, theirs = pair(tiny_model(family), **options)
    before = streamed(ours)
    for seed in range(20):
        shard = make_shard(seed % 5, row_length=32, micro_batch_tokens=64)
        found, wanted = ours.train_step(shard), theirs.train_step(shard)
        assert found.loss == pytest.approx(wanted.loss, rel=1e-3, abs=1e-4), seed
        assert found.learning_rate == wanted.learning_rate
    after, reference = streamed(ours), streamed(theirs)
    assert (ours.version, ours.num_updates) == (20, 40)
    for name, array in reference.items():
        assert distance(after[name], array) < 1e-4, name
        assert distance(before[name], array) > 1e-3, f"{name} has hardly moved"


@pytest.mark.parametrize(
    ("family", "is_tied"), [("qwen2", True), ("qwen3", False), ("llama", True), ("qwen3_moe", False)]
)
def test_the_manifest_is_that_of_the_torch_trainer(tiny_model, family, is_tied) -> None:
    ours, theirs = pair(tiny_model(family, is_tied=is_tied))
    assert weight_manifest(ours) == torch_weight_manifest(theirs)


MESHES = ((8, 1), (4, 2), (2, 4), (1, 8))
BY_SEQUENCE = {"aggregation": "sequence", "correction": "seq_mask", "seq_low": 1e-4, "seq_high": 1e4}
ON_MESHES = [(sizes, options) for sizes in MESHES for options in ({}, BY_SEQUENCE)]


def step_over(directory, sizes, options, gradients_of):
    """Metrics and gradient of a first step over ``fsdp`` x ``tp`` devices."""
    updates = {"learning_rate": 1e-2, "eps": 1e-4, "betas": (0.0, 0.0), "max_grad_norm": 1e9}
    config = JaxPolicyConfig(**updates, loss=LossConfig(**options), fsdp_size=sizes[0], tensor_parallel_size=sizes[1])
    policy = JaxPolicy.from_pretrained(directory, config)
    metrics = policy.train_step(make_shard(row_length=20))
    for name, param in policy.params.items():
        assert policy.state.exp_avg[name].sharding == param.sharding, name
    return metrics, gradients_of(policy)


@pytest.fixture(scope="module")
def on_one_device(gradients_of):
    known = {}

    def step(directory, options):
        key = (directory, repr(options))
        if key not in known:
            known[key] = step_over(directory, (1, 1), options, gradients_of)
        return known[key]

    return step


@pytest.mark.parametrize(
    ("sizes", "options"),
    [pytest.param(*one, marks=() if one == ((2, 4), BY_SEQUENCE) else CI) for one in ON_MESHES],
    ids=str,
)
def test_a_step_over_a_mesh_is_that_of_one_device(tiny_model, on_one_device, gradients_of, sizes, options) -> None:
    # Every dimension that is dealt over tensor-parallel devices divides by 8.
    directory = tiny_model("qwen2", num_attention_heads=8, num_key_value_heads=8)
    wanted, wanted_gradients = on_one_device(directory, options)
    found, gradients = step_over(directory, sizes, options, gradients_of)
    assert found.loss == pytest.approx(wanted.loss, rel=1e-5, abs=1e-6)
    assert wanted.grad_norm > 1e-3, "two gradients of 0 would be equal on any mesh"
    assert gradients.keys() == wanted_gradients.keys()
    for name, array in wanted_gradients.items():
        assert distance(gradients[name], array) < 1e-5, name


def test_a_reference_that_was_not_kept_is_refused(tiny_model) -> None:
    policy = JaxPolicy.from_pretrained(tiny_model(), JaxPolicyConfig())
    with pytest.raises(ConfigError, match="load_reference=True"):
        policy.logprobs(make_shard(), "reference")
    kept = JaxPolicy.from_pretrained(tiny_model(), JaxPolicyConfig(load_reference=True, learning_rate=1e-2))
    before = kept.logprobs(make_shard())[0]
    kept.train_step(make_shard())
    np.testing.assert_array_equal(kept.logprobs(make_shard(), "reference")[0], before)
    assert np.abs(kept.logprobs(make_shard())[0] - before).max() > 0.01


@CI
@pytest.mark.parametrize(
    "options",
    [
        {"activation_checkpointing": True, "logprob_chunk_tokens": 5},
        {"activation_checkpointing": True},
        {"logprob_chunk_tokens": 5},
    ],
    ids=str,
)
def test_what_saves_memory_changes_rounding_only(tiny_model, options) -> None:
    plain = JaxPolicy.from_pretrained(tiny_model(), JaxPolicyConfig(learning_rate=1e-3, eps=1e-4))
    frugal = JaxPolicy.from_pretrained(tiny_model(), JaxPolicyConfig(learning_rate=1e-3, eps=1e-4, **options))
    first, second = plain.train_step(make_shard()), frugal.train_step(make_shard())
    assert second.grad_norm == pytest.approx(first.grad_norm, rel=1e-5)
    for name, array in streamed(plain).items():
        np.testing.assert_allclose(streamed(frugal)[name], array, rtol=0, atol=2e-6, err_msg=name)


def test_a_skipped_step_is_counted_and_survives_a_restore(tiny_model, tmp_path) -> None:
    policy = JaxPolicy.from_pretrained(tiny_model(), JaxPolicyConfig())
    shard = make_shard()
    (mb,) = shard.micro_batches
    broken = dataclasses.replace(
        shard, micro_batches=(dataclasses.replace(mb, advantages_BL=np.full_like(mb.advantages_BL, np.nan)),)
    )
    metrics = policy.train_step(broken)
    assert metrics.is_skipped
    assert metrics.extra["num_skipped_steps"] == 1
    policy.save(tmp_path / "checkpoint")
    other = JaxPolicy.from_pretrained(tiny_model(), JaxPolicyConfig())
    other.restore(tmp_path / "checkpoint")
    assert (other.num_skipped_steps, other.num_updates, other.version) == (1, 0, 0)


@pytest.mark.parametrize(
    ("is_tied", "dtype"),
    [
        (True, "float32"),
        pytest.param(False, "bfloat16", marks=CI),
        pytest.param(False, "float32", marks=CI),
        pytest.param(True, "bfloat16", marks=CI),
    ],
)
def test_an_export_is_a_hugging_face_model_with_the_same_weights(tiny_model, tmp_path, is_tied, dtype) -> None:
    source = tiny_model("qwen2", is_tied=is_tied)
    policy = JaxPolicy.from_pretrained(source, JaxPolicyConfig(learning_rate=1e-2, dtype=dtype))
    policy.train_step(make_shard())
    export_hf(policy, tmp_path / "export")
    model = AutoModelForCausalLM.from_pretrained(tmp_path / "export", dtype=torch.float32)
    held = load_file(tmp_path / "export" / "model.safetensors")
    assert [str(array.dtype) for array in held.values()] == [dtype] * len(held)
    assert held.keys() == {spec.name for spec in weight_manifest(policy)}
    assert ("lm_head.weight" in held) is not is_tied
    assert json.loads((tmp_path / "export" / "config.json").read_text())["dtype"] == dtype
    assert (tmp_path / "export" / "tokenizer.json").read_bytes() == (source / "tokenizer.json").read_bytes()
    chunks: dict[str, torch.Tensor] = {}
    policy.stream_weights(lambda chunk: chunks.update({chunk.name: torch.from_dlpack(chunk.array).clone()}))
    for name, param in model.named_parameters():
        assert torch.equal(param, chunks[name].float()), name


def test_a_checkpoint_of_another_model_is_refused_and_changes_nothing(tiny_model, tmp_path) -> None:
    JaxPolicy.from_pretrained(tiny_model("llama"), JaxPolicyConfig()).save(tmp_path / "checkpoint")
    policy = JaxPolicy.from_pretrained(tiny_model("qwen3"), JaxPolicyConfig())
    before = streamed(policy)
    with pytest.raises(UserError, match="must hold the policy's tensors"):
        policy.restore(tmp_path / "checkpoint")
    for name, array in streamed(policy).items():
        np.testing.assert_array_equal(array, before[name])
    with pytest.raises(UserError, match=r"has trainer\.json"):
        policy.restore(tmp_path)


def test_missing_directories_and_contradicting_settings_are_refused(tmp_path) -> None:
    with pytest.raises(ConfigError, match="must be a directory"):
        JaxPolicy.from_pretrained(tmp_path / "missing", JaxPolicyConfig())
    with pytest.raises(ConfigError, match=r"has no config\.json"):
        JaxPolicy.from_pretrained(tmp_path, JaxPolicyConfig())
    for options, message in (
        ({"row_length_buckets": (64, 32)}, "growing lengths"),
        ({"row_length_buckets": ()}, "growing lengths"),
        ({"device": "cpu"}, "Extra inputs"),
        ({"schedule": "cosine"}, "needs total_steps"),
    ):
        with pytest.raises(ValidationError, match=message):
            JaxPolicyConfig(**options)


def test_sizes_that_are_not_the_number_of_devices_are_refused(tiny_model) -> None:
    with pytest.raises(ConfigError, match="number of devices"):
        JaxPolicy.from_pretrained(tiny_model(), JaxPolicyConfig(fsdp_size=3))


def test_importing_the_package_imports_no_framework() -> None:
    code = (
        "import sys, dockyard_trainer_jax; sys.exit(bool({'jax', 'flax', 'torch', 'transformers'} & set(sys.modules)))"
    )
    assert subprocess.run([sys.executable, "-c", code], check=False, timeout=60).returncode == 0
