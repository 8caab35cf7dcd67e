"""Runs groups on the inference fleet; one whose engine dies runs anew on another, under the same identity."""

from __future__ import annotations

import asyncio
from collections import Counter
from typing import Any

from dockyard_core import EngineDead, GroupId
from dockyard_grpo.config import Config
from dockyard_grpo.fleets import Fleets
from dockyard_grpo.recovery import Recovery
from dockyard_grpo.summary import GroupRun, GroupSummary

_GRACE_S = 60.0
"""A group ends with the deadline of its rollouts; an engine that says nothing for so much longer is dead."""


class GroupRunner:
    """Hands groups to the serving engine with the fewest."""

    def __init__(self, config: Config, fleets: Fleets, recovery: Recovery) -> None:
        self._timeout_s = config.grpo.rollout_timeout_s + _GRACE_S
        self._fleets = fleets
        self._recovery = recovery
        self._load: Counter[str] = Counter()

    async def run(self, split: str, index: int, group_id: GroupId, num_rollouts: int) -> GroupRun:
        """Run a group to its end.

        Args:
            split: "train" or "validation".
            index: of the task in its split.
            group_id: whatever happens, its identity stays.
            num_rollouts: its size.
        """
        while True:
            serving = await self._recovery.wait_serving()
            name = min(serving, key=lambda engine: self._load[engine])
            engine, num_interruptions = self._fleets.engines[name], self._recovery.num_interruptions(name)
            self._load[name] += 1
            try:
                summary, payload = await self._run_on(engine, split, index, group_id, num_rollouts)
                # A refit took the engine's requests along: not a fault of theirs, they run anew.
                is_spoilt = any(rollout.invalid_cause == "infra_error" for rollout in summary.rollouts)
                if not is_spoilt or await self._recovery.was_well(name, engine, num_interruptions):
                    return GroupRun(name, summary, payload)
                self._recovery.run_anew(name, group_id)
            except _EngineLost as lost:
                self._recovery.lose_engine(name, engine, lost.reason)
            finally:
                self._load[name] -= 1

    async def _run_on(
        self, engine: Any, split: str, index: int, group_id: GroupId, num_rollouts: int
    ) -> tuple[GroupSummary, Any]:
        from ray.exceptions import RayActorError

        run = engine.run_group.options(num_returns=2)
        reference, payload = run.remote(split, index, group_id, num_rollouts)
        try:
            async with asyncio.timeout(self._timeout_s):
                summary: GroupSummary = await reference
        except TimeoutError as error:
            raise _EngineLost(f"no word on {group_id} for {self._timeout_s:.0f} s") from error
        except (EngineDead, RayActorError) as error:
            raise _EngineLost(error) from error
        return summary, payload


class _EngineLost(Exception):
    def __init__(self, reason: BaseException | str) -> None:
        super().__init__(str(reason))
        self.reason = reason
