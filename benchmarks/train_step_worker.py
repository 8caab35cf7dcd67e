"""A subject of `benchmarks.train_step` in a process of its own, which takes a step whenever it is told to.

Both ends of the pipe are here. The subject's end runs in the peer's environment too, so this file imports nothing but
the standard library.
"""

from __future__ import annotations

import ctypes
import json
import os
import subprocess
import sys
import time
from collections.abc import Callable, Mapping
from importlib.metadata import version
from pathlib import Path
from typing import Any, NamedTuple, TextIO

from tools.kept_environment import interpreter_of

ROOT = Path(__file__).resolve().parent.parent
TOOL = ROOT / "tools" / "trl_env.py"
VARIABLE = "DOCKYARD_TRL_PYTHON"
SHARED = ("torch", "transformers", "numpy")


class Step(NamedTuple):
    """What one optimizer step reports."""

    loss: float
    grad_norm: float
    """Before clipping."""


class Subject(NamedTuple):
    """What a worker process serves."""

    step: Callable[[], Step]
    gemm: Callable[[], dict[str, float]] | None = None
    """``gflops`` and ``gflops_cpu`` of a matrix product that is large enough to be at its peak."""
    forward: Callable[[], Any] | None = None
    """Log-probabilities of the batch, without gradient."""
    about: Callable[[], Mapping[str, float]] = dict
    """What there is to say once the first step and the first forward pass were taken."""


def claim_stdout() -> TextIO:
    """The pipe to the parent; whatever libraries print goes to stderr from here on."""
    channel = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    return channel


def serve(subject: Subject, channel: TextIO) -> None:
    """Answer each line of stdin until it ends.

    ``first`` is a step with its peak of resident memory above what the process held before it, and a forward pass.
    """

    def timed(function: Callable[[], Any]) -> tuple[dict[str, float], Any]:
        started, cpu_started = time.perf_counter(), time.process_time()
        returned = function()
        cpu_seconds = time.process_time() - cpu_started
        return {"seconds": time.perf_counter() - started, "cpu_seconds": cpu_seconds}, returned

    def timed_step() -> dict[str, float]:
        seconds, step = timed(subject.step)
        found: dict[str, float] = seconds | step._asdict()
        return found

    def first() -> dict[str, float]:
        baseline = _reset_peak()
        found = timed_step()
        found["peak_mib"] = (_status("VmHWM") - baseline) / 1024
        if subject.forward is not None:
            subject.forward()
        return {**found, **subject.about()}

    answers: dict[str, Callable[[], dict[str, float]]] = {"first": first, "step": timed_step}
    if subject.gemm is not None:
        answers["gemm"] = subject.gemm
    if subject.forward is not None:
        forward = subject.forward
        answers["forward"] = lambda: timed(forward)[0]
    _answer(channel, {"ready": True})
    for line in sys.stdin:
        _answer(channel, answers[line.strip()]())


def _answer(channel: TextIO, value: Mapping[str, Any]) -> None:
    channel.write(json.dumps(value) + "\n")
    channel.flush()


def _reset_peak() -> int:
    """Give freed memory back and start the peak anew; returns KiB that are resident."""
    ctypes.CDLL(None).malloc_trim(0)
    Path("/proc/self/clear_refs").write_text("5")
    return _status("VmRSS")


def _status(key: str) -> int:
    """A value of the process, in KiB."""
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith(f"{key}:"):
            return int(line.split()[1])
    raise KeyError(key)


class Worker:
    """The parent's end: starts the process and waits until it is ready."""

    def __init__(self, python: Path | str, module: str, options: Mapping[str, Any], log: Path) -> None:
        environment = {
            **os.environ,
            "HF_HUB_OFFLINE": "1",
            "OMP_NUM_THREADS": str(options["threads"]),
            "TOKENIZERS_PARALLELISM": "false",
        }
        self._log = log
        with log.open("ab") as stderr:
            self._process = subprocess.Popen(
                [python, "-m", module, json.dumps(options)],
                cwd=ROOT,
                env=environment,
                text=True,
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=stderr,
            )
        self._name = f"{module} {options.get('subject', '')}".strip()
        try:
            self._read()
        except BaseException:
            self.close()
            raise

    def ask(self, command: str) -> dict[str, float]:
        """Send one command and wait for its answer."""
        assert self._process.stdin is not None
        self._process.stdin.write(command + "\n")
        self._process.stdin.flush()
        return self._read()

    def _read(self) -> dict[str, float]:
        assert self._process.stdout is not None
        line = self._process.stdout.readline()
        if not line:
            last = self._log.read_text(errors="replace")[-3000:]
            raise RuntimeError(f"{self._name} ended with exit code {self._process.wait()}:\n{last}")
        answer: dict[str, float] = json.loads(line)
        return answer

    def close(self) -> None:
        """End the process."""
        for stream in (self._process.stdin, self._process.stdout):
            if stream is not None:
                stream.close()
        try:
            self._process.wait(timeout=30)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()


def peer_python() -> Path | str:
    """The interpreter with TRL that `DOCKYARD_TRL_PYTHON` names, or of an environment made once and kept.

    Returns why there is none otherwise, as text.
    """
    versions = " ".join(f"{name}=={version(name)}" for name in SHARED)
    return interpreter_of("trl", TOOL, VARIABLE, TOOL.read_bytes() + versions.encode())


def peer_version(python: Path) -> str:
    """Of TRL in the peer's environment."""
    command = (python, "-c", "import importlib.metadata as m; print(m.version('trl'))")
    return subprocess.run(command, check=True, capture_output=True, text=True).stdout.strip()
