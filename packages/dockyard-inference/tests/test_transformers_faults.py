"""Faults of a refit, with the engine that needs no server."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from refit_faults import RefitFaults

from dockyard_inference import TransformersConfig, TransformersGenerator


class TestTransformers(RefitFaults):
    @pytest.fixture(scope="class")
    @classmethod
    def harness(cls, serve: Callable[[Any, Path], Iterator[Any]], make_model: Callable[..., Path]) -> Iterator[Any]:
        model = make_model("qwen2", is_tied=True)
        yield from serve(TransformersGenerator(TransformersConfig(model=str(model), max_model_len=128)), model)
