"""Staged updates: nobody loads before all have verified, and a load that fails is undone."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import AsyncIterator, Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import asynccontextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from sglang_environment import sglang_python

from dockyard_core.errors import RefitCalledOff, RefitError, RefitTimeout, WeightMismatch
from dockyard_core.policy import WeightChunk, WeightSink
from dockyard_core.refit import RefitUpdate, TensorSpec
from dockyard_core.testing.generator_checks import assert_close, outcomes, request
from dockyard_inference import RefitSender, SglangConfig, SglangGenerator, TransformersConfig, TransformersGenerator
from dockyard_inference.fence import Fence
from dockyard_inference.refit.load_counter import LoadCounter
from dockyard_inference.refit.receiver import BucketReceiver
from dockyard_inference.refit.staging import HostStage, StagedVersion

TRANSPORTS = ("collective", "shared_memory", "filesystem")
SHAPE = (1001,)
MANIFEST = tuple(TensorSpec(f"model.layers.{index}.w", "float32", SHAPE) for index in range(6))
HELD = {spec.name: spec.shape for spec in MANIFEST}
UPDATE = RefitUpdate(policy_version=1, manifest=MANIFEST, bucket_bytes=1, timeout_s=20.0)
TOKENS = tuple(range(3, 20))


def stream_of(version: int) -> Callable[[WeightSink], None]:
    def stream_weights(sink: WeightSink) -> None:
        for spec in MANIFEST:
            sink(WeightChunk(spec.name, spec.shape, (0,), torch.full(SHAPE, float(version))))

    return stream_weights


class Rank:
    """A rank in a thread of its own, that stages and then loads."""

    def __init__(self, sender: RefitSender, number: int, thread: ThreadPoolExecutor) -> None:
        self.receiver, self.stage = BucketReceiver(torch.device("cpu"), keeps_views=False), HostStage()
        self.loaded: list[float] = []
        self._thread = thread
        self.joined = thread.submit(self.receiver.connect, sender.endpoint(), number)

    def take(self, update: RefitUpdate, *, is_broken: bool = False) -> Any:
        """Begin an update in the thread; broken: what it takes is not what was sent."""
        return self._thread.submit(self._take, update, is_broken)

    def _take(self, update: RefitUpdate, is_broken: bool) -> str:
        self.receiver.prepare(update, HELD)
        if is_broken:
            self.receiver._is_intact = lambda *_: False  # type: ignore[method-assign]
        try:
            self.stage.fill(self.receiver, update)
        finally:
            self.receiver.__dict__.pop("_is_intact", None)
        with self.receiver.attesting(update):
            assert self.stage.incoming is not None
            self.loaded = [float(tensor[0]) for tensors in self.stage.incoming for _, tensor in tensors]
        self.stage.commit()
        return "loaded"


@pytest.mark.parametrize("transport", TRANSPORTS)
def test_no_rank_loads_when_one_has_taken_other_bytes_and_the_group_goes_on(transport: str, tmp_path: Path) -> None:
    sender = RefitSender("127.0.0.1", 0, 3, transport=transport, directory=tmp_path, staging="host")  # type: ignore[arg-type]
    with ThreadPoolExecutor(1) as first, ThreadPoolExecutor(1) as second:
        ranks = [Rank(sender, number, thread) for number, thread in enumerate((first, second), start=1)]
        sender.connect()
        answers = [ranks[0].take(UPDATE), ranks[1].take(UPDATE, is_broken=True)]
        with pytest.raises(WeightMismatch, match=r"rank 2 refused: rank 2: SHA-256 of bucket 0 differs"):
            sender.send(stream_of(1), UPDATE)
        assert isinstance(answers[0].exception(60), RefitCalledOff)
        assert isinstance(answers[1].exception(60), WeightMismatch)
        assert [rank.loaded for rank in ranks] == [[], []]
        for version in (2, 3):
            update = replace(UPDATE, policy_version=version)
            answers = [rank.take(update) for rank in ranks]
            sender.send(stream_of(version), update)
            assert [answer.result(60) for answer in answers] == ["loaded", "loaded"]
            for rank in ranks:
                assert rank.loaded == [float(version)] * len(MANIFEST)
                assert rank.stage.held is not None
                assert rank.stage.held.update.policy_version == version
                assert rank.stage.incoming is None
        sender.close()
        for rank in ranks:
            rank.receiver.close()


@pytest.mark.parametrize(
    "transport", ["collective", *(pytest.param(one, marks=pytest.mark.ci) for one in TRANSPORTS if one != "collective")]
)
def test_no_rank_loads_when_another_is_late(transport: str, tmp_path: Path) -> None:
    sender = RefitSender("127.0.0.1", 0, 3, transport=transport, directory=tmp_path, staging="host")  # type: ignore[arg-type]
    update, is_over = replace(UPDATE, timeout_s=2.0), threading.Event()
    with ThreadPoolExecutor(1) as first, ThreadPoolExecutor(1) as second:
        ranks = [Rank(sender, number, thread) for number, thread in enumerate((first, second), start=1)]
        sender.connect()
        punctual = ranks[0].take(update)

        def stall() -> None:
            """Every bucket is taken, and then nothing is said."""
            ranks[1].receiver.prepare(update, HELD)
            for _ in ranks[1].receiver.receive(update):
                pass
            is_over.wait(60)

        late = second.submit(stall)
        with pytest.raises(RefitTimeout, match=r"rank 2 did not stage the update within 2.0 s"):
            sender.send(stream_of(1), update)
        assert isinstance(punctual.exception(60), RefitCalledOff)
        assert ranks[0].loaded == []
        is_over.set()
        late.result(60)
        sender.close()
        for rank in ranks:
            rank.receiver.close()


@pytest.mark.parametrize("transport", TRANSPORTS)
def test_a_load_that_fails_before_the_last_bucket_says_why_at_once(transport: str, tmp_path: Path) -> None:
    """Not staged: the sender still has buckets to send when the rank gives up."""
    sender = RefitSender("127.0.0.1", 0, 2, transport=transport, directory=tmp_path)  # type: ignore[arg-type]
    receiver = BucketReceiver(torch.device("cpu"), keeps_views=False)

    def load() -> None:
        receiver.prepare(UPDATE, HELD)
        with receiver.attesting(UPDATE):
            for _ in receiver.receive(UPDATE):
                raise RuntimeError("out of memory")

    with ThreadPoolExecutor(1) as thread:
        joined = thread.submit(receiver.connect, sender.endpoint(), 1)
        sender.connect()
        joined.result(60)
        failed = thread.submit(load)
        with pytest.raises(RefitError, match=r"rank 1 refused: .*RuntimeError: out of memory") as error:
            sender.send(stream_of(1), UPDATE)
        assert not isinstance(error.value, RefitTimeout)
        assert "out of memory" in str(failed.exception(60))
        sender.close()
        receiver.close()


def test_what_was_staged_and_not_loaded_is_forgotten_in_the_next_group() -> None:
    stage, receiver = HostStage(), BucketReceiver(torch.device("cpu"))
    for is_staging in (True, False):
        stage.held = stage.incoming = StagedVersion(UPDATE, ())
        receiver.is_staging = is_staging
        stage.joined(receiver)
        assert stage.incoming is None
        assert (stage.held is not None) == is_staging


async def _joined(generator: Any, staging: str = "host") -> RefitSender:
    sender = RefitSender("127.0.0.1", 0, 2, staging=staging)  # type: ignore[arg-type]
    await asyncio.gather(asyncio.to_thread(sender.connect), generator.connect_refit(sender.endpoint()))
    return sender


class Weights:
    """Of a checkpoint, scaled by a factor per version."""

    def __init__(self, directory: Path) -> None:
        from transformers import AutoModelForCausalLM

        self.model = AutoModelForCausalLM.from_pretrained(directory).eval()
        self.first = {name: tensor.detach().clone() for name, tensor in self.model.named_parameters()}
        manifest = tuple(TensorSpec(name, "float32", tuple(t.shape)) for name, t in self.first.items())
        self._update = RefitUpdate(policy_version=0, manifest=manifest, bucket_bytes=1 << 14, timeout_s=60.0)

    def update(self, version: int) -> RefitUpdate:
        return replace(self._update, policy_version=version)

    def stream(self, version: int) -> Callable[[WeightSink], None]:
        def stream_weights(sink: WeightSink) -> None:
            for name, tensor in self.first.items():
                sink(WeightChunk(name, tuple(tensor.shape), (0,) * tensor.dim(), (1 + 0.1 * version) * tensor))

        return stream_weights

    def scores(self, version: int) -> list[float]:
        with torch.no_grad():
            for name, parameter in self.model.named_parameters():
                parameter.copy_((1 + 0.1 * version) * self.first[name])
            logits = self.model(torch.tensor([TOKENS])).logits[0, :-1].double()
        values: list[float] = torch.log_softmax(logits, -1).gather(-1, torch.tensor(TOKENS)[1:, None])[:, 0].tolist()
        return values


async def _refit(generator: Any, sender: RefitSender, weights: Weights, version: int) -> list[object]:
    update = weights.update(version)
    return await outcomes(asyncio.to_thread(sender.send, weights.stream(version), update), generator.refit(update))


@asynccontextmanager
async def _started(generator: Any) -> AsyncIterator[Any]:
    await generator.start()
    try:
        yield generator
    finally:
        await generator.shutdown()


async def _check_that_a_failed_load_is_undone(
    generator: Any, weights: Weights, let_loads_fail: Callable[[bool], Any]
) -> None:
    """Version 1 is staged and loaded, the load of version 2 fails, and version 1 serves until version 3 comes."""
    async with _started(generator):
        await _undo_a_failed_load(generator, weights, let_loads_fail)


async def _undo_a_failed_load(generator: Any, weights: Weights, let_loads_fail: Callable[[bool], Any]) -> None:
    sender = await _joined(generator)
    assert not [answer for answer in await _refit(generator, sender, weights, 1) if isinstance(answer, Exception)]
    live = asyncio.create_task(generator.generate(request("live", (3, 4, 5), max_new_tokens=120)))
    await asyncio.sleep(0.05)
    await let_loads_fail(True)
    sent, held = await _refit(generator, sender, weights, 2)
    await let_loads_fail(False)
    assert isinstance(sent, RefitError), sent
    assert isinstance(held, RefitError), held
    assert "the engine went back to version 1 and serves it" in str(held)
    assert generator.version == 1
    assert_close(await generator.score(TOKENS), weights.scores(1), 1e-4)
    completion = await live
    assert len(completion.token_ids) == 120
    assert {span.policy_version for span in completion.version_spans} == {1}
    sender.close()
    sender = await _joined(generator)
    assert not [answer for answer in await _refit(generator, sender, weights, 3) if isinstance(answer, Exception)]
    assert_close(await generator.score(TOKENS), weights.scores(3), 1e-4)
    sender.close()


class OutOfMemory(LoadCounter):
    """Fails as a whole load would."""

    is_on = False

    def check(self, update: RefitUpdate) -> None:
        if OutOfMemory.is_on:
            OutOfMemory.is_on = False
            raise RuntimeError("out of memory")
        super().check(update)


def test_transformers_goes_back_to_the_version_before(
    make_model: Callable[..., Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    torch.set_num_threads(1)
    directory = make_model("qwen2", is_tied=True)
    monkeypatch.setattr("dockyard_inference.transformers_engine.model.LoadCounter", OutOfMemory)

    async def let_loads_fail(is_on: bool) -> None:
        OutOfMemory.is_on = is_on

    generator = TransformersGenerator(TransformersConfig(model=str(directory), max_model_len=128))
    asyncio.run(_check_that_a_failed_load_is_undone(generator, Weights(directory), let_loads_fail))


def _patch_worker(worker: Any, is_on: bool) -> None:
    """Runs in vLLM's process."""
    engine = worker.weight_transfer_engine
    usual = type(engine)._load

    def load_once(*arguments: Any) -> None:
        engine.__dict__.pop("_load", None)
        usual(engine, *arguments)
        raise RuntimeError("out of memory")

    if is_on:
        engine._load = load_once


