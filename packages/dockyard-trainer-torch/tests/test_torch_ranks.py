"""What fails on one rank ends the call on all, at once, and leaves the policy as it was: real processes, GLOO."""

import json
import sys
from collections.abc import Sequence
from pathlib import Path

import pytest
from torch import distributed

sys.path.append(str(Path(__file__).parents[3] / "tests"))  # also when a rank runs this file as a script

from rank_processes import rank_main, run_ranks

from dockyard_core.testing.policy_ranks_contract import check_ranks, report_of_rank
from dockyard_trainer_torch import TorchPolicy, TorchPolicyConfig


def work(rank: int, world_size: int, directory: Path, args: Sequence[str]) -> None:
    model, tensor_size = args[0], int(args[1])
    config = TorchPolicyConfig(learning_rate=1e-3, eps=1e-4, tensor_parallel_size=tensor_size, num_threads=1)
    policy, twin = (TorchPolicy.from_pretrained(model, config, process_group=distributed.group.WORLD) for _ in range(2))
    said = report_of_rank(
        policy, twin, rank=rank, data_rank=policy.data_rank, num_data_ranks=policy.num_data_ranks, vocab_size=64
    )
    Path(directory, f"{rank}.json").write_text(json.dumps(said))
    distributed.barrier()


@pytest.mark.parametrize("tensor_size", [1, pytest.param(2, marks=pytest.mark.ci)])
def test_a_failure_of_one_rank_ends_the_call_on_all(tiny_model, tmp_path, tensor_size) -> None:
    run_ranks(__file__, 2, tmp_path, str(tiny_model("qwen3")), str(tensor_size))
    check_ranks([json.loads((tmp_path / f"{rank}.json").read_text()) for rank in range(2)])


if __name__ == "__main__":
    rank_main(work)
