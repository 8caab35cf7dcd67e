"""Three fleets in Ray placement groups: trainer SPREAD, inference PACK, sandbox SPREAD."""

from __future__ import annotations

import asyncio
import os
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from dockyard_core import ConfigError
from dockyard_grpo.config import Config

# Read when Ray is first imported, so nothing else of the app may import it earlier. Ray re-launches
# workers through `uv run` by default, which would sync the environment again.
_RAY_ENVIRONMENT = {
    "RAY_ENABLE_UV_RUN_RUNTIME_ENV": "0",
    "SPT_NOENV": "1",  # a process title must not overwrite the environment, by which `reaper` knows its own
    "RAY_USAGE_STATS_ENABLED": "0",
    "RAY_DEDUP_LOGS": "0",
    "RAY_IGNORE_UNHANDLED_ERRORS": "1",  # the first failure is raised; its siblings' tracebacks only hide it
    "RAY_worker_niceness": "0",  # by default Ray's workers yield to everything else on the machine
    "RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO": "0",
}


@dataclass(frozen=True, kw_only=True)
class Fleet:
    """How many bundles of which size, and how Ray places them."""

    role: str
    count: int
    cpus: int
    gpus: int
    strategy: str
    num_threads: int

    @property
    def bundle(self) -> dict[str, float]:
        """Resources of one member."""
        return {"CPU": float(self.cpus), **({"GPU": float(self.gpus)} if self.gpus else {})}


def plan_fleets(config: Config, num_gpus: int) -> tuple[Fleet, Fleet, Fleet]:
    """Trainer, inference and sandbox fleet. GPU bundles where there are GPUs, else CPU bundles.

    Raises ConfigError when more GPUs are asked for than there are.
    """
    cluster = config.cluster
    has_gpu = num_gpus > 0
    trainer_gpus = cluster.trainer_gpus if cluster.trainer_gpus is not None else int(has_gpu)
    engine_gpus = config.generation.tensor_parallel_size * int(has_gpu)
    inference_gpus = cluster.inference_gpus if cluster.inference_gpus is not None else engine_gpus
    asked = trainer_gpus * config.policy.num_ranks + inference_gpus * config.generation.num_engines
    if asked > num_gpus:
        raise ConfigError(
            f"the fleets ask for {asked} GPUs ({config.policy.num_ranks} x {trainer_gpus} trainer, "
            f"{config.generation.num_engines} x {inference_gpus} inference), but Ray sees {num_gpus}; lower "
            "generation.num_engines, or set cluster.trainer_gpus=0 cluster.inference_gpus=0"
        )
    share = cluster.threads_per_worker
    return (
        Fleet(
            role="trainer",
            count=config.policy.num_ranks,
            cpus=cluster.trainer_cpus,
            gpus=trainer_gpus,
            strategy="SPREAD",
            num_threads=config.policy.num_threads or share,
        ),
        Fleet(
            role="inference",
            count=config.generation.num_engines,
            cpus=cluster.inference_cpus,
            gpus=inference_gpus,
            strategy="PACK",
            num_threads=config.generation.num_threads or share,
        ),
        Fleet(
            role="sandbox",
            count=0 if config.sandbox.url else cluster.num_sandboxes,
            cpus=cluster.sandbox_cpus,
            gpus=0,
            strategy="SPREAD",
            num_threads=1,
        ),
    )


def start_ray(config: Config, folder: Path) -> int:
    """Join ``cluster.address`` or start Ray on this machine; returns the number of GPUs it sees.

    Args:
        config: of the run.
        folder: where a Ray started here keeps its sessions and logs.
    """
    assert "ray" not in sys.modules, "Ray reads these variables when it is imported"
    os.environ.update({name: os.environ.get(name, value) for name, value in _RAY_ENVIRONMENT.items()})
    # Container images like to set this; without bytecode an engine starts in twice the time, every time.
    os.environ.pop("PYTHONDONTWRITEBYTECODE", None)
    import ray

    if config.cluster.address is not None:
        try:
            ray.init(address=config.cluster.address, log_to_driver=False, logging_level="ERROR")
        except ConnectionError as error:
            raise ConfigError(
                f"cluster.address must name a running Ray cluster, got {config.cluster.address!r}; "
                "start one with `ray start --head`, or leave the key out"
            ) from error
    else:
        # Logical CPUs: on a small machine the fleets share the cores, as the operating system lets them.
        needed = sum(fleet.count * fleet.cpus for fleet in plan_fleets(config, num_gpus=1 << 20))
        ray.init(
            num_cpus=max(needed, os.cpu_count() or 1),
            object_store_memory=config.cluster.object_store_mib << 20,
            include_dashboard=False,
            _temp_dir=str(folder),
            log_to_driver=False,
            logging_level="ERROR",
        )
    return int(ray.cluster_resources().get("GPU", 0))


def stop_ray() -> None:
    """Leave the cluster, or end the Ray started here; harmless before `start_ray`."""
    if "ray" in sys.modules:
        import ray

        ray.shutdown()


async def place(fleet: Fleet, *, timeout_s: float = 120.0) -> Any:
    """Reserve the fleet's bundles. Raises ConfigError when they cannot be had in time."""
    import ray
    from ray.util.placement_group import placement_group

    group = placement_group([fleet.bundle] * fleet.count, strategy=fleet.strategy, name=f"dockyard-{fleet.role}")
    try:
        async with asyncio.timeout(timeout_s):
            await group.ready()
    except TimeoutError as error:
        raise ConfigError(
            f"the {fleet.role} fleet needs {fleet.count} x {fleet.bundle}, which Ray could not place in "
            f"{timeout_s:.0f} s ({ray.available_resources()} free); add nodes or lower the cluster section"
        ) from error
    return group


def spawn(worker: type, fleet: Fleet, group: Any, index: int, *args: Any, **kwargs: Any) -> Any:
    """Start one actor of a fleet in its bundle; it inherits DOCKYARD_FLEET_ROLE."""
    import ray
    from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

    environment = {"DOCKYARD_FLEET_ROLE": fleet.role, "OMP_NUM_THREADS": str(fleet.num_threads)}
    if fleet.gpus == 0:
        environment["CUDA_VISIBLE_DEVICES"] = ""  # Ray hides no device from an actor that asked for none
    options = {
        "num_cpus": fleet.cpus,
        "num_gpus": fleet.gpus,
        "scheduling_strategy": PlacementGroupSchedulingStrategy(
            placement_group=group, placement_group_bundle_index=index
        ),
        "runtime_env": {"env_vars": environment},
    }
    return ray.remote(worker).options(**options).remote(*args, **kwargs)


def spawn_beside_driver(worker: type, *args: Any) -> Any:
    """Start an actor that takes no CPU on the driver's node."""
    import ray
    from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

    here = NodeAffinitySchedulingStrategy(node_id=ray.get_runtime_context().get_node_id(), soft=False)
    return ray.remote(worker).options(num_cpus=0, scheduling_strategy=here).remote(*args)
