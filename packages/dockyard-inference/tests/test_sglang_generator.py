"""The SGLang engine against the generator contract, with a real server; one server per class."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from sglang_environment import sglang_python

from dockyard_core.errors import EngineBusy, GeneratorError
from dockyard_core.generator import Completion, GenerateRequest, SamplingParams
from dockyard_core.testing.generator_checks import outcomes, request, until_running
from dockyard_core.testing.generator_contract import GeneratorContract, GeneratorHarness
from dockyard_core.testing.refit_soak import RefitSoak
from dockyard_inference import SglangConfig, SglangGenerator
from dockyard_inference.sglang_engine.broadcast import broadcast_weights

pytestmark = pytest.mark.timeout(900)
Serve = Callable[..., Iterator[Any]]
EOS = 1
"""Of the models that `make_model` writes."""


def config_of(model: Path, **changes: Any) -> SglangConfig:
    values = {"model": str(model), "python": sglang_python(), "max_model_len": 128, "max_num_seqs": 32}
    return SglangConfig.model_validate(values | changes)


@pytest.mark.ci
class TestTiedQwen2(GeneratorContract):
    @pytest.fixture(scope="class")
    @classmethod
    def harness(cls, serve: Serve, make_model: Callable[..., Path]) -> Iterator[GeneratorHarness]:
        model = make_model("qwen2", is_tied=True, intermediate_size=1024)
        yield from serve(SglangGenerator(config_of(model)), model)

    def test_a_seed_fixes_the_sample_and_other_seeds_differ(self, harness: GeneratorHarness) -> None:
        """SGLang ignores seeds on a CPU, so one that is given is refused: the sample would not be the promised one."""
        sampling = SamplingParams(seed=11, max_new_tokens=4)
        seeded = GenerateRequest(request_id="seed", prompt_token_ids=(3, 4, 5), sampling=sampling)
        [error] = harness.run(outcomes(harness.generator.generate(seeded)))
        assert isinstance(error, GeneratorError)
        assert "would ignore a request's seed" in str(error)

    def test_a_token_that_would_kill_the_server_is_refused(self, harness: GeneratorHarness) -> None:
        for tokens in ((3, harness.vocab_size), (3, -1)):
            answers = harness.run(
                outcomes(harness.generator.generate(request("odd", tokens)), harness.generator.score(tokens))
            )
            assert all("token ids are 0 to" in str(answer) for answer in answers), answers
        assert harness.run(harness.generator.score((3, 4, 5)))

    def test_a_cached_prefix_does_not_survive_a_refit(self, harness: GeneratorHarness) -> None:
        prompt = tuple(3 + t % 50 for t in range(96))
        sampling = SamplingParams(temperature=0.0, max_new_tokens=4)
        for number in range(2):
            for _ in range(2):
                one = GenerateRequest(request_id=f"cached-{number}", prompt_token_ids=prompt, sampling=sampling)
                self._assert_exact(harness, prompt, harness.run(harness.generator.generate(one)))
            harness.run(self._refit(harness, self._update(harness, harness.make_version())))

    def test_only_the_requests_own_stop_tokens_stop_it(self, harness: Any) -> None:
        """SGLang would also stop at the model's end token as soon as a request has any stop token."""
        unlikely = 2
        sampling = SamplingParams(temperature=2.0, max_new_tokens=120, stop_token_ids=(unlikely,))
        requests = [
            GenerateRequest(request_id=f"stop-{i}", prompt_token_ids=(3, 4, 5), sampling=sampling) for i in range(24)
        ]

        async def work() -> list[Completion]:
            return await asyncio.gather(*(harness.generator.generate(one) for one in requests))

        completions = harness.run(work())
        assert any(EOS in completion.token_ids[:-1] for completion in completions)
        for completion in completions:
            is_stopped = completion.token_ids[-1] == unlikely
            assert completion.finish_reason == ("stop" if is_stopped else "length")
            assert is_stopped or len(completion.token_ids) == 120
            assert unlikely not in completion.token_ids[:-1]
            self._assert_exact(harness, (3, 4, 5), completion, temperature=2.0)

    def test_the_weights_are_read_from_a_folder_that_is_gone_afterwards(self, harness: Any) -> None:
        folder = harness.generator._session.server.weights
        report = harness.run(self._refit(harness, self._update(harness, harness.make_version())))
        assert list(folder.iterdir()) == []
        assert {"receive", "verify", "stage", "pause", "load", "resume", "total"} <= report.seconds.keys()


