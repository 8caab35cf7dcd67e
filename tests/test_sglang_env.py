"""The tool that makes SGLang's environment: its pins, its stand-ins, and what it refuses to touch."""

from __future__ import annotations

import importlib.util
import re
import subprocess
import sys
from pathlib import Path
from types import ModuleType

import pytest

ROOT = Path(__file__).resolve().parent.parent
TOOL = ROOT / "tools" / "sglang_env.py"
DATA = ROOT / "tools" / "sglang_cpu"


def load(path: Path) -> ModuleType:
    spec = importlib.util.spec_from_file_location(f"loaded_{path.stem}", path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def run_tool(*arguments: str | Path) -> subprocess.CompletedProcess[str]:
    return subprocess.run([sys.executable, TOOL, *arguments], capture_output=True, text=True, timeout=120)


def normalized(name: str) -> str:
    return re.sub(r"[-_.]+", "-", name).lower()


def bare(code: str) -> subprocess.CompletedProcess[str]:
    """Run code with the stand-ins importable and nothing but the standard library beside them."""
    command = [sys.executable, "-S", "-c", f"import sys; sys.path.insert(0, {str(DATA / 'standins')!r})\n{code}"]
    return subprocess.run(command, capture_output=True, text=True, timeout=60)


def test_every_requirement_is_pinned_and_none_names_a_host() -> None:
    pins = load(TOOL).pinned((DATA / "requirements.txt").read_text())
    asked = [line for line in (DATA / "requirements.in").read_text().splitlines() if line and not line.startswith("#")]
    names = {normalized(re.split(r"[<>=!~\[; ]", line)[0]) for line in asked}
    assert names <= set(pins)
    for path in sorted(DATA.rglob("requirements.*")):
        assert "://" not in path.read_text()
        assert "index-url" not in path.read_text()


def test_the_environment_has_the_workspace_s_torch_and_none_of_its_gpu_libraries() -> None:
    pins = load(TOOL).pinned((DATA / "requirements.txt").read_text())
    lock = (ROOT / "uv.lock").read_text()
    assert f'name = "torch"\nversion = "{pins["torch"]}"' in lock
    assert not [name for name in pins if load(TOOL).OF_TORCH.match(f"{name}==")]
    assert {"flashinfer-python", "sglang-kernel", "tilelang"}.isdisjoint(pins)


@pytest.mark.parametrize("line", ["torch>=2", "torch", "torch==2.13.0 --hash=sha256:00", "-r other.txt", "a @ file:b"])
def test_a_line_that_pins_nothing_is_an_error(line: str) -> None:
    with pytest.raises(ValueError, match="not a pinned requirement"):
        load(TOOL).pinned(line)


def test_the_version_of_sglang_is_the_one_that_the_wheel_declares() -> None:
    declared = (ROOT / "packages" / "dockyard-inference" / "pyproject.toml").read_text()
    assert f'"{load(TOOL).SGLANG} ;' in declared


def test_help_says_what_was_never_run() -> None:
    shown = run_tool("--help")
    assert shown.returncode == 0
    assert "never run" in shown.stdout


@pytest.mark.parametrize("arguments", [(), ("somewhere", "--lock")])
def test_a_command_without_one_clear_aim_is_refused(arguments: tuple[str, ...]) -> None:
    assert run_tool(*arguments).returncode == 2


def test_a_directory_that_is_no_environment_is_left_alone(tmp_path: Path) -> None:
    (tmp_path / "thesis.txt").write_text("chapter one")
    refused = run_tool(tmp_path)
    assert refused.returncode == 2
    assert "is no virtual environment" in refused.stderr
    assert [path.name for path in tmp_path.iterdir()] == ["thesis.txt"]


def test_a_file_is_left_alone_and_a_fresh_or_empty_directory_is_not(tmp_path: Path) -> None:
    refusal = load(TOOL).refusal
    (tmp_path / "file").write_text("x")
    (tmp_path / "empty").mkdir()
    assert "is no virtual environment" in refusal(tmp_path / "file", gpu=False)
    assert refusal(tmp_path / "empty", gpu=False) is None
    assert refusal(tmp_path / "new", gpu=False) is None


def test_an_environment_for_cpu_does_not_become_one_for_gpu_nor_the_reverse(tmp_path: Path) -> None:
    refusal = load(TOOL).refusal
    for kind in ("cpu", "gpu"):
        packages = tmp_path / kind / "lib" / "python3.11" / "site-packages"
        packages.mkdir(parents=True)
        (tmp_path / kind / "pyvenv.cfg").write_text("home = /usr/bin\n")
        if kind == "cpu":
            (packages / "sgl_kernel.py").write_text("")
        else:
            (packages / "sgl_kernel").mkdir()
    assert refusal(tmp_path / "cpu", gpu=False) is None
    assert refusal(tmp_path / "gpu", gpu=True) is None
    assert "was made for CPU" in refusal(tmp_path / "cpu", gpu=True)
    assert "was made with --gpu" in refusal(tmp_path / "gpu", gpu=False)


def test_the_stand_ins_import_without_torch() -> None:
    shown = bare("import sgl_kernel, torchvision_schemas; print('torch' in sys.modules)")
    assert (shown.returncode, shown.stdout) == (0, "False\n"), shown.stderr


def test_the_start_up_line_only_waits_for_torchvision() -> None:
    line = (DATA / "standins" / "torchvision_schemas.pth").read_text()
    assert line.startswith("import ")
    shown = bare(f"before = len(sys.meta_path)\n{line}\nimport json\nprint(len(sys.meta_path) - before)")
    assert (shown.returncode, shown.stdout) == (0, "1\n"), shown.stderr


def test_speculative_decoding_is_refused_when_called_not_when_imported() -> None:
    shown = bare("import sgl_kernel\nsgl_kernel.verify_tree_greedy_cpu()")
    assert "NotImplementedError: sgl_kernel stand-in: verify_tree_greedy_cpu" in shown.stderr


def test_new_cache_slots_go_to_their_requests_rows() -> None:
    torch = pytest.importorskip("torch")
    assign = load(DATA / "standins" / "sgl_kernel.py").assign_req_to_token_pool_cpu
    table = torch.zeros((3, 6), dtype=torch.int32)
    rows, starts, ends = torch.tensor([2, 0]), torch.tensor([1, 0]), torch.tensor([3, 3])
    assign(rows, table, starts, ends, torch.tensor([11, 12, 21, 22, 23]), 6)
    assert table.tolist() == [[21, 22, 23, 0, 0, 0], [0] * 6, [0, 11, 12, 0, 0, 0]]
