"""The Transformers engine against the generator contract, and what is its own."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from dockyard_core.testing.generator_contract import GeneratorContract, GeneratorHarness
from dockyard_inference import TransformersConfig, TransformersGenerator

Serve = Callable[[Any, Path], Iterator[GeneratorHarness]]


class TestTiedQwen2(GeneratorContract):
    @pytest.fixture(scope="class")
    @classmethod
    def harness(cls, serve: Serve, make_model: Callable[..., Path]) -> Iterator[GeneratorHarness]:
        model = make_model("qwen2", is_tied=True)
        yield from serve(TransformersGenerator(TransformersConfig(model=str(model), max_model_len=128)), model)


class TestUntiedQwen3(GeneratorContract):
    @pytest.fixture(scope="class")
    @classmethod
    def harness(cls, serve: Serve, make_model: Callable[..., Path]) -> Iterator[GeneratorHarness]:
        model = make_model("qwen3", is_tied=False)
        yield from serve(TransformersGenerator(TransformersConfig(model=str(model), max_model_len=128)), model)
