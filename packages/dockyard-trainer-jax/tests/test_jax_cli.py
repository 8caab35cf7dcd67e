"""The command against the PyTorch trainer's; killed, stopped, and gone on with; in one process and in two."""

from __future__ import annotations

import signal
import socket
import sys
from contextlib import ExitStack
from pathlib import Path

import pytest
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
from safetensors.numpy import load_file

from dockyard_trainer_jax.cli import main
from dockyard_trainer_torch.cli import main as torch_main

pytestmark = pytest.mark.timeout(900)  # most of it is compilation
RESULT = "hf/model.safetensors"
COMMAND = [sys.executable, "-m", "dockyard_trainer_jax"]
ONE_DEVICE = ["--policy", "fsdp_size=1"]
COUNTS = ("step", "epoch", "num_rows", "num_tokens", "num_valid_tokens", "policy_version", "learning_rate", "skipped")


@pytest.fixture
def grpo_file(tmp_path: Path) -> Path:
    return write_rows(tmp_path / "grpo.jsonl", make_rows(num_groups=6))


@pytest.fixture
def sft_file(tmp_path: Path) -> Path:
    return write_rows(tmp_path / "sft.jsonl", sft_rows(make_rows(num_groups=6)))


def assert_same_run(wanted: Path, got: Path) -> None:
    """Counts are equal, numbers and weights within what the order of a sum changes."""
    for line, other in zip(read_metrics(wanted), read_metrics(got), strict=True):
        assert {name: other[name] for name in COUNTS} == {name: line[name] for name in COUNTS}
        assert line.keys() <= other.keys()
        for name in line.keys() - {*COUNTS, "num_compiled_shapes"}:
            assert other[name] == pytest.approx(line[name], rel=1e-4, abs=1e-5), name
    weights, others = load_file(wanted / RESULT), load_file(got / RESULT)
    assert weights.keys() == others.keys()
    for name, weight in weights.items():
        assert abs(others[name] - weight).max() <= 1e-5, name


@pytest.mark.parametrize("command", [pytest.param("sft", marks=pytest.mark.ci), "grpo"])
def test_the_command_takes_the_steps_of_the_torch_wheels(tiny_model, tmp_path, grpo_file, sft_file, command) -> None:
    data, loss = (sft_file, ["kl_coef=0.1"]) if command == "sft" else (grpo_file, ["clip_high=0.28", "correction=is"])
    more = ["--batch-size", 24, "--epochs", 4, "--lr", 1e-3, "--schedule", "cosine", "--warmup-steps", 2]
    more += ["--loss", *loss, "--policy", "eps=1e-4"]  # or Adam turns rounding into whole steps
    model = tiny_model("qwen3")
    assert torch_main(arguments_of(command, model, data, tmp_path / "torch", *more)) == 0
    assert main(arguments_of(command, model, data, tmp_path / "jax", *more, *ONE_DEVICE)) == 0
    assert_same_run(tmp_path / "torch", tmp_path / "jax")
    assert len(read_metrics(tmp_path / "jax")) == 4


@pytest.mark.ci
def test_a_killed_run_goes_on_as_if_nothing_had_happened(tiny_model, tmp_path, capsys) -> None:
    data = write_rows(tmp_path / "rows.jsonl", make_rows(num_groups=6, lengths=[6]))
    more = ["--batch-size", 8, "--epochs", 20, "--shuffle", "--lr", 1e-3, "--schedule", "cosine", "--save-every", 4]
    whole, cut, log = tmp_path / "whole", tmp_path / "cut", tmp_path / "log"
    assert main(arguments_of("grpo", tiny_model(), data, whole, *more, *ONE_DEVICE)) == 0
    arguments = arguments_of("grpo", tiny_model(), data, cut, *more, *ONE_DEVICE)
    with started([*COMMAND, *arguments], log) as process:
        wait_for(lambda: has_saved(cut, 8), process, log)
        process.send_signal(signal.SIGKILL)
        process.wait(DEADLINE_S)
    assert not (cut / "hf").exists()
    with (cut / "metrics.jsonl").open("a") as file:
        file.write('{"step": 99')  # a line that the kill cut
    assert main(arguments) == 0
    assert "going on after step" in capsys.readouterr().err
    assert [line["step"] for line in read_metrics(cut)] == list(range(1, 61))
    assert read_metrics(cut) == read_metrics(whole)
    assert (cut / RESULT).read_bytes() == (whole / RESULT).read_bytes()


@pytest.mark.nightly  # in ci two processes are ended so, and one goes on
def test_a_signal_ends_the_step_and_saves_it_and_the_run_goes_on_on_all_devices(
    tiny_model, tmp_path, grpo_file
) -> None:
    out, log = tmp_path / "out", tmp_path / "log"
    more = ["--batch-size", 24, "--lr", 1e-3, "--policy", "eps=1e-4", "--steps"]
    arguments = arguments_of("grpo", tiny_model(), grpo_file, out, *more)
    with started([*COMMAND, *arguments, "2000", *ONE_DEVICE], log) as process:
        wait_for(lambda: has_taken(out, 3), process, log)
        process.send_signal(signal.SIGTERM)
        assert process.wait(DEADLINE_S) == 143
    taken = len(read_metrics(out))
    assert f"stopped after step {taken} of 2000" in log.read_text().splitlines()[-1]
    assert has_saved(out, taken)
    # Where and how it is computed may change: now on eight devices, which is the default where there are as many.
    assert main([*arguments, str(taken + 2), "--policy", "activation_checkpointing=true"]) == 0
    whole = tmp_path / "whole"
    assert main([*arguments_of("grpo", tiny_model(), grpo_file, whole, *more), str(taken + 2), *ONE_DEVICE]) == 0
    assert_same_run(whole, out)


@pytest.mark.ci
def test_two_processes_stop_together_and_one_goes_on_with_their_steps(tiny_model, tmp_path, grpo_file) -> None:
    one, two = tmp_path / "one", tmp_path / "two"
    more = ["--batch-size", 24, "--lr", 1e-3, "--policy", "eps=1e-4", "--steps"]
    arguments = arguments_of("grpo", tiny_model(), grpo_file, two, *more)
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    place = {"JAX_COORDINATOR_ADDRESS": f"127.0.0.1:{port}", "JAX_NUM_PROCESSES": "2"}
    logs = [tmp_path / f"log-{rank}" for rank in range(2)]
    with ExitStack() as stack:
        processes = [
            stack.enter_context(
                started([*COMMAND, *arguments, "2000"], log, JAX_PROCESS_ID=str(rank), XLA_FLAGS="", **place)
            )
            for rank, log in enumerate(logs)
        ]
        wait_for(lambda: has_taken(two, 3), processes[0], logs[0])
        processes[1].send_signal(signal.SIGTERM)  # one of them is enough
        codes = [process.wait(DEADLINE_S) for process in processes]
    said = [log.read_text() for log in logs]
    assert codes == [143, 143], said
    taken = len(read_metrics(two))
    assert f"stopped after step {taken} of 2000" in said[0]
    assert "stopped after" not in said[1], "one process talks"
    for out in (one, two):
        last = [str(taken + 2), *ONE_DEVICE]
        assert main([*arguments_of("grpo", tiny_model(), grpo_file, out, *more), *last]) == 0
    assert_same_run(one, two)
