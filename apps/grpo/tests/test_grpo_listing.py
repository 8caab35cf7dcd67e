"""`config`: a table for people, YAML that loads again for programs."""

from __future__ import annotations

import os
import pty
import re
import subprocess
import sys
from pathlib import Path

import pytest

from dockyard_grpo.cli import main
from dockyard_grpo.config import listing as listing_module
from dockyard_grpo.config import load_config
from dockyard_grpo.config.listing import Key, list_keys
from dockyard_grpo.config.loading import read_layers, validate


def keys_of(file: Path | None, *overrides: str) -> dict[str, Key]:
    layers = read_layers(file, overrides)
    return {key.name: key for key in list_keys(validate(layers), layers)}


def run_on_a_terminal(*words: str, columns: int = 200) -> str:
    """Standard output of the command when it is a terminal."""
    leader, follower = pty.openpty()
    command = [sys.executable, "-m", "dockyard_grpo", *words]
    environment = {**os.environ, "COLUMNS": str(columns), "TERM": "xterm", "NO_COLOR": "1"}
    with subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=follower, env=environment) as process:
        os.close(follower)
        chunks = []
        try:
            while chunk := os.read(leader, 65536):
                chunks.append(chunk)
        except OSError:  # how Linux says that the other side is closed
            pass
        os.close(leader)
    assert process.returncode == 0
    plain = re.sub(rb"\x1b\[[0-9;]*m", b"", b"".join(chunks))
    return plain.decode().replace("\r\n", "\n")


def test_every_key_has_a_type_and_a_meaning() -> None:
    keys = keys_of(None)
    assert len(keys) > 80
    assert [name for name, key in keys.items() if not key.description or not key.type] == []


def test_no_meaning_is_given_twice(monkeypatch: pytest.MonkeyPatch) -> None:
    """A text here is for a key that its model leaves unexplained, and for no other."""
    extra = set(listing_module._DESCRIPTIONS)
    monkeypatch.setattr(listing_module, "_DESCRIPTIONS", {})
    assert {name for name, key in keys_of(None).items() if not key.description} == extra


def test_each_value_says_where_it_came_from(tmp_path: Path) -> None:
    keys = keys_of(None, "run.seed=7", "reward.penalties.timeout=0.5")
    assert keys["run.seed"].source == "command line"
    assert keys["reward.penalties"].source == "command line"
    assert keys["policy.learning_rate"].source == "quickstart.yaml"
    assert keys["policy.eps"].source == "default"
    file = tmp_path / "mine.yaml"
    file.write_text("policy: {model: m, eps: 1.0e-6}\ndata: {train: t.jsonl}\n")
    keys = keys_of(file, "policy.model=other")
    assert keys["policy.model"].source == "command line"
    assert keys["policy.eps"].source == str(file)
    assert keys["policy.learning_rate"].source == "default"
    assert keys_of(None, "policy.model=m", "data.train=t")["policy.learning_rate"].source == "default"


def test_values_defaults_and_types_are_as_one_writes_them() -> None:
    keys = keys_of(None, "policy.learning_rate=0.5", "reward.penalties.timeout=0.5")
    assert (keys["policy.learning_rate"].value, keys["policy.learning_rate"].default) == ("0.5", "1e-06")
    assert keys["policy.learning_rate"].type == "float >= 0"
    assert keys["reward.penalties"].value == "{timeout: 0.5}"
    assert keys["policy.schedule"].type == "constant | linear | cosine"
    assert keys["run.dir"].type == "path | null"
    assert keys["run.dir"].value == "null"
    assert keys["data.limit"].type == "int >= 1 | null"
    assert keys["logging.trackers"].value == "[tensorboard]"
    assert keys["logging.trackers"].type == "[tensorboard, ...]"
    assert keys["generation.enforce_eager"].type == "true | false"


def test_written_back_as_overrides_the_values_give_the_same_configuration() -> None:
    config = load_config(None, ["run.seed=7", "reward.penalties.timeout=0.5", "loss.dual_clip=3"])
    keys = keys_of(None, "run.seed=7", "reward.penalties.timeout=0.5", "loss.dual_clip=3")
    assert load_config(None, [f"{name}={key.value}" for name, key in keys.items()]) == config


def test_a_terminal_gets_the_table_and_a_pipe_gets_yaml(tmp_path: Path) -> None:
    table = run_on_a_terminal("config", "run.seed=7")
    row = next(line for line in table.splitlines() if line.startswith("run.seed "))
    assert row.split()[:7] == ["run.seed", "7", "command", "line", "0", "int", "Seeds"]
    yaml = run_on_a_terminal("config", "run.seed=7", "--yaml")
    (tmp_path / "config.yaml").write_text(yaml)
    assert load_config(tmp_path / "config.yaml", []) == load_config(None, ["run.seed=7"])


def test_a_narrow_terminal_gets_everything_too() -> None:
    lines = run_on_a_terminal("config", "run.seed=7", columns=80).splitlines()
    assert max(len(line) for line in lines) <= 80
    meaning = lines[lines.index("run.seed = 7  (command line)") + 1]
    assert meaning.strip() == "Seeds the sampler, the engines and the trainer. int; default 0."


def test_explain_gives_the_table_anywhere(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["config", "--explain"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[0].split() == ["key", "value", "from", "default", "type", "meaning"]
    names = {line.split()[0] for line in lines if line[:1].strip()}
    assert names >= set(keys_of(None))


@pytest.mark.parametrize(
    ("words", "shown"),
    [
        (["--help"], ["commands (COMMAND --help says more):", "doctor", "--config FILE"]),
        (["train", "--help"], ["usage: uv run apps/grpo train", "policy.model=DIR"]),
        (["config", "-h"], ["usage: uv run apps/grpo config", "--explain", "--yaml"]),
        (["--config", "config", "doctor", "--help"], ["usage: uv run apps/grpo doctor", "--json"]),
    ],
)
def test_every_command_has_its_help(words: list[str], shown: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        main(words)
    assert ended.value.code == 0
    out = capsys.readouterr().out
    assert [text for text in shown if text not in out] == []
    assert all(len(line) <= 110 for line in out.splitlines())
