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
from typing import Any

from dockyard_core.errors import GeneratorError
from dockyard_core.generator import Completion
from dockyard_core.testing.generator_checks import (
    GeneratorHarness,
    assert_close,
    outcomes,
    request,
    until_running,
)
from dockyard_core.testing.refit_contract import RefitContract
from dockyard_core.testing.refit_modes import RefitModes
from dockyard_core.testing.refit_soak import RefitSoak

__all__ = ["GeneratorContract", "GeneratorHarness"]


class GeneratorContract(RefitSoak, RefitModes, RefitContract):
    """Laws of the ``Generator`` seam, the refit included."""

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

    def test_health_tells_life_version_and_load(self, harness: GeneratorHarness) -> None:
        health = harness.run(harness.generator.health())
        assert health.is_alive
        assert (health.policy_version, health.num_running) == (harness.generator.version, 0)
