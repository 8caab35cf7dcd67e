"""``dockyard-refit push`` into real servers: afterwards they serve the pushed weights, and nothing else."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import httpx
import pytest
import torch
from sglang_environment import sglang_python

from dockyard_inference.push.cli import main

pytestmark = pytest.mark.timeout(900)
START_S, NUM_TOKENS = 300.0, 24
PROMPTS = [[5, 9, 31, 7], [40, 41, 42], [17] * 6, [3, 60, 2, 8, 20]]
ATTESTED = [
    "--worker-extension-cls",
    "dockyard_inference.push.vllm_worker.PushExtension",
    "--weight-transfer-config",
    '{"backend": "dockyard-push"}',
]


@dataclass
class Running:
    """A server, and how to ask it for tokens."""

    url: str
    generate: Callable[[str, list[int], int], list[int]]

    def greedy(self) -> list[list[int]]:
        return [self.generate(self.url, prompt, NUM_TOKENS) for prompt in PROMPTS]


def vllm_tokens(url: str, prompt: list[int], count: int) -> list[int]:
    sampling = {"temperature": 0.0, "max_tokens": count, "ignore_eos": True, "detokenize": False}
    answer = httpx.post(
        f"{url}/inference/v1/generate", json={"token_ids": prompt, "sampling_params": sampling}, timeout=120
    )
    assert answer.status_code == 200, answer.text
    ids: list[int] = answer.json()["choices"][0]["token_ids"]
    return ids


def sglang_tokens(url: str, prompt: list[int], count: int) -> list[int]:
    sampling = {"temperature": 0.0, "max_new_tokens": count, "ignore_eos": True}
    answer = httpx.post(f"{url}/generate", json={"input_ids": prompt, "sampling_params": sampling}, timeout=120)
    assert answer.status_code == 200, answer.text
    ids: list[int] = answer.json()["output_ids"]
    return ids


def expected(directory: Path) -> list[list[int]]:
    """transformers' greedy tokens."""
    from transformers import AutoModelForCausalLM

    model, found = AutoModelForCausalLM.from_pretrained(directory).eval(), []
    for prompt in PROMPTS:
        ids = torch.tensor([prompt])
        with torch.no_grad():
            for _ in range(NUM_TOKENS):
                ids = torch.cat([ids, model(ids).logits[:, -1:].argmax(-1)], dim=1)
        found.append(ids[0, len(prompt) :].tolist())
    return found


def variant(directory: Path, target: Path, seed: int) -> Path:
    """Other weights for the same model."""
    from transformers import AutoModelForCausalLM

    model, rng = AutoModelForCausalLM.from_pretrained(directory), torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(0.1 * torch.randn(parameter.shape, generator=rng))
    model.save_pretrained(target)
    return target


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


@contextmanager
def running(command: Sequence[str], log: Path, ready: str, **environment: str) -> Iterator[str]:
    """Start a server in a process group of its own, wait until it is ready, and end the group."""
    port = free_port()
    env = {**os.environ, "HF_HUB_OFFLINE": "1", "OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": "", **environment}
    env.pop("PYTHONDONTWRITEBYTECODE", None)
    with log.open("wb") as output:
        process = subprocess.Popen(
            [*command, "--host", "127.0.0.1", "--port", str(port)],
            stdout=output,
            stderr=subprocess.STDOUT,
            env=env,
            start_new_session=True,
        )
    url, end = f"http://127.0.0.1:{port}", time.monotonic() + START_S
    try:
        while not _answers(url + ready):
            assert process.poll() is None, log.read_text(errors="replace")[-4000:]
            assert time.monotonic() < end, log.read_text(errors="replace")[-4000:]
            time.sleep(0.3)
        yield url
    finally:
        os.killpg(process.pid, signal.SIGKILL)
        process.wait()


def _answers(url: str) -> bool:
    try:
        return httpx.get(url, timeout=5).status_code == 200
    except httpx.TransportError:
        return False


def vllm(model: Path, *options: str) -> list[str]:
    sizes = [
        "--dtype",
        "float32",
        "--max-model-len",
        "128",
        "--max-num-seqs",
        "8",
        "--kv-cache-memory-bytes",
        "200000000",
    ]
    command = [sys.executable, "-m", "vllm.entrypoints.openai.api_server", "--model", str(model)]
    return [*command, *sizes, "--enforce-eager", "--skip-tokenizer-init", "--enable-scale-out", *options]


