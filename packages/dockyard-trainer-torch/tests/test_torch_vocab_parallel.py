"""Ranks that share a vocabulary have the log-probabilities and gradients of one process: real processes over gloo."""

import sys
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate
from pathlib import Path

import pytest
import torch
from torch import distributed

sys.path.append(str(Path(__file__).parents[3] / "tests"))  # also when a rank runs this file as a script

from rank_processes import rank_main, run_ranks

from dockyard_trainer_torch.logprobs import chunked_logprobs

VOCAB_SIZE = 37


@dataclass(frozen=True, kw_only=True)
class Case:
    name: str
    shards: dict[int, tuple[int, ...]]  # by number of ranks, rows of the weight on each
    num_positions: int = 23
    num_targets: int = VOCAB_SIZE  # targets are below it
    use_entropy: bool = True
    chunk_tokens: int | None = None
    dtype: torch.dtype = torch.float32
    scale: float = 1.0  # of the hidden states
    skip: int = 1  # every so many positions have a gradient


UNEVEN = {2: (30, 7), 3: (20, 16, 1)}
CASES = [
    Case(name="uneven", shards=UNEVEN),
    Case(name="small tiles", shards=UNEVEN, chunk_tokens=2),
    Case(name="without an entropy term", shards=UNEVEN, use_entropy=False, chunk_tokens=3),
    Case(name="an empty shard", shards={2: (37, 0), 3: (20, 17, 0)}),
    Case(name="shards without a target", shards=UNEVEN, num_targets=20),
    Case(name="no positions", shards=UNEVEN, num_positions=0),
    Case(name="huge logits", shards=UNEVEN, scale=1000.0),
    Case(name="few positions with a gradient", shards=UNEVEN, skip=7),
    Case(name="float64", shards=UNEVEN, dtype=torch.float64),
    Case(name="bfloat16", shards=UNEVEN, dtype=torch.bfloat16),
]


def outcome(case: Case, rows: slice, **arguments) -> dict[str, torch.Tensor]:
    """Values and gradients with these rows of the weight."""
    generator = torch.Generator().manual_seed(0)
    hidden_MD = torch.randn(case.num_positions, 8, generator=generator) * case.scale
    weight_VD = torch.randn(VOCAB_SIZE, 8, generator=generator)
    targets_M = torch.randint(0, case.num_targets, (case.num_positions,), generator=generator)
    pull_M, entropy_pull_M = torch.randn(2, case.num_positions, generator=generator)
    pull_M, entropy_pull_M = ((one * (torch.arange(len(one)) % case.skip == 0)) for one in (pull_M, entropy_pull_M))
    hidden_MD = hidden_MD.to(case.dtype).requires_grad_()
    weight_VD = weight_VD[rows].to(case.dtype).requires_grad_()
    logprobs_M, entropy_M = chunked_logprobs(
        hidden_MD, weight_VD, targets_M, temperature=0.7, chunk_tokens=case.chunk_tokens, **arguments
    )
    total = (logprobs_M * pull_M).sum()
    if case.use_entropy:
        total = total + (entropy_M * entropy_pull_M).sum()
    grad_MD, grad_VD = torch.autograd.grad(total, [hidden_MD, weight_VD])
    with torch.no_grad():
        scored_M, _ = chunked_logprobs(
            hidden_MD, weight_VD, targets_M, temperature=0.7, with_entropy=False, **arguments
        )
    values = {"logprobs": logprobs_M.detach(), "entropy": entropy_M.detach(), "scored": scored_M}
    return values | {"grad_hidden": grad_MD, "grad_weight": grad_VD}


def work(rank: int, world_size: int, directory: Path, args: Sequence[str]) -> None:
    outcomes = {}
    for case in CASES:
        ends = [0, *accumulate(case.shards[world_size])]
        rows = slice(ends[rank], ends[rank + 1])
        outcomes[case.name] = outcome(case, rows, vocab_group=distributed.group.WORLD, vocab_offset=rows.start)
    torch.save(outcomes, directory / f"rank{rank}.pt")


@pytest.fixture(scope="module", params=[2, pytest.param(3, marks=pytest.mark.ci)])
def ranks_outcomes(request, tmp_path_factory) -> list[dict[str, dict[str, torch.Tensor]]]:
    """What each rank found, by case."""
    directory: Path = tmp_path_factory.mktemp("ranks")
    run_ranks(__file__, request.param, directory)
    return [torch.load(directory / f"rank{rank}.pt") for rank in range(request.param)]


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_ranks_that_share_the_vocabulary_find_what_one_finds(ranks_outcomes, case) -> None:
    outcomes = [outcomes[case.name] for outcomes in ranks_outcomes]
    wanted = outcome(case, slice(None))
    shards = [len(one["grad_weight"]) for one in outcomes]
    assert tuple(shards) == case.shards[len(outcomes)]
    for name in ("logprobs", "entropy", "scored"):
        for one in outcomes:
            assert torch.equal(one[name], outcomes[0][name]), "equal on every rank, to the bit"
            torch.testing.assert_close(one[name], wanted[name], rtol=1e-5, atol=1e-5)
    found = {f"grad_hidden of rank {rank}": (one["grad_hidden"], "grad_hidden") for rank, one in enumerate(outcomes)}
    found["grad_weight"] = torch.cat([one["grad_weight"] for one in outcomes]), "grad_weight"
    tolerance = 1e-2 if case.dtype == torch.bfloat16 else 1e-5
    for title, (gradient, name) in found.items():
        assert gradient.dtype == case.dtype
        difference = float((gradient - wanted[name]).double().norm())
        assert difference <= tolerance * float(wanted[name].double().norm()), title


if __name__ == "__main__":
    rank_main(work)
