from __future__ import annotations

import asyncio
from collections.abc import Mapping, Sequence
from dataclasses import replace

import pytest

from dockyard_core import (
    Completion,
    DataError,
    GeneratorError,
    Rollout,
    SamplingParams,
    SandboxTimeout,
    Segment,
    Task,
    Verdict,
    VerdictStatus,
    VersionSpan,
)
from dockyard_core.agent import Agent, PatchAgent
from dockyard_core.generator import FinishReason, GenerateRequest
from dockyard_core.prompt import render_numbered

EOS = 256
TASK = Task(
    instance_id="tiny__1",
    repo="tiny",
    base_commit="0" * 40,
    problem_statement="get_price should return the sum",
    test_patch="",
    fail_to_pass=("test_core.py::test_get_price",),
    prompt_files=(("core.py", "def get_price(a, b):\n    return a - b\n"),),
)
DIFF = "--- a/core.py\n+++ b/core.py\n@@ -1,2 +1,2 @@\n def get_price(a, b):\n-    return a - b\n+    return a + b\n"
RESOLVED = Verdict(status=VerdictStatus.RESOLVED, pass_rate=1.0, duration_s={"apply": 0.5, "test": 1.5})


class ByteTokenizer:
    eos_token_id = EOS

    def __init__(self) -> None:
        self.encoded: list[str] = []

    def encode(self, text: str) -> list[int]:
        self.encoded.append(text)
        return list(text.encode())

    def decode(self, token_ids: Sequence[int]) -> str:
        # Keeps what the agent must have cut off, so that a test can see it.
        return "".join("<eos>" if token == EOS else chr(token) for token in token_ids)

    def render_chat(self, messages: Sequence[Mapping[str, str]]) -> str | None:
        return None


class ScriptedGenerator:
    """Answers every request with the same text and records the requests."""

    def __init__(self, text: str, finish_reason: FinishReason = "stop") -> None:
        token_ids = tuple(text.encode()) + ((EOS,) if finish_reason == "stop" else ())
        self.completion = Completion(
            token_ids=token_ids,
            logprobs=tuple(-0.01 * index for index in range(len(token_ids))),
            version_spans=(VersionSpan(3, 0, 2), VersionSpan(4, 2, len(token_ids))),
            finish_reason=finish_reason,
        )
        self.requests: list[GenerateRequest] = []

    async def generate(self, request: GenerateRequest) -> Completion:
        self.requests.append(request)
        return self.completion


class RecordingSandbox:
    def __init__(self, outcome: Verdict | Exception = RESOLVED) -> None:
        self.outcome = outcome
        self.submitted: list[tuple[str, str, str]] = []

    async def judge(self, task: Task, patch: str, *, attempt_id: str) -> Verdict:
        self.submitted.append((task.instance_id, patch, attempt_id))
        if isinstance(self.outcome, Exception):
            raise self.outcome
        return self.outcome


def run(
    generator: ScriptedGenerator,
    sandbox: RecordingSandbox,
    *,
    sampling: SamplingParams | None = None,
    agent: Agent | None = None,
    rollout_id: str = "tiny__1#0/5",
    task: Task = TASK,
) -> Rollout:
    sampling = sampling or SamplingParams(temperature=0.8)
    agent = agent or PatchAgent(ByteTokenizer(), sampling=sampling, prompt_template="numbered")
    return asyncio.run(agent.run(task, generator, sandbox, rollout_id=rollout_id, group_id="tiny__1#0"))  # type: ignore[arg-type]


def test_a_rollout_keeps_the_sampled_tokens_and_submits_the_diff() -> None:
    generator, sandbox = ScriptedGenerator(f"Fix:\n```diff\n{DIFF}```\n"), RecordingSandbox()
    rollout = run(generator, sandbox)
    prompt_ids = tuple(render_numbered(TASK).encode())
    assert generator.requests == [
        GenerateRequest(
            request_id="tiny__1#0/5",
            prompt_token_ids=prompt_ids,
            sampling=SamplingParams(temperature=0.8, stop_token_ids=(EOS,)),
            group_id="tiny__1#0",
        )
    ]
    assert sandbox.submitted == [("tiny__1", DIFF, "tiny__1#0/5")]
    completion = generator.completion
    assert rollout.segments == (
        Segment.prompt(prompt_ids),
        Segment(
            token_ids=completion.token_ids,
            loss_mask=(True,) * len(completion.token_ids),
            logprobs=completion.logprobs,
            version_spans=completion.version_spans,
        ),
    )
    assert (rollout.first_policy_version, rollout.last_policy_version) == (3, 4)
    assert rollout.num_sampled_tokens == len(completion.token_ids)
    assert rollout.completion_text == f"Fix:\n```diff\n{DIFF}```\n"  # no stop token
    assert (rollout.patch, rollout.prompt_text) == (DIFF, render_numbered(TASK))
    assert (rollout.verdict, rollout.finish_reason, rollout.temperature) == (RESOLVED, "stop", 0.8)
    assert rollout.is_valid
    assert rollout.timings_s.keys() == {"generate", "judge", "judge_apply", "judge_test"}
    assert (rollout.timings_s["judge_apply"], rollout.timings_s["judge_test"]) == (0.5, 1.5)


