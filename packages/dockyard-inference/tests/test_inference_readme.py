"""The example of the README runs as it is printed."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest


@pytest.mark.ci
def test_the_readme_example_runs() -> None:
    text = (Path(__file__).parents[1] / "README.md").read_text()
    code = text.partition("```python\n")[2].partition("```")[0]
    answer = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=120)
    assert answer.returncode == 0, answer.stderr
    assert "length" in answer.stdout or "stop" in answer.stdout
