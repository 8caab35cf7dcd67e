"""Parts of the generator contract: its harness, requests, outcomes, and what counts as equal."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Coroutine, Sequence
from typing import Any, Protocol, TypeVar

from dockyard_core.generator import GenerateRequest, Generator, SamplingParams
from dockyard_core.refit import RefitUpdate, TensorSpec

_T = TypeVar("_T")
SETTLE_S = 120.0
"""Deadline of a wait that ends early when all is well."""


class GeneratorHarness(Protocol):
    """An engine under test, and the trainer that feeds it."""

    generator: Generator
    vocab_size: int
    max_model_len: int

    def run(self, work: Coroutine[Any, Any, _T]) -> _T:
        """Run on the one event loop that the engine was started on."""
        ...

    def manifest(self) -> tuple[TensorSpec, ...]:
        """The policy's tensors, in the order they are streamed."""
        ...

    def witness(self, token_ids: Sequence[int], version: int, temperature: float = 1.0) -> Sequence[float]:
        """Reference logprobs [T-1] of tokens 1..T-1 under the weights of ``version``."""
        ...

    def make_version(self) -> int:
        """Make new weights and return their version: one more than the engine holds."""
        ...

    async def send(self, update: RefitUpdate, *, is_corrupt: bool = False) -> None:
        """Send the weights of ``update.policy_version``; corrupt: one byte differs from its digest."""
        ...

    async def reconnect(self) -> None:
        """Open a new sender and let the engine join it."""
        ...


def longer(spec: TensorSpec) -> TensorSpec:
    """The same tensor, one element longer."""
    return spec._replace(shape=(spec.shape[0] + 1, *spec.shape[1:]))


def request(request_id: str, prompt: tuple[int, ...], max_new_tokens: int = 16) -> GenerateRequest:
    """A request at temperature 1 without stop tokens."""
    sampling = SamplingParams(max_new_tokens=max_new_tokens)
    return GenerateRequest(request_id=request_id, prompt_token_ids=prompt, sampling=sampling)


async def outcomes(*work: Awaitable[object]) -> list[object]:
    """Results and exceptions, in order."""
    return list(await asyncio.gather(*work, return_exceptions=True))


async def until_running(generator: Generator, num_requests: int) -> None:
    """Wait until that many requests live, and a little longer."""
    for _ in range(int(SETTLE_S / 0.005)):
        if (await generator.health()).num_running >= num_requests:
            break
        await asyncio.sleep(0.005)
    await asyncio.sleep(0.05)  # a few tokens


def assert_close(got: Sequence[float], wanted: Sequence[float], tolerance: float) -> None:
    """Compare logprobs, nats."""
    assert len(got) == len(wanted), f"{len(got)} logprobs, wanted {len(wanted)}"
    worst = max((abs(a - b) for a, b in zip(got, wanted, strict=True)), default=0.0)
    assert worst <= tolerance, f"logprobs differ by {worst:.3g} nats, allowed {tolerance:.3g}"
