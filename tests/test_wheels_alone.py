"""Every wheel, built and installed alone in a clean environment, does what its README shows."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
import time
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
HEAVY = ["torch", "jax", "ray", "vllm", "sglang", "transformers", "fastapi"]
EXTRAS = {
    "dockyard-core": "[math]",
    "dockyard-sandbox": "",
    "dockyard-trainer-torch": "",
    "dockyard-trainer-jax": "",
    "dockyard-inference": "[sender,transformers]",
}
pytestmark = [pytest.mark.ci, pytest.mark.timeout(900)]

SAVE_TINY_MODEL = """
import torch
from transformers import Qwen2Config, Qwen2ForCausalLM

torch.manual_seed(0)
sizes = {"vocab_size": 128, "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 1}
Qwen2ForCausalLM(Qwen2Config(**sizes, num_attention_heads=2, num_key_value_heads=1)).save_pretrained("model")
"""
PRINT_NLL = """
import json
import torch
from transformers import AutoModelForCausalLM

rows = [json.loads(line) for line in open("sft.jsonl")]
for directory in ("model", "sft/hf"):
    model = AutoModelForCausalLM.from_pretrained(directory, dtype=torch.float32)
    nll = []
    for row in rows:
        ids, start = torch.tensor([row["token_ids"]]), row["prompt_length"]
        logprobs = model(ids).logits[0, start - 1 : -1].log_softmax(-1)
        nll.append(-logprobs.gather(-1, ids[0, start:, None]).mean().item())
    print(json.dumps(nll))
"""


def run(*command: str | Path, cwd: Path = ROOT, **environment: str) -> str:
    done = subprocess.run(
        command, cwd=cwd, env={**os.environ, **environment}, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, f"{command}\n{done.stdout[-2000:]}{done.stderr[-2000:]}"
    return done.stdout


@pytest.fixture(scope="module")
def wheels(tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("wheels")
    run("uv", "build", "--all-packages", "--wheel", "--out-dir", out)
    built = {path.name.partition("-")[0] for path in out.glob("*.whl")}
    assert built == {name.replace("-", "_") for name in [*EXTRAS, "dockyard-grpo"]}
    return out


@pytest.fixture(scope="module")
def install(wheels: Path, tmp_path_factory: pytest.TempPathFactory):
    """Install a wheel alone, third parties at their locked versions; returns the interpreter."""
    made: dict[str, Path] = {}

    def make(name: str, extras: str = "") -> Path:
        key = name + extras
        if key not in made:
            folder = tmp_path_factory.mktemp(name)
            engines = ["--no-extra", "vllm", "--no-extra", "sglang"]  # of the conflicting extras, the CPU's
            plain = ["--no-emit-workspace", "--no-hashes", "--no-annotate", "--no-header"]
            locked = run("uv", "export", "--frozen", "--all-packages", "--all-extras", *engines, *plain)
            (folder / "constraints.txt").write_text(locked)
            run("uv", "venv", "--quiet", "--python", sys.executable, folder / "venv")
            wheel = next(wheels.glob(f"{name.replace('-', '_')}-*.whl"))
            run(
                "uv", "pip", "install", "--quiet", "--find-links", wheels, "--constraints",
                folder / "constraints.txt", f"{name}{extras} @ {wheel.as_uri()}",
                cwd=folder, VIRTUAL_ENV=str(folder / "venv"),
            )  # fmt: skip
            made[key] = folder / "venv" / "bin" / "python"
        return made[key]

    return make


def blocks(name: str, language: str) -> list[str]:
    readme = (ROOT / "packages" / name / "README.md").read_text()
    fenced = re.findall(rf"^(`{{3,4}}){language}\n(.*?)^\1$", readme, flags=re.M | re.S)
    return [code for _, code in fenced]


@pytest.mark.parametrize("name", ["dockyard-core", "dockyard-sandbox"])
def test_a_light_wheel_imports_nothing_heavy(name: str, install) -> None:
    module = name.replace("-", "_")
    code = f"import json, sys, {module}; print(json.dumps(sorted(sys.modules)))"
    loaded = json.loads(run(install(name), "-I", "-c", code))
    assert module in loaded
    assert [heavy for heavy in HEAVY if heavy in loaded] == []


def test_the_sandbox_wheel_installs_in_25_megabytes(install) -> None:
    site = next((install("dockyard-sandbox").parent.parent / "lib").glob("python3*")) / "site-packages"
    own = (path for path in site.rglob("*") if path.is_file() and path.suffix != ".pyc")
    assert sum(path.stat().st_size for path in own) <= 25 * 1024 * 1024


@pytest.mark.parametrize(
    "name", ["dockyard-core", "dockyard-trainer-torch", "dockyard-trainer-jax", "dockyard-inference"]
)
def test_the_readme_example_runs_where_only_this_wheel_is_installed(name: str, install, tmp_path: Path) -> None:
    python = install(name, EXTRAS[name])
    for code in blocks(name, "python"):
        run(python, "-I", "-c", code, cwd=tmp_path, JAX_COMPILATION_CACHE_DIR=str(tmp_path / "compiled"))


def test_the_jax_wheel_brings_no_other_framework(install) -> None:
    code = f"import importlib.util as u, json; print(json.dumps([name for name in {HEAVY} if u.find_spec(name)]))"
    assert json.loads(run(install("dockyard-trainer-jax"), "-I", "-c", code)) == ["jax"]


@pytest.mark.parametrize("backend", ["torch", "jax"])
def test_a_trainer_wheel_trains_from_a_file(backend: str, install, tmp_path: Path) -> None:
    """The README's command: sft whose export transformers loads, then grpo on the README's own rows."""
    wheel = f"dockyard-trainer-{backend}"
    command = install(wheel, EXTRAS[wheel]).parent / f"dockyard-train-{backend}"
    witness = install("dockyard-trainer-torch")  # has the transformers that makes the model and judges the export
    machine = {"OMP_NUM_THREADS": "1", "JAX_COMPILATION_CACHE_DIR": str(tmp_path / "compiled")}

    def train(name: str, *options: str) -> list[dict]:
        files = ["--model", "model", "--data", f"{name}.jsonl", "--out", name]
        run(command, name, *files, *options, cwd=tmp_path, **machine)
        return [json.loads(line) for line in (tmp_path / name / "metrics.jsonl").read_text().splitlines()]

    run(witness, "-I", "-c", SAVE_TINY_MODEL, cwd=tmp_path)
    rows = [{"token_ids": [11, 12, 21 + number, 1], "prompt_length": 2} for number in range(6)]
    (tmp_path / "sft.jsonl").write_text("".join(f"{json.dumps(row)}\n" for row in rows))
    steps = train("sft", "--batch-size", "2", "--lr", "1e-2")
    assert [step["step"] for step in steps] == [1, 2, 3]
    before, after = (json.loads(line) for line in run(witness, "-I", "-c", PRINT_NLL, cwd=tmp_path).splitlines())
    assert steps[0]["nll"] == pytest.approx(sum(before[:2]) / 2, abs=1e-5)
    assert all(new < old for new, old in zip(after, before, strict=True))

    (tmp_path / "grpo.jsonl").write_text(*blocks(wheel, "json"))
    (step,) = train("grpo")
    assert (step["num_rows"], step["reward_mean"]) == (2, 0.5)
    assert (tmp_path / "grpo" / "hf" / "model.safetensors").is_file()


def test_a_sandbox_box_answers_one_curl(install, tmp_path: Path) -> None:
    """The README's two console blocks: serve, then a repository and one request."""
    serve, demo = blocks("dockyard-sandbox", "console")
    assert "dockyard-sandbox serve" in serve
    command = install("dockyard-sandbox").parent / "dockyard-sandbox"
    server = subprocess.Popen(
        [command, "serve", "--port", "0", "--root", tmp_path / "root"], stdout=subprocess.PIPE, text=True
    )
    try:
        assert server.stdout is not None
        ready = server.stdout.readline()
        url = re.search(r"http://\S+", ready)
        assert url is not None, ready
        script = re.sub(r"^\$ ", "", demo, flags=re.M).rpartition("EOF\n")[0] + "EOF\n"
        script = script.replace("http://127.0.0.1:9090", url.group())
        answer = json.loads(run("bash", "-euc", script, cwd=tmp_path).splitlines()[-1])
        assert (answer["status"], answer["isolation"] != "unsafe") == ("resolved", True)
    finally:
        server.terminate()
        deadline = time.monotonic() + 60
        while server.poll() is None and time.monotonic() < deadline:
            time.sleep(0.05)
        server.kill()
        server.wait()
