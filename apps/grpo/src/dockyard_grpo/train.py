"""`train`: from a validated configuration to a finished run directory."""

from __future__ import annotations

import asyncio
import os
import shutil
import signal
import time
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager
from dataclasses import dataclass
from pathlib import Path

from dockyard_core import ConfigError, Task, UserError
from dockyard_core.data import dataset_fingerprint, read_tasks
from dockyard_grpo import compose, reaper, scratch
from dockyard_grpo.cluster import start_ray, stop_ray
from dockyard_grpo.config import Config
from dockyard_grpo.fleets import Fleets
from dockyard_grpo.pipeline import Pipeline
from dockyard_grpo.preflight import check, check_repositories
from dockyard_grpo.progress import Reporter, make_reporter
from dockyard_grpo.recovery import Budget, TrainerLost
from dockyard_grpo.resume import RestorePoint, check_same_run, find_restore_point
from dockyard_grpo.run_directory import RunDirectory
from dockyard_grpo.tracker import Tracker, make_tracker

_SIGNALS = (signal.SIGINT, signal.SIGTERM)
_NODE_POLL_S = 2.0


@dataclass(frozen=True)
class Outcome:
    """How a run ended."""

    run: Path
    stopped_by: signal.Signals | None
    """The signal that ended it in order before its last step; None = it is done, or out of time."""
    is_out_of_time: bool = False
    """It stopped for checkpoint.must_save_by, and wants to be resumed."""


@dataclass(frozen=True)
class _Job:
    config: Config
    run: RunDirectory
    reporter: Reporter
    tracker: Tracker
    training: tuple[Task, ...]
    validation: tuple[Task, ...]
    budget: Budget


def train(config: Config) -> Outcome:
    """Run to the last step.

    Raises UserError for mistakes of the user, before anything heavy starts where that is possible.
    """
    check(config)
    training = read_tasks(compose.data_path(config.data.train or ""), limit=config.data.limit)
    validation: tuple[Task, ...] = ()
    if config.data.validation is not None:
        validation = read_tasks(compose.data_path(config.data.validation), limit=config.evaluation.num_tasks)
    check_repositories(config, (*training, *validation))
    with (
        RunDirectory.create(config) as run,
        make_reporter(config.logging.console, config.run.max_steps) as reporter,
    ):
        reporter.say(f"run directory {_short(run.path)}: {len(training)} training, {len(validation)} held-out tasks")
        with closing(make_tracker(config.logging.trackers, run.path, report=reporter.say)) as tracker:
            job = _Job(config, run, reporter, tracker, training, validation, Budget(config.recovery))
            stopped_by = _live(job)
        if stopped_by is None and not run.is_out_of_time:
            reporter.say(f"done: {_short(run.path)} (checkpoints/latest/hf loads with transformers and vLLM)")
    return Outcome(run.path, stopped_by, run.is_out_of_time)


def _live(job: _Job) -> signal.Signals | None:
    """Live once, and again from the last checkpoint whenever the trainer dies and may be recovered.

    A life that follows a death waits for room: the node that takes the place of a lost one may join later.
    """
    waits_until = 0.0
    while True:
        run, config = job.run, job.config
        run.close_files()
        run.holds_run = run.holds_run or (run.path / "events.jsonl").exists()
        point = find_restore_point(run.path) if run.holds_run else None
        if point is not None:
            check_same_run(point, config, dataset_fingerprint(job.training))
            if point.step >= config.run.max_steps:
                job.reporter.say(f"{_short(run.path)} has its {point.step} steps; to go on, raise run.max_steps")
                return None
        run.write_config(config, incarnation=point.incarnation if point is not None else 0)
        try:
            return _run_fleets(job, point)
        except* TrainerLost as lost:
            if config.recovery.trainer == "stop" or not job.budget.spend():
                raise
            waits_until = time.monotonic() + config.recovery.timeout_s
            job.reporter.say(f"a trainer rank died ({lost.exceptions[0]}); going on from the last checkpoint")
        except* ConfigError as refused:
            if time.monotonic() > waits_until:
                raise
            job.reporter.say(f"waiting for a node, recovery.timeout_s at most: {refused.exceptions[0]}")
            time.sleep(_NODE_POLL_S)


def _run_fleets(job: _Job, point: RestorePoint | None) -> signal.Signals | None:
    scratch.sweep()
    folder = scratch.make("ray")
    guard = reaper.start(folder)
    try:
        num_gpus = start_ray(job.config, folder)
        return asyncio.run(_run(job, point, num_gpus))
    except (UserError, KeyboardInterrupt, asyncio.CancelledError):
        raise
    except BaseException:
        _keep_logs(folder, job)
        raise
    finally:
        stop_ray()
        reaper.reap(str(folder), spare=os.getpid())
        guard.kill()
        guard.wait()


async def _run(job: _Job, point: RestorePoint | None, num_gpus: int) -> signal.Signals | None:
    fleets = Fleets()
    with _signals() as received:
        try:
            fleets.start_recorder(job.run)
            await fleets.start(job.config, num_gpus, job.training, job.validation, job.reporter)
            pipeline = Pipeline(
                job.config,
                fleets,
                job.run,
                job.reporter,
                job.tracker,
                job.training,
                job.validation,
                budget=job.budget,
                point=point,
            )
            received.on_first(pipeline.request_stop)
            done = await pipeline.run()
            await fleets.flush()
            return received.first if done < job.config.run.max_steps else None
        finally:
            await fleets.stop()


class _Received:
    """What signals do: the first one asks for an orderly stop, the second one cancels."""

    def __init__(self, cancel: Callable[[], object]) -> None:
        self.first: signal.Signals | None = None
        self._cancel = cancel
        self._request_stop: Callable[[], None] | None = None

    def on_first(self, request_stop: Callable[[], None]) -> None:
        """From now on there is a step to finish and something to save."""
        self._request_stop = request_stop

    def __call__(self, number: signal.Signals) -> None:
        if self.first is None and self._request_stop is not None:
            self.first = number
            self._request_stop()
        else:
            self._cancel()


@contextmanager
def _signals() -> Iterator[_Received]:
    task = asyncio.current_task()
    assert task is not None, "called from a running event loop"
    loop = asyncio.get_running_loop()
    received = _Received(task.cancel)
    for number in _SIGNALS:
        loop.add_signal_handler(number, received, number)
    try:
        yield received
    finally:
        for number in _SIGNALS:
            loop.remove_signal_handler(number)


def _keep_logs(folder: Path, job: _Job) -> None:
    """Ray's logs leave with the scratch folder; after a failure of ours they are wanted."""
    latest = folder / "session_latest" / "logs"
    if latest.is_dir():
        shutil.copytree(latest, job.run.path / "ray-logs", dirs_exist_ok=True, ignore_dangling_symlinks=True)
        job.reporter.say(
            f"the logs of Ray's processes are in {_short(job.run.path)}/ray-logs; if the run ends here, go on with "
            f"run.resume={_short(job.run.path)}"
        )


def _short(path: Path) -> Path:
    return path.relative_to(Path.cwd()) if path.is_relative_to(Path.cwd()) else path
