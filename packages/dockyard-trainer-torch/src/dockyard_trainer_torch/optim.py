"""AdamW, gradient clipping, and steps that are skipped."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from dockyard_trainer_torch.config import TorchPolicyConfig
from dockyard_trainer_torch.ranks import Ranks, local, num_replicas

_PART_ELEMENTS = 1 << 26
"""With offload, moments come to the device in parts of about this many elements (512 MiB for both)."""


@dataclass(frozen=True, kw_only=True)
class GradientReport:
    """What became of an update's gradient."""

    grad_norm: float
    """Global, before clipping."""
    is_skipped: bool
    """The norm or the loss was not finite: weights and moments are untouched."""


def build_optimizer(parameters: Iterable[nn.Parameter], config: TorchPolicyConfig) -> torch.optim.AdamW:
    """AdamW that decays matrices only; its step count is 0 and its moments are allocated at once.

    With ``optimizer_offload`` the moments are in host memory.
    """
    params = [param for param in parameters if param.requires_grad]
    groups = list(_groups(params, config))
    optimizer = torch.optim.AdamW(groups, lr=config.learning_rate, betas=config.betas, eps=config.eps, fused=True)
    # torch allocates moments at the first step; a checkpoint written before it needs them too.
    for param in params:
        # What "fused" reads of the step count is on the parameter's device.
        optimizer.state[param] = {
            "step": torch.zeros((), device=local(param).device),
            "exp_avg": torch.zeros_like(param),
            "exp_avg_sq": torch.zeros_like(param),
        }
        if config.optimizer_offload:
            _move_moments(optimizer, param, torch.device("cpu"))
    return optimizer


def _groups(params: Sequence[nn.Parameter], config: TorchPolicyConfig) -> Iterator[dict[str, Any]]:
    """Parameters that decay alike and lie on one mesh, which torch steps together; in parts under offload."""
    alike: dict[tuple[bool, Any], list[nn.Parameter]] = {}
    for param in params:
        alike.setdefault((param.ndim >= 2, getattr(param, "device_mesh", None)), []).append(param)
    for (is_decayed, _), members in alike.items():
        for part in _parts(members) if config.optimizer_offload else [members]:
            yield {"params": part, "weight_decay": config.weight_decay if is_decayed else 0.0}


def _parts(params: Sequence[nn.Parameter]) -> Iterator[list[nn.Parameter]]:
    part, num_elements = list[nn.Parameter](), 0
    for param in params:
        part.append(param)
        num_elements += local(param).numel()
        if num_elements >= _PART_ELEMENTS:
            yield part
            part, num_elements = [], 0
    if part:
        yield part


def _move_moments(optimizer: torch.optim.Optimizer, param: nn.Parameter, device: torch.device) -> None:
    state = optimizer.state[param]
    for moment in ("exp_avg", "exp_avg_sq"):
        state[moment] = state[moment].to(device)


def zero_gradients(optimizer: torch.optim.Optimizer) -> None:
    """Drop every gradient."""
    optimizer.zero_grad(set_to_none=True)


def apply_gradients(
    optimizer: torch.optim.Optimizer, config: TorchPolicyConfig, ranks: Ranks, *, learning_rate: float, loss: float
) -> GradientReport:
    """Clip by global norm and take one step, or none when the norm or the loss is not finite (collective).

    A parameter without a gradient counts as gradient 0: a batch of zero advantages must move the
    weights (by momentum) exactly as much whether or not its rows were left out.
    """
    params = [param for group in optimizer.param_groups for param in group["params"]]
    for param in params:
        if param.grad is None:
            param.grad = torch.zeros_like(param)
    grads = [local(param.grad) for param in params]
    grad_norm = global_norm(params, grads, ranks)
    is_skipped = not (math.isfinite(grad_norm) and math.isfinite(loss))
    if not is_skipped:
        for group in optimizer.param_groups:
            group["lr"] = learning_rate
        if grad_norm > config.max_grad_norm:
            torch._foreach_mul_(grads, config.max_grad_norm / grad_norm)
        _step(optimizer, config)
    zero_gradients(optimizer)
    return GradientReport(grad_norm=grad_norm, is_skipped=is_skipped)


def global_norm(params: list[nn.Parameter], grads: list[Tensor], ranks: Ranks) -> float:
    """Euclidean norm of the whole gradient, equal on every rank, whatever the meshes of its parts.

    Each rank adds up its own elements; what several ranks hold counts for a share on each.
    """
    norms = torch.stack([norm.double() for norm in torch._foreach_norm(grads)])
    shares = norms.new_tensor([1 / num_replicas(param, ranks.world_size) for param in params])
    squares = (norms.square() * shares).sum().to(ranks.device)  # offloaded gradients are on the host
    return float(ranks.sum(squares).sqrt())


def _step(optimizer: torch.optim.Optimizer, config: TorchPolicyConfig) -> None:
    if not config.optimizer_offload:
        optimizer.step()
        return
    groups = optimizer.param_groups
    try:
        for group in groups:
            for param in group["params"]:
                _move_moments(optimizer, param, local(param).device)
            optimizer.param_groups = [group]
            optimizer.step()
            for param in group["params"]:
                _move_moments(optimizer, param, torch.device("cpu"))
    finally:
        optimizer.param_groups = groups
