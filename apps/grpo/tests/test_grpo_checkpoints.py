"""Checkpoints beside training: the real trainer rank and recorder in this process, without Ray between them."""

from __future__ import annotations

import asyncio
import errno
import json
import os
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from ray.exceptions import ActorDiedError, ObjectLostError

from dockyard_core import GroupId, Rollout, RolloutGroup, Segment, Verdict, VerdictStatus, VersionSpan
from dockyard_grpo import checkpoint_files
from dockyard_grpo.actors import trainer as trainer_module
from dockyard_grpo.actors.recorder import Recorder
from dockyard_grpo.actors.trainer import TrainerWorker
from dockyard_grpo.checkpoints import Checkpointer
from dockyard_grpo.config import load_config
from dockyard_grpo.fleets import Fleets
from dockyard_grpo.resume import find_restore_point, is_complete
from dockyard_grpo.run_directory import RunDirectory

ADVANTAGES = ((1.0, -1.0),)
PROBES = [list(range(40, 72)), list(range(60, 92))]


class Actor:
    """The calls of a handle, on an object of this process."""

    def __init__(self, worker: Any) -> None:
        self.worker = worker

    def __getattr__(self, name: str) -> Any:
        return Call(getattr(self.worker, name))


class Call:
    def __init__(self, method: Any) -> None:
        self._method = method

    def remote(self, *args: Any) -> asyncio.Future[Any]:
        answer = self._method(*args)
        if not asyncio.iscoroutine(answer):
            ready: asyncio.Future[Any] = asyncio.get_running_loop().create_future()
            ready.set_result(answer)
            return ready
        return asyncio.ensure_future(answer)


def group(seed: int = 0) -> RolloutGroup:
    rng = np.random.default_rng(seed)
    rollouts = []
    for index in range(2):
        ids = tuple(int(token) for token in rng.integers(3, 200, 12))
        sampled = Segment(
            token_ids=ids, loss_mask=(True,) * 12, logprobs=(-5.0,) * 12, version_spans=(VersionSpan(0, 0, 12),)
        )
        rollouts.append(
            Rollout(
                rollout_id=f"r{index}", task_id=f"task-{seed}", segments=(Segment.prompt((5, 6, 7)), sampled),
                prompt_text="p", completion_text="c", patch="", verdict=Verdict(status=VerdictStatus.RESOLVED),
                finish_reason="stop", temperature=1.0, reward=float(index),
            )
        )  # fmt: skip
    return RolloutGroup(group_id=GroupId(f"task-{seed}", 0), rollouts=tuple(rollouts))


def loop_state(step: int, **more: Any) -> dict[str, Any]:
    """A loop.json as small as `find_restore_point` takes it."""
    return {"step": step, "incarnation": 0, "events_bytes": 0, "machine": {"ledger": {"frontier": 0}}, **more}


class Life:
    """A trainer rank, a recorder and a checkpointer over one run directory."""

    def __init__(self, path: Path, *overrides: str) -> None:
        self.config = load_config(None, ["checkpoint.every_steps=2", *overrides])
        self.worker = TrainerWorker(self.config, 0, 1)
        self.run = RunDirectory(path)
        self.run.checkpoints.mkdir(exist_ok=True)
        self.recorder = Recorder(self.run.rollouts_path)
        self.fleets = Fleets(trainers=[Actor(self.worker)], recorder=Actor(self.recorder))
        self.saved: list[tuple[int, str]] = []
        self.failed: list[tuple[int, str]] = []
        self.checkpointer = Checkpointer(
            self.config,
            self.fleets,
            self.run,
            on_saved=lambda step, path: self.saved.append((step, path.name)),
            on_failed=lambda step, reason: self.failed.append((step, reason)),
        )

    async def step(self, seed: int = 0) -> Any:
        return await self.worker.train(ADVANTAGES, group(seed))

    async def begin(self, step: int, *groups: RolloutGroup, **metrics: Any) -> None:
        await self.checkpointer.begin(step, loop_state(step), metrics=metrics, groups=groups)


