from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from dockyard_core import ConfigError
from dockyard_grpo.cluster import plan_fleets
from dockyard_grpo.config import dump_config, load_config, uses_quickstart


def test_no_arguments_are_the_quickstart() -> None:
    config = load_config(None, [])
    assert config.policy.model == "quickstart:policy"
    assert config.grpo.max_staleness == 1


def test_an_own_model_starts_from_defaults_that_suit_real_models() -> None:
    overrides = ["policy.model=/models/some", "data.train=tasks.jsonl"]
    assert not uses_quickstart(None, overrides)
    assert load_config(None, overrides).policy.learning_rate == 1e-6


def test_a_dumped_configuration_loads_to_an_equal_one(tmp_path: Path) -> None:
    config = load_config(None, ["run.seed=7", "loss.kl_coef=0.01"])
    file = tmp_path / "config.yaml"
    file.write_text(dump_config(config))
    assert load_config(file, []) == config


@pytest.mark.parametrize(
    ("override", "hint"),
    [
        ("grpo.max_stalenes=1", "did you mean 'grpo.max_staleness' (section 'grpo')?"),
        ("policy.temperature=0.5", "'generation.temperature' (section 'generation')"),
        ("gpro.max_staleness=1", "did you mean 'grpo.max_staleness' (section 'grpo')?"),
        ("grpo.num_generations_per_prompt=1", "greater than or equal to 2, got 1"),
        ("grpo.max_staleness=-1", "greater than or equal to 0, got -1"),
        ("generation.top_p=0.9", "generation.top_p must stay 1.0 in training, got 0.9"),
        ("generation.top_k=50", "generation.top_k must stay -1 in training, got 50"),
        ("generation.temperature=0", "greater than 0, got 0"),
        ("generation.max_new_tokens=300", "raise max_model_len"),
        ("loss.clip_low=1.0", "clip_low"),
        ("data.max_prompt_tokens=250", "raise generation.max_model_len"),
        ("run.max_steps=many", "run.max_steps"),
        ("policy.num_ranks=0", "policy.num_ranks"),
        ("refit.transport=filesystem", "got None for filesystem; set both, or neither"),
        ("refit.directory=/shared", "got /shared for auto; set both, or neither"),
        ("run.max_steps", "an override is section.key=value"),
        ("--fast", "an override is section.key=value"),
    ],
)
def test_a_mistake_is_one_line_with_the_way_out(override: str, hint: str) -> None:
    with pytest.raises(ConfigError) as caught:
        load_config(None, [override])
    assert hint in str(caught.value)
    assert "\n" not in str(caught.value)


def test_a_mistake_ends_the_command_with_code_2_and_one_line() -> None:
    command = [sys.executable, "-m", "dockyard_grpo", "grpo.max_stalenes=1"]
    answer = subprocess.run(command, capture_output=True, text=True)
    assert answer.returncode == 2
    assert answer.stderr.count("\n") == 1
    assert "did you mean 'grpo.max_staleness'" in answer.stderr


def test_config_prints_what_loads_again(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "dockyard_grpo", "config", "run.seed=3"]
    printed = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    (tmp_path / "config.yaml").write_text(printed)
    assert load_config(tmp_path / "config.yaml", []).run.seed == 3


def test_more_gpus_than_there_are_is_refused_with_the_count() -> None:
    config = load_config(None, ["cluster.trainer_gpus=1", "cluster.inference_gpus=2"])
    with pytest.raises(ConfigError, match=r"ask for 3 GPUs .* but Ray sees 1"):
        plan_fleets(config, num_gpus=1)


def test_fleets_take_gpus_where_there_are_some_and_cpus_elsewhere() -> None:
    config = load_config(None, ["policy.model=some/model", "data.train=tasks.jsonl"])
    assert [fleet.gpus for fleet in plan_fleets(config, num_gpus=0)] == [0, 0, 0]
    assert [fleet.gpus for fleet in plan_fleets(config, num_gpus=2)] == [1, 1, 0]
    assert [fleet.gpus for fleet in plan_fleets(load_config(None, []), num_gpus=2)] == [0, 0, 0]
    assert [fleet.strategy for fleet in plan_fleets(config, num_gpus=0)] == ["SPREAD", "PACK", "SPREAD"]
