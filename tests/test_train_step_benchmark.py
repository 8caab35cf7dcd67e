"""The figures of the train step benchmark against values worked out by hand, and one short real run."""

from __future__ import annotations

import importlib.util
import json
import subprocess
import sys
from dataclasses import asdict
from importlib.metadata import version
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import pytest

from benchmarks import logprob_memory, train_step
from benchmarks import train_step_batches as batches
from benchmarks.train_step import RESULTS, SMALL, SUBJECTS, Settings, measure
from benchmarks.train_step_figures import (
    JAX,
    OURS,
    check,
    disagreements,
    forward_of,
    jax_table,
    summarize,
    summarize_dense,
    summarize_llama,
    table,
)
from benchmarks.train_step_worker import TOOL, Worker, peer_python

ROOT = Path(__file__).resolve().parent.parent
STEP = {"loss": 0.5, "grad_norm": 2.0, "peak_mib": 64.0}
FIRST = {name: STEP | ({"compile_s": 12.34, "num_compiled": 3} if name.startswith(JAX) else {}) for name in SUBJECTS}


def one_round(ours: float, trl: float, *, jax: float = 1.0, jax_forward: float = 0.5) -> dict[str, dict[str, float]]:
    """A round of steps that take so many seconds; our forward pass takes half of one."""
    seconds = {OURS: ours, "ours, nothing shared": 2.0, JAX: jax, f"{JAX}, nothing shared": 3.0, "TRL": trl}
    seconds |= {"naive": 4.0, forward_of(OURS): 0.5, forward_of(JAX): jax_forward}
    steps = {name: {"seconds": value, "cpu_seconds": 2 * value, **STEP} for name, value in seconds.items()}
    return {"gemm": {"gflops": 100.0, "gflops_cpu": 50.0}, **steps}


def results_of(
    rounds: list[dict[str, dict[str, float]]],
    gflop: float = 200.0,
    *,
    llama: list[dict[str, dict[str, float]]] | None = None,
) -> dict[str, Any]:
    """Results with one batch. ``llama``: rounds of the larger model, if it took others."""
    return {
        "batches": {"step 10": summarize(rounds, FIRST, num_tokens=1000, gflop=gflop)},
        "dense": summarize_dense(rounds, num_tokens=1000, gflop=gflop, peak_mib=64.0),
        "llama": summarize_llama(llama or [one_round(1.0, 2.0)], FIRST, num_tokens=500),
    }


def load_tool() -> ModuleType:
    spec = importlib.util.spec_from_file_location("loaded_trl_env", TOOL)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_rates_are_of_the_same_tokens_and_ratios_of_the_same_round() -> None:
    batch = results_of([one_round(1.0, 2.0), one_round(2.0, 8.0), one_round(1.0, 4.0)])["batches"]["step 10"]
    assert batch["subjects"]["ours"]["tokens_per_s"] == {"median": 1000.0, "min": 500.0, "max": 1000.0}
    assert batch["ours_over"]["TRL"] == {"median": 4.0, "min": 2.0, "max": 4.0}
    assert batch["ours_over_cpu"]["TRL"] == {"median": 4.0, "min": 2.0, "max": 4.0}
    assert batch["subjects"]["naive"]["of_gemm"]["median"] == 0.5
    assert batch["subjects"]["ours"]["of_gemm"] is None
    assert batch["subjects"][JAX]["of_gemm"] is None
    assert batch["subjects"][f"{JAX}, nothing shared"]["of_gemm"]["median"] == 0.667


def test_jax_is_compared_with_torch_in_the_same_round_and_what_it_compiled_is_kept() -> None:
    rounds = [one_round(1.0, 2.0, jax=1.5), one_round(2.0, 8.0, jax=2.0, jax_forward=0.4), one_round(1.0, 4.0, jax=1.2)]
    found = results_of(rounds, llama=[one_round(2.0, 2.0, jax=1.0, jax_forward=0.25)])
    batch, llama = found["batches"]["step 10"], found["llama"]
    assert batch["jax_over_torch"]["step"] == {"median": 1.2, "min": 1.0, "max": 1.5}
    assert batch["jax_over_torch"]["forward"] == {"median": 1.0, "min": 0.8, "max": 1.0}
    assert (batch["subjects"][JAX]["compile_s"], batch["subjects"][JAX]["num_compiled"]) == (12.3, 3)
    assert "compile_s" not in batch["subjects"]["ours"]
    assert llama["jax_over_torch"]["step"]["median"] == llama["jax_over_torch"]["forward"]["median"] == 0.5
    assert {name: one["median"] for name, one in llama["tokens_per_s"].items()} == {
        OURS: 250.0,
        JAX: 500.0,
        forward_of(OURS): 1000.0,
        forward_of(JAX): 2000.0,
    }
    assert (llama["compile_s"], llama["num_compiled"]) == (12.3, 3)