@pytest.fixture
def life(tmp_path: Path) -> Life:
    return Life(tmp_path)


@contextmanager
def held_disk(monkeypatch: pytest.MonkeyPatch) -> Iterator[threading.Event]:
    """Snapshots are written only once the event is set."""
    is_open, write = threading.Event(), trainer_module._write

    def wait_and_write(*args: Any) -> str | None:
        assert is_open.wait(120)
        return write(*args)

    monkeypatch.setattr(trainer_module, "_write", wait_and_write)
    yield is_open
    is_open.set()


def shown(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir())


def test_training_goes_on_while_a_checkpoint_is_written_and_it_holds_the_moment_it_began(
    life: Life, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def scenario() -> None:
        await life.worker.build("")
        await life.step(1)
        state = loop_state(1, names=["before"])
        wanted = await life.worker.probe(PROBES)
        with held_disk(monkeypatch) as disk:
            await life.checkpointer.begin(1, state, metrics={"step": 1})
            state["names"] = ["after"]
            later = [await life.step(2), await life.step(3)]
            assert [metrics.policy_version for metrics in later] == [2, 3]
            assert find_restore_point(life.run.path).checkpoint is None, "no reader sees it before it is whole"
            assert life.checkpointer.last_step is None
            disk.set()
            await life.checkpointer.wait()
        assert (life.saved, life.failed, life.checkpointer.last_step) == ([(1, "step-000001")], [], 1)
        point = find_restore_point(life.run.path)
        assert point.loop == loop_state(1, names=["before"])
        await life.worker.restore(point.checkpoint)
        assert await life.worker.probe(PROBES) == wanted
        assert [await life.step(2), await life.step(3)] == later, "moments and schedule came back too"

    asyncio.run(scenario())


def test_a_checkpoint_waits_for_the_one_before_it(life: Life, monkeypatch: pytest.MonkeyPatch) -> None:
    async def scenario() -> None:
        await life.worker.build("")
        with held_disk(monkeypatch) as disk:
            await life.begin(1)
            second = asyncio.ensure_future(life.begin(2))
            await asyncio.sleep(0)
            assert not second.done()
            assert life.saved == []
            disk.set()
            await second
            assert life.saved == [(1, "step-000001")], "the second one took its snapshot after the first was whole"
            await life.begin(2)  # a stop asks for the one that is under way
            await life.checkpointer.wait()
        assert [step for step, _ in life.saved] == [1, 2]

    asyncio.run(scenario())


def test_calls_to_a_trainer_keep_the_order_in_which_they_were_made(life: Life) -> None:
    async def scenario() -> list[Any]:
        await life.worker.build("")
        calls = [
            life.step(1), life.worker.snapshot(), life.step(2), life.worker.probe(PROBES), life.step(3),
        ]  # fmt: skip
        answers = await asyncio.gather(*calls)
        directory = life.run.path / "given"
        directory.mkdir()
        assert await life.worker.write(directory) is None
        await life.worker.restore(directory)
        return [answers[0], answers[2], answers[3], answers[4], await life.step(2), await life.worker.probe(PROBES)]

    first, second, probed, third, again, probed_again = asyncio.run(scenario())
    assert [metrics.policy_version for metrics in (first, second, third)] == [1, 2, 3]
    assert (again, probed_again) == (second, probed), "the snapshot lay between the first step and the second"


def test_everything_that_touches_the_policy_runs_in_one_thread(life: Life) -> None:
    threads: set[int] = set()

    class Watching:
        def __init__(self, policy: Any) -> None:
            self._policy = policy

        def __getattr__(self, name: str) -> Any:
            threads.add(threading.get_ident())
            return getattr(self._policy, name)

    async def scenario() -> int:
        await life.worker.build("")
        life.worker._built = Watching(life.worker._built)  # type: ignore[assignment]
        await life.step(1)
        await life.begin(1)
        await asyncio.gather(life.step(2), life.worker.probe(PROBES))
        await life.checkpointer.wait()
        await life.worker.restore(life.run.checkpoints / "latest")
        return await life.worker._in_order(torch.get_num_threads)

    num_threads = asyncio.run(scenario())
    assert len(threads) == 1
    assert threading.get_ident() not in threads
    assert num_threads == life.config.cluster.threads_per_worker


def test_a_checkpoint_holds_what_a_restore_needs_and_nothing_twice(life: Life) -> None:
    groups = [group(3), group(4)]

    async def scenario() -> None:
        await life.worker.build("")
        life.run.append("metrics", {"step": 2})
        await life.begin(2, *groups, val_reward_mean=0.5, loss=float("nan"), each=[1.0, float("inf")])
        await life.checkpointer.wait()

    asyncio.run(scenario())
    latest = life.run.checkpoints / "latest"
    assert is_complete(latest)
    assert shown(life.run.checkpoints) == ["latest", "step-000002"]
    assert shown(latest) == ["groups.jsonl", "hf", "loop.json", "manifest.json", "policy"]
    manifest = json.loads((latest / "manifest.json").read_text())
    assert (manifest["step"], manifest["metrics"]) == (
        2, {"val_reward_mean": 0.5, "loss": None, "each": [1.0, None]}
    )  # fmt: skip
    on_disk = {str(path.relative_to(latest.resolve())) for path in latest.resolve().rglob("*") if path.is_file()}
    assert manifest["sha256"].keys() == on_disk - {"manifest.json"}
    assert (latest / "hf" / "model.safetensors").samefile(latest / "policy" / "model.safetensors")
    assert [life.recorder.load_group(latest / "groups.jsonl", index)[1] for index in (0, 1)] == groups


def test_the_configured_retention_follows_the_metrics_rows(tmp_path: Path) -> None:
    life = Life(tmp_path, "checkpoint.keep_last=1", "checkpoint.keep_best=1", "checkpoint.best_metric=score")

    async def scenario() -> None:
        await life.worker.build("")
        for step, score in ((1, 0.2), (2, 0.7), (3, float("nan")), (4, 0.7), (5, 0.1)):
            await life.begin(step, score=score)
        await life.checkpointer.wait()

    asyncio.run(scenario())
    assert shown(life.run.checkpoints) == ["best", "latest", "step-000004", "step-000005"]
    assert (life.run.checkpoints / "best").resolve().name == "step-000004"


def test_a_checkpoint_that_the_disk_refuses_is_counted_and_the_next_one_is_tried(
    life: Life, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def scenario() -> None:
        await life.worker.build("")
        await life.begin(1)
        await life.checkpointer.wait()
        with monkeypatch.context() as patch:
            patch.setattr(trainer_module, "_write", lambda *_: "ENOSPC: No space left on device")
            await life.begin(2)
            assert (await life.step(1)).policy_version == 1, "the run goes on"
            await life.checkpointer.wait()
        assert life.checkpointer.last_step == 1
        assert life.failed == life.checkpointer.failures == [(2, "ENOSPC: No space left on device")]
        assert shown(life.run.checkpoints) == ["latest", "step-000001"]
        assert (life.run.checkpoints / "latest").resolve().name == "step-000001"
        await life.begin(3)
        await life.checkpointer.wait()
        assert (life.checkpointer.last_step, life.failed[1:]) == (3, [])

    asyncio.run(scenario())


def test_a_disk_error_at_any_stage_leaves_the_folder_as_it_was(life: Life, monkeypatch: pytest.MonkeyPatch) -> None:
    def fails(*_: Any) -> None:
        raise OSError(errno.EIO, os.strerror(errno.EIO))

    async def scenario() -> None:
        await life.worker.build("")
        await life.begin(1)
        stages = ["open_partial", "write_manifest", "sync_tree", "stage_link", "publish", "swing_link"]
        for step, stage in enumerate(stages, start=2):
            await life.checkpointer.wait()
            before = {path: path.resolve().name for path in life.run.checkpoints.iterdir()}
            with monkeypatch.context() as patch:
                patch.setattr(checkpoint_files, stage, fails)
                await life.begin(step)
                await life.checkpointer.wait()
            assert life.failed[-1] == (step, "EIO: Input/output error"), stage
            assert {path: path.resolve().name for path in life.run.checkpoints.iterdir()} == before, stage
        assert (len(life.failed), life.checkpointer.last_step) == (len(stages), 1)

    asyncio.run(scenario())


def test_old_checkpoints_that_cannot_be_deleted_are_named_and_the_new_one_counts(
    life: Life, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fails(*_: Any, **__: Any) -> None:
        raise OSError(errno.EIO, os.strerror(errno.EIO))

    async def scenario() -> None:
        await life.worker.build("")
        monkeypatch.setattr(checkpoint_files, "prune", fails)
        await life.begin(2)
        await life.checkpointer.wait()

    asyncio.run(scenario())
    assert (life.saved, life.failed) == ([(2, "step-000002")], [])
    assert life.checkpointer.failures == [(2, "prune: EIO: Input/output error")]
    assert life.checkpointer.last_step == 2


@pytest.mark.parametrize("error", [ActorDiedError(), ObjectLostError("ab" * 28, "", "")], ids=["actor", "object"])
def test_what_is_lost_while_a_checkpoint_is_written_costs_it_and_not_the_run(life: Life, error: Exception) -> None:
    class Loses(TrainerWorker):
        async def write(self, directory: Path) -> str | None:
            (directory / "policy").mkdir()
            raise error

    life.fleets.trainers = [Actor(Loses(life.config, 0, 1))]

    async def scenario() -> None:
        await life.fleets.trainers[0].build.remote("")
        await life.begin(2)
        await life.checkpointer.wait()

    asyncio.run(scenario())
    ((step, reason),) = life.failed
    assert step == 2
    assert reason.startswith(f"lost: {type(error).__name__}: ")
    assert "\n" not in reason
    assert shown(life.run.checkpoints) == []


def test_a_bug_while_writing_is_raised_and_not_counted_as_a_full_disk(
    life: Life, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def scenario() -> None:
        await life.worker.build("")
        monkeypatch.setattr(checkpoint_files, "write_manifest", lambda *_: 1 / 0)
        await life.begin(2)
        with pytest.raises(ZeroDivisionError):
            await life.checkpointer.wait()
        assert life.failed == []

    asyncio.run(scenario())


def test_a_waiter_that_is_cancelled_does_not_cancel_the_writer(life: Life, monkeypatch: pytest.MonkeyPatch) -> None:
    async def scenario() -> None:
        await life.worker.build("")
        with held_disk(monkeypatch) as disk:
            await life.begin(2)
            waiter = asyncio.ensure_future(life.checkpointer.wait())
            await asyncio.sleep(0)
            waiter.cancel()
            await asyncio.gather(waiter, return_exceptions=True)
            disk.set()
            await life.checkpointer.wait()
        assert life.checkpointer.last_step == 2

    asyncio.run(scenario())


def test_a_new_life_removes_what_a_dead_one_left_and_nothing_else(tmp_path: Path) -> None:
    config = load_config(None, [f"run.dir={tmp_path / 'run'}"])
    run = RunDirectory.create(config)
    run.write_config(config, incarnation=0)
    run.commit_checkpoint(checkpoint_files.open_partial(run.checkpoints, 2), "{}", {})
    for name in (".step-000004.partial", ".step-000001.removed", "damaged-step-000003-1", "my-notes"):
        (run.checkpoints / name).mkdir()
        (run.checkpoints / name / "file").write_text("x")
    (run.checkpoints / ".latest.partial").symlink_to("step-000004")
    elsewhere = tmp_path / ".step-000004.partial"
    elsewhere.mkdir()
    run.write_config(config, incarnation=1)
    assert shown(run.checkpoints) == ["damaged-step-000003-1", "latest", "my-notes", "step-000002"]
    assert elsewhere.exists()
