from __future__ import annotations

import dataclasses
import hashlib
import itertools
import json
import os
import pickle
import re
import shlex
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import dockyard_grpo
from dockyard_core import ConfigError, GroupId
from dockyard_core.data import read_tasks
from dockyard_grpo import placement
from dockyard_grpo.config import load_config
from dockyard_grpo.node_probe import Need, look, seal_of
from dockyard_grpo.placement import Fleet, Node, candidates, label_selector, plan, roles_of, table
from dockyard_grpo.summary import GroupSummary, RolloutSummary
from dockyard_grpo.survey import needs_of

ROOT = Path(__file__).resolve().parents[3]
PAGE = ROOT / "docs/architecture/cluster-and-fleets.md"


def fleet(role: str, count: int, cpus: int = 1, gpus: int = 0) -> Fleet:
    strategy = "PACK" if role == "inference" else "SPREAD"
    return Fleet(role=role, count=count, cpus=cpus, gpus=gpus, strategy=strategy, num_threads=1)


def node(name: str, cpus: float, gpus: float = 0, roles: str = "") -> Node:
    return Node(id=f"id-{name}", name=name, roles=frozenset(roles.split()), free={"CPU": cpus, "GPU": gpus})


def planned(found: placement.Placement) -> dict[str, dict[str, int]]:
    return {row.fleet.role: {name.removeprefix("id-"): n for name, n in row.planned.items()} for row in found.rows}


THREE = [fleet("trainer", 2), fleet("inference", 1), fleet("sandbox", 1)]


def test_one_machine_without_roles_takes_every_fleet() -> None:
    found = plan(THREE, [node("a", 4)])
    assert found.is_complete
    assert planned(found) == {"trainer": {"a": 2}, "inference": {"a": 1}, "sandbox": {"a": 1}}


def test_each_fleet_goes_to_the_nodes_of_its_role_only() -> None:
    nodes = [node("t", 2, roles="trainer"), node("i", 8, roles="inference"), node("s", 2, roles="sandbox")]
    assert planned(plan(THREE, nodes)) == {"trainer": {"t": 2}, "inference": {"i": 1}, "sandbox": {"s": 1}}
    crowded = plan([fleet("trainer", 3)], nodes)
    assert [row.missing for row in crowded.rows] == [1]


def test_a_fleet_whose_role_nobody_declares_goes_to_nodes_that_declare_nothing() -> None:
    nodes = [node("t", 8, roles="trainer"), node("free", 2)]
    assert planned(plan(THREE, nodes)) == {"trainer": {"t": 2}, "inference": {"free": 1}, "sandbox": {"free": 1}}
    only = plan(THREE, nodes[:1])
    assert {row.fleet.role: row.missing for row in only.rows} == {"trainer": 0, "inference": 1, "sandbox": 1}


def test_a_node_of_several_roles_takes_several_fleets() -> None:
    both = node("both", 3, roles="inference sandbox")
    found = plan(THREE, [both, node("t", 2, roles="trainer")])
    assert planned(found) == {"trainer": {"t": 2}, "inference": {"both": 1}, "sandbox": {"both": 1}}


def test_fleets_share_nodes_so_their_sum_must_fit() -> None:
    for gpus, missing in ((3, 0), (2, 1)):
        found = plan([fleet("trainer", 1, gpus=1), fleet("inference", 2, gpus=1)], [node("a", 16, gpus)])
        assert sum(row.missing for row in found.rows) == missing
        assert all(row.takers for row in found.rows), "each would fit alone"


def test_trainers_and_sandboxes_spread_and_engines_pack() -> None:
    nodes = [node("a", 4), node("b", 4)]
    assert planned(plan([fleet("trainer", 2)], nodes)) == {"trainer": {"a": 1, "b": 1}}
    assert planned(plan([fleet("inference", 3)], nodes)) == {"inference": {"a": 3}}
    assert planned(plan([fleet("sandbox", 3)], nodes)) == {"sandbox": {"a": 2, "b": 1}}


def test_a_plan_is_found_where_placing_member_by_member_runs_into_a_dead_end() -> None:
    # The trainer, the largest, goes where most is free, and then there is room for one engine only.
    nodes = [node("a", 4), node("b", 3)]
    fleets = [fleet("trainer", 1, cpus=3), fleet("inference", 2, cpus=2)]
    assert placement._one_by_one(fleets, {"trainer": 1, "inference": 2}, nodes)["inference"] == {"id-b": 1}
    assert planned(plan(fleets, nodes)) == {"trainer": {"b": 1}, "inference": {"a": 2}}


