"""What fails on one rank ends the call on all, at once, and leaves the policy as it was: real processes, GLOO."""

import dataclasses
import json
import sys
from collections.abc import Callable, Sequence
from pathlib import Path

import numpy as np
import pytest
from torch import distributed

sys.path.append(str(Path(__file__).parents[3] / "tests"))  # also when a rank runs this file as a script

from rank_processes import rank_main, run_ranks

from dockyard_core.batch import BatchShard, TrainSequence, pack_batch
from dockyard_trainer_torch import TorchPolicy, TorchPolicyConfig


def make_shards(num_ranks: int, seed: int = 0) -> tuple[BatchShard, ...]:
    rng = np.random.default_rng(seed)
    mask = np.arange(12) >= 3
    sequences = [
        TrainSequence(
            token_ids_T=rng.integers(0, 64, 12),
            loss_mask_T=mask,
            sampled_logprobs_T=np.where(mask, -4.0, 0).astype(np.float32),
            advantage=float(rng.normal()),
        )
        for _ in range(4)
    ]
    return pack_batch(sequences, num_ranks=num_ranks, micro_batch_tokens=24)


def misread(shard: BatchShard) -> BatchShard:
    """As if another model's tokenizer had made it."""
    (first, *others) = shard.micro_batches
    return dataclasses.replace(
        shard, micro_batches=(dataclasses.replace(first, token_ids_BL=first.token_ids_BL + 64), *others)
    )


def outcome(call: Callable[[], object]) -> str:
    try:
        call()
    except (KeyError, ValueError, RuntimeError) as error:
        return f"{type(error).__name__}: {error}"
    return "nothing"


def work(rank: int, world_size: int, directory: Path, args: Sequence[str]) -> None:
    model, tensor_size = args[0], int(args[1])
    config = TorchPolicyConfig(learning_rate=1e-3, eps=1e-4, tensor_parallel_size=tensor_size, num_threads=1)
    policy, twin = (TorchPolicy.from_pretrained(model, config, process_group=distributed.group.WORLD) for _ in range(2))
    good = make_shards(policy.num_data_ranks)[policy.data_rank]
    bad = misread(good) if rank == 1 else good
    streamed: list[str] = []

    def sink(chunk) -> None:
        streamed.append(chunk.name)
        if rank == 1 and len(streamed) == 3:
            raise KeyError("rank 1 lost its engine")

    said = {
        "train_step": outcome(lambda: policy.train_step(bad)),
        "logprobs": outcome(lambda: policy.logprobs(bad)),
        "stream_weights": outcome(lambda: policy.stream_weights(sink)),
        "num_streamed": len(streamed),
        "is_as_it_was": policy.train_step(good) == twin.train_step(good),
    }
    infinite = dataclasses.replace(make_shards(1)[0].micro_batches[0])
    if rank == 0:  # one rank's loss is not finite: all skip
        infinite = dataclasses.replace(infinite, advantages_BL=np.full_like(infinite.advantages_BL, np.inf))
    spoiled = dataclasses.replace(good, micro_batches=(infinite,))
    if tensor_size == 1:
        skipped = policy.train_step(spoiled)
        said["is_skipped"] = skipped.is_skipped and policy.version == 1 and policy.num_skipped_steps == 1
    Path(directory, f"{tensor_size}-{rank}.json").write_text(json.dumps(said))
    distributed.barrier()


@pytest.mark.parametrize("tensor_size", [1, pytest.param(2, marks=pytest.mark.ci)])
def test_a_failure_of_one_rank_ends_the_call_on_all(tiny_model, tmp_path, tensor_size) -> None:
    run_ranks(__file__, 2, tmp_path, str(tiny_model("qwen3")), str(tensor_size))
    first, second = (json.loads((tmp_path / f"{tensor_size}-{rank}.json").read_text()) for rank in (0, 1))
    assert second["train_step"].startswith("ValueError: token ids must lie in [0, 64), the policy's vocabulary, got ")
    assert second["logprobs"].startswith("ValueError: token ids")
    assert "rank 1 lost its engine" in second["stream_weights"]
    for call in ("train_step", "logprobs"):
        assert first[call] == "RuntimeError: another rank could not read its shard; see that rank's error"
    assert first["stream_weights"].startswith("RuntimeError: the weight sink of another rank raised at 'model.")
    assert first["num_streamed"] == second["num_streamed"] == 3
    for said in (first, second):
        assert said["is_as_it_was"]
        assert said.get("is_skipped", True)


if __name__ == "__main__":
    rank_main(work)
