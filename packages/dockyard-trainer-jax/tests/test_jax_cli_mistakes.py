"""Mistakes in what the command is pointed at: one line, exit code 2, and nothing left behind."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from dockyard_core.errors import ConfigError
from dockyard_trainer_jax.cli import JaxBackend, Place, main
from dockyard_trainer_jax.config import JaxPolicyConfig


def refusal(capsys, model: Path | str, tmp_path: Path, *more: str) -> str:
    data = tmp_path / "rows.jsonl"
    data.write_text(json.dumps({"token_ids": [1, 2, 3], "prompt_length": 1}) + "\n")
    arguments = ["sft", "--model", str(model), "--data", str(data), "--out", str(tmp_path / "out"), *more]
    capsys.readouterr()  # what saving a model has said
    assert main(arguments) == 2
    (said,) = capsys.readouterr().err.splitlines()
    assert not (tmp_path / "out").exists()
    assert said.startswith("dockyard-train-jax: ")
    return str(said)


@pytest.mark.parametrize(
    ("content", "named"),
    [
        ('{"model_type": ', "needs a readable config.json"),
        ("[]", "must be of a family llama, qwen2, qwen3, qwen3_moe, got []"),
        ('{"model_type": "gpt2", "eos_token_id": 50256, "vocab_size": 9}', "got 'gpt2'"),
        ('{"model_type": "qwen2"}', "vocab_size: Field required"),
    ],
)
def test_a_model_that_is_none_of_ours(tmp_path, capsys, content, named) -> None:
    (tmp_path / "config.json").write_text(content)
    assert named in refusal(capsys, tmp_path, tmp_path)


@pytest.mark.parametrize(
    ("more", "named"),
    [
        (["--device", "cuda"], "--device must be a field of JaxPolicyConfig, got 'cuda'; leave it out"),
        (["--policy", "fsdp_size=3"], "fsdp_size x tensor_parallel_size must be the number of devices = 8, got 3 x 1"),
        (["--policy", "tensor_parallel_size=8"], "tensor_parallel_size must divide the model's num_attention_heads"),
        (["--policy", "lr=1"], "got 'lr'; did you mean learning_rate?"),
        (["--policy", "lora.r=8"], "--policy lora must name a field of LoraConfig, got 'r'; did you mean rank?"),
        (["--loss", "clip_low=1.5"], "--loss clip_low has no meaning for sft"),
    ],
)
def test_a_field_that_is_not_there_or_does_not_fit(tiny_model, tmp_path, capsys, more, named) -> None:
    assert named in refusal(capsys, tiny_model(), tmp_path, *more)


@pytest.mark.parametrize(
    ("environment", "named"),
    [
        ({"JAX_PROCESS_ID": "0"}, "got JAX_PROCESS_ID=0; set all three, or none"),
        (
            {"JAX_COORDINATOR_ADDRESS": "host:1", "JAX_NUM_PROCESSES": "2", "JAX_PROCESS_ID": "first"},
            "JAX_PROCESS_ID=first",
        ),
    ],
)
def test_a_place_that_is_said_in_part(environment, named) -> None:
    with pytest.raises(ConfigError) as refused:
        Place.of(environment)
    assert named in str(refused.value)


def test_a_place_among_processes_and_none() -> None:
    environment = {"JAX_COORDINATOR_ADDRESS": "host:1", "JAX_NUM_PROCESSES": "2", "JAX_PROCESS_ID": "1"}
    assert Place.of(environment) == Place(coordinator="host:1", num_processes=2, process_id=1)
    assert Place.of({}) is None


@pytest.mark.parametrize(("process_id", "is_lead"), [(None, True), ("0", True), ("1", False)])
def test_one_process_talks(monkeypatch, process_id, is_lead) -> None:
    monkeypatch.delenv("JAX_PROCESS_ID", raising=False)
    if process_id is not None:
        monkeypatch.setenv("JAX_PROCESS_ID", process_id)
    assert JaxBackend().is_lead is is_lead


def test_what_may_change_when_a_run_goes_on_are_fields_of_the_policy() -> None:
    assert JaxBackend.free_policy_fields <= JaxPolicyConfig.model_fields.keys()
    decide = {"learning_rate", "betas", "dtype", "loss", "lora", "seed", "updates_per_batch", "weight_decay"}
    assert decide <= JaxPolicyConfig.model_fields.keys() - JaxBackend.free_policy_fields


LOOK_AT_A_HUB = """
import sys
from dockyard_trainer_jax.cli import JaxBackend

print(JaxBackend().vocab_size("owner/name"))
print([name for name in ("jax", "flax", "torch", "transformers") if name in sys.modules])
JaxBackend().vocab_size("owner/other")
"""


def test_a_hub_id_is_looked_up_in_the_cache_before_anything_heavy_is_loaded(tiny_model, tmp_path) -> None:
    """As `huggingface_hub` lays it out; without a network, what is not there is one line."""
    held = tmp_path / "models--owner--name"
    (held / "snapshots").mkdir(parents=True)
    (held / "refs").mkdir()
    (held / "refs" / "main").write_text("0" * 40)
    (held / "snapshots" / ("0" * 40)).symlink_to(tiny_model())
    done = subprocess.run(
        [sys.executable, "-c", LOOK_AT_A_HUB],
        env=os.environ | {"HF_HUB_CACHE": str(tmp_path), "HF_HUB_OFFLINE": "1"},
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert done.stdout.splitlines() == ["64", "[]"], done.stderr
    assert "policy.model is neither a directory nor a model the hub serves, got 'owner/other'" in done.stderr


def test_a_path_is_no_hub_id(tmp_path, capsys) -> None:
    assert "check the path, or give a hub id such as 'owner/name'" in refusal(capsys, "/nowhere/at/all", tmp_path)
