"""The vLLM engine against the generator contract, and what is its own. One engine per class."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from dockyard_core.errors import ConfigError
from dockyard_core.generator import GenerateRequest, SamplingParams
from dockyard_core.testing.generator_contract import GeneratorContract, GeneratorHarness
from dockyard_core.testing.refit_soak import RefitSoak
from dockyard_inference import VllmConfig, VllmGenerator

pytest.importorskip("vllm")
Serve = Callable[[Any, Path], Iterator[GeneratorHarness]]


@pytest.fixture(scope="module", autouse=True)
def _few_kernels() -> Iterator[None]:
    """Of the kernels that oneDNN compiles, one for each number of tokens in a step, it keeps a thousand.

    Until it has so many, which these tests reach late, the engine's memory grows with every new batch.
    """
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("ONEDNN_PRIMITIVE_CACHE_CAPACITY", "64")
        yield


def _generator(model: Path, **changes: Any) -> VllmGenerator:
    return VllmGenerator(VllmConfig(model=str(model), max_model_len=128, max_num_seqs=64, kv_cache_gib=0.01, **changes))


class TestTiedQwen2(GeneratorContract):
    @pytest.fixture(scope="class")
    @classmethod
    def harness(cls, serve: Serve, make_model: Callable[..., Path]) -> Iterator[GeneratorHarness]:
        model = make_model("qwen2", is_tied=True, intermediate_size=1024)
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
    def test_fifty_refits_under_load_lose_no_request_mix_no_versions_and_keep_no_memory(
        self, harness: GeneratorHarness
    ) -> None:
        super().test_fifty_refits_under_load_lose_no_request_mix_no_versions_and_keep_no_memory(harness)


@pytest.mark.ci
class TestUntiedLlama(GeneratorContract):
    @pytest.fixture(scope="class")
    @classmethod
    def harness(cls, serve: Serve, make_model: Callable[..., Path]) -> Iterator[GeneratorHarness]:
        model = make_model("llama", is_tied=False, intermediate_size=1024)
        yield from serve(_generator(model), model)


@pytest.mark.ci
class TestTiedQwen3(GeneratorContract):
    @pytest.fixture(scope="class")
    @classmethod
    def harness(cls, serve: Serve, make_model: Callable[..., Path]) -> Iterator[GeneratorHarness]:
        model = make_model("qwen3", is_tied=True, intermediate_size=1024)
        yield from serve(_generator(model), model)


@pytest.mark.ci
class TestUntiedQwen2(RefitSoak):
    @pytest.fixture(scope="class")
    @classmethod
    def harness(cls, serve: Serve, make_model: Callable[..., Path]) -> Iterator[GeneratorHarness]:
        model = make_model("qwen2", is_tied=False, intermediate_size=1024)
        yield from serve(_generator(model), model)


@pytest.mark.ci
class TestTensorParallel(GeneratorContract):
    """Two workers, so two ranks of the refit group, each of which takes whole tensors and keeps its part."""

    test_fifty_refits_under_load_lose_no_request_mix_no_versions_and_keep_no_memory = None  # type: ignore[assignment]

    @pytest.fixture(scope="class")
    @classmethod
    def harness(cls, serve: Serve, make_model: Callable[..., Path]) -> Iterator[GeneratorHarness]:
        model = make_model("qwen2", is_tied=True)
        yield from serve(_generator(model, tensor_parallel_size=2), model)


def test_a_pipeline_is_refused_on_a_cpu(make_model: Callable[..., Path]) -> None:
    with pytest.raises(ConfigError, match="pipeline_parallel_size must be 1 on a CPU"):
        asyncio.run(_generator(make_model("qwen2", is_tied=True), pipeline_parallel_size=2).start())
