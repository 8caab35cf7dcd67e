"""AdamW, its learning-rate schedule, gradient clipping, and steps that are skipped."""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass

import torch
from torch import nn
from torch.nn.utils import clip_grads_with_norm_, get_total_norm

from dockyard_trainer_torch.config import TorchPolicyConfig
from dockyard_trainer_torch.ranks import whole


@dataclass(frozen=True, kw_only=True)
class GradientReport:
    """What became of a step's gradient."""

    grad_norm: float
    """Global, before clipping."""
    is_skipped: bool
    """The norm was not finite: weights and moments are untouched."""


def build_optimizer(parameters: Iterable[nn.Parameter], config: TorchPolicyConfig) -> torch.optim.AdamW:
    """AdamW that decays matrices only; its step count is 0 and its moments are allocated at once."""
    params = list(parameters)
    groups = [
        {"params": [p for p in params if p.ndim >= 2], "weight_decay": config.weight_decay},
        {"params": [p for p in params if p.ndim < 2], "weight_decay": 0.0},
    ]
    optimizer = torch.optim.AdamW(
        [group for group in groups if group["params"]],
        lr=config.learning_rate,
        betas=config.betas,
        eps=config.eps,
        foreach=True,
    )
    # torch allocates moments at the first step; a checkpoint written before it needs them too.
    for param in params:
        optimizer.state[param] = {
            "step": torch.tensor(0.0),
            "exp_avg": torch.zeros_like(param),
            "exp_avg_sq": torch.zeros_like(param),
        }
    return optimizer


def learning_rate_at(config: TorchPolicyConfig, version: int) -> float:
    """Learning rate of the step that turns ``version`` into ``version + 1``.

    Linear warm-up to the peak, then constant, or a linear or cosine decay that reaches
    ``min_lr_ratio`` of the peak at ``total_steps``.
    """
    warmup = min(1.0, (version + 1) / config.warmup_steps) if config.warmup_steps else 1.0
    if config.schedule == "constant":
        return config.learning_rate * warmup
    assert config.total_steps is not None  # TorchPolicyConfig refuses a decay without it
    span = max(config.total_steps - config.warmup_steps, 1)
    progress = min(1.0, max(0.0, (version - config.warmup_steps) / span))
    shape = 1 - progress if config.schedule == "linear" else (1 + math.cos(math.pi * progress)) / 2
    return config.learning_rate * warmup * (config.min_lr_ratio + (1 - config.min_lr_ratio) * shape)


def zero_gradients(optimizer: torch.optim.Optimizer) -> None:
    """Drop every gradient."""
    optimizer.zero_grad(set_to_none=True)


def apply_gradients(
    optimizer: torch.optim.Optimizer, *, learning_rate: float, max_grad_norm: float, loss: float = 0.0
) -> GradientReport:
    """Clip by global norm and take one step, or none when the norm or the loss is not finite.

    A parameter without a gradient counts as gradient 0: a batch of zero advantages must move the
    weights (by momentum) exactly as much whether or not its rows were left out.
    """
    params = [param for group in optimizer.param_groups for param in group["params"]]
    for param in params:
        if param.grad is None:
            param.grad = torch.zeros_like(param)
    total_norm = whole(get_total_norm([param.grad for param in params]))
    grad_norm = float(total_norm)
    is_skipped = not (math.isfinite(grad_norm) and math.isfinite(loss))
    if not is_skipped:
        for group in optimizer.param_groups:
            group["lr"] = learning_rate
        clip_grads_with_norm_(params, max_grad_norm, total_norm)
        optimizer.step()
    zero_gradients(optimizer)
    return GradientReport(grad_norm=grad_norm, is_skipped=is_skipped)
