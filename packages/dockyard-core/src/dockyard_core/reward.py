"""Verdict -> one float, or "not scorable" with a cause."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import replace
from functools import lru_cache
from importlib import import_module
from types import MappingProxyType

from pydantic import BaseModel, ConfigDict, Field, field_validator

from dockyard_core.errors import ConfigError
from dockyard_core.rollout import Rollout
from dockyard_core.verdict import VerdictStatus

RewardFn = Callable[[Rollout], float]
"""A judged rollout -> its reward before shaping; must be finite."""

_NOT_APPLIED = frozenset(
    {
        VerdictStatus.APPLY_FAILED,
        VerdictStatus.POLICY_VIOLATION,
        VerdictStatus.TAMPERED,
        VerdictStatus.TEST_PATCH_FAILED,
        VerdictStatus.INFRA_ERROR,
    }
)
_UNSCORABLE = frozenset(status.value for status in VerdictStatus if not status.is_scorable)


def binary(rollout: Rollout) -> float:
    """1 if the verdict is ``resolved``, else 0."""
    return 1.0 if rollout.verdict.is_resolved else 0.0


def pass_rate(rollout: Rollout) -> float:
    """Share of the deciding test ids that passed, in [0, 1].

    0 for every status but ``resolved`` and ``unresolved``: a run that was cut short, tampered with or
    never started is worth nothing, whatever it reported before.
    """
    is_complete = rollout.verdict.status in (VerdictStatus.RESOLVED, VerdictStatus.UNRESOLVED)
    return rollout.verdict.pass_rate if is_complete else 0.0


REWARDS: Mapping[str, RewardFn] = MappingProxyType({"binary": binary, "pass_rate": pass_rate})


class RewardConfig(BaseModel):
    """How a verdict becomes a reward."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    kind: str = "binary"
    """``binary``, ``pass_rate``, or ``package.module:function``."""
    penalties: dict[str, float] = Field(default_factory=dict)
    """Verdict status or flag -> what is SUBTRACTED when the verdict has it, >= 0."""
    apply_bonus: float = Field(default=0.0, ge=0.0, allow_inf_nan=False)
    """Added when a non-empty patch applied and was not refused."""
    overlong_buffer_tokens: int = Field(default=0, ge=0)
    """Length in tokens of the ramp before ``max_new_tokens``; 0 = no overlong penalty."""
    overlong_penalty: float = Field(default=1.0, ge=0.0, allow_inf_nan=False)
    """λ: what a completion of ``max_new_tokens`` loses."""
    mask_truncated: bool = False
    """Truncated rollouts become invalid: they leave the loss AND the baseline."""

    @field_validator("kind")
    @classmethod
    def _known_kind(cls, kind: str) -> str:
        if kind not in REWARDS and ":" not in kind:
            raise ValueError(f"must be {' or '.join(REWARDS)}, or package.module:function, got {kind!r}; choose one")
        return kind

    @field_validator("penalties")
    @classmethod
    def _usable_penalties(cls, penalties: dict[str, float]) -> dict[str, float]:
        for name, value in penalties.items():
            if not (math.isfinite(value) and value >= 0.0):
                raise ValueError(f"a penalty is subtracted and must be finite and >= 0, got {name}={value}; flip it")
            if name in _UNSCORABLE:
                raise ValueError(f"{name} is not the policy's doing and is never scored; remove its penalty")
        return penalties


def score_rollout(rollout: Rollout, config: RewardConfig, *, max_new_tokens: int) -> Rollout:
    """The rollout with ``unshaped_reward`` and ``reward``, or with the cause why it has none.

    reward = kind − Σ penalties + apply_bonus + min(0, −(L − (L_max − L_buf)) / L_buf · λ), where L
    counts ALL sampled tokens of the rollout, L_max = ``max_new_tokens`` and L_buf =
    ``overlong_buffer_tokens``. An invalid rollout keeps its cause and gets 0.

    Args:
        rollout: as an agent returned it.
        config: the shaping.
        max_new_tokens: the sampling limit, in tokens, over the whole rollout.

    Raises:
        ConfigError: the import path cannot be loaded, the function returned no finite number, or
            the overlong buffer is longer than ``max_new_tokens``.

    References: soft overlong punishment and overlong filtering, DAPO, arXiv:2503.14476.
    """
    cause = rollout.invalid_cause
    if cause is None and not rollout.verdict.status.is_scorable:
        cause = rollout.verdict.status.value
    if cause is None and config.mask_truncated and rollout.finish_reason == "length":
        cause = "truncated"
    if cause is not None:
        return replace(rollout, reward=0.0, unshaped_reward=0.0, invalid_cause=cause)
    unshaped = float(load_reward(config.kind)(rollout))
    if not math.isfinite(unshaped):
        raise ConfigError(
            f"reward.kind: a reward must be finite, got {unshaped} from {config.kind} for rollout "
            f"{rollout.rollout_id}; mend the function"
        )
    found = {rollout.verdict.status.value, *rollout.verdict.flags}
    reward = unshaped - math.fsum(value for name, value in config.penalties.items() if name in found)
    if rollout.patch.strip() and rollout.verdict.status not in _NOT_APPLIED:
        reward += config.apply_bonus
    reward += _overlong(rollout.num_sampled_tokens, config, max_new_tokens)
    return replace(rollout, reward=reward, unshaped_reward=unshaped)


def _overlong(num_tokens: int, config: RewardConfig, max_new_tokens: int) -> float:
    buffer = config.overlong_buffer_tokens
    if buffer == 0:
        return 0.0
    if buffer > max_new_tokens:
        raise ConfigError(
            f"reward.overlong_buffer_tokens must be at most generation.max_new_tokens, got {buffer} > "
            f"{max_new_tokens}; lower it"
        )
    return min(0.0, -(num_tokens - (max_new_tokens - buffer)) / buffer * config.overlong_penalty)


@lru_cache(maxsize=64)
def load_reward(kind: str) -> RewardFn:
    """The reward function that ``kind`` names.

    Args:
        kind: a key of ``REWARDS``, or ``package.module:function``; the function takes a judged
            `Rollout` and returns a finite float.

    Raises:
        ConfigError: no such name, module or function, or it is not callable.
    """
    if kind in REWARDS:
        return REWARDS[kind]
    module_name, separator, name = kind.partition(":")
    if not (separator and name.isidentifier() and all(part.isidentifier() for part in module_name.split("."))):
        raise ConfigError(
            f"reward.kind must be {' or '.join(REWARDS)}, or package.module:function, got {kind!r}; choose one"
        )
    try:
        module = import_module(module_name)
    except ImportError as error:
        raise ConfigError(
            f"reward.kind must name an importable module, got {module_name!r} ({error}); "
            "install it or put its folder on PYTHONPATH"
        ) from error
    function = getattr(module, name, None)
    if not callable(function):
        raise ConfigError(
            f"reward.kind must name a function, got {name!r}, which {module_name} "
            f"{'does not define' if function is None else 'holds but cannot be called'}; check the spelling"
        )
    return function  # type: ignore[no-any-return]
