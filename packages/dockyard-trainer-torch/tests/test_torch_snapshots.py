from __future__ import annotations

import errno
import json
import os
import resource
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM

from dockyard_core.batch import TrainSequence, pack_batch
from dockyard_core.errors import UserError
from dockyard_core.optimizer_config import LoraConfig
from dockyard_trainer_torch import TorchPolicy, TorchPolicyConfig, export_hf


def step(policy: TorchPolicy, seed: int = 0) -> None:
    rng = np.random.default_rng(seed)
    sequences = [
        TrainSequence(
            token_ids_T=rng.integers(0, 64, 12),
            loss_mask_T=np.arange(12) > 3,
            sampled_logprobs_T=np.where(np.arange(12) > 3, -4.0, 0).astype(np.float32),
            advantage=advantage,
        )
        for advantage in (1.0, -1.0)
    ]
    policy.train_step(pack_batch(sequences)[0])


def make(model_dir: Path, dtype: str = "float32") -> TorchPolicy:
    policy = TorchPolicy.from_pretrained(model_dir, TorchPolicyConfig(learning_rate=1e-2, dtype=dtype))
    step(policy)
    return policy


def assert_same_state(one: TorchPolicy, other: TorchPolicy) -> None:
    for (name, left), right in zip(one.causal_lm.named_parameters(), other.causal_lm.parameters(), strict=True):
        assert torch.equal(left, right), name
        for moment, value in one.optimizer.state.get(left, {}).items():
            assert torch.equal(value, other.optimizer.state[right][moment]), (name, moment)


@contextmanager
def files_no_larger_than(num_bytes: int) -> Iterator[None]:
    """The kernel refuses to let any file grow beyond this (EFBIG; Python ignores the signal)."""
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (num_bytes, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))


def test_a_snapshot_shares_no_memory_with_its_policy(tiny_model) -> None:
    policy = make(tiny_model())
    snapshot = policy.snapshot()
    live = {param.data_ptr() for param in policy.causal_lm.parameters()}
    live |= {s[name].data_ptr() for s in policy.optimizer.state.values() for name in ("exp_avg", "exp_avg_sq")}
    held = [shard.tensor for shard in (*snapshot._state.weights.values(), *snapshot._state.optimizer.values())]
    assert len(held) == 3 * len(list(policy.causal_lm.parameters())) + 1, "weights, two moments each, the RNG"
    assert live.isdisjoint(tensor.data_ptr() for tensor in held)


def test_a_float32_export_takes_no_second_place_on_the_disk(tiny_model, tmp_path) -> None:
    policy = make(tiny_model())
    export_hf(policy, tmp_path / "wanted")
    snapshot = policy.snapshot()
    step(policy, 1)
    snapshot.write(tmp_path / "policy")
    snapshot.export(tmp_path / "hf")
    assert (tmp_path / "hf" / "model.safetensors").samefile(tmp_path / "policy" / "model.safetensors")
    wanted = {path.name: path.read_bytes() for path in (tmp_path / "wanted").iterdir()}
    assert {path.name: path.read_bytes() for path in (tmp_path / "hf").iterdir()} == wanted
    AutoModelForCausalLM.from_pretrained(tmp_path / "hf")


def test_an_export_over_another_leaves_nothing_of_it_and_no_checkpoint_changed(tiny_model, tmp_path) -> None:
    policy = make(tiny_model())
    snapshot = policy.snapshot()
    snapshot.write(tmp_path / "policy")
    snapshot.export(tmp_path / "hf")  # a link to the checkpoint's file
    saved = (tmp_path / "policy" / "model.safetensors").read_bytes()
    # As two ranks would have left it: an index, which is read before a file without one.
    held = load_file(tmp_path / "hf" / "model.safetensors")
    save_file(held, tmp_path / "hf" / "model-00001-of-00001.safetensors")
    index = {"metadata": {}, "weight_map": dict.fromkeys(held, "model-00001-of-00001.safetensors")}
    (tmp_path / "hf" / "model.safetensors.index.json").write_text(json.dumps(index))
    step(policy, 1)
    export_hf(policy, tmp_path / "hf")
    assert (tmp_path / "policy" / "model.safetensors").read_bytes() == saved
    found = TorchPolicy.from_pretrained(tmp_path / "hf", TorchPolicyConfig())
    for name, param in found.causal_lm.named_parameters():
        assert torch.equal(param, policy.causal_lm.get_parameter(name)), name


