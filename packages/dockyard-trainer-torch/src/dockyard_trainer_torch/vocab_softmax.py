"""Softmax over the vocabulary, one tile of logits at a time: tiling, running sums, and their reduction over ranks.

Shape legend: M = positions, D = hidden width, V = vocabulary (of this rank), R and C = rows and columns of a tile.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from math import isqrt

import torch
from torch import Tensor, distributed

SCRATCH_BYTES = 64 << 20
"""Default bound of a tile, and of the tiles that are kept for the backward pass instead of being made again."""
CPU_TILE_BYTES = 4 << 20
"""A tile on a CPU is not larger than this: it then stays in the cache from one pass over it to the next.

An accelerator gets the largest tile, because each of its kernels should have much to do.
"""


@dataclass(frozen=True, kw_only=True)
class Head:
    """What does not change between the passes: scaling, tiling, and the ranks that share the vocabulary."""

    temperature: float
    scratch_numbers: int
    """Bound of a tile."""
    with_entropy: bool
    group: distributed.ProcessGroup | None

    def tile_shape(self, hidden_MD: Tensor, weight_VD: Tensor) -> tuple[int, int]:
        """Rows and columns of a tile; all columns when every tile is kept, so that it is a run of whole rows."""
        tile_numbers = self.scratch_numbers
        if hidden_MD.device.type == "cpu":
            tile_numbers = min(tile_numbers, CPU_TILE_BYTES // sum_dtype(hidden_MD).itemsize)
        num_rows, num_columns = max(len(hidden_MD), 1), max(len(weight_VD), 1)
        if self.keeps_tiles(hidden_MD, weight_VD):
            return min(num_rows, max(tile_numbers // num_columns, 1)), num_columns
        rows = min(num_rows, max(isqrt(tile_numbers), 1))
        columns = min(num_columns, max(tile_numbers // rows, 1))
        return min(num_rows, max(tile_numbers // columns, 1)), columns

    def keeps_tiles(self, hidden_MD: Tensor, weight_VD: Tensor) -> bool:
        """Whether the exponentials, and with entropy the logits too, stay within the bound for all positions."""
        num_numbers = len(hidden_MD) * len(weight_VD) * (2 if self.with_entropy else 1)
        return self.group is None and num_numbers <= self.scratch_numbers


@dataclass(kw_only=True)
class Sums:
    """Running results of softmax over the columns, for each position.

    Exponentials are of z - max, so that none overflows; where the maximum grows, the sums are scaled.
    """

    max_M: Tensor
    target_M: Tensor
    """Logit of the target; -inf until its column was met."""
    exp_M: Tensor
    """Sum of exp(z - max)."""
    weighted_M: Tensor
    """Sum of (z - max) exp(z - max); stays 0 without entropy."""

    @staticmethod
    def empty(hidden_MD: Tensor) -> Sums:
        """Those of no column: the maximum is finite, since differences of it are taken."""
        dtype = sum_dtype(hidden_MD)
        zeros_M = hidden_MD.new_zeros(len(hidden_MD), dtype=dtype)
        return Sums(
            max_M=torch.full_like(zeros_M, torch.finfo(dtype).min),
            target_M=torch.full_like(zeros_M, -torch.inf),
            exp_M=zeros_M,
            weighted_M=zeros_M.clone(),
        )

    def add(self, rows: slice, logits_RC: Tensor, columns_R: Tensor, exp_RC: Tensor | None) -> None:
        """Take in a tile, which is left as z - max, or as exp(z - max) when ``exp_RC`` is None."""
        target_R1 = logits_RC.gather(1, columns_R.clamp(0, logits_RC.shape[1] - 1)[:, None])
        self.target_M[rows] = torch.where(is_inside(columns_R, logits_RC), target_R1[:, 0], self.target_M[rows])
        max_R = torch.maximum(self.max_M[rows], logits_RC.amax(-1))
        logits_RC -= max_R[:, None]
        self._move_max(rows, max_R)
        exps_RC = torch.exp(logits_RC, out=logits_RC if exp_RC is None else exp_RC)
        self.exp_M[rows] += exps_RC.sum(-1)
        if exp_RC is not None:
            self.weighted_M[rows] += torch.linalg.vecdot(exps_RC, logits_RC)

    def _move_max(self, rows: slice, max_R: Tensor) -> None:
        shift_R = self.max_M[rows] - max_R
        self.weighted_M[rows] = shift_R.exp() * (self.weighted_M[rows] + shift_R * self.exp_M[rows])
        self.exp_M[rows] *= shift_R.exp()
        self.max_M[rows] = max_R

    def reduce(self, group: distributed.ProcessGroup) -> None:
        """Make them those of all ranks' columns, with two small collectives."""
        largest_2M = torch.stack([self.max_M, self.target_M])
        distributed.all_reduce(largest_2M, distributed.ReduceOp.MAX, group=group)
        self._move_max(slice(None), largest_2M[0])
        self.target_M = largest_2M[1]
        sums_2M = torch.stack([self.exp_M, self.weighted_M])
        distributed.all_reduce(sums_2M, group=group)
        self.exp_M, self.weighted_M = sums_2M.unbind()


def sum_dtype(hidden_MD: Tensor) -> torch.dtype:
    """Of logits and sums."""
    return torch.float64 if hidden_MD.dtype == torch.float64 else torch.float32


def blocks(length: int, size: int) -> Iterator[slice]:
    """Slices of at most ``size`` that cover ``length``."""
    return (slice(start, min(start + size, length)) for start in range(0, length, size))


def scratch_tile(hidden_MD: Tensor, rows: int, columns: int) -> Tensor:
    """Uninitialized memory for the largest tile, in the dtype of the logits."""
    return hidden_MD.new_empty(rows * columns, dtype=sum_dtype(hidden_MD))


def tile_of(scratch: Tensor, shape: tuple[int, int], start: int = 0) -> Tensor:
    """A tile of ``shape`` in it, contiguous also where it is one of the smaller ones at an edge."""
    return scratch[start : start + shape[0] * shape[1]].view(shape)


def is_inside(columns_R: Tensor, tile_RC: Tensor) -> Tensor:
    """Which of the target columns, counted from the first one of the tile, lie in the tile."""
    return (columns_R >= 0) & (columns_R < tile_RC.shape[1])


def scaled_logits(head: Head, hidden_RD: Tensor, weight_CD: Tensor, out_RC: Tensor) -> Tensor:
    """Write W h / T into ``out_RC``; the product is rounded to the dtype of its inputs."""
    if hidden_RD.dtype == out_RC.dtype:
        torch.addmm(out_RC, hidden_RD, weight_CD.T, beta=0, alpha=1 / head.temperature, out=out_RC)
        return out_RC
    out_RC.copy_(hidden_RD @ weight_CD.T)
    return out_RC if head.temperature == 1 else out_RC.div_(head.temperature)


def add_product(out: Tensor, left: Tensor, right: Tensor) -> None:
    """Add left @ right, also to a sum of higher precision."""
    if out.dtype == left.dtype:
        out.addmm_(left, right)
    else:
        out += left @ right
