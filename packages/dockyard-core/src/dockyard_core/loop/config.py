"""The numbers that bound the loop, and what it needs to know of a rollout."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any, NamedTuple

from dockyard_core.loop.ledger import EMPTY_LEDGER

INVALID_CAUSES = frozenset({"infra_error", "deadline", "test_patch_failed", "truncated"})
"""Why a rollout may be missing from its group: not for what the policy did, except that a user may
ask for truncated ones to be left out."""
ZERO_SIGNAL = "zero_signal"
"""Cause by which dynamic sampling drops a group."""


EMPTY_LOOP: Mapping[str, Any] = MappingProxyType(
    {
        "policy_version": 0,
        "num_replaced": 0,
        "admission_versions": (),
        "finished": (),
        "evaluations": (),
        "ledger": EMPTY_LEDGER,
    }
)
"""Snapshot of a loop before its first event: a run that is taken up without a checkpoint."""


@dataclass(frozen=True, kw_only=True)
class LoopConfig:
    """The numbers that bound the loop."""

    num_prompts_per_step: int
    num_generations_per_prompt: int
    max_staleness: int
    max_steps: int | None = None
    """None = endless; else no group is admitted that no step could train."""
    max_replaced_per_step: int = 0
    """Groups without signal that may be replaced between two steps (dynamic sampling); 0 = none."""

    def __post_init__(self) -> None:
        if self.num_prompts_per_step < 1:
            raise ValueError(f"num_prompts_per_step must be >= 1, got {self.num_prompts_per_step}")
        if self.num_generations_per_prompt < 2:
            raise ValueError(f"a group needs >= 2 rollouts, got {self.num_generations_per_prompt}")
        if self.max_staleness < 0:
            raise ValueError(f"max_staleness must be >= 0, got {self.max_staleness}")
        if self.max_replaced_per_step < 0:
            raise ValueError(f"max_replaced_per_step must be >= 0, got {self.max_replaced_per_step}")

    @property
    def num_slots(self) -> int:
        """Groups that may hold a slot at once."""
        return (self.max_staleness + 1) * self.num_prompts_per_step


class Member(NamedTuple):
    """What the loop needs to know of one rollout of a finished group."""

    invalid_cause: str | None
    oldest_version: int | None
    """Version that sampled its oldest token; None when nothing was sampled."""
    unshaped_reward: float = 0.0
    """Reward before penalties and bonuses: what dynamic sampling looks at."""
