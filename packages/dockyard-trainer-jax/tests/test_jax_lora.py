"""LoRA against the PyTorch trainer: the same steps, the same merged weights, and checkpoints that either restores."""

import sys
from pathlib import Path
from typing import NamedTuple

import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM

sys.path.append(str(Path(__file__).parent))

from jax_adapters import LORA, UPDATES, Arrays, adapters, by_layer, distance, fill, make_shard, moments, streamed

from dockyard_core.errors import ConfigError, UserError
from dockyard_core.loss_config import LossConfig
from dockyard_core.policy import StepMetrics
from dockyard_trainer_jax import JaxPolicy, JaxPolicyConfig, export_hf
from dockyard_trainer_jax.lora import is_adapter
from dockyard_trainer_torch import TorchPolicy, TorchPolicyConfig

OPTIONS = UPDATES | {"loss": LossConfig(kl_coef=0.1), "lora": LORA, "max_grad_norm": 0.5}
FILES = {"model.safetensors", "optimizer.safetensors", "trainer.json"}


class Trained(NamedTuple):
    """Both trainers after five steps from the same adapters, ours first, and what they had after the first."""

    policies: tuple[JaxPolicy, TorchPolicy]
    base: Arrays
    start: Arrays
    metrics: list[StepMetrics]
    moments: list[Arrays]
    adapters: list[Arrays]


@pytest.fixture(scope="module")
def trained(tiny_model) -> Trained:
    ours = JaxPolicy.from_pretrained(tiny_model("qwen2"), JaxPolicyConfig(**OPTIONS))
    theirs = TorchPolicy.from_pretrained(tiny_model("qwen2"), TorchPolicyConfig(**OPTIONS))
    base = streamed(ours)
    fill(ours)
    start = adapters(ours)
    with torch.no_grad():
        for name, param in theirs.causal_lm.named_parameters():
            if is_adapter(name):
                param.copy_(torch.from_numpy(start[name]))
    policies = (ours, theirs)
    metrics = [policy.train_step(make_shard(temperature=0.9)) for policy in policies]
    first = [[read(policy) for policy in policies] for read in (moments, adapters)]
    for seed in range(1, 5):
        for policy in policies:
            policy.train_step(make_shard(seed))
    return Trained(policies, base, start, metrics, *first)


def test_a_step_is_that_of_the_torch_trainer(trained) -> None:
    ours, theirs = trained.metrics
    assert ours.kl_ref > 1e-3, "away from the reference"
    for name in ("loss", "grad_norm", "learning_rate", "entropy", "kl_ref", "offpolicy_abs_diff_mean"):
        assert getattr(ours, name) == pytest.approx(getattr(theirs, name), rel=1e-5, abs=1e-6), name
    assert ours.grad_norm > 0.5, "the gradient is clipped"
    assert trained.moments[0].keys() == trained.moments[1].keys() == trained.start.keys()
    for name, moment in trained.moments[1].items():
        assert np.abs(moment).max() > 0, name
        assert distance(trained.moments[0][name], moment) < 1e-5, name
    for name, array in trained.adapters[1].items():
        np.testing.assert_allclose(trained.adapters[0][name], array, rtol=0, atol=1e-5, err_msg=name)


def test_five_steps_end_where_those_of_the_torch_trainer_do(trained) -> None:
    ours, theirs = map(adapters, trained.policies)
    for name, array in theirs.items():
        assert distance(ours[name], array) < 1e-4, name
        assert distance(trained.start[name], array) > 1e-2, f"{name} has hardly moved"
    merged, wanted = map(streamed, trained.policies)
    assert list(merged) == list(wanted)
    for name, array in wanted.items():
        np.testing.assert_allclose(merged[name], array, rtol=0, atol=1e-5, err_msg=name)
        assert np.array_equal(merged[name], trained.base[name]) is not name.endswith("_proj.weight"), name


