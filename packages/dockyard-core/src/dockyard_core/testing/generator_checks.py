"""Parts of the generator contract: its harness, requests, outcomes, and what counts as equal."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Coroutine, Sequence
from dataclasses import replace
from typing import Any, Protocol, TypeVar

from dockyard_core.generator import Completion, GenerateRequest, Generator, SamplingParams
from dockyard_core.refit import RefitReport, RefitUpdate, Staging, TensorSpec

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

    def best(self, token_ids: Sequence[int], version: int) -> Sequence[float]:
        """Reference logprobs [T-1] of the most likely token at each of the same positions, at temperature 1."""
        ...

    def memory_bytes(self) -> int:
        """Resident memory of the engine's processes; of this process, if the engine runs in it."""
        ...

    def make_version(self) -> int:
        """Make new weights and return their version: one more than the engine holds."""
        ...

    async def send(self, update: RefitUpdate, *, is_corrupt: bool = False) -> None:
        """Send the weights of ``update.policy_version``; corrupt: one byte differs from its digest."""
        ...

    async def reconnect(self, staging: Staging = "none") -> None:
        """Open a new sender, of a group that stages or not, and let the engine join it."""
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
    diffs = [abs(a - b) for a, b in zip(got, wanted, strict=True)]
    too_far = [diff for diff in diffs if not diff <= tolerance]  # a NaN is too far as well
    assert not too_far, (
        f"{len(too_far)} of {len(diffs)} logprobs differ, one by {too_far[0]:.3g} nats, allowed {tolerance:.3g}"
    )


class GeneratorChecks:
    """What the laws of the contract share."""

    tolerance: float = 1e-4
    """Largest difference to the witness, nats; 1e-4 suits float32.

    It is for models whose logprobs float32 can compute that well, as those with small random weights.
    A trained policy may not be one: at a few positions a rounding in its first layer grows a thousandfold.
    """

    def _update(self, harness: GeneratorHarness, version: int, **changes: Any) -> RefitUpdate:
        return replace(RefitUpdate(policy_version=version, manifest=harness.manifest(), timeout_s=SETTLE_S), **changes)

    async def _both_fail(
        self, harness: GeneratorHarness, update: RefitUpdate, *, is_corrupt: bool = False
    ) -> list[object]:
        return await outcomes(harness.send(update, is_corrupt=is_corrupt), harness.generator.refit(update))

    async def _refit(self, harness: GeneratorHarness, update: RefitUpdate) -> RefitReport:
        _, report = await asyncio.gather(harness.send(update), harness.generator.refit(update))
        return report

    def _generate(
        self,
        harness: GeneratorHarness,
        request_id: str,
        *,
        prompt: tuple[int, ...] = (3, 4, 5),
        temperature: float = 1.0,
        max_new_tokens: int = 16,
        stop: tuple[int, ...] = (),
        seed: int | None = None,
    ) -> Completion:
        sampling = SamplingParams(
            temperature=temperature, max_new_tokens=max_new_tokens, stop_token_ids=stop, seed=seed
        )
        request = GenerateRequest(request_id=request_id, prompt_token_ids=prompt, sampling=sampling)
        return harness.run(harness.generator.generate(request))

    def _assert_exact(
        self, harness: GeneratorHarness, prompt: tuple[int, ...], completion: Completion, temperature: float = 1.0
    ) -> None:
        """Spans cover the tokens, and each span's logprobs are those of its version's weights."""
        end = 0
        for span in completion.version_spans:
            assert span.start == end < span.end
            end = span.end
            wanted = harness.witness((*prompt, *completion.token_ids), span.policy_version, temperature)
            part = slice(span.start, span.end)
            assert_close(completion.logprobs[part], wanted[len(prompt) - 1 :][part], self.tolerance)
        assert end == len(completion.token_ids)
