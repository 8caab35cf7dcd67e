from __future__ import annotations

import errno
import os
import resource
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM

from dockyard_core.batch import TrainSequence, pack_batch
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
    held = [*snapshot._weights.values(), *snapshot._optimizer_state.values()]
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
