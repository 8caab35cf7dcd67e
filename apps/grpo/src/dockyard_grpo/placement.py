"""What goes where on the nodes of a cluster, and what is missing: known before anything is placed.

Pure functions; `cluster` brings the nodes and asks Ray for what is planned here. The roles of a node
are labels of its Ray (``ray start --labels=dockyard/trainer=true``), because Ray's scheduler sees
labels and no environment.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field

from dockyard_core import ConfigError

ROLES = ("trainer", "inference", "sandbox")
LABEL_PREFIX = "dockyard/"
_UNIT = 10_000  # Ray counts resources in ten-thousandths
_NAMED_NODES = 6
_KNOBS = {
    "trainer": ("policy.num_ranks", "cluster.trainer_cpus"),
    "inference": ("generation.num_engines", "cluster.inference_cpus"),
    "sandbox": ("cluster.num_sandboxes", "cluster.sandbox_cpus"),
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
    environment: Mapping[str, str] = field(default_factory=dict)
    """What a member's process has besides, from its start."""

    @property
    def bundle(self) -> dict[str, float]:
        """Resources of one member."""
        return {"CPU": float(self.cpus), **({"GPU": float(self.gpus)} if self.gpus else {})}


@dataclass(frozen=True, kw_only=True)
class Node:
    """A living node of the cluster."""

    id: str
    name: str
    """For people; unique in the cluster."""
    roles: frozenset[str]
    """What it declares; empty = nothing."""
    free: Mapping[str, float]
    """What Ray has not given away: CPU, GPU."""


@dataclass(frozen=True)
class Row:
    """One fleet in the table."""

    fleet: Fleet
    takers: tuple[Node, ...]
    """Nodes whose role allows the fleet and on which at least one member fits, were it alone."""
    planned: Mapping[str, int]
    """Node id -> members, in a plan that holds for all fleets at once."""

    @property
    def missing(self) -> int:
        """Members for which no node has room."""
        return self.fleet.count - sum(self.planned.values())


@dataclass(frozen=True)
class Placement:
    """A plan for every fleet with members."""

    rows: tuple[Row, ...]
    nodes: tuple[Node, ...]

    @property
    def is_complete(self) -> bool:
        """Whether every member of every fleet has a place."""
        return all(row.missing == 0 for row in self.rows)


def roles_of(labels: Mapping[str, str], name: str) -> frozenset[str]:
    """Roles that a node's labels declare. Raises ConfigError for a role that does not exist."""
    declared = {key.removeprefix(LABEL_PREFIX): value for key, value in labels.items() if key.startswith(LABEL_PREFIX)}
    for role, value in declared.items():
        if role not in ROLES or value != "true":
            raise ConfigError(
                f"a node's role must be a label {LABEL_PREFIX}ROLE=true with a ROLE of {', '.join(ROLES)}, got "
                f"{LABEL_PREFIX}{role}={value} on node {name}; restart its Ray: {start_line('trainer')}"
            )
    return frozenset(declared)


def start_line(role: str | None, address: str | None = None) -> str:
    """The command that adds a node; with a role, it declares it to Ray and to whoever looks at the environment."""
    join = f"ray start --address={address or 'HEAD:6379'}"
    if role is None:
        return f"`{join}`"
    return f"`DOCKYARD_FLEET_ROLE={role} {join} --labels={LABEL_PREFIX}{role}=true`"


def candidates(role: str, nodes: Sequence[Node]) -> tuple[Node, ...]:
    """Nodes whose role allows a fleet: those that declare it; if none does, those that declare nothing."""
    declaring = tuple(node for node in nodes if role in node.roles)
    return declaring or tuple(node for node in nodes if not node.roles)


def label_selector(role: str, nodes: Sequence[Node]) -> dict[str, str]:
    """The rule of `candidates` in Ray's words; it also holds for nodes that join later."""
    declared = frozenset[str]().union(*(node.roles for node in nodes))
    if role in declared:
        return {f"{LABEL_PREFIX}{role}": "true"}
    return {f"{LABEL_PREFIX}{other}": "!true" for other in ROLES} if declared else {}


def plan(fleets: Sequence[Fleet], nodes: Sequence[Node]) -> Placement:
    """Place as many members as there is room for, all fleets together.

    The plan is complete if and only if a complete one exists: first as Ray would do it, member by
    member, and where that fails by trying every way to share the nodes.
    """
    asked = [fleet for fleet in fleets if fleet.count]
    # What does not fit alone is missing in any case; the rest is asked for no more than that.
    wanted = {fleet.role: min(fleet.count, _room_alone(fleet, candidates(fleet.role, nodes))) for fleet in asked}
    planned = _one_by_one(asked, wanted, nodes)
    if any(sum(planned[fleet.role].values()) < wanted[fleet.role] for fleet in asked):
        planned = _best_of_all(asked, wanted, nodes)
    rows = []
    for fleet in asked:
        takers = tuple(node for node in candidates(fleet.role, nodes) if _room(fleet, _units(node)))
        rows.append(Row(fleet, takers, planned[fleet.role]))
    return Placement(tuple(rows), tuple(nodes))


def table(placement: Placement) -> list[str]:
    """Aligned lines, a head and one per fleet."""
    lines = [("fleet", "members", "strategy", "missing", "nodes that can take it (free)")]
    for row in placement.rows:
        fleet = row.fleet
        lines.append(
            (
                fleet.role,
                f"{fleet.count} x {_amounts(fleet.bundle)}",
                fleet.strategy,
                str(row.missing),
                _listed(row.takers) or "none",
            )
        )
    widths = [max(map(len, column)) for column in zip(*lines, strict=True)]
    return ["  ".join(cell.ljust(width) for cell, width in zip(line, widths, strict=True)).rstrip() for line in lines]


