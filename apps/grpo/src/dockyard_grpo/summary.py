"""What the driver learns of a rollout: metadata only, well under 1 KB each; tokens stay with Ray."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from dockyard_core import GroupId, Rollout, RolloutGroup
from dockyard_core.loop import Member


@dataclass(frozen=True, slots=True)
class RolloutSummary:
    """One rollout without its tokens and texts."""

    reward: float
    invalid_cause: str | None
    unshaped_reward: float
    """Before penalties and bonuses: what dynamic sampling looks at."""
    oldest_version: int | None
    newest_version: int | None
    num_sampled_tokens: int
    finish_reason: str
    status: str
    """Status of the verdict."""
    is_cached: bool
    """Whether the verdict came from the sandbox's cache."""
    generate_s: float
    judge_s: float
    detail: str
    """Why it is invalid, for the console; "" when it is valid."""

    @property
    def member(self) -> Member:
        """What the loop's state machine needs of it."""
        return Member(self.invalid_cause, self.oldest_version, self.unshaped_reward)


@dataclass(frozen=True, slots=True)
class GroupSummary:
    """One group without its tokens and texts."""

    group_id: GroupId
    rollouts: tuple[RolloutSummary, ...]


@dataclass(frozen=True, slots=True)
class GroupRun:
    """A group that ended: what the driver may know of it, and where the rest is."""

    engine: str
    summary: GroupSummary
    payload: Any
    """Reference to the `RolloutGroup`."""


def summarize(group: RolloutGroup) -> GroupSummary:
    """Keep what decides, leave what is heavy."""
    return GroupSummary(group.group_id, tuple(_summarize_rollout(rollout) for rollout in group.rollouts))


def _summarize_rollout(rollout: Rollout) -> RolloutSummary:
    return RolloutSummary(
        reward=rollout.reward,
        invalid_cause=rollout.invalid_cause,
        unshaped_reward=rollout.unshaped_reward,
        oldest_version=rollout.first_policy_version if rollout.num_sampled_tokens else None,
        newest_version=rollout.last_policy_version if rollout.num_sampled_tokens else None,
        num_sampled_tokens=rollout.num_sampled_tokens,
        finish_reason=rollout.finish_reason,
        status=str(rollout.verdict.status),
        is_cached=rollout.verdict.cached,
        generate_s=rollout.timings_s.get("generate", 0.0),
        judge_s=rollout.timings_s.get("judge", 0.0),
        detail="" if rollout.is_valid else rollout.verdict.detail[:200],
    )
