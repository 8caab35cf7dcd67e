"""Starts the real app as a process and looks for what it leaves behind."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
import uuid
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
SMALL = [
    "grpo.num_prompts_per_step=4",
    "grpo.num_generations_per_prompt=4",
    "evaluation.num_tasks=4",
    "evaluation.num_generations=1",
    "logging.console=plain",
    "generation.backend=transformers",
]
_MARK = "DOCKYARD_TEST_APP"


def rows(path: Path) -> list[dict[str, Any]]:
    """Objects of a JSONL file; a last line without its end is not there yet."""
    if not path.exists():
        return []
    return [json.loads(line) for line in path.read_text().split("\n")[:-1]]


class RunningApp:
    """`python apps/grpo …` in a process group of its own, with a mark that its processes inherit."""

    def __init__(self, run_dir: Path, *overrides: str, launcher: Sequence[str] = (sys.executable,)) -> None:
        self.run_dir = run_dir
        self.mark = uuid.uuid4().hex
        self._log = run_dir.with_suffix(f".{self.mark[:6]}.log")
        with self._log.open("wb") as log:
            self.process = subprocess.Popen(
                [*launcher, "apps/grpo", f"run.dir={run_dir}", *overrides],
                cwd=ROOT,
                stdout=log,
                stderr=subprocess.STDOUT,
                start_new_session=True,
                env={**os.environ, _MARK: self.mark, "HF_HUB_OFFLINE": "1"},
            )

    @property
    def output(self) -> str:
        """What it printed so far."""
        return self._log.read_text(errors="replace")

    def wait(self, timeout_s: float = 600) -> int:
        """Its exit code."""
        return self.process.wait(timeout_s)

    def interrupt(self) -> None:
        """Ctrl-C: the terminal sends SIGINT to the whole foreground process group."""
        os.killpg(self.process.pid, signal.SIGINT)

    def wait_until(self, condition: Callable[[], bool], timeout_s: float = 300) -> None:
        """Wait until something is so; fails with the output when the app ends or time runs out first."""
        deadline = time.monotonic() + timeout_s
        while not condition():
            assert self.process.poll() is None, f"ended early:\n{self.output[-4000:]}"
            assert time.monotonic() < deadline, f"still not so after {timeout_s} s:\n{self.output[-4000:]}"
            time.sleep(0.05)

    def wait_for_step(self, step: int) -> None:
        """Wait until metrics.jsonl has the row of a step."""
        self.wait_until(lambda: any(row["step"] >= step for row in rows(self.run_dir / "metrics.jsonl")))

    def survivors(self, timeout_s: float = 30) -> list[str]:
        """Command lines of processes of this app that are alive after ``timeout_s``."""
        deadline = time.monotonic() + timeout_s
        while (alive := self._alive()) and time.monotonic() < deadline:
            time.sleep(0.2)
        return alive

    def pid_of(self, words: str) -> int:
        """Process id of the one process of this app whose command line has ``words``."""
        found = [line for line in self._alive() if words in line]
        assert len(found) == 1, found
        return int(found[0].split()[0])

    def pids_of(self, words: str) -> list[int]:
        """Process ids of the processes of this app whose command line has ``words``, oldest first."""
        return sorted(int(line.split()[0]) for line in self._alive() if words in line)

    def _alive(self) -> list[str]:
        wanted = f"{_MARK}={self.mark}".encode()
        found = []
        for entry in Path("/proc").iterdir():
            if not entry.name.isdigit():
                continue
            try:
                environment = (entry / "environ").read_bytes()
                command = (entry / "cmdline").read_bytes()
                parent = (entry / "stat").read_text().rpartition(")")[2].split()[1]
                parents = Path(f"/proc/{parent}/environ").read_bytes() if parent != "0" else b""
            except OSError:
                continue
            # The sandbox clears its environment, so a process also counts by its parent's mark.
            if wanted in environment.split(b"\0") or wanted in parents.split(b"\0"):
                found.append(f"{entry.name} {command.replace(bytes(1), b' ').decode(errors='replace')}")
        return found
