"""What a run says while it runs: a line that is drawn over on a terminal, a line per step elsewhere."""

from __future__ import annotations

import time
from collections.abc import Mapping
from typing import Any, TextIO

_BAR_WIDTH = 20


class Progress:
    """Writes to one stream; silent on ranks that do not lead.

    Args:
        stream: usually standard error.
        total_steps: of the run.
        is_lead: whether to write at all.
        is_plain: a line per step even on a terminal.
    """

    def __init__(self, stream: TextIO, *, total_steps: int, is_lead: bool, is_plain: bool) -> None:
        self._stream = stream
        self._total = total_steps
        self._is_lead = is_lead
        self._is_drawn_over = stream.isatty() and not is_plain
        self._width = 0
        self._first: tuple[int, float] | None = None

    def step(self, line: Mapping[str, Any]) -> None:
        """Show one step's metrics."""
        step = int(line["step"])
        if self._first is None:
            self._first = (step, time.monotonic())
        parts = [f"step {step}/{self._total}"]
        if self._is_drawn_over:
            filled = _BAR_WIDTH * step // max(self._total, 1)
            parts.append(f"[{'=' * filled}{' ' * (_BAR_WIDTH - filled)}]")
        shown = {"nll": "nll", "perplexity": "ppl"} if "nll" in line else {"loss": "loss", "reward_mean": "reward"}
        for name, label in (shown | {"grad_norm": "grad", "learning_rate": "lr"}).items():
            if line.get(name) is not None:
                parts.append(f"{label} {line[name]:.4g}")
        parts.append(f"{line['tokens_per_s']:.0f} tokens/s")
        if line["skipped"]:
            parts.append("SKIPPED: the gradient was not finite")
        left = self._seconds_left(step)
        if left is not None:
            parts.append(f"{_duration(left)} left")
        self._write("  ".join(parts), is_final=not self._is_drawn_over)

    def say(self, text: str) -> None:
        """Write one line."""
        self.finish()
        self._write(text, is_final=True)

    def finish(self) -> None:
        """Leave the last drawn line standing."""
        if self._width:
            self._stream.write("\n")
            self._width = 0

    def _write(self, text: str, *, is_final: bool) -> None:
        if not self._is_lead:
            return
        if is_final:
            self._stream.write(f"{text}\n")
        else:
            self._stream.write(f"\r{text.ljust(self._width)}")
            self._width = len(text)
        self._stream.flush()

    def _seconds_left(self, step: int) -> float | None:
        assert self._first is not None
        first_step, started = self._first
        if step == first_step:
            return None
        return (time.monotonic() - started) / (step - first_step) * (self._total - step)


def _duration(seconds: float) -> str:
    minutes, whole = divmod(int(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02d}:{whole:02d}" if hours else f"{minutes}:{whole:02d}"
