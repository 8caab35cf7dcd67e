"""Muon in float32, for the warm start only.

`torch.optim.Muon` orthogonalises in bfloat16, which is many times slower on a CPU without bfloat16 units.
"""

from __future__ import annotations

from collections.abc import Iterable

import torch

__all__ = ["Muon", "orthogonalize"]

_COEFFICIENTS = (3.4445, -4.7750, 2.0315)


def orthogonalize(matrices_BMN: torch.Tensor, *, num_steps: int = 5) -> torch.Tensor:
    """Return matrices with the same singular vectors and singular values near 1.

    Quintic Newton-Schulz iteration, x <- a x + (b x x' + c (x x')^2) x, after scaling by the Frobenius norm.
    Source: Jordan et al., Muon (2024).
    """
    a, b, c = _COEFFICIENTS
    is_tall = matrices_BMN.shape[-2] > matrices_BMN.shape[-1]
    x = matrices_BMN.mT if is_tall else matrices_BMN
    x = x / (x.norm(dim=(-2, -1), keepdim=True) + 1e-7)
    for _ in range(num_steps):
        gram = x @ x.mT
        x = a * x + (b * gram + c * gram @ gram) @ x
    return x.mT if is_tall else x


class Muon(torch.optim.Optimizer):
    """Momentum SGD whose update of each matrix is orthogonalised. Takes 2-D parameters only."""

    def __init__(self, params: Iterable[torch.nn.Parameter], *, lr: float, momentum: float = 0.95) -> None:
        super().__init__(params, {"lr": lr, "momentum": momentum})

    @torch.no_grad()
    def step(self) -> None:  # type: ignore[override]
        """Update every parameter that has a gradient."""
        for group in self.param_groups:
            momentum = group["momentum"]
            by_shape: dict[torch.Size, list[tuple[torch.nn.Parameter, torch.Tensor]]] = {}
            for parameter in group["params"]:
                if parameter.grad is None:
                    continue
                state = self.state[parameter]
                buffer = state.setdefault("momentum", torch.zeros_like(parameter))
                buffer.lerp_(parameter.grad, 1 - momentum)
                nesterov = parameter.grad.lerp(buffer, momentum)
                by_shape.setdefault(parameter.shape, []).append((parameter, nesterov))
            for shape, pairs in by_shape.items():
                updates = orthogonalize(torch.stack([update for _, update in pairs]))
                scale = max(1.0, shape[0] / shape[1]) ** 0.5
                for (parameter, _), update in zip(pairs, updates, strict=True):
                    parameter.add_(update, alpha=-group["lr"] * scale)
