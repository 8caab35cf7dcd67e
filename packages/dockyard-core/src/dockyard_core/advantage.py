"""Advantages of one group: each rollout's reward relative to the others of its task.

Shape legend: G = rollouts of a group.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal, get_args

import numpy as np

Baseline = Literal["leave_one_out", "mean"]
Scale = Literal["std", "none"]

_RELATIVE_TIE = 1e-6


def group_advantages(
    rewards_G: Sequence[float] | np.ndarray,
    valid_G: Sequence[bool] | np.ndarray | None = None,
    *,
    baseline: Baseline = "leave_one_out",
    scale: Scale = "std",
) -> np.ndarray:
    """Return float64 advantages [G]; invalid rollouts get 0 and do not vote.

    With V the valid rollouts and n = |V|: A_i = (r_i - b_i) / s, where b_i is the mean of the other
    valid rewards (`leave_one_out`) or of all of them (`mean`), and s is the group's standard
    deviation with n - 1 (`std`) or 1 (`none`). Everything is 0 if n < 2 or if the valid rewards
    differ by no more than 1e-6 of their size, since 0.1 + 0.2 against 0.3 is no signal.

    Args:
        rewards_G: one reward per rollout; what invalid ones hold is never read, NaN included.
        valid_G: True for rollouts that vote; None = all.

    Raises ValueError for misshapen arrays, unknown options, or a valid reward that is not finite.
    References: RLOO, arXiv:2402.14740; DeepSeekMath, arXiv:2402.03300 (std); Dr. GRPO,
        arXiv:2503.20783 (none).
    """
    if baseline not in get_args(Baseline):
        raise ValueError(f"baseline must be one of {get_args(Baseline)}, got {baseline!r}; choose one")
    if scale not in get_args(Scale):
        raise ValueError(f"scale must be one of {get_args(Scale)}, got {scale!r}; choose one")
    rewards = np.asarray(rewards_G, np.float64)
    valid = np.ones(rewards.shape, bool) if valid_G is None else np.asarray(valid_G, bool)
    if rewards.ndim != 1 or valid.shape != rewards.shape:
        raise ValueError(f"rewards and valid must both be [G], got {rewards.shape} and {valid.shape}; pass one group")
    voting = rewards[valid]
    if not np.isfinite(voting).all():
        raise ValueError(f"rewards of valid rollouts must be finite, got {voting.tolist()}; mark the rollout invalid")
    advantages = np.zeros(rewards.shape, np.float64)
    if len(voting) < 2 or np.ptp(voting) <= _RELATIVE_TIE * max(1.0, float(np.abs(voting).max())):
        return advantages
    # Two passes: subtracting the mean first keeps the figures when rewards are large and close.
    centred = voting - voting.mean()
    std = float(np.sqrt((centred**2).sum() / (len(voting) - 1))) if scale == "std" else 1.0
    # r_i - mean of the others = (r_i - mean of all) * n / (n - 1).
    factor = len(voting) / (len(voting) - 1) if baseline == "leave_one_out" else 1.0
    advantages[valid] = centred * factor / std
    return advantages
