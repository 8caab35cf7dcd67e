"""A user's own model and repositories: any causal LM of the families, SWE-bench-style rows."""

from __future__ import annotations

import json
import shutil
import subprocess
from pathlib import Path

import pytest
from running_app import RunningApp, rows

from dockyard_grpo import compose
from dockyard_grpo.config import load_config

TEMPLATE = "{% for m in messages %}{{ m['role'] + ': ' + m['content'] + '\n' }}{% endfor %}assistant: "


def git(repo: Path, *arguments: str) -> str:
    identity = ["-c", "user.name=Someone", "-c", "user.email=someone@example.invalid"]
    done = subprocess.run(["git", *identity, *arguments], cwd=repo, check=True, capture_output=True, text=True)
    return done.stdout.strip()


def make_repo(path: Path, right: str, wrong: str) -> tuple[str, str, str]:
    """A repository with a bug; returns base commit, gold patch, test patch."""
    path.mkdir()
    git(path, "init", "-q")
    (path / "calc.py").write_text(f"def total(a, b):\n    return a {wrong} b\n")
    (path / "README.md").write_text("# calc\n")
    git(path, "add", "-A")
    git(path, "commit", "-qm", "start")
    base = git(path, "rev-parse", "HEAD")
    (path / "calc.py").write_text(f"def total(a, b):\n    return a {right} b\n")
    gold = git(path, "diff") + "\n"
    git(path, "checkout", "-q", "--", ".")
    (path / "test_calc.py").write_text("from calc import total\n\n\ndef test_total():\n    assert total(7, 2) == 9\n")
    git(path, "add", "-AN")
    tests = git(path, "diff") + "\n"
    git(path, "rm", "-q", "--cached", "test_calc.py")
    (path / "test_calc.py").unlink()
    return base, gold, tests


def write_tasks(folder: Path) -> Path:
    by_path, by_url = make_repo(folder / "one", "+", "-"), make_repo(folder / "two", "+", "*")
    lines = []
    for name, repo, (base, gold, tests) in (
        ("one", "one", by_path),
        ("two", (folder / "two").as_uri(), by_url),
    ):
        row = {
            "instance_id": f"someone__{name}-1",
            "repo": repo,
            "base_commit": base,
            "problem_statement": "total(7, 2) should be 9",
            "patch": gold,
            "test_patch": tests,
            "FAIL_TO_PASS": json.dumps(["test_calc.py::test_total"]),
            "PASS_TO_PASS": [],
            "version": "1.0",
        }
        lines.append(json.dumps(row) + "\n")
    (folder / "tasks.jsonl").write_text("".join(lines))
    return folder / "tasks.jsonl"


def write_model(folder: Path, family: str) -> Path:
    """A random tiny model of another family, with the quickstart's tokenizer and a chat template."""
    import torch
    from transformers import LlamaConfig, LlamaForCausalLM, Qwen3Config, Qwen3ForCausalLM

    source = Path(compose.model_path(load_config(None, [])))
    shutil.copytree(source, folder, ignore=shutil.ignore_patterns("*.safetensors", "config.json"))
    settings = json.loads((folder / "tokenizer_config.json").read_text())
    (folder / "tokenizer_config.json").write_text(json.dumps(settings | {"chat_template": TEMPLATE}))
    vocabulary = json.loads((source / "config.json").read_text())["vocab_size"]
    shape = {
        "vocab_size": vocabulary, "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 2,
        "num_attention_heads": 2, "num_key_value_heads": 1, "head_dim": 32, "max_position_embeddings": 4096,
        "eos_token_id": 1, "pad_token_id": 0, "bos_token_id": None,
    }  # fmt: skip
    torch.manual_seed(0)
    model = LlamaForCausalLM(LlamaConfig(**shape)) if family == "llama" else Qwen3ForCausalLM(Qwen3Config(**shape))
    model.save_pretrained(folder)
    return folder


@pytest.mark.timeout(600)
@pytest.mark.parametrize(
    ("family", "backend"),
    [("llama", "transformers"), pytest.param("qwen3", "vllm", marks=pytest.mark.ci)],
)
def test_own_model_and_own_repositories_train_from_the_command_line(tmp_path: Path, family: str, backend: str) -> None:
    (tmp_path / "data").mkdir()
    tasks = write_tasks(tmp_path / "data")
    app = RunningApp(
        tmp_path / "run",
        f"policy.model={write_model(tmp_path / 'model', family)}",
        f"data.train={tasks}",
        f"data.validation={tasks}",
        f"generation.backend={backend}",
        "generation.max_new_tokens=24",
        "grpo.num_prompts_per_step=2",
        "grpo.num_generations_per_prompt=4",
        "run.max_steps=2",
        "logging.console=plain",
    )
    assert app.wait(500) == 0, app.output[-4000:]
    assert app.survivors() == []
    assert "quickstart" not in app.output
    metrics = rows(tmp_path / "run" / "metrics.jsonl")
    assert [row["step"] for row in metrics] == [1, 2]
    assert all(row["refit_probe_abs_diff_mean"] <= 1e-4 for row in metrics)
    assert all(row["num_rollouts"] == 8 and row["dropped"] == {} for row in metrics)
    rollouts = rows(tmp_path / "run" / "rollouts.jsonl")
    assert {row["task"] for row in rollouts} == {"someone__one-1", "someone__two-1"}
    assert all("user: " in row["prompt"] and "return a" in row["prompt"] for row in rollouts)
    assert all(row["isolation"] == "namespaces" or row["isolation"] == "bwrap" for row in rollouts)
    assert {row["verdict"] for row in rollouts} <= {"unresolved", "apply_failed"}