@pytest.mark.nightly
class TestUntiedLlama(GeneratorContract):
    @pytest.fixture(scope="class")
    @classmethod
    def harness(cls, serve: Serve, make_model: Callable[..., Path]) -> Iterator[GeneratorHarness]:
        model = make_model("llama", is_tied=False, intermediate_size=1024)
        yield from serve(SglangGenerator(config_of(model, enable_prefix_caching=False)), model)

    test_a_seed_fixes_the_sample_and_other_seeds_differ = (
        TestTiedQwen2.test_a_seed_fixes_the_sample_and_other_seeds_differ
    )


@pytest.mark.nightly
class TestTiedQwen3Soak(RefitSoak):
    @pytest.fixture(scope="class")
    @classmethod
    def harness(cls, serve: Serve, make_model: Callable[..., Path]) -> Iterator[GeneratorHarness]:
        model = make_model("qwen3", is_tied=True, intermediate_size=1024)
        yield from serve(SglangGenerator(config_of(model)), model)


@pytest.mark.nightly
class TestServerAtAnAddress(GeneratorContract):
    """A server that others started; it reads none of our folders, so the weights are sent to it."""

    @pytest.fixture(scope="class")
    @classmethod
    def harness(cls, serve: Serve, make_model: Callable[..., Path], tmp_path_factory: Any) -> Iterator[Any]:
        model = make_model("qwen2", is_tied=False, intermediate_size=1024)
        with asyncio.Runner() as runner:
            owner = SglangGenerator(config_of(model))
            runner.run(owner.start())
            assert owner._session is not None
            key = tmp_path_factory.mktemp("key") / "key"
            key.write_text(f"{owner._session.server.api_key}\n")
            config = SglangConfig(
                model=str(model), url=owner._session.server.url, api_key_file=key, max_model_len=128, max_num_seqs=32
            )
            try:
                yield from serve(SglangGenerator(config), model, owner)
                assert owner._session.server.is_running
            finally:
                runner.run(owner.shutdown())

    def test_the_weights_are_sent_to_it(self, harness: Any, monkeypatch: pytest.MonkeyPatch) -> None:
        labels = []

        def counted(url: str, api_key: str | None, staged: Any, label: str, limit_s: float) -> None:
            labels.append(label)
            broadcast_weights(url, api_key, staged, label, limit_s)

        monkeypatch.setattr("dockyard_inference.sglang_engine.loading.broadcast_weights", counted)
        update = self._update(harness, harness.make_version())
        harness.run(self._refit(harness, update))
        assert labels == [f"0:{update.policy_version}"]

    test_a_seed_fixes_the_sample_and_other_seeds_differ = (
        TestTiedQwen2.test_a_seed_fixes_the_sample_and_other_seeds_differ
    )


@pytest.mark.nightly
class TestFewSequences:
    @pytest.fixture(scope="class")
    @classmethod
    def harness(cls, serve: Serve, make_model: Callable[..., Path]) -> Iterator[Any]:
        model = make_model("qwen3", is_tied=True)
        yield from serve(SglangGenerator(config_of(model, max_num_seqs=2, max_queued=22)), model)

    def test_score_goes_before_rollouts_that_wait(self, harness: Any) -> None:
        """Two sequences run at a time and 23 rollouts came first."""

        async def work() -> int:
            requests = [request(f"queued-{i}", (3, 4), max_new_tokens=120) for i in range(23)]
            tasks = [asyncio.create_task(harness.generator.generate(one)) for one in requests]
            await until_running(harness.generator, 23)
            await harness.generator.score((3, 4, 5))
            num_done = sum(task.done() for task in tasks)
            await asyncio.gather(*tasks)
            return num_done

        assert harness.run(work()) <= 8

    def test_beyond_its_queue_it_is_busy_and_begins_nothing(self, harness: Any) -> None:
        async def work() -> list[object]:
            await harness.generator.pause("keep")
            requests = [request(f"busy-{i}", (3, 4), max_new_tokens=2) for i in range(25)]
            tasks = [asyncio.create_task(harness.generator.generate(one)) for one in requests[:24]]
            await until_running(harness.generator, 24)
            [refused] = await outcomes(harness.generator.generate(requests[24]))
            await harness.generator.resume()
            return [refused, *await asyncio.gather(*tasks)]

        refused, *completions = harness.run(work())
        assert isinstance(refused, EngineBusy)
        assert [len(completion.token_ids) for completion in completions] == [2] * 24
