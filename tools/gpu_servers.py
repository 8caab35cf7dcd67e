"""The checks of tools/gpu_check.py that start a server and push a checkpoint into it with ``dockyard-refit``."""

from __future__ import annotations

import json
import os
import re
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx
import torch

ROOT = Path(__file__).resolve().parent.parent
POLICY = ROOT / "apps/grpo/src/dockyard_grpo/quickstart/policy"
SGLANG_PYTHON = "DOCKYARD_SGLANG_PYTHON"
START_S, NUM_TOKENS, MAX_GAP = 240.0, 32, 1e-3
PROMPTS = [list(range(5 + index, 13 + index)) for index in range(4)]
Figures = dict[str, Any]


@contextmanager
def serving(command: Sequence[str], ready: str, **environment: str) -> Iterator[str]:
    """Start a server, wait until it is ready, and end it; its children end with this check's process group."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    words = [*command, "--host", "127.0.0.1", "--port", str(port)]
    process = subprocess.Popen(words, env={**os.environ, **environment})
    url, end = f"http://127.0.0.1:{port}", time.monotonic() + START_S
    try:
        while not answers(url + ready):
            if process.poll() is not None:
                raise RuntimeError(f"the server ended with code {process.returncode} while it started")
            if time.monotonic() > end:
                raise RuntimeError(f"the server was not ready after {START_S:.0f} s")
            time.sleep(0.5)
        yield url
    finally:
        process.kill()
        process.wait()


def answers(url: str) -> bool:
    try:
        return httpx.get(url, timeout=5).status_code == 200
    except httpx.TransportError:
        return False


def changed(target: Path, seed: int) -> Path:
    """The quickstart's policy with other weights."""
    from transformers import AutoModelForCausalLM

    model, rng = AutoModelForCausalLM.from_pretrained(POLICY), torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(0.02 * torch.randn(parameter.shape, generator=rng))
    model.save_pretrained(target)
    return target


def gap_of(directory: Path, completions: Sequence[Sequence[int]]) -> float:
    """How far the served tokens' logprobs are below transformers' best; 0 where they are its choice."""
    from transformers import AutoModelForCausalLM

    model, worst = AutoModelForCausalLM.from_pretrained(directory).eval(), 0.0
    for prompt, completion in zip(PROMPTS, completions, strict=True):
        assert len(completion) == NUM_TOKENS
        ids = torch.tensor([[*prompt, *completion]])
        with torch.no_grad():
            rows = model(ids).logits[0, len(prompt) - 1 : -1].log_softmax(-1)
        picked = rows.gather(-1, ids[0, len(prompt) :, None])[:, 0]
        worst = max(worst, float((rows.max(-1).values - picked).max()))
    return worst


def push(directory: Path, url: str, *options: str) -> str:
    """Run the command; returns its last line."""
    command = [sys.executable, "-m", "dockyard_inference.push", "push", str(directory), "--to", url, *options]
    done = subprocess.run(command, capture_output=True, text=True, timeout=240, check=False)
    print(done.stderr, done.stdout)
    assert done.returncode == 0, f"dockyard-refit ended with code {done.returncode}"
    return done.stdout.strip().splitlines()[-1]


def vllm_tokens(url: str, prompt: Sequence[int]) -> list[int]:
    sampling = {"temperature": 0.0, "max_tokens": NUM_TOKENS, "ignore_eos": True, "detokenize": False}
    body = {"token_ids": prompt, "sampling_params": sampling}
    said = httpx.post(f"{url}/inference/v1/generate", json=body, timeout=120).raise_for_status().json()
    ids: list[int] = said["choices"][0]["token_ids"]
    return ids


def sglang_tokens(url: str, prompt: Sequence[int]) -> list[int]:
    sampling = {"temperature": 0.0, "max_new_tokens": NUM_TOKENS, "ignore_eos": True}
    body = {"input_ids": prompt, "sampling_params": sampling}
    ids: list[int] = httpx.post(f"{url}/generate", json=body, timeout=120).raise_for_status().json()["output_ids"]
    return ids


def pushed_into(url: str, tokens: Any, ways: Sequence[str]) -> Figures:
    """One push per way, each with weights of its own; afterwards the server must serve those."""
    figures: Figures = {}
    with tempfile.TemporaryDirectory(prefix="dockyard-push-check-") as folder:
        for number, way in enumerate(ways, start=1):
            directory = changed(Path(folder) / str(number), number)
            line = push(directory, url, "--transport", way, "--version", str(number))
            gap = gap_of(directory, [tokens(url, prompt) for prompt in PROMPTS])
            assert gap <= MAX_GAP, f"after a push by {way} the server's tokens are {gap} below transformers' best"
            rate = re.search(r"(\d+) MB/s", line)
            figures |= {f"{way}_MB/s": int(rate[1]) if rate else None, f"{way}_gap": gap}
    return figures


def push_vllm(device: str) -> Figures:
    """By ``PushExtension``, and on a GPU also a directory that vLLM reads itself."""
    sizes = ["--dtype", "float32", "--max-model-len", "128", "--max-num-seqs", "8", "--enforce-eager"]
    attested = ["--worker-extension-cls", "dockyard_inference.push.vllm_worker.PushExtension"]
    backend = ["--weight-transfer-config", json.dumps({"backend": "dockyard-push"})]
    command = [
        sys.executable,
        "-m",
        "vllm.entrypoints.openai.api_server",
        "--model",
        str(POLICY),
        *sizes,
        *attested,
        *backend,
    ]
    command += ["--skip-tokenizer-init", "--enable-scale-out", "--kv-cache-memory-bytes", str(256 << 20)]
    with serving(command, "/health", VLLM_SERVER_DEV_MODE="1") as url:
        return pushed_into(url, vllm_tokens, ["auto"] if device == "cpu" else ["auto", "disk"])


def push_sglang(device: str) -> Figures:
    """A directory that SGLang reads itself, and the bytes where NCCL has a GPU for each side."""
    python = os.environ[SGLANG_PYTHON]
    sizes = [
        "--dtype",
        "float32",
        "--max-total-tokens",
        "4096",
        "--mem-fraction-static",
        "0.1",
        "--skip-tokenizer-init",
    ]
    quick = ["--skip-server-warmup", "--disable-cuda-graph", "--disable-overlap-schedule", "--disable-radix-cache"]
    command = [python, "-m", "sglang.launch_server", "--model-path", str(POLICY), *sizes, *quick]
    ways, environment = ["disk"], {}
    if device == "cpu":
        command += ["--device", "cpu", "--attention-backend", "torch_native", "--sampling-backend", "pytorch"]
        ways, environment = ["disk", "collective"], {"SGLANG_USE_CPU_ENGINE": "1", "CUDA_VISIBLE_DEVICES": ""}
    elif torch.cuda.device_count() > 1:
        command += ["--base-gpu-id", "1"]  # this process sends from the first
        ways = ["disk", "collective"]
    with serving(command, "/model_info", **environment) as url:
        return pushed_into(url, sglang_tokens, ways)


PATHS = {"push-vllm": push_vllm, "push-sglang": push_sglang}
