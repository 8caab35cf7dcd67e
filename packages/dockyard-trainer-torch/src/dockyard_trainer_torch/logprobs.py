"""Log-probabilities and entropy at chosen positions; the [M, V] logits of a batch need never exist.

The logits are made one tile at a time, some rows by some columns, and each tile is used up before the next one:
softmax only needs running sums over the columns. Nearly square tiles keep the matrix products at full speed and read
the output embedding few times; the gradient of a block of its rows is complete before the next block is begun.
The backward pass makes the tiles again, unless all of them are few enough to be kept.

Shape legend: M = trained positions of a micro-batch, A = those of them with a gradient, D = hidden width,
V = vocabulary (of this rank), R and C = rows and columns of a tile.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal, overload

import torch
from torch import Tensor, distributed
from torch.autograd.function import once_differentiable

from dockyard_trainer_torch.vocab_softmax import (
    SCRATCH_BYTES,
    Head,
    Sums,
    add_product,
    blocks,
    is_inside,
    scaled_logits,
    scratch_tile,
    sum_dtype,
    tile_of,
)


@dataclass(frozen=True, kw_only=True)
class _Kept:
    """What a forward pass leaves so that the backward pass need not make the logits again."""

    exp_MV: Tensor
    logits_MV: Tensor
    """z - max; the same tensor as ``exp_MV`` without entropy."""

    def of(self, active_A: Tensor | None) -> _Kept:
        """Those of the positions with a gradient, free to be overwritten."""
        if active_A is None:
            return self
        return _Kept(exp_MV=self.exp_MV[active_A], logits_MV=self.logits_MV[active_A])


def _forward(
    head: Head, hidden_MD: Tensor, weight_VD: Tensor, columns_M: Tensor, *, is_trained: bool
) -> tuple[Sums, _Kept | None]:
    keeps_tiles = is_trained and head.keeps_tiles(hidden_MD, weight_VD)
    rows, columns = head.tile_shape(hidden_MD, weight_VD)
    scratch = scratch_tile(hidden_MD, len(hidden_MD) if keeps_tiles else rows, columns)
    exp_scratch = torch.empty_like(scratch) if head.with_entropy else None
    sums = Sums.empty(hidden_MD)
    for block in blocks(len(weight_VD), columns):
        weight_CD = weight_VD[block].to(hidden_MD.dtype)
        for span in blocks(len(hidden_MD), rows):
            shape, start = (span.stop - span.start, len(weight_CD)), span.start * columns if keeps_tiles else 0
            logits_RC = scaled_logits(head, hidden_MD[span], weight_CD, tile_of(scratch, shape, start))
            exp_RC = None if exp_scratch is None else tile_of(exp_scratch, shape, start)
            sums.add(span, logits_RC, columns_M[span] - block.start, exp_RC)
    if head.group is not None and len(hidden_MD):
        sums.reduce(head.group)
    if not keeps_tiles:
        return sums, None
    logits_MV = scratch.view(len(hidden_MD), len(weight_VD))
    return sums, _Kept(exp_MV=logits_MV if exp_scratch is None else exp_scratch.view_as(logits_MV), logits_MV=logits_MV)


@dataclass(frozen=True, kw_only=True)
class _LogitGradient:
    """Gradient with respect to the logits W h, of the positions that have one.

    With z = W h / T, p = softmax(z) and H = log Z - E[z]:  d logp_y / dz = e_y - p,  dH / dz = -p (log p + H),  so the
    gradient is  exp(z - max) (constant + slope (z - max)) + target e_y  with three numbers for each position.
    """

    target_A: Tensor
    constant_A: Tensor
    slope_A: Tensor | None
    """None when nothing flows back from the entropy."""

    @staticmethod
    def of(temperature: float, grad_logprobs_A: Tensor, grad_entropy_A: Tensor | None, sums: Sums) -> _LogitGradient:
        target_A, slope_A = grad_logprobs_A / temperature, None
        constant_A = -target_A
        if grad_entropy_A is not None:
            slope_A = -grad_entropy_A / temperature
            constant_A = constant_A - slope_A * (sums.weighted_M / sums.exp_M)
            slope_A = slope_A / sums.exp_M
        return _LogitGradient(target_A=target_A, constant_A=constant_A / sums.exp_M, slope_A=slope_A)

    def write(self, rows: slice, logits_RC: Tensor, exp_RC: Tensor, columns_R: Tensor) -> Tensor:
        """Turn a tile of z - max and its exponentials into the gradient; returns the tensor that holds it."""
        if self.slope_A is None:
            grad_RC = exp_RC.mul_(self.constant_A[rows, None])
        else:
            grad_RC = logits_RC.mul_(self.slope_A[rows, None]).add_(self.constant_A[rows, None]).mul_(exp_RC)
        target_R = torch.where(is_inside(columns_R, grad_RC), self.target_A[rows], 0.0)
        return grad_RC.scatter_add_(1, columns_R.clamp(0, grad_RC.shape[1] - 1)[:, None], target_R[:, None])


def _backward(
    head: Head,
    inputs: tuple[Tensor, Tensor, Tensor],
    max_A: Tensor,
    gradient: _LogitGradient,
    kept: _Kept | None,
    needs: tuple[bool, bool],
) -> tuple[Tensor | None, Tensor | None]:
    """Gradients of the hidden states, in the dtype of sums and of this rank's columns alone, and of the weight."""
    hidden_AD, weight_VD, columns_A = inputs
    rows, columns = head.tile_shape(hidden_AD, weight_VD) if kept is None else (max(len(hidden_AD), 1), len(weight_VD))
    scratch = scratch_tile(hidden_AD, rows, columns) if kept is None else None
    exp_scratch = None if scratch is None or gradient.slope_A is None else torch.empty_like(scratch)
    grad_hidden_AD = torch.zeros_like(hidden_AD, dtype=sum_dtype(hidden_AD)) if needs[0] else None
    grad_weight_VD = torch.zeros_like(weight_VD) if needs[1] else None
    for block in blocks(len(weight_VD), columns):
        weight_CD = weight_VD[block].to(hidden_AD.dtype)
        grad_block_CD = None if grad_weight_VD is None else grad_weight_VD[block].to(sum_dtype(hidden_AD))
        for span in blocks(len(hidden_AD), rows):
            if kept is not None:
                logits_RC, exp_RC = kept.logits_MV, kept.exp_MV
            else:
                assert scratch is not None
                shape = (span.stop - span.start, len(weight_CD))
                logits_RC = scaled_logits(head, hidden_AD[span], weight_CD, tile_of(scratch, shape))
                logits_RC -= max_A[span, None]
                exp_RC = torch.exp(logits_RC, out=logits_RC if exp_scratch is None else tile_of(exp_scratch, shape))
            grad_RC = gradient.write(span, logits_RC, exp_RC, columns_A[span] - block.start).to(hidden_AD.dtype)
            if grad_hidden_AD is not None:
                add_product(grad_hidden_AD[span], grad_RC, weight_CD)
            if grad_block_CD is not None:
                add_product(grad_block_CD, grad_RC.T, hidden_AD[span])
        if grad_weight_VD is not None and grad_weight_VD.dtype != sum_dtype(hidden_AD):
            grad_weight_VD[block] = grad_block_CD
    return grad_hidden_AD, grad_weight_VD


