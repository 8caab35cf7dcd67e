"""`train`: from a validated configuration to a finished run directory."""

from __future__ import annotations

import asyncio
from pathlib import Path

from dockyard_core import Task
from dockyard_core.data import read_tasks
from dockyard_grpo import compose
from dockyard_grpo.cluster import start_ray
from dockyard_grpo.config import Config
from dockyard_grpo.fleets import Fleets
from dockyard_grpo.pipeline import Pipeline
from dockyard_grpo.preflight import check_model
from dockyard_grpo.progress import Reporter, make_reporter
from dockyard_grpo.run_directory import RunDirectory


def train(config: Config) -> Path:
    """Run to the last step; returns the run directory.

    Raises UserError for mistakes of the user, before anything heavy starts where that is possible.
    """
    check_model(config)
    training = read_tasks(compose.data_path(config.data.train or ""), limit=config.data.limit)
    validation: tuple[Task, ...] = ()
    if config.data.validation is not None:
        validation = read_tasks(compose.data_path(config.data.validation), limit=config.evaluation.num_tasks)
    with (
        RunDirectory.create(config) as run,
        make_reporter(config.logging.console, config.run.max_steps) as reporter,
    ):
        reporter.say(f"run directory {_short(run.path)}: {len(training)} training, {len(validation)} held-out tasks")
        _run_fleets(config, run, reporter, training, validation)
        reporter.say(f"done: {_short(run.path)} (checkpoints/latest/hf loads with transformers and vLLM)")
    return run.path


def _run_fleets(
    config: Config,
    run: RunDirectory,
    reporter: Reporter,
    training: tuple[Task, ...],
    validation: tuple[Task, ...],
) -> None:
    import ray

    num_gpus = start_ray(config)
    try:
        asyncio.run(_run(config, run, reporter, num_gpus, training, validation))
    finally:
        ray.shutdown()


async def _run(
    config: Config,
    run: RunDirectory,
    reporter: Reporter,
    num_gpus: int,
    training: tuple[Task, ...],
    validation: tuple[Task, ...],
) -> None:
    fleets = Fleets()
    try:
        fleets.start_recorder(run)
        await fleets.start(config, num_gpus, training, validation, reporter)
        await Pipeline(config, fleets, run, reporter, training, validation).run()
        await fleets.flush()
    finally:
        await fleets.stop()


def _short(path: Path) -> Path:
    return path.relative_to(Path.cwd()) if path.is_relative_to(Path.cwd()) else path
