"""What watches over an SGLang server: nothing of it outlives its owner. Any command will do as the server."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import textwrap
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from process_tree import is_alive

from dockyard_core.errors import GeneratorError
from dockyard_inference import SglangConfig
from dockyard_inference.sglang_engine import guard
from dockyard_inference.sglang_engine.server import ServerProcess, check_interpreter, command_line, num_cached_tokens

TREE = """
import os, subprocess, sys, time
child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"], start_new_session=True)
open(sys.argv[1], "w").write(f"{os.getpid()} {child.pid}\\n")
time.sleep(600)
"""
"""A server with a child in a session of its own."""


def until(condition: Callable[[], bool], timeout_s: float = 60.0) -> None:
    deadline = time.monotonic() + timeout_s
    while not condition():
        assert time.monotonic() < deadline, "still not so"
        time.sleep(0.02)


@pytest.fixture
def owner() -> Iterator[subprocess.Popen[bytes]]:
    with subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"]) as process:
        yield process
        process.kill()


def start(owner: subprocess.Popen[bytes], folder: Path, *command: str) -> subprocess.Popen[bytes]:
    words = [sys.executable, "-I", "-S", guard.__file__, str(owner.pid), "1", str(folder), *command]
    process = subprocess.Popen(words, stdin=subprocess.PIPE, start_new_session=True, env={})
    assert process.stdin is not None
    process.stdin.write(json.dumps(dict(os.environ)).encode() + b"\n")
    process.stdin.flush()
    return process


def tree(tmp_path: Path) -> tuple[str, ...]:
    return sys.executable, "-c", TREE, str(tmp_path / "pids")


def pids(tmp_path: Path) -> list[int]:
    path = tmp_path / "pids"
    until(lambda: path.exists() and path.read_text().endswith("\n"))
    return [int(word) for word in path.read_text().split()]


@pytest.mark.parametrize(
    "end", ["the owner is killed", "the input is closed", "the server is killed", "the guard is killed"]
)
def test_every_process_and_folder_goes(tmp_path: Path, owner: subprocess.Popen[bytes], end: str) -> None:
    folder = tmp_path / "scratch"
    folder.mkdir()
    (folder / "weights").write_bytes(b"x")
    with start(owner, folder, *tree(tmp_path)) as guarding:
        server, child = pids(tmp_path)
        if end == "the owner is killed":
            owner.kill()
        elif end == "the input is closed":
            assert guarding.stdin is not None
            guarding.stdin.close()
        elif end == "the guard is killed":  # as Ray does with the children of a worker that ends
            guarding.kill()
        else:
            os.kill(server, signal.SIGKILL)
        assert guarding.wait(60) == {"the server is killed": 137, "the guard is killed": -9}.get(end, 0)
    until(lambda: not (is_alive(server) or is_alive(child) or folder.exists()))


SHARED = """
import mmap, multiprocessing, os, sys, time
lock = multiprocessing.get_context("spawn").Lock()
files = [open(f"/dev/shm/sglang_loads_{name}", "w+b") for name in sys.argv[2:]]
[file.truncate(4096) for file in files]
maps = [mmap.mmap(file.fileno(), 4096) for file in files[:1]]
open(sys.argv[1], "w").write(f"{os.getpid()} {lock._semlock.name}\\n")
time.sleep(600)
"""
"""A server that maps the first of two files, and has a semaphore whose tracker is killed with it."""


def test_shared_memory_of_the_server_goes_and_no_other(tmp_path: Path, owner: subprocess.Popen[bytes]) -> None:
    ours, other = (Path(f"/dev/shm/sglang_loads_{tmp_path.parent.name}-{name}") for name in ("ours", "other"))
    words = (name.name.removeprefix("sglang_loads_") for name in (ours, other))
    said = tmp_path / "said"
    try:
        with start(owner, tmp_path / "none", sys.executable, "-c", SHARED, str(said), *words) as guarding:
            until(lambda: said.exists() and said.read_text().endswith("\n"))
            pid, semaphore = said.read_text().split()
            assert Path(f"/dev/shm/sem.{semaphore.removeprefix('/')}").exists()
            time.sleep(2.5)  # the guard has looked since
            os.kill(int(pid), signal.SIGKILL)
            assert guarding.wait(60) == 137
        until(lambda: not (ours.exists() or Path(f"/dev/shm/sem.{semaphore.removeprefix('/')}").exists()))
        assert other.exists()
    finally:
        ours.unlink(missing_ok=True)
        other.unlink(missing_ok=True)


def test_without_its_inner_process_the_server_dies_as_well(tmp_path: Path, owner: subprocess.Popen[bytes]) -> None:
    with start(owner, tmp_path / "none", *tree(tmp_path)) as guarding:
        server, child = pids(tmp_path)
        [inner] = Path(f"/proc/{guarding.pid}/task/{guarding.pid}/children").read_text().split()
        os.kill(int(inner), signal.SIGKILL)
        assert guarding.wait(60) != 0
    until(lambda: not is_alive(server))
    os.kill(child, signal.SIGKILL)  # SGLang's own children watch their parent; this one does not


def test_the_code_of_the_server_is_told(tmp_path: Path, owner: subprocess.Popen[bytes]) -> None:
    with start(owner, tmp_path / "none", sys.executable, "-c", "raise SystemExit(7)") as guarding:
        assert guarding.wait(60) == 7


def test_an_owner_that_is_gone_already_ends_it(tmp_path: Path) -> None:
    with subprocess.Popen([sys.executable, "-c", ""]) as gone:
        gone.wait()
    with start(gone, tmp_path / "none", *tree(tmp_path)) as guarding:
        assert guarding.wait(60) == 0


def fake_python(tmp_path: Path, code: str) -> Path:
    """An interpreter that runs ``code`` whatever it is asked."""
    script = tmp_path / "python"
    script.write_text(f"#!{sys.executable}\n{textwrap.dedent(code)}")
    script.chmod(0o755)
    return script


def test_the_last_lines_of_a_server_that_ended_are_told(tmp_path: Path) -> None:
    python = fake_python(tmp_path, "print('one'); print('No module named sglang'); raise SystemExit(3)")
    server = ServerProcess(SglangConfig(model=str(tmp_path), python=python))
    until(lambda: not server.is_running)
    assert server.exit_code == 3
    assert server.last_words() == "its last lines: one | No module named sglang"
    server.stop()
    assert not server.weights.exists()


def test_the_server_gets_an_environment_of_its_own_and_no_key_on_its_command_line(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PYTHONPATH", "/of/another/environment")
    python = fake_python(
        tmp_path,
        f"""
        import json, os, pathlib, sys
        said = [sys.argv, dict(os.environ), pathlib.Path(sys.argv[sys.argv.index("--config") + 1]).read_text()]
        pathlib.Path({str(tmp_path / "said")!r}).write_text(json.dumps(said))
        """,
    )
    config = SglangConfig(model=str(tmp_path), python=python, server_args={"log_level": "info", "dtype": None})
    server = ServerProcess(config)
    until(lambda: not server.is_running)
    words, environment, settings = json.loads((tmp_path / "said").read_text())
    server.stop()
    assert "PYTHONPATH" not in environment
    assert environment["CUDA_VISIBLE_DEVICES"] == ""
    assert not Path(environment["TMPDIR"]).exists()
    assert server.api_key is not None
    assert server.api_key in settings
    assert not any(server.api_key in word for word in words)
    assert words[words.index("--log-level") + 1] == "info"
    assert "--dtype" not in words


def test_options_become_words() -> None:
    options = {"a_b": 1, "c": True, "d": False, "e": None, "f": ["x", 2]}
    assert command_line(options) == ["--a-b", "1", "--c", "--f", "x", "2"]


def test_what_is_no_interpreter_says_how_to_make_one(tmp_path: Path) -> None:
    for path in (tmp_path, tmp_path / "none"):
        with pytest.raises(GeneratorError, match=r"make an environment with SGLang: python tools/sglang_env\.py VENV"):
            check_interpreter(path)


def test_the_cache_is_as_large_as_asked_and_no_larger_than_useful(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(
        '{"num_attention_heads": 4, "num_key_value_heads": 2, "hidden_size": 64, "num_hidden_layers": 3}'
    )
    # 2 (keys, values) x 3 layers x 2 heads x 16 wide x 4 bytes = 768 bytes a token
    few = SglangConfig(model=str(tmp_path), python=tmp_path, max_num_seqs=4, max_model_len=100)
    assert num_cached_tokens(few) == 400
    many = SglangConfig(model=str(tmp_path), python=tmp_path, max_num_seqs=100_000, max_model_len=100)
    assert num_cached_tokens(many) == (1 << 30) // 768
    (tmp_path / "config.json").write_text("{}")
    assert num_cached_tokens(many) is None
