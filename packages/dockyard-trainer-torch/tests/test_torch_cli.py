"""The command, in processes of its own where a process has to end, and in this one elsewhere."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
from offline_runs import (
    DEADLINE_S,
    arguments_of,
    has_saved,
    has_taken,
    make_rows,
    read_metrics,
    sft_rows,
    started,
    wait_for,
    write_rows,
)
from transformers import AutoModelForCausalLM

from dockyard_core.advantage import group_advantages
from dockyard_core.batch import TrainSequence, pack_batch
from dockyard_core.loss_config import LossConfig
from dockyard_trainer_torch import TorchPolicy, TorchPolicyConfig
from dockyard_trainer_torch.cli import main

RESULT = "hf/model.safetensors"
COMMAND = [sys.executable, "-m", "dockyard_trainer_torch"]


@pytest.fixture
def grpo_file(tmp_path: Path) -> Path:
    return write_rows(tmp_path / "grpo.jsonl", make_rows(num_groups=6))


@pytest.fixture
def sft_file(tmp_path: Path) -> Path:
    return write_rows(tmp_path / "sft.jsonl", sft_rows(make_rows(num_groups=6)))


def run_here(capsys: pytest.CaptureFixture[str], *arguments: object) -> tuple[int, str]:
    code = main([str(argument) for argument in arguments])
    return code, capsys.readouterr().err


def test_grpo_takes_the_steps_of_train_step_called_by_hand(tiny_model, tmp_path, grpo_file, capsys) -> None:
    more = ["--batch-size", 8, "--lr", 1e-2, "--loss", "clip_high=0.28", "--temperature", 1.3, "--save-every", 0]
    code, _ = run_here(capsys, *arguments_of("grpo", tiny_model(), grpo_file, tmp_path / "out", *more))
    assert code == 0
    config = TorchPolicyConfig(learning_rate=1e-2, loss=LossConfig(clip_high=0.28))
    policy = TorchPolicy.from_pretrained(tiny_model(), config)
    rows = [json.loads(line) for line in grpo_file.read_text().splitlines()]
    lines = read_metrics(tmp_path / "out")
    assert [line["step"] for line in lines] == [1, 2, 3]
    for line, start in zip(lines, range(0, 24, 8), strict=True):
        sequences = []
        for group in (rows[start : start + 4], rows[start + 4 : start + 8]):
            for row, advantage in zip(group, group_advantages([row["reward"] for row in group]), strict=True):
                mask = np.arange(len(row["token_ids"])) >= 4
                logprobs = np.zeros(len(mask), np.float32)
                logprobs[mask] = row["logprobs"]
                sequences.append(
                    TrainSequence(
                        token_ids_T=np.array(row["token_ids"]),
                        loss_mask_T=mask,
                        sampled_logprobs_T=logprobs,
                        advantage=float(advantage),
                    )
                )
        metrics = policy.train_step(pack_batch(sequences, temperature=1.3, skip_zero_advantage=True)[0])
        assert (line["loss"], line["grad_norm"], line["entropy"]) == (metrics.loss, metrics.grad_norm, metrics.entropy)
        assert line["policy_version"] == metrics.policy_version
        assert line["num_valid_tokens"] == sum(len(row["logprobs"]) for row in rows[start : start + 8])
    assert line["reward_mean"] == 0.25
    result = AutoModelForCausalLM.from_pretrained(tmp_path / "out" / "hf")
    for (name, one), other in zip(policy.causal_lm.named_parameters(), result.parameters(), strict=True):
        assert torch.equal(one, other), name


def test_the_loss_of_sft_is_that_of_hugging_face(tiny_model, tmp_path, sft_file, capsys) -> None:
    arguments = arguments_of("sft", tiny_model("qwen3"), sft_file, tmp_path / "out", "--batch-size", 24)
    code, _ = run_here(capsys, *arguments)
    assert code == 0
    rows = [json.loads(line) for line in sft_file.read_text().splitlines()]
    length = max(len(row["token_ids"]) for row in rows)
    token_ids = torch.zeros(len(rows), length, dtype=torch.long)
    labels, attention = torch.full_like(token_ids, -100), torch.zeros_like(token_ids)
    for index, row in enumerate(rows):
        num_tokens = len(row["token_ids"])
        token_ids[index, :num_tokens] = torch.tensor(row["token_ids"])
        labels[index, 4:num_tokens] = token_ids[index, 4:num_tokens]
        attention[index, :num_tokens] = 1
    model = AutoModelForCausalLM.from_pretrained(tiny_model("qwen3"), dtype=torch.float32)
    with torch.no_grad():
        wanted = model(input_ids=token_ids, attention_mask=attention, labels=labels).loss.item()
    (line,) = read_metrics(tmp_path / "out")
    assert line["loss"] == pytest.approx(wanted, abs=1e-5)
    assert line["nll"] == pytest.approx(wanted, abs=1e-5)
    assert line["perplexity"] == pytest.approx(np.exp(wanted), rel=1e-5)
    assert "clip_fraction" not in line


@pytest.mark.ci
def test_a_killed_run_goes_on_as_if_nothing_had_happened(tiny_model, tmp_path, grpo_file, capsys) -> None:
    more = ["--batch-size", 8, "--epochs", 20, "--shuffle", "--lr", 1e-3, "--schedule", "cosine", "--save-every", 4]
    whole, cut = tmp_path / "whole", tmp_path / "cut"
    assert run_here(capsys, *arguments_of("grpo", tiny_model(), grpo_file, whole, *more))[0] == 0
    arguments = arguments_of("grpo", tiny_model(), grpo_file, cut, *more)
    with started([*COMMAND, *arguments], tmp_path / "log") as process:
        wait_for(lambda: has_saved(cut, 8), process, tmp_path / "log")
        process.send_signal(signal.SIGKILL)
        process.wait(DEADLINE_S)
    assert not (cut / "hf").exists()
    with (cut / "metrics.jsonl").open("a") as file:
        file.write('{"step": 99')  # a line that the kill cut
    code, said = run_here(capsys, *arguments)
    assert code == 0
    assert "going on after step" in said
    assert [line["step"] for line in read_metrics(cut)] == list(range(1, 61))
    assert read_metrics(cut) == read_metrics(whole)
    assert (cut / RESULT).read_bytes() == (whole / RESULT).read_bytes()
    assert sorted(path.name for path in (cut / "checkpoints").iterdir()) == ["step-000056", "step-000060"]
    assert "nothing to do" in run_here(capsys, *arguments)[1]
    (cut / "hf").rename(tmp_path / "moved")  # killed after the last checkpoint, before the export
    assert run_here(capsys, *arguments)[0] == 0
    assert (cut / RESULT).read_bytes() == (whole / RESULT).read_bytes()


@pytest.mark.parametrize(
    ("number", "code"), [(signal.SIGTERM, 143), pytest.param(signal.SIGINT, 130, marks=pytest.mark.ci)]
)
def test_a_signal_ends_the_step_saves_it_and_says_how_to_go_on(
    tiny_model, tmp_path, grpo_file, capsys, number, code
) -> None:
    out, log = tmp_path / "out", tmp_path / "log"
    arguments = arguments_of("grpo", tiny_model(), grpo_file, out, "--batch-size", 4, "--steps", 2000)
    with started([*COMMAND, *arguments], log) as process:
        wait_for(lambda: has_taken(out, 3), process, log)
        process.send_signal(number)
        assert process.wait(DEADLINE_S) == code
    taken = len(read_metrics(out))
    last = log.read_text().splitlines()[-1]
    assert f"stopped after step {taken} of 2000" in last
    assert "run the same command again" in last
    assert has_saved(out, taken)
    arguments[-1] = str(taken + 2)  # a constant schedule does not depend on the number of steps
    assert run_here(capsys, *arguments)[0] == 0
    assert [line["step"] for line in read_metrics(out)] == list(range(1, taken + 3))


def test_a_directory_of_another_run_is_refused_in_one_line(tiny_model, tmp_path, grpo_file, sft_file, capsys) -> None:
    out = tmp_path / "out"
    arguments = arguments_of("grpo", tiny_model(), grpo_file, out, "--batch-size", 8, "--steps", 1)
    assert run_here(capsys, *arguments)[0] == 0
    other_data = write_rows(tmp_path / "other.jsonl", make_rows(num_groups=6, seed=1))
    for changed, named in (
        ([*arguments, "--lr", 1e-3], "policy.learning_rate must be 1e-06, got 0.001"),
        ([*arguments, "--policy", "loss={}"], "--policy loss must be given as --loss"),
        ([*arguments, "--loss", "clip_high=0.3"], "policy.loss.clip_high must be 0.2, got 0.3"),
        ([*arguments, "--data", other_data], "data_sha256 must be"),
        ([*arguments, "--resume", "never"], "--resume never needs an empty --out"),
        (arguments_of("sft", tiny_model(), sft_file, out), "batch_size must be 8, got 64"),
        (arguments_of("grpo", tiny_model(), grpo_file, tmp_path), "with other files; give another directory"),
        (arguments_of("grpo", tiny_model(), grpo_file, tmp_path / "new", "--resume", "must"), "got none in"),
    ):
        code, said = run_here(capsys, *changed)
        assert (code, len(said.splitlines())) == (2, 1), said
        assert named in said
    more_memory = [*arguments, "--micro-batch-tokens", 64, "--policy", "logprob_chunk_tokens=8", "--keep", 1]
    assert run_here(capsys, *more_memory)[0] == 0, "how something is computed may change"


@pytest.mark.parametrize(
    ("more", "named"),
    [
        (["--loss", "clip_hi=0.3"], "did you mean clip_high?"),
        (["--policy", "lr=1"], "--policy must name a field of TorchPolicyConfig, got 'lr'; did you mean"),
        (["--policy", "eps"], "--policy must be key=value, got 'eps'"),
        (["--lr", "-1"], "--lr: Input should be greater than or equal to 0, got -1"),
        (["--loss", "clip_low=1.5"], "--loss: clip_low must be < 1"),
        (["--lr", "1", "--policy", "learning_rate=1"], "learning_rate must be given once"),
        (["--batch-size", "3"], "--batch-size must hold the largest group, got 3 < 4 rows; use --batch-size 4"),
        (["--model", "/nowhere/at/all"], "must be a directory"),
        (["--data", "/nowhere/at/all"], "file: must be readable, got No such file or directory"),
        (["--warmup-steps", "9", "--schedule", "linear"], "warmup_steps must be <= total_steps, got 9 > 1"),
    ],
)
def test_a_mistake_is_one_line_and_exit_code_2(tiny_model, tmp_path, grpo_file, capsys, more, named) -> None:
    code, said = run_here(capsys, *arguments_of("grpo", tiny_model(), grpo_file, tmp_path / "out", *more))
    assert (code, len(said.splitlines())) == (2, 1), said
    assert said.startswith("dockyard-train-torch: ")
    assert named in said
    assert not (tmp_path / "out").exists()


def test_a_token_that_the_model_does_not_know_is_refused(tiny_model, tmp_path, capsys) -> None:
    data = write_rows(tmp_path / "rows.jsonl", [{"token_ids": [1, 2, 64], "prompt_length": 1}])
    code, said = run_here(capsys, *arguments_of("sft", tiny_model(), data, tmp_path / "out"))
    assert code == 2
    assert f"{data}:1: token_ids: must lie in 0..63, the model's vocabulary, got 64 at 2" in said


def test_proximal_logprobs_of_the_file_reach_the_loss(tiny_model, tmp_path, capsys) -> None:
    rows = make_rows(num_groups=1)
    for row in rows:
        row["proximal_logprobs"] = [value - 0.5 for value in row["logprobs"]]
    data = write_rows(tmp_path / "rows.jsonl", rows)
    arguments = arguments_of("grpo", tiny_model(), data, tmp_path / "out", "--loss", "correction=is")
    code, said = run_here(capsys, *arguments)
    assert (code, "proximal_logprobs are read under --loss proximal=given" in said) == (2, True)
    assert run_here(capsys, *arguments, "proximal=given")[0] == 0
    (line,) = read_metrics(tmp_path / "out")
    # E[r - 1 - log r] with log r = -0.5 on every token
    assert line["kl_sampled_proximal"] == pytest.approx(np.exp(-0.5) - 1 + 0.5, abs=1e-5)


@pytest.mark.ci
@pytest.mark.parametrize("command", ["sft", "grpo"])
def test_two_ranks_of_torchrun_take_the_steps_of_one(
    tiny_model, tmp_path, grpo_file, sft_file, capsys, command
) -> None:
    data = grpo_file if command == "grpo" else sft_file
    more = ["--batch-size", 8, "--epochs", 2, "--shuffle", "--lr", 1e-3, "--policy", "eps=1e-4", "--save-every", 2]
    assert run_here(capsys, *arguments_of(command, tiny_model(), data, tmp_path / "one", *more))[0] == 0
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    torchrun += ["-m", "dockyard_trainer_torch", *arguments_of(command, tiny_model(), data, tmp_path / "two", *more)]
    environment = os.environ | {"OMP_NUM_THREADS": "1"}
    for steps in ("3", "6"):  # stops in the middle, then goes on
        run = [*torchrun, "--steps", steps]
        done = subprocess.run(run, capture_output=True, text=True, timeout=DEADLINE_S, check=False, env=environment)
        assert done.returncode == 0, done.stderr
    assert done.stderr.count("done: 6 steps") == 1, "one rank talks"
    counts = ("step", "epoch", "num_rows", "num_tokens", "num_valid_tokens", "policy_version", "learning_rate")
    for wanted, got in zip(*(read_metrics(tmp_path / name) for name in ("one", "two")), strict=True):
        assert {name: got[name] for name in counts} == {name: wanted[name] for name in counts}
        for name in ("loss", "grad_norm", "entropy"):
            assert got[name] == pytest.approx(wanted[name], rel=1e-4, abs=1e-6), name
    models = [AutoModelForCausalLM.from_pretrained(tmp_path / name / "hf") for name in ("one", "two")]
    for (name, wanted), got in zip(models[0].named_parameters(), models[1].parameters(), strict=True):
        torch.testing.assert_close(got, wanted, rtol=0, atol=1e-5, msg=name)
