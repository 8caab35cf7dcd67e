from __future__ import annotations

import math
import sys
from dataclasses import replace
from pathlib import Path

import pytest
from pydantic import ValidationError

from dockyard_core import ConfigError, Rollout, Segment, Verdict, VerdictStatus, VersionSpan
from dockyard_core.generator import FinishReason
from dockyard_core.reward import RewardConfig, load_reward, score_rollout


def rollout(
    status: VerdictStatus = VerdictStatus.UNRESOLVED,
    *,
    pass_rate: float = 0.0,
    flags: tuple[str, ...] = (),
    num_tokens: int = 10,
    patch: str = "--- a/x\n",
    finish_reason: FinishReason = "stop",
) -> Rollout:
    sampled = Segment(
        token_ids=(1,) * num_tokens,
        loss_mask=(True,) * num_tokens,
        logprobs=(-1.0,) * num_tokens,
        version_spans=(VersionSpan(0, 0, num_tokens),),
    )
    return Rollout(
        rollout_id="t#0/0",
        task_id="t",
        segments=(Segment.prompt((1, 2, 3)), sampled),
        prompt_text="",
        completion_text="",
        patch=patch,
        verdict=Verdict(status=status, pass_rate=pass_rate, flags=flags),
        finish_reason=finish_reason,
        temperature=1.0,
    )


def reward(scored: Rollout, config: RewardConfig, max_new_tokens: int = 100) -> float:
    result = score_rollout(scored, config, max_new_tokens=max_new_tokens)
    assert result.is_valid
    return result.reward


SCORABLE = [status for status in VerdictStatus if status.is_scorable]


@pytest.mark.parametrize("status", SCORABLE)
def test_binary_pays_for_resolved_alone(status: VerdictStatus) -> None:
    assert reward(rollout(status, pass_rate=0.9), RewardConfig()) == float(status is VerdictStatus.RESOLVED)


@pytest.mark.parametrize("status", SCORABLE)
def test_pass_rate_pays_only_for_runs_that_finished(status: VerdictStatus) -> None:
    finished = status in (VerdictStatus.RESOLVED, VerdictStatus.UNRESOLVED)
    assert reward(rollout(status, pass_rate=0.75), RewardConfig(kind="pass_rate")) == (0.75 if finished else 0.0)


@pytest.mark.parametrize("status", [VerdictStatus.INFRA_ERROR, VerdictStatus.TEST_PATCH_FAILED])
def test_what_is_not_scorable_has_a_cause_and_no_reward(status: VerdictStatus) -> None:
    scored = score_rollout(rollout(status, pass_rate=1.0), RewardConfig(apply_bonus=0.1), max_new_tokens=10)
    assert (scored.invalid_cause, scored.reward, scored.unshaped_reward) == (status.value, 0.0, 0.0)


def test_an_invalid_rollout_keeps_its_cause() -> None:
    late = replace(rollout(VerdictStatus.RESOLVED), invalid_cause="deadline")
    assert score_rollout(late, RewardConfig(), max_new_tokens=10).invalid_cause == "deadline"


def test_penalties_of_status_and_flags_are_subtracted_after_the_unshaped_reward() -> None:
    config = RewardConfig(penalties={"resolved": 0.25, "reads_frames": 0.5, "timeout": 9.0})
    scored = score_rollout(rollout(VerdictStatus.RESOLVED, flags=("reads_frames", "other")), config, max_new_tokens=10)
    assert (scored.unshaped_reward, scored.reward) == (1.0, 0.25)


@pytest.mark.parametrize(
    ("status", "patch", "bonus"),
    [
        (VerdictStatus.RESOLVED, "--- a/x\n", 0.125),
        (VerdictStatus.TIMEOUT, "--- a/x\n", 0.125),
        (VerdictStatus.UNRESOLVED, "", 0.0),  # an empty patch applies to anything
        (VerdictStatus.APPLY_FAILED, "--- a/x\n", 0.0),
        (VerdictStatus.POLICY_VIOLATION, "--- a/x\n", 0.0),
        (VerdictStatus.TAMPERED, "--- a/x\n", 0.0),
    ],
)
def test_the_apply_bonus_is_for_patches_that_applied(status: VerdictStatus, patch: str, bonus: float) -> None:
    judged = rollout(status, patch=patch)
    assert reward(judged, RewardConfig(apply_bonus=0.125)) - reward(judged, RewardConfig()) == bonus


