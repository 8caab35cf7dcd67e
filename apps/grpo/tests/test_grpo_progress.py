"""What a person reads while a run goes on."""

from __future__ import annotations

import io
from typing import Any

import pytest
from rich.console import Console

from dockyard_grpo.progress import BarReporter, PlainReporter

ROW: dict[str, Any] = {
    "reward_mean": 0.5,
    "resolved_rate": None,
    "staleness_mean": 1.0,
    "tokens_per_s": 1234.0,
    "step_s": 2.0,
}


@pytest.mark.parametrize("reporter", [PlainReporter, BarReporter])
def test_a_step_that_waited_for_the_compiler_says_so(reporter: type[PlainReporter | BarReporter]) -> None:
    out = io.StringIO()
    shown = []
    with reporter(Console(file=out, width=200, force_terminal=False), 5) as live:
        # The trainer of the fourth step is a new one, which counts from 0.
        for step, compile_s in enumerate((30.0, 30.04, 33.0, 4.0, None), 1):
            live.step({"step": step, **ROW, **({} if compile_s is None else {"compile_s": compile_s})})
            if isinstance(live, BarReporter):
                shown.append(live._progress.tasks[0].fields["figures"])
    shown = shown or out.getvalue().splitlines()
    assert ["compiling" in line for line in shown] == [True, False, True, True, False]
    for line, seconds in zip((shown[0], shown[2], shown[3]), ("30.0", "3.0", "4.0"), strict=True):
        assert f"2.0 s  compiling {seconds} s" in line
