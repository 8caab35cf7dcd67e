"""Looks at the cluster before anything is placed: who is there, what fits where, what a node cannot see."""

from __future__ import annotations

import asyncio
import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any
from urllib.parse import unquote, urlsplit

from dockyard_core import ConfigError, Task
from dockyard_grpo import compose
from dockyard_grpo.config import Config
from dockyard_grpo.node_probe import Answer, Need, look, seal_of
from dockyard_grpo.placement import (
    LABEL_PREFIX,
    Fleet,
    Node,
    Placement,
    plan,
    refuse_what_is_missing,
    roles_of,
    start_line,
    table,
)

_SETTLE_S = 20.0
"""How long room may take to come free: the actors of a run that has just ended go one by one."""
_ANSWER_S = 120.0
_WAYS_OUT = {
    "repo": "put it on a file system that every sandbox node mounts, or write its https:// URL",
    "run.dir": "choose a run.dir on a file system that the trainer nodes and this machine share",
    "policy.model": "put it on a file system that these nodes mount, or name a hub id",
}


async def survey(
    config: Config, fleets: Sequence[Fleet], needs: Mapping[str, Sequence[Need]], say: Callable[[str], None]
) -> Placement:
    """Plan every fleet; on a cluster of several nodes say the plan as a table, and ask the nodes.

    Args:
        config: of the run.
        fleets: to be placed.
        needs: role -> what each node that can take the role's fleet must see.
        say: prints a line.

    Raises ConfigError, in one line with the way out, for what has no place or is not seen. Nothing was
    started then.
    """
    placement = await _plan(fleets)
    if len(placement.nodes) > 1:
        for line in table(placement):
            say(line)
    refuse_what_is_missing(placement, config.cluster.address)
    if len(placement.nodes) > 1:
        await _ask_nodes(placement, needs)
    return placement


def needs_of(config: Config, tasks: Sequence[Task], run: Path) -> dict[str, tuple[Need, ...]]:
    """What the nodes of each role must see: repositories, the model, the run directory."""
    model = Path(compose.model_path(config)).expanduser()
    models = (Need("policy.model", model.absolute()),) if model.is_dir() else ()
    repositories = {path for task in tasks if (path := _local_path(task.repo)) is not None}
    return {
        "trainer": (Need("run.dir", run, sealed=seal_of(run), must_write=True), *models),
        "inference": models,
        "sandbox": tuple(Need("repo", path) for path in sorted(repositories)),
    }


def living_nodes(*, total: bool = False) -> list[Node]:
    """The cluster's nodes, by name; ``total`` = as if nothing were in use. Raises ConfigError for an unknown role."""
    import ray
    from ray._private.state import available_resources_per_node  # Ray has no public call that tells nodes apart

    free = available_resources_per_node()
    alive = [node for node in ray.nodes() if node["Alive"]]
    names = Counter(node["NodeName"] for node in alive)
    nodes = []
    for node in alive:
        name = node["NodeName"] if names[node["NodeName"]] == 1 else f"{node['NodeName']}#{node['NodeID'][:6]}"
        there = node["Resources"] if total else free.get(node["NodeID"], {})
        nodes.append(
            Node(
                id=node["NodeID"],
                name=name,
                roles=roles_of(node["Labels"], name),
                free={kind: there[kind] for kind in ("CPU", "GPU") if kind in there},
            )
        )
    return sorted(nodes, key=lambda node: node.name)


async def _plan(fleets: Sequence[Fleet]) -> Placement:
    deadline = time.monotonic() + _SETTLE_S
    while not (placement := plan(fleets, living_nodes())).is_complete and time.monotonic() < deadline:
        if not plan(fleets, living_nodes(total=True)).is_complete:
            break
        await asyncio.sleep(0.5)
    return placement


async def _ask_nodes(placement: Placement, needs: Mapping[str, Sequence[Need]]) -> None:
    wanted: dict[str, dict[Need, None]] = {node.id: {} for node in placement.nodes}
    for row in placement.rows:
        for node in row.takers:
            wanted[node.id].update(dict.fromkeys(needs.get(row.fleet.role, ())))
    answers = await asyncio.gather(*(_ask(node, tuple(wanted[node.id])) for node in placement.nodes))
    for node, answer in zip(placement.nodes, answers, strict=True):
        _check_role(node, answer.declared)
        for need, why in answer.unmet:
            raise ConfigError(
                f"{need.key} must be seen by node {node.name}, got {str(need.path)!r}, which {why}; "
                f"{_WAYS_OUT[need.key]}"
            )


async def _ask(node: Node, needs: tuple[Need, ...]) -> Answer:
    import ray
    from ray.exceptions import RayError
    from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

    there = NodeAffinitySchedulingStrategy(node_id=node.id, soft=False)
    reference: Any = ray.remote(look).options(num_cpus=0, max_retries=0, scheduling_strategy=there).remote(needs)
    try:
        async with asyncio.timeout(_ANSWER_S):
            answer: Answer = await reference
    except TimeoutError as error:
        raise ConfigError(
            f"node {node.name} must start a worker, got none within {_ANSWER_S:.0f} s; look at its Ray's logs, or take "
            "the node out with `ray stop`"
        ) from error
    except RayError as error:
        reason = str(error).strip().splitlines()[-1]
        raise ConfigError(
            f"node {node.name} must run what this machine runs, got {reason}; install the same environment there, at "
            "the same path"
        ) from error
    return answer


def _check_role(node: Node, declared: str | None) -> None:
    """An environment that says more or less than the labels would be passed over in silence."""
    said = frozenset(word.strip() for word in (declared or "").split(",") if word.strip())
    if declared is not None and said != node.roles:
        labels = ",".join(f"{LABEL_PREFIX}{role}=true" for role in sorted(node.roles)) or "none"
        raise ConfigError(
            f"DOCKYARD_FLEET_ROLE must agree with the labels of the node's Ray, got {declared!r} and {labels} on node "
            f"{node.name}; restart it: {start_line(min(said, default=None))}"
        )


def _local_path(repo: str) -> Path | None:
    """A repository that is a path, else None."""
    if "://" not in repo:
        return Path(repo) if Path(repo).is_absolute() else None
    parts = urlsplit(repo)
    return Path(unquote(parts.path)) if parts.scheme == "file" else None
