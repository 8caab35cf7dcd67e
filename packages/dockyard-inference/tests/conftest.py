"""The trainer's side of the generator contract: tiny models, their versions, and a real sender."""

from __future__ import annotations

import asyncio
import gc
from collections.abc import Callable, Coroutine, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeVar
from unittest import mock

import pytest
import torch

from dockyard_core.generator import Generator
from dockyard_core.policy import WeightChunk, WeightSink
from dockyard_core.refit import RefitUpdate, TensorSpec
from dockyard_inference import RefitSender, SendReport

_T = TypeVar("_T")
VOCAB_SIZE = 61
MAX_MODEL_LEN = 128


def _config(family: str, *, is_tied: bool) -> Any:
    from transformers import LlamaConfig, Qwen2Config, Qwen3Config

    kind = {"llama": LlamaConfig, "qwen2": Qwen2Config, "qwen3": Qwen3Config}[family]
    return kind(
        vocab_size=VOCAB_SIZE,
        hidden_size=64,
        intermediate_size=96,
        num_hidden_layers=2,
        num_attention_heads=2,
        num_key_value_heads=1,
        head_dim=32,
        max_position_embeddings=256,
        tie_word_embeddings=is_tied,
        initializer_range=0.15,
        eos_token_id=1,
        pad_token_id=0,
        bos_token_id=None,
    )


@pytest.fixture(scope="session")
def make_model(tmp_path_factory: pytest.TempPathFactory) -> Callable[..., Path]:
    """Write a random checkpoint of a family; returns its directory."""

    def make(family: str, *, is_tied: bool) -> Path:
        from transformers import AutoModelForCausalLM

        torch.manual_seed(7)
        directory = tmp_path_factory.mktemp(f"{family}-{'tied' if is_tied else 'untied'}")
        AutoModelForCausalLM.from_config(_config(family, is_tied=is_tied)).save_pretrained(directory)
        return directory

    return make


@dataclass
class TrainerHarness:
    """Implements the contract's harness on a Hugging Face model."""

    generator: Generator
    model: Any
    runner: asyncio.Runner
    vocab_size: int = VOCAB_SIZE
    max_model_len: int = MAX_MODEL_LEN
    versions: dict[int, dict[str, torch.Tensor]] = field(default_factory=dict)
    sender: RefitSender | None = None

    def __post_init__(self) -> None:
        self.versions[0] = {name: tensor.detach().clone() for name, tensor in self.model.named_parameters()}

    def run(self, work: Coroutine[Any, Any, _T]) -> _T:
        return self.runner.run(work)

    def manifest(self) -> tuple[TensorSpec, ...]:
        return tuple(TensorSpec(name, "float32", tuple(t.shape)) for name, t in self.versions[0].items())

    def witness(self, token_ids: Sequence[int], version: int, temperature: float = 1.0) -> list[float]:
        self.model.load_state_dict(self.versions[version], strict=False)
        ids = torch.tensor([list(token_ids)])
        with torch.no_grad():
            logprobs = torch.log_softmax(self.model(ids).logits[0, :-1].double() / temperature, dim=-1)
        values: list[float] = logprobs.gather(-1, ids[0, 1:, None])[:, 0].tolist()
        return values

    def make_version(self) -> int:
        version = self.generator.version + 1
        rng = torch.Generator().manual_seed(version)
        old = self.versions[self.generator.version]
        self.versions[version] = {n: t + 0.05 * torch.randn(t.shape, generator=rng) for n, t in old.items()}
        return version

    def stream(self, version: int) -> Callable[[WeightSink], None]:
        """``Policy.stream_weights`` of one version."""

        def stream_weights(sink: WeightSink) -> None:
            for name, tensor in self.versions[version].items():
                sink(WeightChunk(name, tuple(tensor.shape), (0,) * tensor.dim(), tensor))

        return stream_weights

    async def send(self, update: RefitUpdate, *, is_corrupt: bool = False) -> SendReport:
        assert self.sender is not None
        work = asyncio.to_thread(self.sender.send, self.stream(update.policy_version), update)
        if not is_corrupt:
            return await work
        with mock.patch("dockyard_inference.sender.digest_of", _digest_that_is_wrong_once()):
            return await work

    async def reconnect(self) -> None:
        if self.sender is not None:
            self.sender.close()
        self.sender = RefitSender("127.0.0.1", 0, 2, timeout_s=60.0, transport="collective")
        await asyncio.gather(
            asyncio.to_thread(self.sender.connect), self.generator.connect_refit(self.sender.endpoint())
        )


def _digest_that_is_wrong_once() -> Callable[[torch.Tensor, int], bytes]:
    """As if a byte of the second bucket changed on its way."""
    from dockyard_inference.refit.group import digest_of

    count = iter(range(1 << 30))

    def digest(buffer: torch.Tensor, num_bytes: int) -> bytes:
        right = digest_of(buffer, num_bytes)
        return bytes([right[0] ^ 1]) + right[1:] if next(count) == 1 else right

    return digest


@pytest.fixture(scope="session")
def serve() -> Callable[[Any, Path], Iterator[TrainerHarness]]:
    """Start a generator, connect a sender, yield the harness, stop both."""

    def make(generator: Any, model_dir: Path) -> Iterator[TrainerHarness]:
        from transformers import AutoModelForCausalLM

        torch.set_num_threads(1)
        with asyncio.Runner() as runner:
            harness = TrainerHarness(generator, AutoModelForCausalLM.from_pretrained(model_dir).eval(), runner)
            runner.run(generator.start())
            try:
                runner.run(harness.reconnect())
                yield harness
            finally:
                if harness.sender is not None:
                    harness.sender.close()
                runner.run(generator.shutdown())
                gc.collect()

    return make
