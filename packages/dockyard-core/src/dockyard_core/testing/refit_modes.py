# ruff: noqa: D102 - the names of the laws are their documentation
"""What becomes of live requests in a refit, and what a staged refit leaves behind: a part of ``GeneratorContract``."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace

from dockyard_core.errors import RefitError, RefitTimeout, WeightMismatch
from dockyard_core.generator import Completion
from dockyard_core.refit import PauseMode, RefitReport, RefitUpdate
from dockyard_core.testing.generator_checks import (
    GeneratorChecks,
    GeneratorHarness,
    assert_close,
    outcomes,
    request,
    until_running,
)

_TOKENS = tuple(range(3, 20))


class RefitModes(GeneratorChecks):
    """Laws of ``RefitUpdate.mode``, ``RefitUpdate.hashes`` and ``RefitEndpoint.staging``."""

    def test_a_refit_that_waits_lets_live_requests_end_with_their_weights(self, harness: GeneratorHarness) -> None:
        old = harness.generator.version
        live, later, report = harness.run(self._refit_beside_requests(harness, "wait"))
        assert report.policy_version == harness.generator.version == old + 1
        assert {span.policy_version for span in live.version_spans} == {old}
        assert len(live.token_ids) == harness.max_model_len - 12
        assert {span.policy_version for span in later.version_spans} == {old + 1}
        for completion in (live, later):
            self._assert_exact(harness, (3, 4, 5), completion)

    def test_a_refit_that_aborts_returns_live_requests_partial(self, harness: GeneratorHarness) -> None:
        for _ in range(5):  # the engine may be faster than the refit
            old = harness.generator.version
            live, later, _ = harness.run(self._refit_beside_requests(harness, "abort"))
            assert {span.policy_version for span in live.version_spans} <= {old}
            assert {span.policy_version for span in later.version_spans} == {old + 1}
            for completion in (live, later):
                self._assert_exact(harness, (3, 4, 5), completion)
            if live.finish_reason == "abort":
                assert len(live.token_ids) < harness.max_model_len - 12
                return
        raise AssertionError("no refit aborted a request")

    def test_requests_of_a_paused_engine_are_not_waited_for(self, harness: GeneratorHarness) -> None:
        update = self._update(harness, harness.make_version(), mode="wait")
        held = harness.generator.version

        async def work() -> Completion:
            await harness.generator.pause("keep")
            task = asyncio.create_task(harness.generator.generate(request("stuck", (3, 4, 5))))
            await until_running(harness.generator, 1)
            failed = await self._both_fail(harness, update)
            assert all(isinstance(error, RefitError) and "does not drain" in str(error) for error in failed), failed
            await harness.generator.resume()
            return await task

        completion = harness.run(work())
        assert {span.policy_version for span in completion.version_spans} == {held}
        self._assert_exact(harness, (3, 4, 5), completion)
        harness.run(harness.reconnect())

    def test_sampled_hashes_attest_the_bytes_as_well(self, harness: GeneratorHarness) -> None:
        update = self._update(harness, harness.make_version(), hashes="sampled", bucket_bytes=10_000)
        failed = harness.run(self._both_fail(harness, update, is_corrupt=True))
        assert all(isinstance(error, WeightMismatch) for error in failed), failed
        harness.run(self._refit(harness, update))
        self._assert_holds(harness, update.policy_version)

    def test_a_staged_update_is_verified_before_the_pause(self, harness: GeneratorHarness) -> None:
        with _staging(harness):
            for bucket_bytes in (64 << 20, 10_000):
                update = self._update(harness, harness.make_version(), bucket_bytes=bucket_bytes)
                completions, report = harness.run(self._refit_while_serving(harness, update))
                assert all(len(c.token_ids) == 16 for c in completions)
                assert {s.policy_version for c in completions for s in c.version_spans} == {update.policy_version - 1}
                assert report.num_tensors == len(harness.manifest())
                self._assert_holds(harness, update.policy_version)

    def test_a_staged_update_that_is_corrupt_changes_nothing(self, harness: GeneratorHarness) -> None:
        with _staging(harness):
            update = self._update(harness, harness.make_version(), bucket_bytes=10_000)
            harness.run(self._refit(harness, update))
            worse = self._update(harness, harness.make_version(), bucket_bytes=10_000)
            failed = harness.run(self._both_fail(harness, worse, is_corrupt=True))
            assert all(isinstance(error, WeightMismatch) for error in failed), failed
            self._assert_holds(harness, update.policy_version)
            self._assert_exact(harness, (3, 4, 5), self._generate(harness, "unharmed"))
            harness.run(self._refit(harness, worse))  # the group is in step
            self._assert_holds(harness, worse.policy_version)

    def test_a_staged_update_whose_sender_does_not_come_changes_nothing(self, harness: GeneratorHarness) -> None:
        with _staging(harness):
            held = harness.generator.version
            update = self._update(harness, harness.make_version())
            [error] = harness.run(outcomes(harness.generator.refit(replace(update, timeout_s=1.0))))
            assert isinstance(error, RefitTimeout)
            assert "rank 0" in str(error)
            self._assert_holds(harness, held)
            self._assert_exact(harness, (3, 4, 5), self._generate(harness, "still-serving"))

    async def _refit_beside_requests(
        self, harness: GeneratorHarness, mode: PauseMode
    ) -> tuple[Completion, Completion, RefitReport]:
        """A request that is live when the refit begins, one that comes during it, and the report."""
        update = self._update(harness, harness.make_version(), mode=mode)
        long = request(f"{mode}-live", (3, 4, 5), max_new_tokens=harness.max_model_len - 12)
        live = asyncio.create_task(harness.generator.generate(long))
        await until_running(harness.generator, 1)
        report = await self._refit(harness, update)
        later = await harness.generator.generate(request(f"{mode}-later", (3, 4, 5)))
        return await live, later, report

    async def _refit_while_serving(
        self, harness: GeneratorHarness, update: RefitUpdate
    ) -> tuple[list[Completion], RefitReport]:
        """Requests that begin and end after the engine was told of the update and before the sender is."""
        refit = asyncio.create_task(harness.generator.refit(update))
        await asyncio.sleep(0.05)
        completions = [await harness.generator.generate(request(f"serving-{i}", (3, 4, 5))) for i in range(3)]
        await harness.send(update)
        return completions, await refit

    def _assert_holds(self, harness: GeneratorHarness, version: int) -> None:
        """The engine is at a version and computes with its weights."""
        assert harness.generator.version == version
        scores = harness.run(harness.generator.score(_TOKENS))
        assert_close(scores, harness.witness(_TOKENS, version), self.tolerance)


@contextmanager
def _staging(harness: GeneratorHarness) -> Iterator[None]:
    harness.run(harness.reconnect(staging="host"))
    try:
        yield
    finally:
        harness.run(harness.reconnect())
