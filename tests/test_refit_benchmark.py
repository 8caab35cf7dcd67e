"""The figures of the refit benchmark against values worked out by hand, and one short real run."""

from __future__ import annotations

import json
import sys
from dataclasses import asdict
from math import prod
from pathlib import Path
from typing import Any

import pytest

from benchmarks import refit
from benchmarks.refit import RESULTS, ROOT, Settings, measure
from benchmarks.refit_figures import check, summarize, table
from benchmarks.refit_subjects import TRANSPORTS, smollm2_manifest

STAGES = {
    "sender pack": 0.1,
    "sender digest": 0.5,
    "sender wire": 0.2,
    "rank receive": 0.3,
    "rank verify": 0.5,
    "rank load": 0.25,
}


def one_round(*, raw: float = 0.5, collective: float = 1.0, shared_memory: float = 0.5) -> dict[str, Any]:
    totals = {"collective": collective, "shared_memory": shared_memory, "filesystem": 2.0}
    return {
        "memcpy": 0.1,
        "raw": raw,
        "wire": {"collective": 0.5, "shared_memory": 0.05, "filesystem": 1.0},
        "whole": {name: STAGES | {"total": total} for name, total in totals.items()},
    }


def results_of(rounds: list[dict[str, Any]], *, extra_s: float | None = 0.3) -> dict[str, Any]:
    results: dict[str, Any] = {"subjects": summarize(rounds, 100_000_000, TRANSPORTS)}
    if extra_s is not None:
        values = {"stall_s": 1.0 + extra_s, "transfer_s": 1.0, "extra_s": extra_s, "recompute_s": 0.2}
        one = {"engine": "vllm", "transport": "shared_memory", "requests": 16} | {
            name: {"median": value, "min": value, "max": value} for name, value in values.items()
        }
        results["stall"] = {"none": one, "host": one}
    return results


def test_rates_are_of_the_same_bytes_and_ratios_of_the_same_round() -> None:
    found = summarize([one_round(), one_round(raw=0.25, collective=2.0), one_round()], 100_000_000, TRANSPORTS)
    assert found["memcpy"] == {"median": 1000.0, "min": 1000.0, "max": 1000.0}
    assert found["raw"] == {"median": 200.0, "min": 200.0, "max": 400.0}
    assert found["collective"]["wire_of_raw"] == {"median": 1.0, "min": 0.5, "max": 1.0}
    assert found["shared_memory"]["of_collective"] == {"median": 2.0, "min": 2.0, "max": 4.0}
    assert found["shared_memory"]["end_to_end"]["median"] == 200.0
    rates = {stage: one["median"] for stage, one in found["filesystem"]["stages"].items()}
    assert rates == {"gather": 1000.0, "hash": 200.0, "verify": 200.0, "load": 400.0}


def test_a_target_is_met_at_its_bound_and_missed_past_it() -> None:
    assert check(results_of([one_round(raw=0.425, shared_memory=1.0 / 1.3)], extra_s=0.5)) == []
    assert check(results_of([one_round(raw=0.42, shared_memory=0.8)], extra_s=0.51)) == [
        "collective: its wire is 0.84 x the raw broadcast, the target is 0.85",
        "shared_memory: 1.25 x the collective end to end, the target is 1.3",
        "stall, staging none: 0.51 s beyond the transfer, the target is 0.5 s",
        "stall, staging host: 0.51 s beyond the transfer, the target is 0.5 s",
    ]
    assert check(results_of([one_round()], extra_s=None)) == [
        "stall, staging none: not measured",
        "stall, staging host: not measured",
    ]


def test_the_tables_say_what_the_results_do() -> None:
    lines = table(results_of([one_round()])).splitlines()
    assert lines[2] == "| memcpy |  |  | 1000 (1000 to 1000) |  |  |  |  |  |"
    assert lines[5].startswith("| shared_memory | 1000 (1000 to 1000) | 200 (200 to 200) | 2000 (2000 to 2000) | 10.00")
    assert lines[5].endswith("| 200 (200 to 200) | 2.00 (2.00 to 2.00) |")
    assert lines[-1].startswith("| vllm | host | shared_memory | 16 | 1.30 (1.30 to 1.30) | 1.00 (1.00 to 1.00) | 0.30")
    assert all(line.count("|") == lines[0].count("|") for line in lines[:6])


def test_a_missed_target_is_an_exit_code(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(refit, "RESULTS", tmp_path / "results.json")
    monkeypatch.setattr(sys, "argv", ["refit", "--check", "--table"])
    too_long = "s beyond the transfer, the target is 0.5 s"
    missed = f"stall, staging none: 0.6 {too_long}\nstall, staging host: 0.6 {too_long}"
    for extra_s, message in ((0.3, 0), (0.6, missed)):
        results = results_of([one_round()], extra_s=extra_s)
        refit.RESULTS.write_text(json.dumps(results))
        with pytest.raises(SystemExit) as ended:
            refit.main()
        assert ended.value.code == message
        assert capsys.readouterr().out == f"{table(results)}\n"


def test_the_shapes_are_those_of_the_model() -> None:
    manifest = smollm2_manifest()
    assert sum(prod(spec.shape) for spec in manifest) == 134_515_008
    assert len(manifest) == 2 + 30 * 9


@pytest.mark.skipif(not RESULTS.exists(), reason="not recorded yet")
def test_the_recorded_results_meet_the_targets() -> None:
    results = json.loads(RESULTS.read_text())
    assert check(results) == []
    assert results["settings"] == json.loads(json.dumps(asdict(Settings())))
    assert list(results["subjects"]) == ["memcpy", "raw", *TRANSPORTS]


@pytest.mark.skipif(not RESULTS.exists(), reason="not recorded yet")
def test_the_documentation_shows_the_recorded_tables() -> None:
    page = (ROOT / "docs" / "architecture" / "weight-sync.md").read_text()
    assert table(json.loads(RESULTS.read_text())) in page


@pytest.mark.ci
def test_a_short_run_measures_every_stage_and_leaves_no_file(tmp_path: Path) -> None:
    results = measure(Settings(rounds=1, num_layers=1, bucket_mib=8), tmp_path)
    again = json.loads(json.dumps(results))
    assert table(again) == table(results)
    assert list(results["subjects"]) == ["memcpy", "raw", *TRANSPORTS]
    for name in TRANSPORTS:
        found = results["subjects"][name]
        assert min(rate["min"] for rate in found["stages"].values()) > 0
        assert found["seconds"]["total"] >= found["seconds"]["sender digest"]
    assert list(tmp_path.iterdir()) == []