class _TiledLogprobs(torch.autograd.Function):
    """The two passes and what is saved between them."""

    @staticmethod
    def forward(
        ctx: Any, hidden_MD: Tensor, weight_VD: Tensor, columns_M: Tensor, head: Head
    ) -> tuple[Tensor, Tensor | None]:
        sums, kept = _forward(head, hidden_MD, weight_VD, columns_M, is_trained=True)
        ctx.save_for_backward(hidden_MD, weight_VD, columns_M, sums.max_M, sums.exp_M, sums.weighted_M)
        ctx.head, ctx.kept = head, kept
        ctx.set_materialize_grads(False)
        return _results(head, sums)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_logprobs_M: Tensor | None, grad_entropy_M: Tensor | None) -> tuple[Tensor | None, ...]:
        hidden_MD, weight_VD, columns_M, max_M, exp_M, weighted_M = ctx.saved_tensors
        head, kept = ctx.head, ctx.kept
        ctx.kept = None  # it is overwritten; another backward pass through the same graph makes the logits again
        grad_logprobs_M = torch.zeros_like(max_M) if grad_logprobs_M is None else grad_logprobs_M
        # Positions without a gradient (advantage 0) are left out: they cost nothing, and if they are not finite
        # they spoil nothing.
        is_active_M = grad_logprobs_M != 0
        if grad_entropy_M is not None:
            is_active_M = is_active_M | (grad_entropy_M != 0)
        active_A = None if bool(is_active_M.all()) else is_active_M.nonzero()[:, 0]

        def active(values: Tensor) -> Tensor:
            return values if active_A is None else values[active_A]

        sums = Sums(max_M=active(max_M), target_M=max_M, exp_M=active(exp_M), weighted_M=active(weighted_M))
        grad_entropy_A = None if grad_entropy_M is None else active(grad_entropy_M)
        gradient = _LogitGradient.of(head.temperature, active(grad_logprobs_M), grad_entropy_A, sums)
        inputs = (active(hidden_MD), weight_VD, active(columns_M))
        grad_hidden, grad_weight = _backward(
            head, inputs, sums.max_M, gradient, None if kept is None else kept.of(active_A), ctx.needs_input_grad[:2]
        )
        if grad_hidden is not None and active_A is not None:
            grad_hidden = torch.zeros_like(hidden_MD, dtype=max_M.dtype).index_copy_(0, active_A, grad_hidden)
        # One collective, of all positions: ranks whose gradients differ by a rounding still agree about its shape.
        if grad_hidden is not None and head.group is not None and len(hidden_MD):
            distributed.all_reduce(grad_hidden, group=head.group)
        return None if grad_hidden is None else grad_hidden.to(hidden_MD.dtype), grad_weight, None, None


