"""The figures of the throughput benchmark against values worked out by hand, and one short real run."""

from __future__ import annotations

import json
import sys
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import pytest

from benchmarks import sandbox_throughput
from benchmarks.result_files import write_results
from benchmarks.sandbox_figures import (
    Block,
    Sample,
    check,
    cpu_ms,
    percentile,
    spread,
    summarize,
    table,
    took_its_path,
    wall_ms,
)
from benchmarks.sandbox_subjects import new_patches
from benchmarks.sandbox_throughput import PAGE, RESULTS, SUBJECTS, Settings, measure, with_tables


def block(seconds: float, latencies: Sequence[float] = (0.1, 0.2, 0.3, 0.4), **cpu_s: float) -> Block:
    samples = [Sample(latency, {"start": latency / 10, "total": latency}) for latency in latencies]
    return Block(seconds, samples, {"machine": 1.0, "client": 0.1, **cpu_s})


def figures(speed: float) -> dict[str, Any]:
    return {
        "verdicts": 4,
        "verdicts_per_s_per_core": {"median": 2.5, "min": 2.0, "max": 3.0},
        "speed": {"median": speed, "min": speed - 0.1, "max": speed + 0.1},
        "p50_ms": {"median": 80.0, "min": 75.0, "max": 85.0},
        "p99_ms": 120.0,
        "cpu_ms": {"machine": 100.0, "client": 1.0, "test": 90.0, "rest": 9.0},
        "wall_ms": {"start": 8.0, "total": 80.0},
    }


def results_of(*, cold: float, warm: float, start: float = 1.0, total: float = 1.0) -> dict[str, Any]:
    stages = {"apply": 10.0, "start": 8.0, "test": 50.0, "total": 80.0, "worktree": 20.0, "copy": 9.0}
    ratio = {"apply": 1.0, "start": start, "total": total, "worktree": 40.0, "copy": 90.0}
    subjects = {"bare": {"1 per core": figures(1.0), "one": figures(1.0)}}
    for name, speed in (("cold", cold), ("warm", warm)):
        subjects[name] = {load: figures(speed) for load in ("1 per core", "4 per core", "one")}
    return {"subjects": subjects, "fresh_tree": {"warm": {"ms": {"10": stages, "10000": stages}, "ratio": ratio}}}


def test_a_percentile_is_one_of_the_values() -> None:
    assert [percentile([40, 10, 30, 20], share) for share in (0.25, 0.5, 0.51, 0.99)] == [10, 20, 30, 40]
    assert percentile(range(1, 101), 0.99) == 99
    assert percentile([7.0], 0.99) == 7.0


def test_a_spread_has_the_median_between_the_extremes() -> None:
    assert spread([3.0, 1.0, 2.5]) == {"median": 2.5, "min": 1.0, "max": 3.0}


def test_a_subject_is_compared_with_bare_of_its_own_round() -> None:
    blocks = {
        ("bare", "1 per core"): [block(2.0), block(1.0)],  # 2 and 4 verdicts/s
        ("bare", "one"): [block(4.0), block(4.0)],
        ("warm", "1 per core"): [block(1.0), block(0.4)],  # 4 and 10
        ("warm", "4 per core"): [block(0.5), block(0.5)],  # 8 and 8, compared with bare's 2 and 4
        ("warm", "one"): [block(2.0), block(1.0, (0.02, 0.04, 0.05, 0.09))],  # 2 and 4, compared with bare's 1 and 1
    }
    found = summarize(blocks, cores=2)
    assert found["bare"]["1 per core"]["verdicts_per_s_per_core"] == {"median": 1.5, "min": 1.0, "max": 2.0}
    assert found["bare"]["1 per core"]["speed"] == {"median": 1.0, "min": 1.0, "max": 1.0}
    assert found["warm"]["1 per core"]["speed"] == {"median": 2.25, "min": 2.0, "max": 2.5}
    assert found["warm"]["4 per core"]["speed"] == {"median": 3.0, "min": 2.0, "max": 4.0}
    one = found["warm"]["one"]
    assert one["speed"] == {"median": 3.0, "min": 2.0, "max": 4.0}
    assert one["p50_ms"] == {"median": 120.0, "min": 40.0, "max": 200.0}
    assert (one["p99_ms"], one["verdicts"]) == (400.0, 8)


def test_what_no_stage_accounts_for_is_the_rest() -> None:
    rounds = [block(1.0, machine=1.0, test=0.6, server=0.1), block(1.0, machine=0.8, test=0.6, server=0.1)]
    # per verdict of four: machine 250 and 200, client 25, test 150, server 25
    expected = {"machine": 225.0, "client": 25.0, "test": 150.0, "server": 25.0, "rest": 25.0}
    assert cpu_ms(rounds) == expected


def test_stages_are_medians() -> None:
    assert wall_ms(block(1.0, (0.1, 0.2, 0.9)).samples) == {"start": 20.0, "total": 200.0}


def test_a_target_is_met_at_its_bound_and_missed_past_it() -> None:
    assert check(results_of(cold=0.769, warm=2.0, start=1.2, total=1.2)) == []
    assert check(results_of(cold=0.768, warm=1.999, start=1.201, total=1.201)) == [
        "cold, 1 per core: 0.768 x bare, the target is 0.769",
        "cold, 4 per core: 0.768 x bare, the target is 0.769",
        "warm, 1 per core: 1.999 x bare, the target is 2.000",
        "warm, 4 per core: 1.999 x bare, the target is 2.000",
        "fresh tree, start: 1.201 x the small tree's, the target is 1.2",
        "fresh tree, total: 1.201 x the small tree's, the target is 1.2",
    ]


