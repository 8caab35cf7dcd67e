"""Verified weights on their way into an SGLang server: a folder that other readers can read."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from dockyard_core.errors import GeneratorError, RefitError, WeightMismatch
from dockyard_core.refit import RefitUpdate, TensorSpec
from dockyard_inference.sglang_engine.model_facts import read_facts
from dockyard_inference.sglang_engine.staging import StagedWeights, write_safetensors

TENSORS = [
    ("a.weight", torch.arange(3, dtype=torch.bfloat16)),
    ("b.weight", torch.randn(4, 5, dtype=torch.float32).T),
    ("c.weight", torch.zeros(0, 7, dtype=torch.float32)),
    ("d.scale", torch.tensor(2.5, dtype=torch.float16)),
]


class Receiver:
    """The part of ``BucketReceiver`` that staging uses."""

    def __init__(self, buckets: list[Any], error: RefitError | None = None) -> None:
        self.seconds = {"stage": 0.0}
        self._buckets, self._error = buckets, error

    def receive(self, update: RefitUpdate) -> Any:
        yield from self._buckets
        if self._error is not None:
            raise self._error

    def not_loaded(self, error: Exception, version: int) -> RefitError:
        return RefitError(f"not loaded: {error}", wanted_version=version)


def _update() -> RefitUpdate:
    specs = tuple(TensorSpec(n, str(t.dtype).removeprefix("torch."), tuple(t.shape)) for n, t in TENSORS)
    return RefitUpdate(policy_version=3, manifest=specs)


def test_the_files_hold_the_tensors_bit_by_bit(tmp_path: Path) -> None:
    staged = StagedWeights(tmp_path, tmp_path, _update())
    receiver: Any = Receiver([TENSORS[:2], TENSORS[2:]])
    counter = staged.receive(receiver, _update())
    assert counter.num_tensors == 4
    read = {name: tensor for path in sorted(staged.path.iterdir()) for name, tensor in load_file(path).items()}
    assert read.keys() == {name for name, _ in TENSORS}
    for name, tensor in TENSORS:
        assert read[name].dtype == tensor.dtype
        assert torch.equal(read[name], tensor)
    for specs, payload in staged.runs():
        assert len({spec.dtype for spec in specs}) == 1
        parts = [read[spec.name].reshape(-1).view(torch.uint8) for spec in specs]
        assert torch.equal(payload, torch.cat(parts))
    del payload
    staged.remove()
    assert list(tmp_path.iterdir()) == []


def test_every_tensor_is_aligned_to_its_type(tmp_path: Path) -> None:
    write_safetensors(tmp_path / "mixed.safetensors", [TENSORS[0], TENSORS[1]])
    assert torch.equal(load_file(tmp_path / "mixed.safetensors")["b.weight"], TENSORS[1][1])


def test_a_bucket_that_fails_or_is_missing_is_an_error(tmp_path: Path) -> None:
    corrupt: Any = Receiver([TENSORS[:2]], WeightMismatch("SHA-256 differs", wanted_version=3))
    with pytest.raises(WeightMismatch, match="SHA-256"):
        StagedWeights(tmp_path, tmp_path, _update()).receive(corrupt, _update())
    short: Any = Receiver([TENSORS[:1]])
    with pytest.raises(WeightMismatch, match="another number of elements"):
        StagedWeights(tmp_path, tmp_path, _update()).receive(short, _update())


def test_the_fallback_is_taken_where_the_first_has_no_room(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    first, second = tmp_path / "first", tmp_path / "second"
    first.mkdir()
    second.mkdir()
    free = {first: 1, second: 1 << 20}
    usage: Any = lambda path: type("Usage", (), {"free": free[path]})  # noqa: E731
    monkeypatch.setattr("dockyard_inference.sglang_engine.staging.shutil.disk_usage", usage)
    assert StagedWeights(first, second, _update()).path.parent == second
    free[second] = 1
    with pytest.raises(RefitError, match=r"no room for 88 bytes of weights: 1 are free in .*; set weights_directory"):
        StagedWeights(first, second, _update())


def test_facts_come_from_the_directory(make_model: Any, tmp_path: Path) -> None:
    facts = read_facts(str(make_model("qwen2", is_tied=True)))
    assert facts.vocab_size == 61
    assert "lm_head.weight" not in facts.held
    assert facts.held["model.embed_tokens.weight"] == (61, 64)
    with pytest.raises(GeneratorError, match="cannot read the configuration of"):
        read_facts(str(tmp_path))