@pytest.mark.parametrize(
    ("labels", "roles"),
    [
        ({}, set()),
        ({"ray.io/node-id": "1", "region": "north"}, set()),
        ({"dockyard/trainer": "true"}, {"trainer"}),
        ({"dockyard/sandbox": "true", "dockyard/inference": "true"}, {"sandbox", "inference"}),
    ],
)
def test_roles_are_read_from_labels(labels: Mapping[str, str], roles: set[str]) -> None:
    assert roles_of(labels, "a") == roles


@pytest.mark.parametrize("labels", [{"dockyard/trianer": "true"}, {"dockyard/trainer": "yes"}])
def test_a_label_that_is_almost_a_role_is_refused(labels: Mapping[str, str]) -> None:
    with pytest.raises(ConfigError, match=r"got dockyard/\w+=\w+ on node a; restart its Ray: `DOCKYARD_FLEET_ROLE="):
        roles_of(labels, "a")


def test_the_selector_for_ray_says_what_candidates_says() -> None:
    nodes = [node("t", 1, roles="trainer"), node("ts", 1, roles="trainer sandbox"), node("free", 1)]
    for role in placement.ROLES:
        selector = label_selector(role, nodes)
        chosen = [n for n in nodes if all(_satisfies(n, key, value) for key, value in selector.items())]
        assert chosen == list(candidates(role, nodes))
    assert label_selector("trainer", [node("a", 1), node("b", 1)]) == {}


def _satisfies(candidate: Node, key: str, value: str) -> bool:
    has = key.removeprefix("dockyard/") in candidate.roles
    return has if value == "true" else not has


def test_the_table_lists_each_fleet_with_what_it_needs_and_what_there_is() -> None:
    nodes = [
        node("head", 0), node("gpu-1", 14, 2, roles="trainer"), node("gpu-2", 16, 0.5, roles="trainer"),
        node("box", 31.5, roles="sandbox"),
    ]  # fmt: skip
    fleets = [fleet("trainer", 2, gpus=1), fleet("inference", 4, cpus=2, gpus=1), fleet("sandbox", 2, cpus=4)]
    assert table(plan(fleets, nodes)) == [
        "fleet      members            strategy  missing  nodes that can take it (free)",
        "trainer    2 x 1 CPU + 1 GPU  SPREAD    0        gpu-1 (14 CPU + 2 GPU)",
        "inference  4 x 2 CPU + 1 GPU  PACK      4        none",
        "sandbox    2 x 4 CPU          SPREAD    0        box (31.5 CPU)",
    ]


def test_long_lists_of_nodes_are_cut_with_their_number() -> None:
    line = table(plan([fleet("sandbox", 1)], [node(f"n{i:02}", 1) for i in range(40)]))[1]
    assert line.endswith("n04 (1 CPU), n05 (1 CPU) and 34 more")


@pytest.mark.parametrize(
    ("fleets", "nodes", "line"),
    [
        (
            [fleet("trainer", 2, cpus=4)],
            [node("a", 6), node("b", 2)],
            "the trainer fleet needs 2 x 4 CPU, got room for 1 (a (6 CPU), b (2 CPU)); add a node: "
            "`ray start --address=H:1`, or lower policy.num_ranks or cluster.trainer_cpus",
        ),
        (
            [fleet("trainer", 1), fleet("inference", 1)],
            [node("t", 4, roles="trainer")],
            "the inference fleet needs 1 x 1 CPU on nodes without a role, got room for 0 (no such node); add a node: "
            "`DOCKYARD_FLEET_ROLE=inference ray start --address=H:1 --labels=dockyard/inference=true`, or lower "
            "generation.num_engines or cluster.inference_cpus",
        ),
        (
            [fleet("trainer", 1, gpus=1), fleet("inference", 2, gpus=1)],
            [node("a", 8, 2, roles="trainer inference"), node("b", 8, roles="inference")],
            "the inference fleet needs 2 x 1 CPU + 1 GPU on nodes of that role, got room for 1 beside the other fleets "
            "(a (8 CPU + 2 GPU), b (8 CPU)); add a node: `DOCKYARD_FLEET_ROLE=inference ray start --address=H:1 "
            "--labels=dockyard/inference=true`, or lower generation.num_engines or cluster.inference_cpus",
        ),
    ],
)
def test_what_is_missing_is_one_line_with_the_command_that_brings_it(
    fleets: Sequence[Fleet], nodes: Sequence[Node], line: str
) -> None:
    with pytest.raises(ConfigError) as refused:
        placement.refuse_what_is_missing(plan(fleets, nodes), "H:1")
    assert str(refused.value) == line


