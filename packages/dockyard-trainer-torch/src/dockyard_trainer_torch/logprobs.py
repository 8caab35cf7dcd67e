"""Log-probabilities and entropy at chosen positions; the [T, V] logits of a batch never exist.

Shape legend: B = rows, L = row length, M = trained positions of a micro-batch, C = one chunk of
them, D = hidden width, V = vocabulary.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable


class _ChunkedLogprobs(torch.autograd.Function):
    """Forward and backward over chunks of positions; the backward pass recomputes each chunk's logits.

    With z = W h / T and p = softmax(z): d logp_y / dz = e_y - p and dH / dz = -p (log p + H).
    """

    @staticmethod
    def forward(
        ctx: Any, hidden_MD: Tensor, weight_VD: Tensor, targets_M: Tensor, temperature: float, chunk: int
    ) -> tuple[Tensor, Tensor]:
        logprobs, entropy, log_norm = [], [], []
        for hidden_CD, targets_C in zip(hidden_MD.split(chunk), targets_M.split(chunk), strict=True):
            scaled_CV = _scaled_logits(hidden_CD, weight_VD, temperature)
            log_norm_C = scaled_CV.logsumexp(-1)
            logprobs.append(scaled_CV.gather(1, targets_C[:, None])[:, 0] - log_norm_C)
            log_norm.append(log_norm_C)
            # H = log Z - E[z]; the softmax overwrites a copy because z is still needed beside it.
            probs_CV = (scaled_CV - log_norm_C[:, None]).exp_()
            entropy.append(log_norm_C - torch.einsum("cv,cv->c", probs_CV, scaled_CV))
        logprobs_M, entropy_M = torch.cat(logprobs), torch.cat(entropy)
        ctx.save_for_backward(hidden_MD, weight_VD, targets_M, torch.cat(log_norm), entropy_M)
        ctx.temperature, ctx.chunk = temperature, chunk
        return logprobs_M, entropy_M

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_logprobs_M: Tensor, grad_entropy_M: Tensor) -> tuple[Tensor | None, ...]:
        hidden_MD, weight_VD, targets_M, log_norm_M, entropy_M = ctx.saved_tensors
        has_entropy = bool(grad_entropy_M.any())
        grad_hidden_MD = torch.empty_like(hidden_MD)
        grad_weight_VD = torch.zeros_like(weight_VD, dtype=torch.float32) if ctx.needs_input_grad[1] else None
        for start in range(0, len(targets_M), ctx.chunk):
            span = slice(start, start + ctx.chunk)
            log_probs_CV = _scaled_logits(hidden_MD[span], weight_VD, ctx.temperature)
            log_probs_CV -= log_norm_M[span, None]
            probs_CV = log_probs_CV.exp()
            if has_entropy:
                log_probs_CV += entropy_M[span, None]
                log_probs_CV *= -grad_entropy_M[span, None]
                log_probs_CV -= grad_logprobs_M[span, None]
                grad_logits_CV = probs_CV.mul_(log_probs_CV)
            else:
                grad_logits_CV = probs_CV.mul_(-grad_logprobs_M[span, None])
            grad_logits_CV.scatter_add_(1, targets_M[span, None], grad_logprobs_M[span, None])
            grad_logits_CV /= ctx.temperature
            grad_logits_CV = grad_logits_CV.to(hidden_MD.dtype)
            torch.mm(grad_logits_CV, weight_VD, out=grad_hidden_MD[span])
            if grad_weight_VD is not None:
                grad_weight_VD += grad_logits_CV.T @ hidden_MD[span]
        grad_weight = None if grad_weight_VD is None else grad_weight_VD.to(weight_VD.dtype)
        return grad_hidden_MD, grad_weight, None, None, None


def _scaled_logits(hidden_CD: Tensor, weight_VD: Tensor, temperature: float) -> Tensor:
    logits_CV = (hidden_CD @ weight_VD.T).float()
    return logits_CV if temperature == 1.0 else logits_CV / temperature


def chunked_logprobs(
    hidden_MD: Tensor, weight_VD: Tensor, targets_M: Tensor, *, temperature: float, chunk_tokens: int
) -> tuple[Tensor, Tensor]:
    """Return (logprobs_M, entropy_M) of softmax(hidden @ weight.T / temperature), float32, nats.

    Both are differentiable in ``hidden_MD`` and ``weight_VD`` (once). Extra memory is one chunk of
    logits, ``chunk_tokens * V``; the price is one more matrix product in the backward pass.

    Args:
        hidden_MD: last hidden states at the positions that predict the targets.
        weight_VD: the output embedding, same dtype as ``hidden_MD``.
        targets_M: int64, the tokens whose log-probability is wanted.
        temperature: sampling temperature, > 0.
        chunk_tokens: positions handled at one time; does not change the result.
    """
    if temperature <= 0:
        raise ValueError(f"temperature must be > 0, got {temperature}; greedy samples have no log-probabilities")
    result: tuple[Tensor, Tensor] = _ChunkedLogprobs.apply(
        hidden_MD, weight_VD.to(hidden_MD.dtype), targets_M, temperature, chunk_tokens
    )
    return result
