"""Runs the rollouts of a group against an engine and the sandbox fleet, each within its deadline."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Sequence

from dockyard_core import (
    EngineDead,
    Generator,
    GeneratorError,
    GroupId,
    Rollout,
    RolloutGroup,
    Sandbox,
    SandboxUnavailable,
    Segment,
    Task,
    Verdict,
    VerdictStatus,
)
from dockyard_core.agent import Agent
from dockyard_core.reward import RewardConfig, score_rollout

_NO_WORK = ("queue", "total")
_AGAIN_S = 0.5


class RolloutWorker:
    """One agent, one engine, one front to the sandboxes."""

    def __init__(
        self,
        *,
        agent: Agent,
        generator: Generator,
        sandbox: Sandbox,
        reward: RewardConfig,
        max_new_tokens: int,
        timeout_s: float,
    ) -> None:
        self._agent = agent
        self._generator = generator
        self._sandbox = sandbox
        self._reward = reward
        self._max_new_tokens = max_new_tokens
        self._timeout_s = timeout_s

    async def run_group(self, task: Task, group_id: GroupId, num_rollouts: int) -> RolloutGroup:
        """Run ``num_rollouts`` rollouts of one task side by side.

        A rollout's id is its identity, ``task#repetition/index``: one that runs anew has the same.

        Args:
            task: the problem.
            group_id: the group's identity.
            num_rollouts: its size.
        """
        running = [
            asyncio.create_task(self._run_rollout(task, f"{group_id}/{index}", str(group_id)))
            for index in range(num_rollouts)
        ]
        try:
            rollouts = await asyncio.gather(*running)
        finally:  # the first failure is raised as it is; the others of its group end with it
            for rollout in running:
                rollout.cancel()
        return RolloutGroup(group_id=group_id, rollouts=tuple(rollouts))

    async def _run_rollout(self, task: Task, rollout_id: str, group_id: str) -> Rollout:
        started = time.monotonic()
        try:
            async with asyncio.timeout(self._timeout_s):
                rollout = await self._agent.run(
                    task, self._generator, self._sandbox, rollout_id=rollout_id, group_id=group_id
                )
        except TimeoutError:
            return _unfinished(task, rollout_id, "deadline", time.monotonic() - started)
        except EngineDead:
            raise  # no rollout of this engine can ever end: the run must know
        except GeneratorError as error:
            return _unfinished(task, rollout_id, "infra_error", time.monotonic() - started, str(error))
        return score_rollout(rollout, self._reward, max_new_tokens=self._max_new_tokens)


class SandboxFleet:
    """Several servers as one: a task always goes to the same one, whose verdict cache knows it.

    Args:
        sandboxes: one client per server.
        attempt: prefix of the attempt ids, unique in the life of the servers, which may outlive a run and
            know the ids of its rollouts: a new life asks anew.
        are_ours: the run starts its servers again when they die, or ends: until then a verdict waits, up to
            the deadline of its rollout. A server of somebody else's that is away is an ``infra_error``.
    """

    def __init__(self, sandboxes: Sequence[Sandbox], attempt: str, *, are_ours: bool) -> None:
        self._attempt = attempt
        self._are_ours = are_ours
        self._num_calls = 0
        self.work_s = 0.0
        """Seconds that servers worked on the verdicts; what they had cached cost none."""
        self.use(sandboxes)

    def use(self, sandboxes: Sequence[Sandbox]) -> None:
        """From now on ask these servers."""
        if not sandboxes:
            raise ValueError("a run needs at least 1 sandbox server, got 0")
        self._sandboxes = tuple(sandboxes)

    async def judge(self, task: Task, patch: str, *, attempt_id: str) -> Verdict:
        """See `dockyard_core.Sandbox.judge`."""
        index = sum(task.instance_id.encode()) % len(self._sandboxes)
        # Numbered: a rollout that runs anew in this life is another attempt.
        self._num_calls += 1
        unique = f"{self._attempt}/{self._num_calls}/{attempt_id}"
        while True:
            try:
                verdict = await self._sandboxes[index].judge(task, patch, attempt_id=unique)
                break
            except SandboxUnavailable:
                if not self._are_ours:
                    raise
                await asyncio.sleep(_AGAIN_S)
        if not verdict.cached:
            self.work_s += sum(seconds for stage, seconds in verdict.duration_s.items() if stage not in _NO_WORK)
        return verdict


def _unfinished(task: Task, rollout_id: str, cause: str, seconds: float, detail: str = "") -> Rollout:
    """An invalid rollout: it leaves baseline and loss, and is counted by its cause."""
    return Rollout(
        rollout_id=rollout_id,
        task_id=task.instance_id,
        segments=(Segment(token_ids=(), loss_mask=(), logprobs=()),),
        prompt_text="",
        completion_text="",
        patch="",
        verdict=Verdict(status=VerdictStatus.INFRA_ERROR, detail=detail or cause),
        finish_reason="abort",
        temperature=1.0,
        invalid_cause=cause,
        timings_s={"generate": seconds},
    )
