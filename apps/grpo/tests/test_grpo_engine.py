"""An engine of the user's: what it is called with, and what its module may not do."""

from __future__ import annotations

import asyncio
import sys
from pathlib import Path

import pytest

from dockyard_core import ConfigError
from dockyard_grpo import compose, preflight
from dockyard_grpo.config import dump_config, load_config

ENGINE = """
class Engine:
    version = 0

    def __init__(self, values):
        self.values = values
        self.is_started = False

    async def start(self):
        self.is_started = True

    async def generate(self, request): ...
    async def score(self, token_ids): ...
    async def pause(self, mode="keep"): ...
    async def resume(self): ...
    async def connect_refit(self, endpoint): ...
    async def refit(self, update): ...
    async def health(self): ...
    async def shutdown(self): ...
"""


@pytest.fixture
def own_module(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.delitem(sys.modules, "engine_of_mine", raising=False)
    module = tmp_path / "engine_of_mine.py"
    module.write_text(ENGINE)
    return module


def test_an_engine_of_the_users_gets_the_generic_values_and_is_started(own_module: Path) -> None:
    config = load_config(None, ["generation.backend=engine_of_mine:Engine", "run.seed=3", "generation.max_num_seqs=7"])
    assert preflight.check_engine(config) == "engine_of_mine:Engine"
    engine = asyncio.run(compose.start_generator(config, engine_index=2))
    assert type(engine).__module__ == "engine_of_mine"
    assert engine.is_started  # type: ignore[attr-defined]
    values = engine.values  # type: ignore[attr-defined]
    assert values.keys() == {"model", "dtype", "max_model_len", "max_num_seqs", "seed", "device"}
    assert Path(values.pop("model")).is_dir()
    assert values.pop("device") in ("cpu", "cuda")
    assert values == {"dtype": "float32", "max_model_len": 256, "max_num_seqs": 7, "seed": 3002}


def test_the_dump_keeps_an_engine_of_the_users(own_module: Path, tmp_path: Path) -> None:
    config = load_config(None, ["generation.backend=engine_of_mine:Engine"])
    (tmp_path / "config.yaml").write_text(dump_config(config))
    assert load_config(tmp_path / "config.yaml", []) == config


def test_a_module_that_brings_ray_is_refused(own_module: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "ray", None)  # put back what was there, afterwards
    own_module.write_text(f"import sys\nsys.modules['ray'] = sys\n{ENGINE}")
    config = load_config(None, ["generation.backend=engine_of_mine:Engine"])
    with pytest.raises(ConfigError, match="must not import ray with its module, got 'engine_of_mine:Engine'"):
        preflight.check_engine(config)
