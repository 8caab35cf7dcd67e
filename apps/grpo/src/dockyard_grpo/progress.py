"""Live progress: a bar with ETA on a terminal, plain lines elsewhere."""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping
from statistics import fmean
from types import TracebackType
from typing import Any, Protocol

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TaskID, TextColumn, TimeElapsedColumn
from rich.progress import TimeRemainingColumn as Remaining


class Reporter(Protocol):
    """Where a run tells a person what it does."""

    def say(self, line: str) -> None:
        """One line."""
        ...

    def step(self, row: Mapping[str, Any]) -> None:
        """A finished step, as in metrics.jsonl."""
        ...

    def __enter__(self) -> Reporter: ...

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None: ...


def make_reporter(console: str, max_steps: int) -> Reporter:
    """`logging.console`: ``bar``, ``plain``, or ``auto`` (a bar on a terminal)."""
    out = Console(highlight=False, soft_wrap=True)
    use_bar = console == "bar" or (console == "auto" and out.is_terminal)
    return BarReporter(out, max_steps) if use_bar else PlainReporter(out, max_steps)


class PlainReporter:
    """One line per step."""

    def __init__(self, out: Console, max_steps: int) -> None:
        self._out = out
        self._max_steps = max_steps
        self._recent_s: deque[float] = deque(maxlen=10)
        self._compiling = Compiling()

    def say(self, line: str) -> None:
        """Print one line."""
        self._out.print(line, markup=False)

    def step(self, row: Mapping[str, Any]) -> None:
        """Print one step."""
        self._recent_s.append(row["step_s"])
        left = (self._max_steps - row["step"]) * fmean(self._recent_s)
        self.say(
            f"step {row['step']:>4}/{self._max_steps}  {_figures(row)}{self._compiling.since(row)}  eta {_clock(left)}"
        )

    def __enter__(self) -> PlainReporter:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        return None


class BarReporter:
    """A bar that stays, with the step's figures behind it."""

    def __init__(self, out: Console, max_steps: int) -> None:
        self._progress = Progress(
            TextColumn("step"),
            MofNCompleteColumn(),
            BarColumn(bar_width=24),
            TimeElapsedColumn(),
            TextColumn("eta"),
            Remaining(),
            TextColumn("{task.fields[figures]}"),
            console=out,
            speed_estimate_period=3600,  # steps of minutes have an ETA too
        )
        self._compiling = Compiling()
        self._bar: TaskID = self._progress.add_task("train", total=max_steps, figures="")

    def say(self, line: str) -> None:
        """Print one line above the bar."""
        self._progress.console.print(line, markup=False)

    def step(self, row: Mapping[str, Any]) -> None:
        """Advance the bar."""
        self._progress.update(self._bar, completed=row["step"], figures=_figures(row) + self._compiling.since(row))

    def __enter__(self) -> BarReporter:
        self._progress.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self._progress.stop()


class Compiling:
    """Says why a step took long: with JAX, a trainer compiles a program for each shape that it meets."""

    def __init__(self) -> None:
        self._total_s = 0.0

    def since(self, row: Mapping[str, Any]) -> str:
        """What was compiled since the row before; empty if that was nothing."""
        before_s, self._total_s = self._total_s, row.get("compile_s", 0.0)
        if self._total_s < before_s:  # a trainer that came back counts anew
            before_s = 0.0
        spent_s = self._total_s - before_s
        return f"  compiling {spent_s:.1f} s" if spent_s >= 0.1 else ""


def _figures(row: Mapping[str, Any]) -> str:
    held_out = f"  held-out {_rate(row['val_resolved_rate'])}" if "val_resolved_rate" in row else ""
    return (
        f"reward {_rate(row['reward_mean'])}  resolved {_rate(row['resolved_rate'])}  "
        f"staleness {_rate(row['staleness_mean'])}  {row['tokens_per_s']:,.0f} tokens/s  "
        f"{row['step_s']:.1f} s{held_out}"
    )


def _rate(value: float | None) -> str:
    return "-" if value is None else f"{value:.2f}"


def _clock(seconds: float) -> str:
    minutes, rest = divmod(round(seconds), 60)
    return f"{minutes}:{rest:02d}"