def test_a_truncated_completion_is_judged_and_loses_no_token() -> None:
    generator, sandbox = ScriptedGenerator(DIFF, "length"), RecordingSandbox()
    rollout = run(generator, sandbox)
    assert sandbox.submitted == [("tiny__1", DIFF, "tiny__1#0/5")]
    assert (rollout.completion_text, rollout.finish_reason, rollout.invalid_cause) == (DIFF, "length", None)


def test_a_completion_without_a_diff_is_submitted_as_an_empty_patch() -> None:
    sandbox = RecordingSandbox(Verdict(status=VerdictStatus.UNRESOLVED))
    rollout = run(ScriptedGenerator("I do not know."), sandbox)
    assert sandbox.submitted == [("tiny__1", "", "tiny__1#0/5")]
    assert rollout.is_valid


def test_a_sandbox_failure_is_an_invalid_rollout_and_not_a_zero() -> None:
    rollout = run(ScriptedGenerator(DIFF), RecordingSandbox(SandboxTimeout("no verdict in 60 s")))
    assert rollout.invalid_cause == "infra_error"
    assert rollout.verdict.status is VerdictStatus.INFRA_ERROR
    assert rollout.verdict.detail == "SandboxTimeout: no verdict in 60 s"


@pytest.mark.parametrize("status", list(VerdictStatus))
def test_a_rollout_is_invalid_exactly_when_its_status_is_not_scorable(status: VerdictStatus) -> None:
    rollout = run(ScriptedGenerator(DIFF), RecordingSandbox(Verdict(status=status)))
    assert rollout.invalid_cause == (None if status.is_scorable else status.value)


def test_an_aborted_generation_is_invalid_and_goes_to_no_sandbox() -> None:
    sandbox = RecordingSandbox()
    rollout = run(ScriptedGenerator(DIFF, "abort"), sandbox)
    assert (rollout.invalid_cause, sandbox.submitted) == ("infra_error", [])


def test_a_bug_in_the_sandbox_client_is_not_swallowed() -> None:
    with pytest.raises(ZeroDivisionError):
        run(ScriptedGenerator(DIFF), RecordingSandbox(ZeroDivisionError()))


def test_the_prompt_is_tokenised_once_per_task() -> None:
    tokenizer = ByteTokenizer()
    agent = PatchAgent(tokenizer, sampling=SamplingParams(), prompt_template="numbered")
    other = replace(TASK, instance_id="tiny__2", problem_statement="another")
    for index in range(16):
        run(ScriptedGenerator(DIFF), RecordingSandbox(), agent=agent, rollout_id=f"a/{index}")
        run(ScriptedGenerator(DIFF), RecordingSandbox(), agent=agent, rollout_id=f"b/{index}", task=other)
    assert tokenizer.encoded == [render_numbered(TASK), render_numbered(other)]


def test_a_seed_differs_between_rollouts_and_repeats_for_one() -> None:
    def seed_of(rollout_id: str, seed: int) -> int | None:
        generator = ScriptedGenerator(DIFF)
        run(generator, RecordingSandbox(), sampling=SamplingParams(seed=seed), rollout_id=rollout_id)
        return generator.requests[0].sampling.seed

    seeds = [seed_of(f"tiny__1#0/{index}", 7) for index in range(16)]
    assert len(set(seeds)) == 16
    assert seeds == [seed_of(f"tiny__1#0/{index}", 7) for index in range(16)]
    assert seed_of("tiny__1#0/0", 8) != seeds[0]
    assert all(seed is not None and 0 <= seed < 2**31 for seed in seeds)


def test_given_stop_tokens_are_kept() -> None:
    generator = ScriptedGenerator(DIFF)
    rollout = run(generator, RecordingSandbox(), sampling=SamplingParams(stop_token_ids=(EOS, 9)))
    assert generator.requests[0].sampling.stop_token_ids == (EOS, 9)
    assert rollout.completion_text == DIFF


def test_a_completion_with_missing_logprobs_is_refused() -> None:
    generator = ScriptedGenerator(DIFF)
    generator.completion = replace(generator.completion, logprobs=generator.completion.logprobs[1:])
    with pytest.raises(GeneratorError, match="one logprob per token"):
        run(generator, RecordingSandbox())


def test_a_prompt_over_the_budget_is_refused() -> None:
    agent = PatchAgent(ByteTokenizer(), sampling=SamplingParams(), prompt_template="numbered", max_prompt_tokens=8)
    with pytest.raises(DataError, match="tiny__1"):
        run(ScriptedGenerator(DIFF), RecordingSandbox(), agent=agent)