@pytest.mark.ci
def test_vllm_goes_back_to_the_version_before(make_model: Callable[..., Path], monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("vllm")
    from dockyard_inference import VllmConfig, VllmGenerator

    monkeypatch.setenv("VLLM_ALLOW_INSECURE_SERIALIZATION", "1")  # to reach into its process
    directory = make_model("qwen2", is_tied=True)

    generator = VllmGenerator(VllmConfig(model=str(directory), max_model_len=128, max_num_seqs=16, kv_cache_gib=0.1))

    async def let_loads_fail(is_on: bool) -> None:
        await generator._running().collective_rpc(_patch_worker, args=(is_on,))

    asyncio.run(_check_that_a_failed_load_is_undone(generator, Weights(directory), let_loads_fail))


@pytest.mark.nightly
@pytest.mark.timeout(600)
def test_sglang_goes_back_to_the_version_before(
    make_model: Callable[..., Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    from dockyard_inference.sglang_engine.loading import WeightLoader

    directory, usual = make_model("qwen2", is_tied=True), WeightLoader._hand_over

    async def emptied(self: WeightLoader, staged: Any, label: str) -> None:
        """As by somebody who cleans up. A damaged or misshapen file would kill the server instead."""
        monkeypatch.setattr(WeightLoader, "_hand_over", usual)
        for path in staged.path.iterdir():
            path.unlink()
        await usual(self, staged, label)

    async def let_loads_fail(is_on: bool) -> None:
        monkeypatch.setattr(WeightLoader, "_hand_over", emptied if is_on else usual)

    values = {"model": str(directory), "python": sglang_python(), "max_model_len": 128, "max_num_seqs": 32}
    generator = SglangGenerator(SglangConfig.model_validate(values))
    asyncio.run(_check_that_a_failed_load_is_undone(generator, Weights(directory), let_loads_fail))


def test_a_first_staged_load_that_fails_has_nothing_to_go_back_to(
    make_model: Callable[..., Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    directory = make_model("qwen2", is_tied=True)
    monkeypatch.setattr("dockyard_inference.transformers_engine.model.LoadCounter", OutOfMemory)

    async def work() -> tuple[list[object], list[object]]:
        weights = Weights(directory)
        config = TransformersConfig(model=str(directory), max_model_len=128)
        async with _started(TransformersGenerator(config)) as generator:
            sender = await _joined(generator)
            OutOfMemory.is_on = True
            failed = await _refit(generator, sender, weights, 1)
            served = await outcomes(generator.score(TOKENS))
            sender.close()
            return failed, served

    (_, held), [score] = asyncio.run(work())
    assert isinstance(held, RefitError)
    assert "went back" not in str(held)
    assert "fenced" in str(score)


def test_a_drain_that_takes_too_long_leaves_the_engine_serving() -> None:
    async def work() -> tuple[list[object], str]:
        fence, never = Fence(), asyncio.Event()

        async def refit() -> None:
            async with fence.transaction("refit to policy version 1") as transaction:
                transaction.begin()
                await transaction.drain([never.wait()], 0.05, UPDATE)

        answers = await outcomes(refit())
        await asyncio.wait_for(fence.passed(), 5)
        return answers, fence.reason

    [error], reason = asyncio.run(work())
    assert isinstance(error, RefitTimeout)
    assert "1 requests did not end" in str(error)
    assert reason == ""


def test_a_drain_that_takes_too_long_does_not_heal_a_fenced_engine() -> None:
    async def work() -> str:
        fence, never = Fence(), asyncio.Event()
        fence.break_("an earlier refit did not commit")

        async def refit() -> None:
            async with fence.transaction("refit to policy version 1") as transaction:
                transaction.begin()
                await transaction.drain([never.wait()], 0.05, UPDATE)

        await outcomes(refit())
        return fence.reason

    assert asyncio.run(work()) == "an earlier refit did not commit"
