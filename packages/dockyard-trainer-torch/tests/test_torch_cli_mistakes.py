"""Mistakes in what the command is pointed at: one line, exit code 2, and nothing left behind."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from dockyard_trainer_torch.cli import main


def refusal(capsys, model: Path, tmp_path: Path, *more: str) -> str:
    data = tmp_path / "rows.jsonl"
    data.write_text(json.dumps({"token_ids": [1, 2, 3], "prompt_length": 1}) + "\n")
    arguments = ["sft", "--model", str(model), "--data", str(data), "--out", str(tmp_path / "out"), *more]
    assert main(arguments) == 2
    (said,) = capsys.readouterr().err.splitlines()
    assert not (tmp_path / "out").exists()
    return str(said)


@pytest.mark.parametrize(
    ("content", "named"),
    [
        ('{"model_type": ', "must have a config.json that can be read"),
        ("[]", "must be of a family llama, qwen2, qwen3, qwen3_moe, got None"),
        ('{"model_type": "gpt2", "eos_token_id": 50256, "vocab_size": 9}', "got 'gpt2'"),
        ('{"model_type": "qwen2"}', "must have a config.json with vocab_size"),
    ],
)
def test_a_model_that_is_none_of_ours(tmp_path, capsys, content, named) -> None:
    (tmp_path / "config.json").write_text(content)
    assert named in refusal(capsys, tmp_path, tmp_path)


@pytest.mark.parametrize(
    ("more", "named"),
    [
        (["--device", "gpu"], "--device must be cpu, cuda or cuda:N, got 'gpu'"),
        (["--device", "cuda:99"], "--device must name a GPU that torch sees, got 'cuda:99' (number 99) of"),
        (["--policy", "lr=1"], "got 'lr'; did you mean learning_rate?"),
        (["--policy", "lora.r=8"], "--policy lora must name a field of LoraConfig, got 'r'; did you mean rank?"),
        (["--policy", "lora=true"], "got True; write lora.FIELD=VALUE"),
    ],
)
def test_a_device_or_field_that_is_not_there(tiny_model, tmp_path, capsys, more, named) -> None:
    assert named in refusal(capsys, tiny_model(), tmp_path, *more)
