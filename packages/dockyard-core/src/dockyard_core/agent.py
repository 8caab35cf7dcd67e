"""An agent turns a task into a rollout: it asks the generator, and submits to the sandbox."""

from __future__ import annotations

import hashlib
import time
from dataclasses import replace
from functools import lru_cache
from typing import Protocol

from dockyard_core.errors import GeneratorError, SandboxError
from dockyard_core.generator import Completion, GenerateRequest, Generator, SamplingParams
from dockyard_core.patch import extract_patch
from dockyard_core.prompt import Prompt, PromptTemplate, fit_prompt
from dockyard_core.rollout import Rollout, Segment
from dockyard_core.sandbox import Sandbox
from dockyard_core.task import Task
from dockyard_core.tokenizer import Tokenizer
from dockyard_core.verdict import Verdict, VerdictStatus

_CACHED_PROMPTS = 1024


class Agent(Protocol):
    """How a policy attempts a task. Pluggable by import path."""

    async def run(
        self, task: Task, generator: Generator, sandbox: Sandbox, *, rollout_id: str, group_id: str
    ) -> Rollout:
        """Attempt ``task`` once; the rollout carries no reward yet.

        Args:
            task: the problem.
            generator: samples the completions.
            sandbox: gives the verdict.
            rollout_id: unique; names the generation request and the sandbox attempt.
            group_id: shared by the rollouts of one group.

        Raises:
            GeneratorError: the engine failed. A sandbox failure is not raised: it is a rollout with
                ``invalid_cause``.
            DataError: the task's prompt does not fit.
        """
        ...


class PatchAgent:
    """One prompt, one completion, one diff, one verdict.

    A completion that ran into the token limit is judged like any other: the limit is the policy's.
    An aborted one is not the policy's doing: it is invalid and goes to no sandbox.

    Args:
        tokenizer: the policy's.
        sampling: shared by every rollout, except that a ``seed`` is mixed with the rollout's id, or a
            group would hold the same completion many times. Without stop tokens, the end-of-sequence
            token stops.
        prompt_template: see `dockyard_core.prompt.fit_prompt`.
        max_prompt_tokens: token budget of a prompt; None = no bound.
    """

    def __init__(
        self,
        tokenizer: Tokenizer,
        *,
        sampling: SamplingParams,
        prompt_template: PromptTemplate = "auto",
        max_prompt_tokens: int | None = None,
    ) -> None:
        self._tokenizer = tokenizer
        self._sampling = (
            sampling if sampling.stop_token_ids else replace(sampling, stop_token_ids=(tokenizer.eos_token_id,))
        )

        def prompt_of(task: Task) -> Prompt:
            return fit_prompt(task, template=prompt_template, tokenizer=tokenizer, max_prompt_tokens=max_prompt_tokens)

        # A group's rollouts share their prompt, and live groups share few tasks.
        self._prompt_of = lru_cache(maxsize=_CACHED_PROMPTS)(prompt_of)

    def prompt(self, task: Task) -> Prompt:
        """What the policy is shown of a task. Raises DataError when it cannot fit the token budget."""
        return self._prompt_of(task)

    async def run(
        self, task: Task, generator: Generator, sandbox: Sandbox, *, rollout_id: str, group_id: str
    ) -> Rollout:
        """See `Agent.run`."""
        prompt = self.prompt(task)
        started_s = time.perf_counter()
        completion = await generator.generate(
            GenerateRequest(
                request_id=rollout_id,
                prompt_token_ids=prompt.token_ids,
                sampling=self._sampling_of(rollout_id),
                group_id=group_id,
            )
        )
        generated_s = time.perf_counter()
        text = self._tokenizer.decode(_without_stop(completion, self._sampling))
        patch = extract_patch(text)
        if completion.finish_reason == "abort":
            verdict = Verdict(status=VerdictStatus.INFRA_ERROR, detail="the generation was aborted")
        else:
            verdict = await _judge(sandbox, task, patch, rollout_id)
        judged_s = time.perf_counter()
        return Rollout(
            rollout_id=rollout_id,
            task_id=task.instance_id,
            segments=(Segment.prompt(prompt.token_ids), _sampled(completion)),
            prompt_text=prompt.text,
            completion_text=text,
            patch=patch,
            verdict=verdict,
            finish_reason=completion.finish_reason,
            temperature=self._sampling.temperature,
            invalid_cause=None if verdict.status.is_scorable else verdict.status.value,
            timings_s={
                "generate": generated_s - started_s,
                "judge": judged_s - generated_s,
                **{f"judge_{stage}": seconds for stage, seconds in verdict.duration_s.items()},
            },
        )

    def _sampling_of(self, rollout_id: str) -> SamplingParams:
        if self._sampling.seed is None:
            return self._sampling
        digest = hashlib.sha256(f"{self._sampling.seed}/{rollout_id}".encode()).digest()
        # 31 bits: engines differ in how wide a seed they take.
        return replace(self._sampling, seed=int.from_bytes(digest[:4], "big") >> 1)


async def _judge(sandbox: Sandbox, task: Task, patch: str, rollout_id: str) -> Verdict:
    try:
        return await sandbox.judge(task, patch, attempt_id=rollout_id)
    except SandboxError as error:
        # No verdict is not a zero: the rollout leaves its group's baseline and the loss.
        return Verdict(status=VerdictStatus.INFRA_ERROR, detail=f"{type(error).__name__}: {error}")


def _without_stop(completion: Completion, sampling: SamplingParams) -> tuple[int, ...]:
    is_stopped = completion.finish_reason == "stop" and completion.token_ids[-1:] != ()
    if is_stopped and completion.token_ids[-1] in sampling.stop_token_ids:
        return completion.token_ids[:-1]
    return completion.token_ids


def _sampled(completion: Completion) -> Segment:
    num_tokens = len(completion.token_ids)
    if len(completion.logprobs) != num_tokens:
        raise GeneratorError(
            f"a completion must have one logprob per token, got {len(completion.logprobs)} for {num_tokens} tokens; "
            "check the generator against dockyard_core.testing"
        )
    return Segment(
        token_ids=completion.token_ids,
        loss_mask=(True,) * num_tokens,
        logprobs=completion.logprobs,
        version_spans=completion.version_spans,
    )
