# ruff: noqa: D102 - the names of the laws are their documentation
"""What every inference engine must do when its weights change: a part of ``GeneratorContract``."""

from __future__ import annotations

import asyncio
from dataclasses import replace

from dockyard_core.errors import GeneratorError, RefitTimeout, WeightMismatch
from dockyard_core.generator import Completion
from dockyard_core.refit import TensorSpec, elements_per_layer
from dockyard_core.testing.generator_checks import (
    SETTLE_S,
    GeneratorChecks,
    GeneratorHarness,
    assert_close,
    longer,
    outcomes,
    request,
    until_running,
)


class RefitContract(GeneratorChecks):
    """Laws of ``Generator.refit``."""

    def test_live_requests_end_when_a_refit_fails(self, harness: GeneratorHarness) -> None:
        self._check_that_requests_end(harness, comes_in_a_pause=False)

    def test_requests_that_came_in_a_pause_end_when_a_refit_fails(self, harness: GeneratorHarness) -> None:
        self._check_that_requests_end(harness, comes_in_a_pause=True)

    def test_a_refit_changes_the_version_and_what_is_sampled(self, harness: GeneratorHarness) -> None:
        tokens = tuple(range(3, 20))
        before, version = harness.run(harness.generator.score(tokens)), harness.make_version()
        for bucket_bytes in (64 << 20, 10_000):
            report = harness.run(self._refit(harness, self._update(harness, version, bucket_bytes=bucket_bytes)))
            assert (report.policy_version, harness.generator.version) == (version, version)
            assert report.elements_per_layer == elements_per_layer(harness.manifest())
            assert report.num_tensors == len(harness.manifest())
            after = harness.run(harness.generator.score(tokens))
            assert_close(after, harness.witness(tokens, version), self.tolerance)
            assert max(abs(a - b) for a, b in zip(before, after, strict=True)) > 0.01
        completion = self._generate(harness, "after")
        assert {span.policy_version for span in completion.version_spans} == {version}
        self._assert_exact(harness, (3, 4, 5), completion)

    def test_tokens_after_an_in_flight_refit_are_the_new_weights(self, harness: GeneratorHarness) -> None:
        length = harness.max_model_len - 12
        prompts = [tuple(range(3, 6 + number)) for number in range(8)]

        async def work(version: int) -> list[Completion]:
            requests = [request(f"fly-{version}-{i}", p, max_new_tokens=length) for i, p in enumerate(prompts)]
            tasks = [asyncio.create_task(harness.generator.generate(request)) for request in requests]
            await until_running(harness.generator, len(prompts))
            await self._refit(harness, self._update(harness, version))
            return await asyncio.gather(*tasks)

        for _ in range(5):  # the engine may be faster than the refit, or not have begun
            old, new = harness.generator.version, harness.make_version()
            completions = harness.run(work(new))
            for prompt, completion in zip(prompts, completions, strict=True):
                assert {span.policy_version for span in completion.version_spans} <= {old, new}
                assert len(completion.token_ids) == length
                self._assert_exact(harness, prompt, completion)
            if any(len(completion.version_spans) == 2 for completion in completions):
                return
        raise AssertionError("no completion spans both versions: no refit landed in flight")

    def test_a_manifest_with_other_tensors_is_refused_and_changes_nothing(self, harness: GeneratorHarness) -> None:
        good, held, tokens = harness.manifest(), harness.generator.version, tuple(range(3, 20))
        extra = TensorSpec("extra.weight", "float32", (2,))
        for manifest in (good[1:], (*good, extra), (good[0], longer(good[1]), *good[2:])):
            version = harness.make_version()
            failed = harness.run(self._both_fail(harness, self._update(harness, version, manifest=manifest)))
            assert all(isinstance(error, WeightMismatch) for error in failed), failed
            assert harness.generator.version == held
            scores = harness.run(harness.generator.score(tokens))
            assert_close(scores, harness.witness(tokens, held), self.tolerance)

    def test_corrupt_bytes_fence_the_engine_until_a_good_refit(self, harness: GeneratorHarness) -> None:
        held, version, tokens = harness.generator.version, harness.make_version(), tuple(range(3, 20))
        update = self._update(harness, version, bucket_bytes=10_000)
        failed = harness.run(self._both_fail(harness, update, is_corrupt=True))
        assert all(isinstance(error, WeightMismatch) for error in failed), failed
        assert harness.generator.version == held
        self._assert_fenced(harness)
        harness.run(self._refit(harness, update))
        scores = harness.run(harness.generator.score(tokens))
        assert_close(scores, harness.witness(tokens, version), self.tolerance)

    def test_a_sender_that_does_not_come_is_named_and_the_engine_stays_fenced(self, harness: GeneratorHarness) -> None:
        version, tokens = harness.make_version(), tuple(range(3, 20))
        update = self._update(harness, version)

        [error] = harness.run(outcomes(harness.generator.refit(replace(update, timeout_s=1.0))))
        assert isinstance(error, RefitTimeout)
        assert "rank 0" in str(error)
        self._assert_fenced(harness)
        harness.run(harness.reconnect())
        harness.run(self._refit(harness, update))
        scores = harness.run(harness.generator.score(tokens))
        assert_close(scores, harness.witness(tokens, version), self.tolerance)

    def _assert_fenced(self, harness: GeneratorHarness) -> None:
        generator = harness.generator
        work = generator.generate(request("fenced", (3, 4))), generator.score((3, 4, 5)), generator.resume()
        assert all(isinstance(answer, GeneratorError) for answer in harness.run(outcomes(*work)))

    def _check_that_requests_end(self, harness: GeneratorHarness, *, comes_in_a_pause: bool) -> None:
        update = self._update(harness, harness.make_version(), bucket_bytes=10_000)

        async def work() -> object:
            if comes_in_a_pause:
                await harness.generator.pause("keep")
            live = request("broken", (3, 4, 5), max_new_tokens=harness.max_model_len - 3)
            task = asyncio.create_task(harness.generator.generate(live))
            await until_running(harness.generator, 1)
            await harness.generator.pause("keep")
            await self._both_fail(harness, update, is_corrupt=True)
            [answer] = await asyncio.wait_for(outcomes(task), SETTLE_S)
            await self._refit(harness, update)
            await harness.generator.resume()
            return answer

        answer = harness.run(work())
        if isinstance(answer, Completion):
            self._assert_exact(harness, (3, 4, 5), answer)
        else:
            assert isinstance(answer, GeneratorError), answer