def _results(head: Head, sums: Sums) -> tuple[Tensor, Tensor | None]:
    log_exp_M = sums.exp_M.log()
    entropy_M = log_exp_M - sums.weighted_M / sums.exp_M if head.with_entropy else None
    return sums.target_M - sums.max_M - log_exp_M, entropy_M


@overload
def chunked_logprobs(
    hidden_MD: Tensor,
    weight_VD: Tensor,
    targets_M: Tensor,
    *,
    temperature: float,
    chunk_tokens: int | None = ...,
    with_entropy: Literal[True] = ...,
    vocab_group: distributed.ProcessGroup | None = ...,
    vocab_offset: int = ...,
) -> tuple[Tensor, Tensor]: ...


@overload
def chunked_logprobs(
    hidden_MD: Tensor,
    weight_VD: Tensor,
    targets_M: Tensor,
    *,
    temperature: float,
    chunk_tokens: int | None = ...,
    with_entropy: bool,
    vocab_group: distributed.ProcessGroup | None = ...,
    vocab_offset: int = ...,
) -> tuple[Tensor, Tensor | None]: ...


def chunked_logprobs(
    hidden_MD: Tensor,
    weight_VD: Tensor,
    targets_M: Tensor,
    *,
    temperature: float,
    chunk_tokens: int | None = None,
    with_entropy: bool = True,
    vocab_group: distributed.ProcessGroup | None = None,
    vocab_offset: int = 0,
) -> tuple[Tensor, Tensor | None]:
    """Return (logprobs_M, entropy_M) of softmax(hidden @ weight.T / temperature), in nats.

    Both are float32 (float64 for float64 inputs) and differentiable in ``hidden_MD`` and ``weight_VD``, once. The
    price of the memory that is saved is one more matrix product in the backward pass, where the logits are too
    many to be kept. A target outside the vocabulary has the log-probability -inf.

    Args:
        hidden_MD: last hidden states at the positions that predict the targets. Products are taken in this dtype.
        weight_VD: the output embedding, or this rank's rows of it. Its gradient is summed in float32.
        targets_M: int64, the tokens whose log-probability is wanted.
        temperature: sampling temperature, > 0.
        chunk_tokens: bounds the logits that exist at one time to ``chunk_tokens * V`` numbers (twice that with
            entropy); None: to `SCRATCH_BYTES`. Changes the result by rounding only.
        with_entropy: False saves time and leaves ``entropy_M`` None.
        vocab_group: the ranks that share the vocabulary, each with rows of its own. All of them give equal hidden
            states and targets, take the same gradients of the results, and get the gradient of the hidden states
            whole. None: this process has all rows.
        vocab_offset: token id of the first row of ``weight_VD``.
    """
    if temperature <= 0:
        raise ValueError(f"temperature must be > 0, got {temperature}; greedy samples have no log-probabilities")
    if chunk_tokens is not None and chunk_tokens < 1:
        raise ValueError(f"chunk_tokens must be >= 1, got {chunk_tokens}; None chooses it from the vocabulary")
    scratch_numbers = SCRATCH_BYTES // sum_dtype(hidden_MD).itemsize
    head = Head(
        temperature=temperature,
        scratch_numbers=scratch_numbers if chunk_tokens is None else chunk_tokens * max(len(weight_VD), 1),
        with_entropy=with_entropy,
        group=vocab_group,
    )
    columns_M = targets_M - vocab_offset
    # Dtypes are as chosen here: autocast would round what is exact, such as the sums behind the entropy.
    with torch.autocast(hidden_MD.device.type, enabled=False):
        if torch.is_grad_enabled() and (hidden_MD.requires_grad or weight_VD.requires_grad):
            result: tuple[Tensor, Tensor | None] = _TiledLogprobs.apply(hidden_MD, weight_VD, columns_M, head)
            return result
        sums, _ = _forward(head, hidden_MD.detach(), weight_VD.detach(), columns_M, is_trained=False)
        return _results(head, sums)