@pytest.mark.parametrize(("num_tokens", "penalty"), [(0, 0.0), (80, 0.0), (85, -0.125), (90, -0.25), (100, -0.5)])
def test_the_overlong_penalty_is_a_ramp_over_the_buffer(num_tokens: int, penalty: float) -> None:
    config = RewardConfig(overlong_buffer_tokens=20, overlong_penalty=0.5)
    assert reward(rollout(num_tokens=num_tokens), config) == pytest.approx(penalty)


def test_overlong_counts_sampled_tokens_of_every_segment_and_no_prompt() -> None:
    single = rollout(num_tokens=45)
    double = replace(single, segments=single.segments * 2)
    config = RewardConfig(overlong_buffer_tokens=20)
    assert reward(single, config) == 0.0
    assert reward(double, config) == pytest.approx(-0.5)  # L = 90 of 100


def test_an_overlong_buffer_longer_than_the_limit_is_refused() -> None:
    with pytest.raises(ConfigError, match="got 20 > 10"):
        score_rollout(rollout(), RewardConfig(overlong_buffer_tokens=20), max_new_tokens=10)


def test_truncated_rollouts_are_scored_unless_masked() -> None:
    truncated = rollout(VerdictStatus.RESOLVED, finish_reason="length")
    assert reward(truncated, RewardConfig()) == 1.0
    masked = score_rollout(truncated, RewardConfig(mask_truncated=True), max_new_tokens=10)
    assert (masked.invalid_cause, masked.is_valid) == ("truncated", False)
    assert score_rollout(rollout(), RewardConfig(mask_truncated=True), max_new_tokens=10).is_valid


@pytest.mark.parametrize(
    "values",
    [
        {"kind": "binry"},
        {"penalties": {"timeout": -0.1}},
        {"penalties": {"timeout": math.nan}},
        {"penalties": {"infra_error": 0.1}},
        {"apply_bonus": -1.0},
        {"overlong_buffer_tokens": -1},
        {"unknown": 1},
    ],
)
def test_a_useless_configuration_is_refused(values: dict[str, object]) -> None:
    with pytest.raises(ValidationError):
        RewardConfig.model_validate(values)


def test_a_reward_can_be_any_importable_function(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "my_rewards_x1.py").write_text(
        "LIMIT = 3\n"
        "def short(rollout):\n    return 1.0 - rollout.num_sampled_tokens / 100\n"
        "def broken(rollout):\n    return float('nan')\n"
    )
    monkeypatch.syspath_prepend(tmp_path)
    try:
        assert reward(rollout(num_tokens=25), RewardConfig(kind="my_rewards_x1:short")) == 0.75
        with pytest.raises(ConfigError, match=r"must be finite, got nan from my_rewards_x1:broken for rollout t#0/0"):
            score_rollout(rollout(), RewardConfig(kind="my_rewards_x1:broken"), max_new_tokens=10)
        with pytest.raises(ConfigError, match="'longer', which my_rewards_x1 does not define"):
            load_reward("my_rewards_x1:longer")
        with pytest.raises(ConfigError, match="holds but cannot be called"):
            load_reward("my_rewards_x1:LIMIT")
    finally:
        sys.modules.pop("my_rewards_x1", None)


@pytest.mark.parametrize("kind", ["nothing_here_x9:f", "binry", "a:", ":f", ".rel:f", "a b:c"])
def test_a_bad_import_path_is_one_clear_line(kind: str) -> None:
    with pytest.raises(ConfigError, match=r"^reward\.kind must [^\n]*; [^\n]*$"):
        load_reward(kind)
