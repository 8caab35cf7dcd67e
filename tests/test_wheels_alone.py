"""Wheels built and installed alone, in a clean environment: light ones stay light."""

from __future__ import annotations

import json
import os
import subprocess
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
HEAVY = ["torch", "jax", "ray", "vllm", "sglang", "transformers", "fastapi"]


@pytest.fixture(scope="module")
def wheels(tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("wheels")
    for name in ("dockyard-core", "dockyard-sandbox"):
        subprocess.run(["uv", "build", "--wheel", "--package", name, "--out-dir", out], cwd=ROOT, check=True)
    return out


def install(tmp_path: Path, wheels: Path, name: str) -> Path:
    environment = {**os.environ, "VIRTUAL_ENV": str(tmp_path / "venv")}
    subprocess.run(["uv", "venv", "--quiet", tmp_path / "venv"], check=True)
    wheel = next(wheels.glob(f"{name.replace('-', '_')}-*.whl"))
    command = ["uv", "pip", "install", "--quiet", "--find-links", wheels, wheel]
    subprocess.run(command, check=True, env=environment, cwd=tmp_path)
    return tmp_path / "venv" / "bin" / "python"


@pytest.mark.ci
@pytest.mark.parametrize("name", ["dockyard-core", "dockyard-sandbox"])
def test_a_light_wheel_imports_nothing_heavy(name: str, wheels: Path, tmp_path: Path) -> None:
    python = install(tmp_path, wheels, name)
    module = name.replace("-", "_")
    code = f"import json, sys, {module}; print(json.dumps(sorted(sys.modules)))"
    loaded = json.loads(subprocess.run([python, "-I", "-c", code], check=True, capture_output=True, text=True).stdout)
    assert module in loaded
    assert [heavy for heavy in HEAVY if heavy in loaded] == []


@pytest.mark.ci
def test_the_sandbox_wheel_installs_in_25_megabytes(wheels: Path, tmp_path: Path) -> None:
    python = install(tmp_path, wheels, "dockyard-sandbox")
    site = next((python.parent.parent / "lib").glob("python3*")) / "site-packages"
    own = (path for path in site.rglob("*") if path.is_file() and path.suffix != ".pyc")
    assert sum(path.stat().st_size for path in own) <= 25 * 1024 * 1024