def test_the_base_is_frozen_and_is_the_reference(trained, tiny_model) -> None:
    policy, shard = trained.policies[0], make_shard()
    for name, array in by_layer(policy.frozen).items():
        np.testing.assert_array_equal(array, trained.base[name], err_msg=name)
    names = {
        name.removesuffix("weight") + key
        for name in policy.frozen
        if "_proj.weight" in name
        for key in ("lora_A", "lora_B")
    }
    assert policy.params.keys() == policy.state.exp_avg.keys() == policy.state.exp_avg_sq.keys() == names
    base = JaxPolicy.from_pretrained(tiny_model("qwen2"), JaxPolicyConfig()).logprobs(shard)[0]
    np.testing.assert_array_equal(policy.logprobs(shard, "reference")[0], base)
    assert np.abs(policy.logprobs(shard)[0] - base).max() > 0.01
    unused = JaxPolicy.from_pretrained(tiny_model("qwen2"), JaxPolicyConfig(lora=LORA))
    with pytest.raises(ConfigError, match="load_reference=True"):
        unused.logprobs(shard, "reference")


def test_an_export_is_a_hugging_face_model_that_computes_what_was_learnt(trained, tmp_path) -> None:
    policy, shard = trained.policies[0], make_shard(9)
    export_hf(policy, tmp_path / "export")
    policy.snapshot().export(tmp_path / "of a snapshot")
    files = [tmp_path / name / "model.safetensors" for name in ("export", "of a snapshot")]
    assert files[0].read_bytes() == files[1].read_bytes()
    model = AutoModelForCausalLM.from_pretrained(tmp_path / "export", dtype=torch.float32)
    held = streamed(policy)
    assert {name: param.shape for name, param in model.named_parameters()} == {
        name: array.shape for name, array in held.items()
    }
    for name, param in model.named_parameters():
        np.testing.assert_array_equal(param.detach().numpy(), held[name], err_msg=name)
    (mb,) = shard.micro_batches
    (found_BL,) = policy.logprobs(shard)
    for index in range(int(mb.sequence_ids_BL.max()) + 1):
        where = mb.sequence_ids_BL == index
        ids_T = torch.from_numpy(mb.token_ids_BL[where])
        with torch.no_grad():
            logprobs_TV = model(ids_T[None]).logits[0, :-1].double().log_softmax(-1)
        wanted_T = logprobs_TV.gather(1, ids_T[1:, None])[:, 0].numpy()
        is_trained_T = mb.loss_mask_BL[where][1:]
        np.testing.assert_allclose(found_BL[where][1:][is_trained_T], wanted_T[is_trained_T], rtol=0, atol=1e-5)


@pytest.mark.parametrize("giver", [0, 1], ids=["jax to torch", "torch to jax"])
def test_adapters_are_handed_over_between_the_trainers(trained, tiny_model, tmp_path, giver) -> None:
    trained.policies[giver].save(tmp_path / "checkpoint")
    assert {path.name for path in (tmp_path / "checkpoint").iterdir()} == FILES, "this is no Hugging Face model"
    ours = JaxPolicy.from_pretrained(tiny_model("qwen2"), JaxPolicyConfig(**OPTIONS))
    theirs = TorchPolicy.from_pretrained(tiny_model("qwen2"), TorchPolicyConfig(**OPTIONS))
    for policy in (ours, theirs):
        policy.restore(tmp_path / "checkpoint")
        for read in (adapters, moments):
            for name, array in read(trained.policies[giver]).items():
                np.testing.assert_array_equal(read(policy)[name], array, err_msg=name)
    found, wanted = ours.train_step(make_shard(9)), theirs.train_step(make_shard(9))
    assert found.policy_version == wanted.policy_version == 6
    assert found.loss == pytest.approx(wanted.loss, abs=1e-5)
    after = adapters(theirs)
    for name, array in adapters(ours).items():
        np.testing.assert_allclose(array, after[name], rtol=0, atol=1e-5, err_msg=name)


@pytest.mark.parametrize("lora", [None, LORA.model_copy(update={"alpha": 5.0})], ids=["without", "another alpha"])
def test_a_checkpoint_of_other_adapters_is_refused(trained, tiny_model, tmp_path, lora) -> None:
    trained.policies[0].save(tmp_path / "checkpoint")
    other = JaxPolicy.from_pretrained(tiny_model("qwen2"), JaxPolicyConfig(lora=lora))
    with pytest.raises(UserError, match=r"with the adapters it was trained with.*set lora to the checkpoint's"):
        other.restore(tmp_path / "checkpoint")
