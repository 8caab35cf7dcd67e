"""Three fleets in Ray placement groups: trainer SPREAD, inference PACK, sandbox SPREAD, each on nodes of its role."""

from __future__ import annotations

import asyncio
import os
import sys
import time
from pathlib import Path
from typing import Any

from dockyard_core import ConfigError
from dockyard_grpo.config import Config
from dockyard_grpo.jax_environment import jax_environment
from dockyard_grpo.placement import Fleet, Placement, Row, by_size, label_selector

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


SYSTEM_CONFIG = {"max_direct_call_object_size": 8 << 10}
"""Ray sends smaller results along with the answer, into the caller's heap: the driver gets summaries, no tokens."""
_TRIAL_S = 10.0
_PLACE_S = 120.0


def plan_fleets(config: Config, num_gpus: int) -> tuple[Fleet, Fleet, Fleet]:
    """Trainer, inference and sandbox fleet. GPU bundles where there are GPUs, else CPU bundles.

    Raises ConfigError when more GPUs are asked for than there are.
    """
    cluster = config.cluster
    has_gpu = num_gpus > 0
    trainer_gpus = cluster.trainer_gpus if cluster.trainer_gpus is not None else int(has_gpu)
    engine_gpus = config.generation.num_workers * int(has_gpu)
    inference_gpus = cluster.inference_gpus if cluster.inference_gpus is not None else engine_gpus
    asked = trainer_gpus * config.policy.num_ranks + inference_gpus * config.generation.num_engines
    if asked > num_gpus:
        raise ConfigError(
            f"the fleets ask for {asked} GPUs ({config.policy.num_ranks} x {trainer_gpus} trainer, "
            f"{config.generation.num_engines} x {inference_gpus} inference), but Ray sees {num_gpus}; lower "
            "generation.num_engines, or set cluster.trainer_gpus=0 cluster.inference_gpus=0"
        )
    share = cluster.threads_per_worker
    trainer_threads = config.policy.num_threads or share
    is_jax = config.policy.backend == "jax"
    return (
        Fleet(
            role="trainer",
            count=config.policy.num_ranks,
            cpus=cluster.trainer_cpus,
            gpus=trainer_gpus,
            strategy="SPREAD",
            num_threads=trainer_threads,
            environment=jax_environment(num_threads=trainer_threads, num_gpus=trainer_gpus) if is_jax else {},
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
    # A run whose trainer died starts Ray again, and finds them as it set them.
    is_set = all(name in os.environ for name in _RAY_ENVIRONMENT)
    assert is_set or "ray" not in sys.modules, "Ray reads these variables when it is imported"
    os.environ.update({name: os.environ.get(name, value) for name, value in _RAY_ENVIRONMENT.items()})
    # Container images like to set this; without bytecode an engine starts in twice the time, every time.
    os.environ.pop("PYTHONDONTWRITEBYTECODE", None)
    import ray

    if config.cluster.address is not None:
        _join(config.cluster.address)
    else:
        # Logical CPUs: on a small machine the fleets share the cores, as the operating system lets them.
        needed = sum(fleet.count * fleet.cpus for fleet in plan_fleets(config, num_gpus=1 << 20))
        ray.init(
            num_cpus=max(needed, os.cpu_count() or 1),
            object_store_memory=config.cluster.object_store_mib << 20,
            _system_config=SYSTEM_CONFIG,
            include_dashboard=False,
            _temp_dir=str(folder),
            log_to_driver=False,
            logging_level="ERROR",
        )
    return int(ray.cluster_resources().get("GPU", 0))


def _join(address: str) -> None:
    import ray

    try:
        ray.init(address=address, log_to_driver=False, logging_level="ERROR")
    except ConnectionError as error:
        if "AuthToken" in str(error.__cause__):
            raise ConfigError(
                f"cluster.address must name a cluster whose token this machine gives, got {address!r}; set "
                "RAY_AUTH_MODE=token, and copy ~/.ray/auth_token from its head"
            ) from error
        raise ConfigError(
            f"cluster.address must name a running Ray cluster, got {address!r}; "
            "start one with `ray start --head`, or leave the key out"
        ) from error
    except RuntimeError as error:  # no Ray on this machine, or another version of Python or of Ray
        raise ConfigError(
            f"cluster.address must name a cluster that this machine can join, got {address!r}: {error}; join it first "
            f"with `ray start --address={address}`"
        ) from error


def stop_ray() -> None:
    """Leave the cluster, or end the Ray started here; harmless before `start_ray`."""
    if "ray" in sys.modules:
        import ray

        ray.shutdown()


async def place(placement: Placement) -> dict[str, Any]:
    """Reserve the bundles of every fleet; role -> placement group. Raises ConfigError when Ray has no place for one.

    Ray chooses among the nodes of the fleet's role, and again when a node is lost. Where fleets share
    nodes it may choose badly; then each bundle is bound to the node of the plan.
    """
    from ray.util.placement_group import remove_placement_group

    rows = {row.fleet.role: row for row in placement.rows}
    order = [rows[fleet.role] for fleet in by_size([row.fleet for row in placement.rows])]
    trials = [(False, _TRIAL_S), (True, _PLACE_S)] if len(placement.nodes) > 1 else [(False, _PLACE_S)]
    for is_bound, timeout_s in trials:
        groups = {row.fleet.role: _reserve(row, placement, is_bound) for row in order}
        late = await _wait_for(groups, timeout_s)
        if not late:
            return groups
        for group in groups.values():
            remove_placement_group(group)
    fleet = rows[late[0]].fleet
    raise ConfigError(
        f"the {fleet.role} fleet needs {fleet.count} x {fleet.bundle}, which Ray could not place in "
        f"{_PLACE_S:.0f} s, though there was room; see who else uses the cluster"
    )


def places(placement: Placement, groups: dict[str, Any]) -> str:
    """Where Ray placed the members of every fleet, in their order: ``trainer a, b; inference b``."""
    from ray.util.placement_group import placement_group_table

    names = {node.id: node.name for node in placement.nodes}
    fleets = []
    for row in placement.rows:
        node_of = placement_group_table(groups[row.fleet.role])["bundles_to_node_id"]
        fleets.append(f"{row.fleet.role} {', '.join(names[node_of[index]] for index in range(row.fleet.count))}")
    return "; ".join(fleets)


def _reserve(row: Row, placement: Placement, is_bound: bool) -> Any:
    from ray.util.placement_group import placement_group

    fleet, selector = row.fleet, label_selector(row.fleet.role, placement.nodes)
    selectors = [selector] * fleet.count if selector else []
    if is_bound:
        planned = [node for node, count in row.planned.items() for _ in range(count)]
        selectors = [{"ray.io/node-id": node} for node in planned]
    return placement_group(
        [fleet.bundle] * fleet.count,
        strategy=fleet.strategy,
        name=f"dockyard-{fleet.role}",
        bundle_label_selector=selectors or None,
    )


async def _wait_for(groups: dict[str, Any], timeout_s: float) -> list[str]:
    """Roles whose group Ray has not created in time."""
    from ray.util.placement_group import placement_group_table

    deadline = time.monotonic() + timeout_s
    while late := [role for role, group in groups.items() if placement_group_table(group).get("state") != "CREATED"]:
        if time.monotonic() > deadline:
            break
        await asyncio.sleep(0.05)
    return late


def spawn(worker: type, fleet: Fleet, group: Any, index: int, *args: Any, **kwargs: Any) -> Any:
    """Start one actor of a fleet in its bundle; it inherits DOCKYARD_FLEET_ROLE."""
    import ray
    from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

    environment = {
        "DOCKYARD_FLEET_ROLE": fleet.role,
        "OMP_NUM_THREADS": str(fleet.num_threads),
        **fleet.environment,
    }
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


def kill(actor: Any) -> None:
    """End an actor at once; harmless when it is gone already."""
    import ray

    ray.kill(actor, no_restart=True)


def spawn_beside_driver(worker: type, *args: Any) -> Any:
    """Start an actor that takes no CPU on the driver's node."""
    import ray
    from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

    here = NodeAffinitySchedulingStrategy(node_id=ray.get_runtime_context().get_node_id(), soft=False)
    return ray.remote(worker).options(num_cpus=0, scheduling_strategy=here).remote(*args)