def test_a_target_is_met_at_its_bound_and_missed_past_it() -> None:
    assert check(results_of([one_round(1.0, 1.5)], gflop=70.0)) == []
    assert check(results_of([one_round(1.0, 1.4)], gflop=69.0)) == [
        "step 10: 1.4 x TRL's tokens/s, the target is 1.5",
        "dense step: 0.69 of the matrix product's rate, the target is 0.7",
    ]


def test_jax_may_take_so_many_of_torchs_steps_and_no_longer_for_a_forward_pass() -> None:
    assert check(results_of([one_round(1.0, 2.0, jax=1.6)], llama=[one_round(1.0, 2.0, jax=1.2)])) == []
    late = [one_round(1.0, 2.0, jax=1.61, jax_forward=0.505)]
    assert check(results_of(late, llama=[one_round(1.0, 2.0, jax=1.21, jax_forward=0.51)])) == [
        "step 10: JAX's step takes 1.61 times torch's, the target is 1.6",
        "step 10: JAX's forward takes 1.01 times torch's, the target is 1.0",
        "135M: JAX's step takes 1.21 times torch's, the target is 1.2",
        "135M: JAX's forward takes 1.02 times torch's, the target is 1.0",
    ]


@pytest.mark.parametrize("value", [0.502, float("nan")])
def test_subjects_that_compute_another_step_are_named(value: float) -> None:
    first: dict[str, dict[str, float]] = {name: dict(STEP) for name in SUBJECTS}
    first["ours"]["loss"] *= 1.0005
    assert disagreements(first) == []
    first["TRL"]["loss"] = value
    assert disagreements(first) == [f"TRL: loss is {value:.6g}, that of naive is 0.5"]
    first[JAX]["grad_norm"] = 2.01
    assert disagreements({name: first[name] for name in (OURS, JAX)}, OURS) == [
        f"{JAX}: grad_norm is 2.01, that of ours is 2"
    ]


def test_the_table_says_what_the_results_do() -> None:
    lines = table(results_of([one_round(1.0, 2.0)])).splitlines()
    assert lines[6] == "| step 10 | TRL | 500 (500 to 500) | 2.00 (2.00 to 2.00) x | 64 | 1.00 (1.00 to 1.00) |"
    assert all(line.count("|") == lines[0].count("|") for line in lines)


def test_the_table_of_both_trainers_says_what_the_results_do() -> None:
    results = results_of([one_round(1.0, 2.0, jax=1.5)], llama=[one_round(1.0, 2.0, jax_forward=0.25)])
    assert jax_table(results).splitlines()[2:] == [
        "| step 10 | 1.50 (1.50 to 1.50) | 1.00 (1.00 to 1.00) | 3 | 12.3 |",
        "| 135M Llama | 1.00 (1.00 to 1.00) | 0.50 (0.50 to 0.50) | 3 | 12.3 |",
    ]