@pytest.fixture(scope="module")
def tied(make_model: Callable[..., Path]) -> Path:
    return make_model("qwen2", is_tied=True)


@pytest.mark.nightly
def test_vllm_takes_attested_pushes(tied: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    pytest.importorskip("vllm")
    with running(vllm(tied, *ATTESTED), tmp_path / "log", "/health", VLLM_SERVER_DEV_MODE="1") as url:
        server = Running(url, vllm_tokens)
        before = server.greedy()
        assert before == expected(tied)
        first = variant(tied, tmp_path / "first", 1)
        assert main(["push", str(first), "--to", url, "--version", "7"]) == 0, capsys.readouterr().err
        assert "attested" in capsys.readouterr().out
        assert server.greedy() == expected(first) != before
        assert httpx.get(f"{url}/weight_info").json() == {"weight_version": "7"}

        other = variant_of_another_shape(first, tmp_path / "other")
        assert main(["push", str(other), "--to", url]) == 5
        assert "model.norm.weight (63,) != (64,)" in capsys.readouterr().err
        assert server.greedy() == expected(first)
        assert httpx.get(f"{url}/is_paused").json() == {"is_paused": False}

        second, answers = variant(tied, tmp_path / "second", 2), list[list[int]]()
        asking = threading.Thread(target=lambda: answers.append(vllm_tokens(url, PROMPTS[0], 120)))
        asking.start()
        assert main(["push", str(second), "--to", url, "--transport", "collective"]) == 0, capsys.readouterr().err
        asking.join(120)
        assert [len(ids) for ids in answers] == [120]
        assert server.greedy() == expected(second)
        assert httpx.get(f"{url}/weight_info").json() == {"weight_version": "8"}


def variant_of_another_shape(directory: Path, target: Path) -> Path:
    import shutil

    from safetensors.torch import load_file, save_file

    shutil.copytree(directory, target)
    tensors = load_file(target / "model.safetensors")
    tensors["model.norm.weight"] = tensors["model.norm.weight"][:63].clone()
    save_file(tensors, target / "model.safetensors")
    return target


@pytest.mark.nightly
def test_a_plain_vllm_reads_the_directory(
    make_model: Callable[..., Path], tied: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    pytest.importorskip("vllm")
    model = make_model("llama", is_tied=False)
    with running(vllm(model), tmp_path / "log", "/health", VLLM_SERVER_DEV_MODE="1") as url:
        server = Running(url, vllm_tokens)
        before = server.greedy()
        pushed = variant(model, tmp_path / "pushed", 3)
        assert main(["push", str(pushed), "--to", url]) == 0, capsys.readouterr().err
        assert "version 1, disk" in capsys.readouterr().out
        assert server.greedy() == expected(pushed) != before
        assert httpx.get(f"{url}/weight_info").json() == {"weight_version": "1"}
        assert main(["push", str(pushed), "--to", url, "--transport", "collective"]) == 4
        assert "--worker-extension-cls" in capsys.readouterr().err
        assert main(["push", str(tied), "--to", url]) == 5
        assert server.greedy() == expected(pushed)


@pytest.mark.ci
def test_sglang_reads_the_directory_or_is_sent_the_bytes(
    tied: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    python = str(sglang_python())
    sizes = [
        "--dtype",
        "float32",
        "--max-total-tokens",
        "4096",
        "--mem-fraction-static",
        "0.1",
        "--disable-radix-cache",
    ]
    cpu = ["--device", "cpu", "--attention-backend", "torch_native", "--sampling-backend", "pytorch"]
    rest = ["--disable-cuda-graph", "--disable-overlap-schedule", "--skip-server-warmup", "--skip-tokenizer-init"]
    command = [python, "-m", "sglang.launch_server", "--model-path", str(tied), *cpu, *sizes, *rest]
    with running(command, tmp_path / "log", "/model_info", SGLANG_USE_CPU_ENGINE="1") as url:
        server = Running(url, sglang_tokens)
        for version, transport in enumerate(("disk", "collective", "disk"), start=1):
            pushed = variant(tied, tmp_path / str(version), version)
            assert main(["push", str(pushed), "--to", url, "--transport", transport]) == 0, capsys.readouterr().err
            assert f"version {version}, {transport}" in capsys.readouterr().out
            assert server.greedy() == expected(pushed)
            assert httpx.get(f"{url}/model_info").json()["weight_version"] == str(version)
        assert main(["push", str(variant_of_another_shape(pushed, tmp_path / "other")), "--to", url]) == 5
        assert server.greedy() == expected(pushed)
