"""What fails on one rank ends the call on all, at once, and leaves the policy as it was: real processes, GLOO."""

import json
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
from torch import distributed

sys.path.append(str(Path(__file__).parents[3] / "tests"))  # also when a rank runs this file as a script

from rank_processes import rank_main, run_ranks

from dockyard_core.batch import pack_batch
from dockyard_core.errors import ConfigError
from dockyard_core.testing.policy_material import PolicyMaterial
from dockyard_core.testing.policy_ranks_contract import check_ranks, report_of_rank
from dockyard_trainer_torch import TorchPolicy, TorchPolicyConfig, step
from dockyard_trainer_torch.loss import policy_loss


def work(rank: int, world_size: int, directory: Path, args: Sequence[str]) -> None:
    model, tensor_size = args[0], int(args[1])
    group = distributed.group.WORLD
    try:
        TorchPolicy.from_pretrained(model if rank else f"{model}/nothing", TorchPolicyConfig(), process_group=group)
    except ConfigError as error:
        loading = str(error)
    config = TorchPolicyConfig(learning_rate=1e-3, eps=1e-4, tensor_parallel_size=tensor_size, num_threads=1)
    policy, twin = (TorchPolicy.from_pretrained(model, config, process_group=group) for _ in range(2))
    said = report_of_rank(
        policy, twin, rank=rank, data_rank=policy.data_rank, num_data_ranks=policy.num_data_ranks, vocab_size=64
    )
    shards = pack_batch(PolicyMaterial().sequences(), num_ranks=policy.num_data_ranks, micro_batch_tokens=16)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(step, "policy_loss", second_one_fails())
        torn = [outcome(lambda: policy.train_step(shards[policy.data_rank])) for _ in range(2)]
    said |= {"loading": loading, "torn": torn, "after": outcome(lambda: policy.logprobs(shards[policy.data_rank]))}
    Path(directory, f"{rank}.json").write_text(json.dumps(said))
    distributed.barrier()


def second_one_fails() -> Callable[..., Any]:
    """The loss; its second call runs out of memory."""
    called: list[int] = []

    def fail(*args: Any, **kwargs: Any) -> Any:
        called.append(1)
        if len(called) == 2:
            raise MemoryError("no room for the second micro-batch")
        return policy_loss(*args, **kwargs)

    return fail


def outcome(call: Callable[[], object]) -> str:
    try:
        call()
    except (MemoryError, RuntimeError) as error:
        return str(error)
    return "nothing was raised"


@pytest.mark.parametrize("tensor_size", [1, pytest.param(2, marks=pytest.mark.ci)])
def test_a_failure_of_one_rank_ends_the_call_on_all(tiny_model, tmp_path, tensor_size) -> None:
    run_ranks(__file__, 2, tmp_path, str(tiny_model("qwen3")), str(tensor_size))
    reports = [json.loads((tmp_path / f"{rank}.json").read_text()) for rank in range(2)]
    check_ranks(reports)
    assert "must be a directory" in reports[0]["loading"]
    assert reports[1]["loading"] == "another rank could not load policy.model; see that rank's error"
    for said in reports:  # gradients that FSDP2 keeps inside cannot be dropped: a step on top of them would be wrong
        first, second = said["torn"]
        assert first == "no room for the second micro-batch"
        wanted = "build a new policy and restore it" if tensor_size == 1 else "nothing was raised"
        assert wanted in second
        assert wanted in said["after"]


if __name__ == "__main__":
    rank_main(work)
