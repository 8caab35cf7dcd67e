"""`doctor` on this machine, and on machines that lack something."""

from __future__ import annotations

import json
import re
import socket
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

from dockyard_grpo import doctor as doctor_module
from dockyard_grpo.cli import main


def findings(out: str) -> dict[str, dict[str, Any]]:
    return {finding["name"]: finding for finding in json.loads(out)["findings"]}


@pytest.fixture
def broken_engines(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """For child processes: torch cannot be imported, vLLM crashes, Ray hangs."""
    (tmp_path / "torch.py").write_text("raise ImportError('libcudart.so: cannot open shared object file')\n")
    (tmp_path / "vllm.py").write_text("import os; os.abort()\n")
    (tmp_path / "ray.py").write_text("import time; time.sleep(600)\n")
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    monkeypatch.setattr(doctor_module, "_IMPORT_TIMEOUT_S", 1.0)


def test_a_sound_machine() -> None:
    pytest.importorskip("vllm")
    command = [sys.executable, "-m", "dockyard_grpo", "doctor", "--json"]
    started = time.perf_counter()
    answer = subprocess.run(command, capture_output=True, text=True, check=False)
    assert time.perf_counter() - started < 40, "under 20 s, unless others use the machine"
    assert answer.returncode == 0, answer.stdout
    assert json.loads(answer.stdout)["ok"] is True
    found = findings(answer.stdout)
    assert re.fullmatch(r"[1-9]\d* tasks", found["data.train"]["found"])
    assert re.match(r"qwen2, \d{3},\d{3} parameters, in ", found["model"]["found"])
    assert found["engine"]["found"].startswith("vllm")
    assert found["sandbox"]["found"] in ("namespaces", "bwrap", "landlock")
    expected = {"python", "wheels", "configuration", "run directory", "reward", "git", "torch", "GPUs", "ray", "cpu"}
    assert expected <= set(found)
    assert [name for name, finding in found.items() if finding["status"] == "fail"] == []


def test_engines_that_fail_crash_or_hang_are_lines_of_the_report(
    broken_engines: None, capsys: pytest.CaptureFixture[str]
) -> None:
    started = time.perf_counter()
    assert main(["doctor", "--json"]) == 2
    assert time.perf_counter() - started < 10
    found = findings(capsys.readouterr().out)
    assert found["torch"]["found"] == "import fails: ImportError: libcudart.so: cannot open shared object file"
    assert found["engine"]["found"] == "vllm: import fails: exit code -6"
    assert found["engine"]["mend"].startswith("uv sync --group cpu")
    assert found["ray"]["found"] == "import takes more than 1 s"
    assert [found[name]["status"] for name in ("torch", "engine", "ray")] == ["fail", "fail", "warn"]
    assert found["model"]["status"] == "ok", "what is sound is still said to be"
    assert [name for name, finding in found.items() if finding["status"] != "ok" and not finding["mend"]] == []


def test_a_configuration_that_does_not_fit_says_where_and_how_to_mend(
    broken_engines: None, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    data = tmp_path / "tasks.jsonl"
    data.write_text("{}\n")
    words = [
        "generation.max_model_len=30000",
        f"data.train={data}",
        "policy.model=quickstart:policy",
        "policy.micro_batch_tokens=65536",
    ]
    assert main(["doctor", "generation.max_new_tokens=64", "reward.kind=json:nothing", *words]) == 2
    lines = capsys.readouterr().out.splitlines()
    shown = {
        line.split()[1]: (line, mend) for line, mend in zip(lines, [*lines[1:], ""], strict=True) if line[0] != " "
    }
    assert shown["model"][0].startswith("fail ")
    assert "max_position_embeddings" in shown["model"][0]
    assert shown["model"][1].strip() == "-> lower it, or choose another model"
    assert f"{data}:1: instance_id: Field required" in shown["data.train"][0]
    assert shown["reward"][1].strip() == "-> check the spelling"
    assert shown["git"][0].startswith("ok ")


def test_a_configuration_that_does_not_load_hides_nothing_of_the_machine(
    broken_engines: None, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["doctor", "--json", "grpo.max_stalenes=1"]) == 2
    found = findings(capsys.readouterr().out)
    assert found["configuration"]["status"] == "fail"
    assert found["configuration"]["mend"] == "did you mean 'grpo.max_staleness' (section 'grpo')?"
    assert found["data.train"]["status"] == "ok"


@pytest.mark.ci
def test_the_backend_that_trains_is_looked_at(
    broken_engines: None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    main(["doctor", "--json"])
    assert "jax" not in findings(capsys.readouterr().out)
    (tmp_path / "jax.py").write_text("__version__ = '0.10.2'\ndef devices(): return []\n")
    main(["doctor", "--json", "policy.backend=jax"])
    found = findings(capsys.readouterr().out)
    assert found["jax"]["found"] == "0.10.2, on the CPU"
    assert "dockyard-trainer-jax" in found["wheels"]["found"]
    main(["doctor", "--json", "policy.backend=jax", "policy.num_ranks=3"])
    found = findings(capsys.readouterr().out)
    assert (found["jax"]["status"], found["jax"]["mend"]) == ("fail", "lower it")
    monkeypatch.setattr(doctor_module.preflight, "visible_gpus", lambda: 1)
    main(["doctor", "--json", "policy.backend=jax", "cluster.trainer_gpus=1"])
    found = findings(capsys.readouterr().out)
    assert (found["jax"]["status"], found["jax"]["found"]) == ("warn", "0.10.2, which uses no GPU")
    (tmp_path / "jax.py").write_text("raise ImportError('no jaxlib')\n")
    main(["doctor", "--json", "policy.backend=jax"])
    assert findings(capsys.readouterr().out)["jax"]["status"] == "fail"


def test_a_cluster_is_asked_whether_it_answers(
    broken_engines: None, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "ray.py").write_text("__version__ = '2.60.0'\n")
    with socket.create_server(("127.0.0.1", 0)) as listener:
        address = f"127.0.0.1:{listener.getsockname()[1]}"
        main(["doctor", "--json", f"cluster.address={address}", "sandbox.url=http://127.0.0.1:1"])
        assert findings(capsys.readouterr().out)["ray"]["found"] == f"2.60.0, {address} answers"
    main(["doctor", "--json", f"cluster.address={address}", "sandbox.url=http://127.0.0.1:1"])
    closed = findings(capsys.readouterr().out)["ray"]
    assert closed["status"] == "fail"
    assert closed["mend"] == "ray start --head, or leave cluster.address out"


def test_doctor_itself_imports_nothing_heavy() -> None:
    program = (
        "import sys, dockyard_grpo.doctor as d, dockyard_grpo.train\n"
        "print(sorted({'torch', 'ray', 'vllm', 'transformers', 'tensorboard'} & sys.modules.keys()))"
    )
    answer = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert answer.stdout == "[]\n"
