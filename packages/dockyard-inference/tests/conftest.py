"""The trainer's side of the generator contract: tiny models, their versions, and a real sender."""

from __future__ import annotations

import asyncio
import gc
import os
from collections.abc import Callable, Coroutine, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeVar
from unittest import mock

import pytest
import torch
from process_tree import descendants

from dockyard_core.generator import Generator
from dockyard_core.policy import WeightChunk, WeightSink
from dockyard_core.refit import RefitUpdate, Staging, TensorSpec
from dockyard_inference import RefitSender, SendReport, SglangGenerator, VllmGenerator

_T = TypeVar("_T")
VOCAB_SIZE = 61
MAX_MODEL_LEN = 128


def _config(family: str, *, is_tied: bool, intermediate_size: int) -> Any:
    from transformers import LlamaConfig, Qwen2Config, Qwen3Config

    kind = {"llama": LlamaConfig, "qwen2": Qwen2Config, "qwen3": Qwen3Config}[family]
    return kind(
        vocab_size=VOCAB_SIZE,
        hidden_size=64,
        intermediate_size=intermediate_size,
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
    """Write a random checkpoint of a family; returns its directory.

    A larger ``intermediate_size`` makes a copy of the weights that is left behind large enough to be seen.
    """

    def make(family: str, *, is_tied: bool, intermediate_size: int = 96) -> Path:
        from transformers import AutoModelForCausalLM

        torch.manual_seed(7)
        directory = tmp_path_factory.mktemp(f"{family}-{'tied' if is_tied else 'untied'}")
        config = _config(family, is_tied=is_tied, intermediate_size=intermediate_size)
        AutoModelForCausalLM.from_config(config).save_pretrained(directory)
        return directory

    return make


class Versions(Mapping[int, Mapping[str, torch.Tensor]]):
    """Weights by version: the first ones plus noise of the version's own, made when they are asked for.

    So any number of versions takes the memory of two. The noise does not add up, since the logprobs of a model
    whose weights grow are soon beyond what float32 computes well.
    """

    def __init__(self, first: Mapping[str, torch.Tensor]) -> None:
        self._numbers = [0]
        self._first = first
        self._made: tuple[int, Mapping[str, torch.Tensor]] = (0, first)

    def add(self, version: int) -> None:
        """Make a new version known."""
        if version not in self._numbers:
            self._numbers.append(version)

    def __getitem__(self, version: int) -> Mapping[str, torch.Tensor]:
        if version not in self._numbers:
            raise KeyError(version)
        number, weights = self._made
        if number != version:
            rng = torch.Generator().manual_seed(version)
            noise = 0.05 if version else 0.0
            weights = {n: t + noise * torch.randn(t.shape, generator=rng) for n, t in self._first.items()}
            self._made = (version, weights)
        return weights

    def __iter__(self) -> Iterator[int]:
        return iter(self._numbers)

    def __len__(self) -> int:
        return len(self._numbers)


@dataclass
class TrainerHarness:
    """Implements the contract's harness on a Hugging Face model."""

    generator: Generator
    model: Any
    runner: asyncio.Runner
    vocab_size: int = VOCAB_SIZE
    max_model_len: int = MAX_MODEL_LEN
    owner: Any = None
    """The generator that started the engine's processes, if it is another one."""
    sender: RefitSender | None = None
    versions: Versions = field(init=False)

    def __post_init__(self) -> None:
        first = {name: tensor.detach().clone() for name, tensor in self.model.named_parameters()}
        self.versions, self._loaded = Versions(first), 0

    def run(self, work: Coroutine[Any, Any, _T]) -> _T:
        return self.runner.run(work)

    def manifest(self) -> tuple[TensorSpec, ...]:
        return tuple(TensorSpec(name, "float32", tuple(t.shape)) for name, t in self.versions[0].items())

    def witness(self, token_ids: Sequence[int], version: int, temperature: float = 1.0) -> list[float]:
        logprobs = self._logprobs(token_ids, version, temperature)
        values: list[float] = logprobs.gather(-1, torch.tensor(token_ids)[1:, None])[:, 0].tolist()
        return values

    def best(self, token_ids: Sequence[int], version: int) -> list[float]:
        values: list[float] = self._logprobs(token_ids, version).max(-1).values.tolist()
        return values

    def _logprobs(self, token_ids: Sequence[int], version: int, temperature: float = 1.0) -> torch.Tensor:
        if version != self._loaded:
            self.model.load_state_dict(self.versions[version], strict=False)
            self._loaded = version
        with torch.no_grad():
            logits = self.model(torch.tensor([list(token_ids)])).logits[0, :-1]
        return torch.log_softmax(logits.double() / temperature, dim=-1)

    def memory_bytes(self) -> int:
        gc.collect()  # what waits for a collection is no leak
        return sum(_resident_bytes(pid) for pid in engine_processes(self.owner or self.generator))

    def make_version(self) -> int:
        version = self.generator.version + 1
        self.versions.add(version)
        return version

    def stream(self, version: int) -> Callable[[WeightSink], None]:
        """``Policy.stream_weights`` of one version."""

        weights = self.versions[version]

        def stream_weights(sink: WeightSink) -> None:
            for name, tensor in weights.items():
                sink(WeightChunk(name, tuple(tensor.shape), (0,) * tensor.dim(), tensor))

        return stream_weights

    async def send(self, update: RefitUpdate, *, is_corrupt: bool = False) -> SendReport:
        assert self.sender is not None
        work = asyncio.to_thread(self.sender.send, self.stream(update.policy_version), update)
        if not is_corrupt:
            return await work
        with mock.patch("dockyard_inference.sender.digest_of", _digest_that_is_wrong_once()):
            return await work

    async def reconnect(self, staging: Staging = "none") -> None:
        if self.sender is not None:
            self.sender.close()
        world_size = 1 + self.generator.config.num_workers  # type: ignore[attr-defined]
        self.sender = RefitSender("127.0.0.1", 0, world_size, timeout_s=60.0, transport="collective", staging=staging)
        await asyncio.gather(
            asyncio.to_thread(self.sender.connect), self.generator.connect_refit(self.sender.endpoint())
        )


def engine_processes(generator: Any) -> set[int]:
    """Those that the engine started; this one, if it runs here."""
    if isinstance(generator, VllmGenerator):
        from dockyard_inference.vllm_engine.launch import engine_pids

        roots = engine_pids(generator._running())
    elif isinstance(generator, SglangGenerator):
        roots = [generator._running().server.pid]
    else:
        return {os.getpid()}
    return {pid for root in roots for pid in (root, *descendants(root))}


def _resident_bytes(pid: int) -> int:
    pages = int(Path(f"/proc/{pid}/statm").read_text().split()[1])
    return pages * os.sysconf("SC_PAGE_SIZE")


def _digest_that_is_wrong_once() -> Callable[[torch.Tensor, int], bytes]:
    """As if a byte of the second bucket changed on its way."""
    from dockyard_inference.refit.hashing import digest_of

    count = iter(range(1 << 30))

    def digest(buffer: torch.Tensor, num_bytes: int) -> bytes:
        right = digest_of(buffer, num_bytes)
        return bytes([right[0] ^ 1]) + right[1:] if next(count) == 1 else right

    return digest


@pytest.fixture(scope="session")
def serve() -> Callable[..., Iterator[TrainerHarness]]:
    """Start a generator, connect a sender, yield the harness, stop both."""

    def make(generator: Any, model_dir: Path, owner: Any = None) -> Iterator[TrainerHarness]:
        from transformers import AutoModelForCausalLM

        torch.set_num_threads(1)
        with asyncio.Runner() as runner:
            model = AutoModelForCausalLM.from_pretrained(model_dir).eval()
            harness = TrainerHarness(generator, model, runner, owner=owner)
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
