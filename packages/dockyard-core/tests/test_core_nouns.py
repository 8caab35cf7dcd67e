from __future__ import annotations

import re
import subprocess
import sys
from dataclasses import FrozenInstanceError, replace
from pathlib import Path

import pytest

import dockyard_core
from dockyard_core import GroupId, RefitTimeout, Rollout, Segment, Task, UserError, Verdict, VerdictStatus, VersionSpan

HEAVY = ("numpy", "torch", "jax", "ray", "vllm", "sglang", "transformers", "starlette", "httpx")
LIGHT_MODULES = ("agent", "data", "patch", "prompt", "reward", "tokenizer")


def sampled(*spans: tuple[int, int, int], mask: tuple[bool, ...]) -> Segment:
    return Segment(
        token_ids=(7,) * len(mask),
        loss_mask=mask,
        logprobs=(-1.0,) * len(mask),
        version_spans=tuple(VersionSpan(*span) for span in spans),
    )


def rollout(*segments: Segment) -> Rollout:
    return Rollout(
        rollout_id="t#0/0",
        task_id="t",
        segments=segments,
        prompt_text="",
        completion_text="",
        patch="",
        verdict=Verdict(status=VerdictStatus.UNRESOLVED),
        finish_reason="stop",
        temperature=1.0,
    )


def test_importing_core_pulls_in_nothing_heavy() -> None:
    imports = "; ".join(["import dockyard_core", *(f"import dockyard_core.{name}" for name in LIGHT_MODULES)])
    code = f"{imports}; import sys; print(sorted(set({HEAVY!r}) & sys.modules.keys()))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout == "[]\n"


def test_everything_listed_is_there_and_listed_once() -> None:
    assert sorted(set(dockyard_core.__all__)) == dockyard_core.__all__
    assert [name for name in dockyard_core.__all__ if not hasattr(dockyard_core, name)] == []


def test_a_prompt_segment_trains_nothing() -> None:
    segment = Segment.prompt((5, 6))
    assert (segment.loss_mask, segment.logprobs, segment.version_spans) == ((False, False), (0.0, 0.0), ())


def test_a_rollout_counts_and_dates_what_was_sampled_over_all_segments() -> None:
    attempt = rollout(
        Segment.prompt((1, 2, 3)),
        sampled((4, 0, 1), (5, 1, 3), mask=(True, True, True)),
        Segment.prompt((9,)),
        sampled((6, 0, 2), mask=(True, False)),
    )
    assert attempt.num_sampled_tokens == 4
    assert (attempt.first_policy_version, attempt.last_policy_version) == (4, 6)
    with pytest.raises(ValueError):
        _ = rollout(Segment.prompt((1,))).first_policy_version


def test_an_invalid_cause_makes_a_rollout_invalid() -> None:
    assert rollout().is_valid
    assert not replace(rollout(), invalid_cause="deadline").is_valid


def test_only_faults_that_are_not_the_policys_are_unscorable() -> None:
    unscorable = {status for status in VerdictStatus if not status.is_scorable}
    assert unscorable == {VerdictStatus.INFRA_ERROR, VerdictStatus.TEST_PATCH_FAILED}
    assert [status for status in VerdictStatus if Verdict(status=status).is_resolved] == [VerdictStatus.RESOLVED]


def test_nouns_are_frozen_and_a_group_id_names_task_and_repetition() -> None:
    task = Task(
        instance_id="a", repo="r", base_commit="0" * 40, problem_statement="p", test_patch="", fail_to_pass=("t",)
    )
    with pytest.raises(FrozenInstanceError):
        task.repo = "other"  # type: ignore[misc]
    assert str(GroupId("a", 2)) == "a#2"


def test_errors_say_whose_fault_they_are() -> None:
    assert issubclass(dockyard_core.DataError, UserError)
    assert not issubclass(dockyard_core.SandboxError, UserError)
    error = RefitTimeout("rank 2 is late", wanted_version=3, held_version=2)
    assert str(error) == "rank 2 is late (wanted policy version 3, holds 2)"
    assert (error.wanted_version, error.held_version) == (3, 2)


def test_the_examples_of_the_readme_run() -> None:
    pytest.importorskip("numpy")
    text = (Path(__file__).parents[1] / "README.md").read_text()
    examples = [match.group(2) for match in re.finditer(r"^(`{3,})python\n(.*?)^\1$", text, re.DOTALL | re.MULTILINE)]
    assert len(examples) == 3
    for example in examples:
        subprocess.run([sys.executable, "-c", example], check=True)