def test_a_complete_plan_is_not_refused() -> None:
    placement.refuse_what_is_missing(plan(THREE, [node("a", 4)]), None)


ROLE_SETS = st.sets(st.sampled_from(placement.ROLES), max_size=2).map(frozenset)
NODES = st.lists(st.tuples(st.integers(0, 5), st.integers(0, 2), st.booleans(), ROLE_SETS), min_size=1, max_size=3).map(
    lambda rows: [
        Node(id=f"id-{i}", name=str(i), roles=roles, free={"CPU": cpus + 0.5 * half, "GPU": gpus})
        for i, (cpus, gpus, half, roles) in enumerate(rows)
    ]
)
FLEETS = st.tuples(
    *(st.builds(fleet, st.just(r), st.integers(0, 3), st.integers(1, 3), st.integers(0, 1)) for r in placement.ROLES)
)


def fits_by_brute_force(fleets: Sequence[Fleet], nodes: Sequence[Node]) -> bool:
    """Every assignment of every member to every node, judged by the rules as they are written."""
    declared = {role for n in nodes for role in n.roles}
    members = [one for one in fleets for _ in range(one.count)]
    for choice in itertools.product(nodes, repeat=len(members)):
        used = {n.id: [0.0, 0.0] for n in nodes}
        for member, n in zip(members, choice, strict=True):
            if member.role not in n.roles if member.role in declared else n.roles:
                break
            used[n.id][0] += member.cpus
            used[n.id][1] += member.gpus
        else:
            if all(used[n.id][0] <= n.free["CPU"] and used[n.id][1] <= n.free["GPU"] for n in nodes):
                return True
    return False


@settings(max_examples=300, deadline=None)
@given(FLEETS, NODES)
def test_the_table_says_it_fits_exactly_when_trying_everything_finds_a_way(
    fleets: Sequence[Fleet], nodes: list[Node]
) -> None:
    small = [one for one in fleets if sum(other.count for other in fleets) <= 7]
    found = plan(small, nodes)
    assert found.is_complete == fits_by_brute_force(small, nodes)


@settings(max_examples=300, deadline=None)
@given(FLEETS, NODES)
def test_a_plan_overfills_no_node_and_keeps_to_the_roles(fleets: Sequence[Fleet], nodes: list[Node]) -> None:
    found = plan(fleets, nodes)
    for n in nodes:
        here = [(row.fleet, row.planned.get(n.id, 0)) for row in found.rows]
        assert sum(one.cpus * count for one, count in here) <= n.free["CPU"]
        assert sum(one.gpus * count for one, count in here) <= n.free["GPU"]
        assert all(count == 0 or n in candidates(one.role, nodes) for one, count in here)
    assert all(row.missing >= 0 for row in found.rows)


def test_a_hundred_shared_nodes_are_planned_in_an_instant() -> None:
    nodes = [node(f"n{i:03}", 17, 8) for i in range(100)]
    fleets = [fleet("trainer", 64, cpus=2, gpus=1), fleet("inference", 100, cpus=9, gpus=4), fleet("sandbox", 300)]
    found = plan(fleets, nodes)
    assert found.is_complete
    assert len([row for row in found.rows if len(row.takers) == 100]) == 3


# The probe: what a node sees.


def test_a_node_says_which_paths_it_does_not_see(tmp_path: Path) -> None:
    there = tmp_path / "repo"
    there.mkdir()
    absent = Need("repo", tmp_path / "absent")
    assert look([Need("repo", there), absent]).unmet == ((absent, "is not there"),)


def test_a_directory_of_the_same_name_is_told_from_the_shared_one(tmp_path: Path) -> None:
    (tmp_path / "config.yaml").write_text("run: 1\n")
    shared = Need("run.dir", tmp_path, sealed=seal_of(tmp_path), must_write=True)
    assert shared.sealed == hashlib.sha256(b"run: 1\n").hexdigest()
    assert look([shared]).unmet == ()
    (tmp_path / "config.yaml").write_text("run: 2\n")
    assert look([shared]).unmet == ((shared, "is another directory of the same name"),)
    (tmp_path / "config.yaml").unlink()
    assert look([shared]).unmet == ((shared, "is another directory of the same name"),)