def refuse_what_is_missing(placement: Placement, address: str | None) -> None:
    """Raise ConfigError for the first fleet that has no place, with what it needs, what there is, the way out."""
    for row in placement.rows:
        if row.missing == 0:
            continue
        role, placed = row.fleet.role, row.fleet.count - row.missing
        declared = frozenset[str]().union(*(node.roles for node in placement.nodes))
        where = f" on nodes {'of that role' if role in declared else 'without a role'}" if declared else ""
        beside = " beside the other fleets" if _room_alone(row.fleet, row.takers) > placed else ""
        there = _listed(candidates(role, placement.nodes)) or "no such node"
        count, cpus = _KNOBS[role]
        raise ConfigError(
            f"the {role} fleet needs {row.fleet.count} x {_amounts(row.fleet.bundle)}{where}, got room for "
            f"{placed}{beside} ({there}); add a node: {start_line(role if declared else None, address)}, or lower "
            f"{count} or {cpus}"
        )


def _listed(nodes: Sequence[Node]) -> str:
    named = [f"{node.name} ({_amounts(node.free)})" for node in nodes[:_NAMED_NODES]]
    return ", ".join(named) + (f" and {len(nodes) - len(named)} more" if len(nodes) > len(named) else "")


def _amounts(resources: Mapping[str, float]) -> str:
    return " + ".join(f"{resources.get(kind, 0):g} {kind}" for kind in ("CPU", "GPU") if resources.get(kind)) or "0 CPU"


# Below, resources are whole numbers of Ray's units: (CPU, GPU).
_Units = tuple[int, int]


def _units(node: Node) -> _Units:
    return round(node.free.get("CPU", 0) * _UNIT), round(node.free.get("GPU", 0) * _UNIT)


def _room(fleet: Fleet, free: _Units) -> int:
    """Members that fit into ``free``."""
    by_gpu = [free[1] // (fleet.gpus * _UNIT)] if fleet.gpus else []
    return min([free[0] // (fleet.cpus * _UNIT), *by_gpu])


def _without(free: _Units, fleet: Fleet, count: int) -> _Units:
    return free[0] - count * fleet.cpus * _UNIT, free[1] - count * fleet.gpus * _UNIT


def _room_alone(fleet: Fleet, nodes: Sequence[Node]) -> int:
    return sum(_room(fleet, _units(node)) for node in nodes)


def by_size(fleets: Sequence[Fleet]) -> list[Fleet]:
    """The order of placing: what is hardest to place goes first."""
    return sorted(fleets, key=lambda fleet: (-fleet.gpus, -fleet.cpus, ROLES.index(fleet.role)))


def _one_by_one(
    fleets: Sequence[Fleet], wanted: Mapping[str, int], nodes: Sequence[Node]
) -> dict[str, Mapping[str, int]]:
    """SPREAD: to the node with the fewest members; PACK: to the one with the most; the rest is left over."""
    free = {node.id: _units(node) for node in nodes}
    planned: dict[str, Mapping[str, int]] = {}
    for fleet in by_size(fleets):
        here: dict[str, int] = {}
        allowed = [node.id for node in candidates(fleet.role, nodes)]
        sign = 1 if fleet.strategy == "SPREAD" else -1
        for _ in range(wanted[fleet.role]):
            fitting = [name for name in allowed if _room(fleet, free[name])]
            if not fitting:
                break
            best = min(fitting, key=lambda name: (sign * here.get(name, 0), sign * -free[name][0]))
            here[best] = here.get(best, 0) + 1
            free[best] = _without(free[best], fleet, 1)
        planned[fleet.role] = here
    return planned


def _best_of_all(
    fleets: Sequence[Fleet], wanted: Mapping[str, int], nodes: Sequence[Node]
) -> dict[str, Mapping[str, int]]:
    """The most members that can be placed at all, by dynamic programming over the nodes.

    After each node, for every reachable number of members of all fleets but the last, only the way
    with most members of the last one is kept: more of it is never worse.
    """
    goal = tuple(wanted[fleet.role] for fleet in fleets)
    allowed = [{node.id for node in candidates(fleet.role, nodes)} for fleet in fleets]
    ways: dict[tuple[int, ...], tuple[tuple[int, ...], ...]] = {(0,) * len(fleets): ()}
    for node in nodes:
        here = [fleet if node.id in ids else None for fleet, ids in zip(fleets, allowed, strict=True)]
        shares = list(_shares(here, _units(node)))
        grown: dict[tuple[int, ...], tuple[tuple[int, ...], tuple[tuple[int, ...], ...]]] = {}
        for total, way in ways.items():
            for share in shares:
                added = tuple(min(s, want - have) for s, want, have in zip(share, goal, total, strict=True))
                reached = tuple(have + more for have, more in zip(total, added, strict=True))
                if reached[:-1] not in grown or grown[reached[:-1]][0] < reached:
                    grown[reached[:-1]] = reached, (*way, added)
        ways = dict(grown.values())
    best = ways[max(ways, key=lambda total: (sum(total), total))]
    return {
        fleet.role: {node.id: share[index] for node, share in zip(nodes, best, strict=True) if share[index]}
        for index, fleet in enumerate(fleets)
    }


def _shares(fleets: Sequence[Fleet | None], free: _Units) -> Iterator[tuple[int, ...]]:
    """Every way to share one node in which the last fleet takes all that is left; None = not allowed here."""
    fleet, *others = fleets
    most = _room(fleet, free) if fleet is not None else 0
    for count in range(most if not others else 0, most + 1):
        left = _without(free, fleet, count) if fleet is not None else free
        for rest in _shares(others, left) if others else ((),):
            yield (count, *rest)
