# ruff: noqa: D102 - the names of the laws are their documentation
"""What every inference engine must do, as a test class to subclass.

    class TestMyGenerator(GeneratorContract):
        tolerance = 1e-4

        @pytest.fixture(scope="class")
        def harness(self) -> Iterator[GeneratorHarness]: ...

One started engine serves all laws of a class. The harness is the trainer's side: it keeps, witnesses
and sends the weights of every version it made, which must differ (in logprobs, by 0.01 and more).
"""

from __future__ import annotations

import asyncio
from dataclasses import replace
from typing import Any

from dockyard_core.errors import GeneratorError, RefitTimeout, WeightMismatch
from dockyard_core.generator import Completion, GenerateRequest, SamplingParams
from dockyard_core.refit import RefitReport, RefitUpdate, TensorSpec, elements_per_layer
from dockyard_core.testing.generator_checks import (
    SETTLE_S,
    GeneratorHarness,
    assert_close,
    longer,
    outcomes,
    request,
    until_running,
)

__all__ = ["GeneratorContract", "GeneratorHarness"]


class GeneratorContract:
    """Laws of the ``Generator`` seam, the refit included."""

    tolerance: float = 1e-4
    """Largest difference to the witness, nats; 1e-4 suits float32."""

    def test_logprobs_are_those_of_the_held_weights(self, harness: GeneratorHarness) -> None:
        completion = self._generate(harness, "lp", prompt=(5, 6, 7, 8))
        self._assert_exact(harness, (5, 6, 7, 8), completion)
        assert len(completion.logprobs) == len(completion.token_ids) > 0

    def test_score_gives_the_logprob_of_every_given_token(self, harness: GeneratorHarness) -> None:
        tokens = tuple(3 + (7 * t) % (harness.vocab_size - 3) for t in range(20))
        scores = harness.run(harness.generator.score(tokens))
        assert_close(scores, harness.witness(tokens, harness.generator.version), self.tolerance)

    def test_logprobs_are_scaled_by_the_temperature(self, harness: GeneratorHarness) -> None:
        for temperature in (0.5, 1.7):
            completion = self._generate(harness, "temp", prompt=(9, 8, 7), temperature=temperature)
            self._assert_exact(harness, (9, 8, 7), completion, temperature=temperature)

    def test_greedy_takes_the_most_likely_token_with_its_unscaled_logprob(self, harness: GeneratorHarness) -> None:
        first = self._generate(harness, "greedy", prompt=(4, 5, 6), temperature=0.0)
        again = self._generate(harness, "greedy", prompt=(4, 5, 6), temperature=0.0)
        assert first.token_ids == again.token_ids
        self._assert_exact(harness, (4, 5, 6), first)

    def test_a_seed_fixes_the_sample_and_other_seeds_differ(self, harness: GeneratorHarness) -> None:
        samples = [self._generate(harness, "seed", seed=seed).token_ids for seed in (11, 11, 12, 13)]
        assert samples[0] == samples[1]
        assert len(set(samples)) > 1

    def test_the_stop_token_ends_the_completion_and_belongs_to_it(self, harness: GeneratorHarness) -> None:
        free = self._generate(harness, "free", temperature=0.0)
        stop = free.token_ids[-1]
        stopped = self._generate(harness, "stop", temperature=0.0, stop=(stop,))
        assert stopped.finish_reason == "stop"
        assert stopped.token_ids == free.token_ids[: free.token_ids.index(stop) + 1]

    def test_a_completion_ends_at_its_token_limit(self, harness: GeneratorHarness) -> None:
        completion = self._generate(harness, "length", max_new_tokens=5)
        assert (len(completion.token_ids), completion.finish_reason) == (5, "length")

    def test_the_models_length_bounds_prompt_and_completion(self, harness: GeneratorHarness) -> None:
        prompt = (5,) * (harness.max_model_len - 2)
        completion = self._generate(harness, "bound", prompt=prompt, max_new_tokens=50)
        assert (len(completion.token_ids), completion.finish_reason) == (2, "length")
        too_long = request("too-long", (5,) * (harness.max_model_len + 1))
        [error] = harness.run(outcomes(harness.generator.generate(too_long)))
        assert isinstance(error, GeneratorError), error

    def test_concurrent_requests_do_not_disturb_each_other(self, harness: GeneratorHarness) -> None:
        prompts = [tuple(range(3, 5 + number % 9)) for number in range(24)]

        async def work() -> list[Completion]:
            requests = [request(f"many-{i}", prompt, max_new_tokens=4 + i) for i, prompt in enumerate(prompts)]
            return await asyncio.gather(*(harness.generator.generate(request) for request in requests))

        for number, completion in enumerate(harness.run(work())):
            assert len(completion.token_ids) == 4 + number
            self._assert_exact(harness, prompts[number], completion)

    def test_a_pause_stops_sampling_until_resume(self, harness: GeneratorHarness) -> None:
        async def work() -> tuple[bool, Completion]:
            await harness.generator.pause("keep")
            task = asyncio.create_task(harness.generator.generate(request("held", (3, 4, 5))))
            done, _ = await asyncio.wait([task], timeout=0.3)
            await harness.generator.resume()
            return bool(done), await task

        was_done, completion = harness.run(work())
        assert not was_done
        self._assert_exact(harness, (3, 4, 5), completion)

    def test_an_abort_returns_what_was_sampled_so_far(self, harness: GeneratorHarness) -> None:
        async def work() -> Completion:
            long = request("abort", (3, 4, 5), max_new_tokens=harness.max_model_len - 3)
            task = asyncio.create_task(harness.generator.generate(long))
            await until_running(harness.generator, 1)
            await harness.generator.pause("abort")
            completion = await task
            await harness.generator.resume()
            return completion

        completion = harness.run(work())
        assert completion.finish_reason == "abort"
        self._assert_exact(harness, (3, 4, 5), completion)

    def test_a_cancelled_request_leaves_the_others_alone(self, harness: GeneratorHarness) -> None:
        async def work(delay_s: float) -> list[Any]:
            requests = [request(f"cancel-{delay_s}-{i}", (3, 4, 5 + i)) for i in range(6)]
            tasks = [asyncio.create_task(harness.generator.generate(one)) for one in requests]
            await asyncio.sleep(delay_s)
            tasks[0].cancel()
            return await asyncio.gather(*tasks, return_exceptions=True)

        for delay_s in (0.0, 0.001, 0.004, 0.016):
            for number, completion in enumerate(harness.run(work(delay_s))[1:], start=1):
                self._assert_exact(harness, (3, 4, 5 + number), completion)

    def test_a_paused_engine_does_not_wait_for_requests_that_cannot_end(self, harness: GeneratorHarness) -> None:
        async def work() -> tuple[object, Completion]:
            await harness.generator.pause("keep")
            task = asyncio.create_task(harness.generator.generate(request("drain", (3, 4, 5))))
            await until_running(harness.generator, 1)
            [answer] = await asyncio.wait_for(outcomes(harness.generator.pause("wait")), 30.0)
            await harness.generator.resume()
            return answer, await task

        answer, completion = harness.run(work())
        assert isinstance(answer, GeneratorError | None)
        self._assert_exact(harness, (3, 4, 5), completion)

    def test_live_requests_end_when_a_refit_fails(self, harness: GeneratorHarness) -> None:
        update = self._update(harness, harness.make_version(), bucket_bytes=10_000)

        async def work() -> object:
            live = request("broken", (3, 4, 5), max_new_tokens=harness.max_model_len - 3)
            task = asyncio.create_task(harness.generator.generate(live))
            await until_running(harness.generator, 1)
            await harness.generator.pause("keep")
            await self._both_fail(harness, update, is_corrupt=True)
            [answer] = await asyncio.wait_for(outcomes(task), 30.0)
            await self._refit(harness, update)
            await harness.generator.resume()
            return answer

        answer = harness.run(work())
        if isinstance(answer, Completion):
            self._assert_exact(harness, (3, 4, 5), answer)
        else:
            assert isinstance(answer, GeneratorError), answer

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

    def test_health_tells_life_version_and_load(self, harness: GeneratorHarness) -> None:
        health = harness.run(harness.generator.health())
        assert health.is_alive
        assert (health.policy_version, health.num_running) == (harness.generator.version, 0)

    def _update(self, harness: GeneratorHarness, version: int, **changes: Any) -> RefitUpdate:
        return replace(RefitUpdate(policy_version=version, manifest=harness.manifest(), timeout_s=SETTLE_S), **changes)

    async def _refit(self, harness: GeneratorHarness, update: RefitUpdate) -> RefitReport:
        _, report = await asyncio.gather(harness.send(update), harness.generator.refit(update))
        return report

    async def _both_fail(
        self, harness: GeneratorHarness, update: RefitUpdate, *, is_corrupt: bool = False
    ) -> list[object]:
        return await outcomes(harness.send(update, is_corrupt=is_corrupt), harness.generator.refit(update))

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

    def _assert_fenced(self, harness: GeneratorHarness) -> None:
        generator = harness.generator
        work = generator.generate(request("fenced", (3, 4))), generator.score((3, 4, 5)), generator.resume()
        assert all(isinstance(answer, GeneratorError) for answer in harness.run(outcomes(*work)))