@pytest.mark.skipif(os.geteuid() == 0, reason="root may write everywhere")
def test_a_directory_that_may_not_be_written_is_named(tmp_path: Path) -> None:
    tmp_path.chmod(0o500)
    need = Need("run.dir", tmp_path, must_write=True)
    assert look([need]).unmet == ((need, "may not be written"),)


def test_nodes_need_what_their_fleet_opens_and_nothing_that_a_url_brings(tmp_path: Path) -> None:
    (tmp_path / "config.yaml").write_text("run: 1\n")
    task = read_tasks(Path(dockyard_grpo.__file__).parent / "quickstart/train.jsonl", limit=1)[0]
    sources = ("/shared/a.git", "/shared/a.git", "file:///shared/b%20c.git", "https://example.org/d.git", "owner/name")
    tasks = [dataclasses.replace(task, repo=source) for source in sources]
    needs = needs_of(load_config(None, []), tasks, tmp_path)
    assert [str(need.path) for need in needs["sandbox"]] == ["/shared/a.git", "/shared/b c.git"]
    run, *models = needs["trainer"]
    assert (run.path, run.must_write, run.sealed) == (tmp_path, True, seal_of(tmp_path))
    assert tuple(models) == needs["inference"]
    assert [(need.key, need.path.name) for need in models] == [("policy.model", "policy")]


# What travels to the driver.


def worst_summary(index: int = 0) -> RolloutSummary:
    return RolloutSummary(
        reward=-1.0 / 3.0 + index,
        unshaped_reward=1.0 / 7.0 + index,
        invalid_cause="test_patch_failed",
        oldest_version=2**40 + index,
        newest_version=2**41 + index,
        num_sampled_tokens=2**20 + index,
        finish_reason="length",
        status="policy_violation",
        is_cached=False,
        generate_s=1e3 / 7 + index,
        judge_s=1e3 / 3 + index,
        detail=chr(0x1F600 + index) * 200,  # four bytes each
    )


def test_a_summary_of_the_worst_rollout_is_at_most_1_kb() -> None:
    one = len(pickle.dumps(GroupSummary(GroupId("task", 1), ()), protocol=5))
    assert len(pickle.dumps(worst_summary(), protocol=5)) <= 1024
    sixteen = GroupSummary(GroupId("owner__project-12345", 2**31), tuple(worst_summary(i) for i in range(16)))
    assert one < len(pickle.dumps(sixteen, protocol=5)) <= 16 * 1024


# The commands of the documentation are read by Ray's own parser.


def documented_starts() -> list[list[str]]:
    lines = PAGE.read_text().replace("\\\n", " ").splitlines()
    return [shlex.split(line) for line in lines if re.match(r"(\w+=\S+ )*ray start ", line)]


READ_BY_RAY = """
import json, sys
import ray.scripts.scripts
from ray._private.label_utils import parse_node_labels_string
from dockyard_grpo.cluster import SYSTEM_CONFIG
starts = [ray.scripts.scripts.start.make_context("start", words).params for words in json.loads(sys.argv[1])]
keys = ("head", "address", "system_config")
rows = [{**{key: read[key] for key in keys}, "labels": parse_node_labels_string(read["labels"])} for read in starts]
print(json.dumps([SYSTEM_CONFIG, rows]))
"""


def test_documented_ray_start_lines_are_understood_by_ray_and_declare_their_role() -> None:
    starts = documented_starts()
    assert len(starts) >= 4
    arguments = json.dumps([words[words.index("ray") + 2 :] for words in starts])
    # A process of its own: Ray reads its environment at its first import.
    read = subprocess.run([sys.executable, "-c", READ_BY_RAY, arguments], check=True, capture_output=True, text=True)
    system_config, rows = json.loads(read.stdout)
    seen: set[str] = set()
    for words, row in zip(starts, rows, strict=True):
        environment = dict(word.split("=", 1) for word in words[: words.index("ray")])
        roles = roles_of(row["labels"], "documented")
        assert roles == frozenset(filter(None, environment.get("DOCKYARD_FLEET_ROLE", "").split(",")))
        assert row["head"] or row["address"]
        assert environment["RAY_worker_niceness"] == "0"
        if row["head"]:
            assert row["system_config"] == system_config
        seen |= roles
    assert seen == set(placement.ROLES)