def test_a_bfloat16_export_is_a_file_of_its_own(tiny_model, tmp_path) -> None:
    policy = make(tiny_model(), "bfloat16")
    export_hf(policy, tmp_path / "wanted")
    snapshot = policy.snapshot()
    step(policy, 1)
    snapshot.write(tmp_path / "policy")
    snapshot.export(tmp_path / "hf")
    held, wanted = (load_file(tmp_path / name / "model.safetensors") for name in ("hf", "wanted"))
    assert {tensor.dtype for tensor in held.values()} == {torch.bfloat16}
    assert held.keys() == wanted.keys()
    assert all(torch.equal(held[name], wanted[name]) for name in wanted)


@pytest.mark.parametrize("what", ["changed", "gone", "another"])
def test_an_export_never_links_to_a_file_that_is_not_the_written_one(tiny_model, tmp_path, what) -> None:
    policy = make(tiny_model())
    export_hf(policy, tmp_path / "wanted")
    snapshot = policy.snapshot()
    snapshot.write(tmp_path / "policy")
    weights = tmp_path / "policy" / "model.safetensors"
    if what == "changed":
        weights.write_bytes(b"other bytes")
    elif what == "gone":
        weights.unlink()
    else:
        step(policy, 1)
        policy.save(tmp_path / "policy")
    snapshot.export(tmp_path / "hf")
    wanted = (tmp_path / "wanted" / "model.safetensors").read_bytes()
    assert (tmp_path / "hf" / "model.safetensors").read_bytes() == wanted


def test_where_the_file_system_has_no_links_the_export_is_a_copy(tiny_model, tmp_path, monkeypatch) -> None:
    def no_links(source: Path, target: Path) -> None:
        raise OSError(errno.EPERM, os.strerror(errno.EPERM), str(source))

    monkeypatch.setattr(os, "link", no_links)
    snapshot = make(tiny_model()).snapshot()
    snapshot.write(tmp_path / "policy")
    snapshot.export(tmp_path / "hf")
    one, other = (tmp_path / name / "model.safetensors" for name in ("policy", "hf"))
    assert one.read_bytes() == other.read_bytes()
    assert not one.samefile(other)


@pytest.mark.parametrize("num_bytes", [100, 20_000, 80_000])
def test_a_disk_that_refuses_leaves_what_was_there_and_says_its_errno(tiny_model, tmp_path, num_bytes) -> None:
    policy = make(tiny_model())
    policy.save(tmp_path / "policy")
    before = {path.name: path.read_bytes() for path in (tmp_path / "policy").iterdir()}
    assert num_bytes < len(before["optimizer.safetensors"]), "the limit must bite"
    step(policy, 1)
    with files_no_larger_than(num_bytes):
        with pytest.raises(OSError) as caught:
            policy.snapshot().write(tmp_path / "policy")
    assert caught.value.errno == errno.EFBIG
    assert [path.name for path in tmp_path.iterdir()] == ["policy"]
    assert {path.name: path.read_bytes() for path in (tmp_path / "policy").iterdir()} == before
    policy.snapshot().write(tmp_path / "policy")  # the next one is written like any other
    restored = make(tiny_model())
    restored.restore(tmp_path / "policy")
    assert restored.version == 2


