"""A whole attempt at a task, and the group of attempts it is compared with."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import NamedTuple

from dockyard_core.generator import FinishReason, VersionSpan
from dockyard_core.verdict import Verdict


class GroupId(NamedTuple):
    """Identity of a group that survives a restart: which task, and its how-manieth visit."""

    task_id: str
    repetition: int

    def __str__(self) -> str:
        return f"{self.task_id}#{self.repetition}"


@dataclass(frozen=True, kw_only=True, slots=True)
class Segment:
    """A stretch of a rollout's token sequence. Prompts and tool output have mask 0."""

    token_ids: tuple[int, ...]  # [T]
    loss_mask: tuple[bool, ...]  # [T], True on tokens the policy sampled and that are trained
    logprobs: tuple[float, ...]  # [T], sampled_logprobs; 0.0 where loss_mask is False
    version_spans: tuple[VersionSpan, ...] = ()
    """Spans over this segment's own indices; () when nothing in it was sampled."""

    @classmethod
    def prompt(cls, token_ids: tuple[int, ...]) -> Segment:
        """Tokens that were given, not sampled."""
        num_tokens = len(token_ids)
        return cls(token_ids=token_ids, loss_mask=(False,) * num_tokens, logprobs=(0.0,) * num_tokens)


@dataclass(frozen=True, kw_only=True)
class Rollout:
    """One attempt: the tokens, what the sandbox said, and what it is worth."""

    rollout_id: str
    task_id: str
    segments: tuple[Segment, ...]
    prompt_text: str
    completion_text: str
    patch: str
    """What was submitted to the sandbox; "" when no diff could be extracted."""
    verdict: Verdict
    finish_reason: FinishReason
    temperature: float
    reward: float = 0.0
    """Set by the reward function; meaningless when ``invalid_cause`` is set."""
    unshaped_reward: float = 0.0
    """Before penalties and bonuses; dynamic sampling tests its variance."""
    invalid_cause: str | None = None
    """None = valid. Else why the rollout leaves baseline and loss: infra_error, deadline, …"""
    timings_s: Mapping[str, float] = field(default_factory=dict)
    """Seconds: generate, judge, and the verdict's own stages."""

    @property
    def is_valid(self) -> bool:
        """Whether the rollout may vote in its group and enter the loss."""
        return self.invalid_cause is None

    @property
    def num_sampled_tokens(self) -> int:
        """Tokens with loss_mask True over all segments."""
        return sum(sum(segment.loss_mask) for segment in self.segments)

    @property
    def first_policy_version(self) -> int:
        """Version that sampled the oldest token; raises ValueError if nothing was sampled."""
        return min(span.policy_version for segment in self.segments for span in segment.version_spans)

    @property
    def last_policy_version(self) -> int:
        """Version that sampled the newest token; raises ValueError if nothing was sampled."""
        return max(span.policy_version for segment in self.segments for span in segment.version_spans)


@dataclass(frozen=True, kw_only=True)
class RolloutGroup:
    """Rollouts of one task, compared with each other."""

    group_id: GroupId
    rollouts: tuple[Rollout, ...]
