"""What the other tests compile without the compiler's optimizations (`conftest.py`), as users run it: with them."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

TESTS = (
    "test_jax_policy.py::test_twenty_steps_end_where_those_of_torch_do[qwen2]",
    "test_jax_sharding.py::test_a_mesh_computes_what_one_device_does[qwen3-True-overrides1-4-2]",
    "test_jax_loss.py::test_values_gradients_and_metrics_are_those_of_torch",
)


@pytest.mark.ci
def test_parity_holds_with_the_optimizations_that_users_have() -> None:
    here = Path(__file__).parent
    flags = "--xla_force_host_platform_device_count=8 --xla_backend_optimization_level=3"
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", *(str(here / name) for name in TESTS)]
    done = subprocess.run(
        command, env=os.environ | {"XLA_FLAGS": flags}, capture_output=True, text=True, timeout=280, check=False
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert " passed" in done.stdout
    assert "skipped" not in done.stdout
