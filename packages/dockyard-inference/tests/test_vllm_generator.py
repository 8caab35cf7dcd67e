"""The vLLM engine against the generator contract, and what is its own. One engine per class."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from dockyard_core.generator import GenerateRequest, SamplingParams
from dockyard_core.testing.generator_contract import GeneratorContract, GeneratorHarness
from dockyard_inference import VllmConfig, VllmGenerator

pytest.importorskip("vllm")
Serve = Callable[[Any, Path], Iterator[GeneratorHarness]]


def _generator(model: Path) -> VllmGenerator:
    return VllmGenerator(VllmConfig(model=str(model), max_model_len=128, max_num_seqs=64, kv_cache_gib=0.1))


class TestTiedQwen2(GeneratorContract):
    @pytest.fixture(scope="class")
    @classmethod
    def harness(cls, serve: Serve, make_model: Callable[..., Path]) -> Iterator[GeneratorHarness]:
        model = make_model("qwen2", is_tied=True)
        yield from serve(_generator(model), model)

    def test_a_cached_prefix_does_not_survive_a_refit(self, harness: GeneratorHarness) -> None:
        """The prompt fills whole cache blocks, so a stale block would be reused."""
        prompt = tuple(3 + t % 50 for t in range(96))
        sampling = SamplingParams(temperature=0.0, max_new_tokens=4)
        for number in range(2):
            request = GenerateRequest(request_id=f"cached-{number}", prompt_token_ids=prompt, sampling=sampling)
            for _ in range(2):
                completion = harness.run(harness.generator.generate(request))
                self._assert_exact(harness, prompt, completion)
            harness.run(self._refit(harness, self._update(harness, harness.make_version())))


@pytest.mark.ci
class TestUntiedLlama(GeneratorContract):
    @pytest.fixture(scope="class")
    @classmethod
    def harness(cls, serve: Serve, make_model: Callable[..., Path]) -> Iterator[GeneratorHarness]:
        model = make_model("llama", is_tied=False)
        yield from serve(_generator(model), model)


@pytest.mark.ci
class TestTiedQwen3(GeneratorContract):
    @pytest.fixture(scope="class")
    @classmethod
    def harness(cls, serve: Serve, make_model: Callable[..., Path]) -> Iterator[GeneratorHarness]:
        model = make_model("qwen3", is_tied=True)
        yield from serve(_generator(model), model)