def test_a_figure_of_a_busy_machine_is_none() -> None:
    results = results_of(cold=1.0, warm=4.0)
    bare = results["subjects"]["bare"]["1 per core"]["cpu_ms"]
    bare["rest"] = 10.0
    assert check(results) == []
    bare["rest"] = 10.1
    assert check(results) == ["bare: 10.1 of 100.0 CPU ms are not its own, the machine was not quiet"]


def test_what_was_not_measured_is_missed() -> None:
    results = results_of(cold=1.0, warm=4.0)
    del results["subjects"]["warm"], results["fresh_tree"]["warm"]
    assert check(results) == [
        "warm, 1 per core: not measured",
        "warm, 4 per core: not measured",
        "fresh tree: not measured",
    ]


def test_the_tables_say_what_the_results_do() -> None:
    lines = table(results_of(cold=0.9, warm=4.0, start=1.05)).splitlines()
    assert lines[2] == "| bare | 2.50 | 1.00 (0.90 to 1.10) |  |  | 80, 120 | 1.00 (0.90 to 1.10) |"
    warm = "| warm | 2.50 | 4.00 (3.90 to 4.10) | 2.50 | 4.00 (3.90 to 4.10) | 80, 120 | 4.00 (3.90 to 4.10) |"
    assert lines[4] == warm
    assert "| warm | start 8.0, total 80.0 |" in lines
    assert "| warm | 100.0 | 1.0 |  |  |  | 90.0 | 9.0 |" in lines
    assert "| 10000 | 10.0 | 8.0 | 80.0 | 20.0 | 9.0 |" in lines
    assert lines[-1] == "| ratio | 1.00 | 1.05 | 1.00 | 40.00 | 90.00 |"
    assert all(line.count("|") == lines[0].count("|") for line in lines[:5])


def test_a_missed_target_is_an_exit_code(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "results.json"
    monkeypatch.setattr(sandbox_throughput, "RESULTS", path)
    monkeypatch.setattr(sys, "argv", ["sandbox_throughput", "--check", "--table"])
    for warm, message in ((2.5, 0), (1.5, "warm, 1 per core: 1.5 x bare, the target is 2.000")):
        results = results_of(cold=1.0, warm=warm)
        path.write_text(json.dumps(results))
        with pytest.raises(SystemExit) as ended:
            sandbox_throughput.main()
        assert ended.value.code == message or str(ended.value.code).startswith(f"{message}\n")
        assert capsys.readouterr().out == f"{table(results)}\n"


def test_a_result_file_says_where_it_is_from(tmp_path: Path) -> None:
    path = tmp_path / "results" / "x.json"
    write_results(path, {"figure": 1, "versions": {"git": "2.47"}}, ("pytest",))
    found = json.loads(path.read_text())
    assert found["figure"] == 1
    assert found["versions"] == {"git": "2.47", "pytest": pytest.__version__}
    assert set(found) == {"figure", "versions", "machine", "commit"}
    assert list(path.parent.iterdir()) == [path]


def test_the_runs_of_a_subject_take_its_path() -> None:
    assert took_its_path({"cold": 5, "warm": 95}, is_warm=True)
    assert not took_its_path({"cold": 6, "warm": 94}, is_warm=True)
    assert took_its_path({"cold": 100}, is_warm=False)
    assert not took_its_path({"cold": 99, "warm": 1}, is_warm=False)


def test_no_patch_is_made_twice() -> None:
    assert len(set(new_patches(50))) == 50


def test_the_recorded_results_meet_the_targets() -> None:
    results = json.loads(RESULTS.read_text())
    assert check(results) == []
    assert list(results["subjects"]) == list(SUBJECTS)
    assert results["settings"] == json.loads(json.dumps(asdict(Settings())))
    assert results["runs"]["cold"].get("warm", 0) == 0
    assert set(results["isolation"].values()) == {"namespaces"}
    assert table(results).count("\n") > 20
    assert PAGE.read_text() == with_tables(PAGE.read_text(), results)


@pytest.mark.ci
def test_a_short_run_measures_every_stage(tmp_path: Path) -> None:
    settings = Settings(rounds=1, verdicts=3, fresh_tree_files=(10, 20), fresh_tree_verdicts=1)
    results = measure(settings, ["bare", "cold"], tmp_path)
    again = json.loads(json.dumps(results))
    assert table(again) == table(results)
    assert {name: list(loads) for name, loads in results["subjects"].items()} == {
        "bare": ["1 per core", "one"],
        "cold": ["1 per core", "4 per core", "one"],
    }
    one = results["subjects"]["cold"]["one"]
    assert one["verdicts"] == 3
    assert list(one["wall_ms"]) == ["queue", "apply", "start", "test", "total", "http"]
    assert {"machine", "client", "server", "git", "launcher", "test", "rest"} == set(one["cpu_ms"])
    assert min(one["cpu_ms"][stage] for stage in ("machine", "client", "test")) > 0
    assert one["p50_ms"]["median"] >= one["wall_ms"]["test"]
    assert results["runs"] == {"cold": {"cold": 9}}
    assert results["fresh_tree"]["cold"]["runs"] == {"cold": 2}
    assert list(results["fresh_tree"]["cold"]["ms"]) == ["10", "20"]