def test_a_missed_target_is_an_exit_code(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(train_step, "RESULTS", tmp_path / "results.json")
    monkeypatch.setattr(sys, "argv", ["train_step", "--check"])
    train_step.RESULTS.write_text(json.dumps(results_of([one_round(1.0, 1.4)])))
    with pytest.raises(SystemExit, match=r"1\.4 x TRL's tokens/s"):
        train_step.main()


def test_the_recorded_steps_are_whole_steps_of_the_quickstart() -> None:
    for step in batches.STEPS:
        sequences = batches.recorded(step)
        about = batches.describe(sequences)
        assert (about["sequences"], about["prompts"]) == (256, 16)
        assert about["distinct_sequences"] < 256
        assert sum(one.advantage for one in sequences) == pytest.approx(0.0, abs=1e-4)


def test_distinct_completions_keep_prompts_and_lengths() -> None:
    sequences = batches.recorded(10)
    distinct = batches.all_distinct(sequences)
    about, before = batches.describe(distinct), batches.describe(sequences)
    assert about["distinct_with_advantage"] == 256
    assert {name: about[name] for name in ("tokens", "trained_tokens", "prompts")} == {
        name: before[name] for name in ("tokens", "trained_tokens", "prompts")
    }
    assert distinct[0].token_ids.tolist() == sequences[0].token_ids.tolist()
    assert all(one.token_ids[-1] == batches.EOS for one in distinct)


def test_dense_sequences_fill_rows() -> None:
    from dockyard_core.batch import TrainSequence, pack_batch

    sequences = batches.dense(512, 8)
    packed = [
        TrainSequence(
            token_ids_T=one.token_ids,
            loss_mask_T=np.arange(len(one.token_ids)) > 0,
            sampled_logprobs_T=np.zeros(len(one.token_ids), np.float32),
            advantage=one.advantage,
        )
        for one in sequences
    ]
    [shard] = pack_batch(packed, micro_batch_tokens=4096, row_length=batches.DENSE_ROW)
    [micro_batch] = shard.micro_batches
    assert micro_batch.shape == (8, 512)
    assert (micro_batch.sequence_ids_BL >= 0).all()


def test_the_work_of_a_step_is_six_times_parameters_and_causal_attention() -> None:
    config = {
        "hidden_size": 8,
        "intermediate_size": 16,
        "num_hidden_layers": 2,
        "num_attention_heads": 2,
        "num_key_value_heads": 1,
        "vocab_size": 32,
    }
    one = batches.Sampled(np.zeros(10, np.int64), 4, 1.0)
    per_layer = 2 * 8 * 8 + 2 * 8 * 4 + 3 * 8 * 16
    want = 2 * (6 * per_layer * 10 + 6 * 100 * 8) + 6 * 8 * 32 * 6
    assert batches.gflop(config, [one, one]) == pytest.approx(2 * want / 1e9)


def test_the_peer_gets_the_libraries_of_this_environment() -> None:
    requirements = load_tool().requirements()
    assert f"torch=={version('torch').partition('+')[0]}" in requirements
    assert f"transformers=={version('transformers')}" in requirements
    assert all("==" in one and "://" not in one for one in requirements)


def test_the_tool_leaves_a_directory_alone_that_it_did_not_make(tmp_path: Path) -> None:
    (tmp_path / "kept").touch()
    ended = subprocess.run([sys.executable, TOOL, tmp_path], capture_output=True, text=True, timeout=60)
    assert ended.returncode == 2
    assert "is no virtual environment" in ended.stderr
    assert [path.name for path in tmp_path.iterdir()] == ["kept"]


def test_a_worker_that_ends_says_what_it_said(tmp_path: Path) -> None:
    with pytest.raises(RuntimeError, match="No module named"):
        Worker(sys.executable, "benchmarks.no_such_subject", {"threads": 1}, tmp_path / "log")


def test_a_peer_that_is_named_wrongly_is_refused(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("DOCKYARD_TRL_PYTHON", str(tmp_path / "python"))
    assert peer_python() == f"DOCKYARD_TRL_PYTHON={tmp_path / 'python'} is no interpreter"


@pytest.mark.skipif(not RESULTS.exists(), reason="not recorded yet")
def test_the_recorded_results_meet_the_targets() -> None:
    results = json.loads(RESULTS.read_text())
    assert check(results) == []
    want = asdict(Settings()) | {"threads": results["settings"]["threads"]}
    assert results["settings"] == json.loads(json.dumps(want))


@pytest.mark.ci
@pytest.mark.timeout(900)
def test_a_short_run_agrees_on_the_step_and_measures_every_subject(tmp_path: Path) -> None:
    peer = peer_python()
    if isinstance(peer, str):
        pytest.skip(peer)
    results = measure(SMALL, peer, tmp_path)
    again = json.loads(json.dumps(results))
    assert train_step.tables(again) == train_step.tables(results)
    for batch in results["batches"].values():
        assert list(batch["subjects"]) == list(SUBJECTS)
        for one in batch["subjects"].values():
            assert one["seconds"]["min"] > 0
            assert one["loss"] == pytest.approx(batch["subjects"]["naive"]["loss"], rel=1e-3)
        assert batch["subjects"][JAX]["num_compiled"] > 0
        assert batch["jax_over_torch"]["forward"]["min"] > 0
    assert results["dense"]["of_gemm"]["min"] > 0
    assert results["llama"]["num_compiled"] > 0
    assert results["llama"]["jax_over_torch"]["step"]["min"] > 0


@pytest.mark.skipif(not RESULTS.exists(), reason="not recorded yet")
def test_the_documentation_shows_the_recorded_tables() -> None:
    results, pages = json.loads(RESULTS.read_text()), ROOT / "docs" / "design-docs"
    torch_page = (pages / "torch-trainer.md").read_text()
    assert table(results) in torch_page
    assert logprob_memory.table(json.loads(logprob_memory.RESULTS.read_text())) in torch_page
    assert jax_table(results) in (pages / "jax-trainer.md").read_text()


def test_the_recorded_memory_of_logprobs_meets_its_target() -> None:
    assert logprob_memory.check(json.loads(logprob_memory.RESULTS.read_text())) == []