def test_a_checkpoint_counts_updates_apart_from_batches(tiny_model, tmp_path) -> None:
    policy = make(tiny_model())
    policy.num_updates = 5  # as several updates on each batch would make it
    for state in policy.optimizer.state.values():
        state["step"].fill_(5.0)
    policy.save(tmp_path / "policy")
    restored = make(tiny_model())
    restored.restore(tmp_path / "policy")
    assert (restored.version, restored.num_updates) == (1, 5)
    assert {float(state["step"]) for state in restored.optimizer.state.values()} == {5.0}


def test_a_checkpoint_of_the_first_format_is_read(tiny_model, tmp_path) -> None:
    policy = make(tiny_model())
    policy.save(tmp_path / "policy")
    optimizer = load_file(tmp_path / "policy" / "optimizer.safetensors")
    optimizer["rng"] = optimizer.pop("rng.0")
    save_file(optimizer, tmp_path / "policy" / "optimizer.safetensors")
    meta = {"format": 1, "version": 1, "optimizer_steps": 1, "num_skipped_steps": 0, "config": {}}
    (tmp_path / "policy" / "trainer.json").write_text(json.dumps(meta))
    torch.manual_seed(7)
    restored = make(tiny_model())
    step(restored, 3)
    restored.restore(tmp_path / "policy")
    assert (restored.version, restored.num_updates) == (1, 1)
    assert torch.equal(torch.get_rng_state(), optimizer["rng"])
    step(policy, 1)
    step(restored, 1)
    assert_same_state(policy, restored)


def test_a_frozen_parameter_is_checked_and_not_held(tiny_model, tmp_path) -> None:
    def make_frozen(family: str, frozen: str) -> TorchPolicy:
        policy = TorchPolicy.from_pretrained(tiny_model(family), TorchPolicyConfig(learning_rate=1e-2))
        param = policy.causal_lm.get_parameter(frozen).requires_grad_(False)
        policy.optimizer.state.pop(param)
        for group in policy.optimizer.param_groups:
            group["params"] = [other for other in group["params"] if other is not param]
        return policy

    policy = make_frozen("qwen2", "model.embed_tokens.weight")
    step(policy)
    policy.save(tmp_path / "policy")
    held = load_file(tmp_path / "policy" / "model.safetensors")
    assert set(held) == {n for n, _ in policy.causal_lm.named_parameters()} - {"model.embed_tokens.weight"}
    assert not (tmp_path / "policy" / "config.json").exists(), "without its base it is no Hugging Face model"
    restored = make_frozen("qwen2", "model.embed_tokens.weight")
    restored.restore(tmp_path / "policy")
    assert_same_state(policy, restored)
    policy.snapshot().export(tmp_path / "hf")
    exported = AutoModelForCausalLM.from_pretrained(tmp_path / "hf")
    for (name, one), two in zip(policy.causal_lm.named_parameters(), exported.parameters(), strict=True):
        assert torch.equal(one, two), name
    for other in (make_frozen("qwen2", "model.norm.weight"), make(tiny_model())):
        with pytest.raises(UserError, match=r"hold the policy's tensors.*restore it with the model"):
            other.restore(tmp_path / "policy")


def test_adapters_are_held_without_their_base_and_exported_merged(tiny_model, tmp_path) -> None:
    config = TorchPolicyConfig(learning_rate=1e-2, lora=LoraConfig(rank=2))
    policy = TorchPolicy.from_pretrained(tiny_model(), config)
    step(policy)
    export_hf(policy, tmp_path / "wanted")
    snapshot = policy.snapshot()
    step(policy, 1)
    snapshot.write(tmp_path / "policy")
    snapshot.export(tmp_path / "hf")
    held = load_file(tmp_path / "policy" / "model.safetensors")
    assert all(name.endswith((".lora_A", ".lora_B")) for name in held)
    one, other = (load_file(tmp_path / name / "model.safetensors") for name in ("hf", "wanted"))
    assert one.keys() == other.keys()
    assert all(torch.equal(one[name], other[name]) for name in other)
    restored = TorchPolicy.from_pretrained(tiny_model(), config)
    restored.restore(tmp_path / "policy")
    step(restored, 1)
    assert_same_state(policy, restored)
