"""Two ranks over gloo are one rank: real processes, weights sharded with FSDP2."""

import json
import os
import subprocess
import sys
import threading
from datetime import timedelta
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import distributed

from dockyard_core.batch import TrainSequence, pack_batch
from dockyard_core.loss_config import LossConfig
from dockyard_trainer_torch import TorchPolicy, TorchPolicyConfig, export_hf

CONFIG = TorchPolicyConfig(learning_rate=1e-3, eps=1e-4, loss=LossConfig(kl_coef=0.1), num_threads=1)


def make_shards(seed: int, *, num_ranks: int, count: int = 7):
    rng = np.random.default_rng(seed)
    sequences = []
    for _ in range(count):
        num_tokens = int(rng.integers(5, 16))
        mask = np.arange(num_tokens) >= 3
        sequences.append(
            TrainSequence(
                token_ids_T=rng.integers(0, 64, num_tokens),
                loss_mask_T=mask,
                sampled_logprobs_T=np.where(mask, -4.0, 0).astype(np.float32),
                advantage=float(rng.normal()),
            )
        )
    return pack_batch(sequences, num_ranks=num_ranks, micro_batch_tokens=40)


def run_steps(policy: TorchPolicy, rank: int, num_ranks: int) -> list[dict]:
    taken = []
    for seed, count in ((0, 7), (1, 1), (2, 7)):  # with one sequence, one of two ranks has only padding
        metrics = policy.train_step(make_shards(seed, num_ranks=num_ranks, count=count)[rank])
        taken.append({name: getattr(metrics, name) for name in ("loss", "grad_norm", "entropy", "kl_ref")})
    return taken


def rank_main(rank: int, directory: str, model_dir: str) -> None:
    torch.set_num_threads(1)
    store = distributed.FileStore(f"{directory}/store", 2)
    distributed.init_process_group("gloo", store=store, rank=rank, world_size=2, timeout=timedelta(seconds=60))
    try:
        policy = TorchPolicy.from_pretrained(model_dir, CONFIG, process_group=distributed.group.WORLD)
        taken = run_steps(policy, rank, 2)
        # A forward pass alone leaves gathered weights behind, which neither export nor save may meet.
        policy.logprobs(make_shards(0, num_ranks=2)[rank])
        export_hf(policy, Path(directory) / "export")
        policy.save(Path(directory) / "checkpoint")
        streamed: list[str] = []

        def sink(chunk) -> None:
            streamed.append(chunk.name)
            if rank == 1 and len(streamed) == 3:
                raise KeyError("rank 1 lost its engine")

        try:
            policy.stream_weights(sink)
        except (KeyError, RuntimeError) as error:
            outcome = type(error).__name__
        snapshot = policy.snapshot()  # collective; writing it is not, and goes on while both ranks step
        writer = threading.Thread(target=snapshot.write, args=(Path(directory) / "snapshot",))
        writer.start()
        after = policy.train_step(make_shards(3, num_ranks=2)[rank])
        writer.join()
        policy.ranks.barrier()
        policy.restore(Path(directory) / "snapshot")
        again = policy.train_step(make_shards(3, num_ranks=2)[rank])
        report = {"steps": taken, "sink": outcome, "streamed": len(streamed), "is_equal": after == again}
        Path(directory, f"rank{rank}.json").write_text(json.dumps(report))
    finally:
        distributed.destroy_process_group()


def spawn_ranks(directory: Path, model_dir: Path) -> None:
    """Run this file once per rank and wait; a rank that fails takes the other one with it."""
    command = [sys.executable, __file__, str(directory), str(model_dir)]
    ranks = [subprocess.Popen([*command, str(rank)], stderr=subprocess.PIPE, text=True) for rank in (0, 1)]
    try:
        for process in ranks:
            _, errors = process.communicate(timeout=150)
            assert process.returncode == 0, errors
    finally:
        for process in ranks:
            process.kill()
            process.wait()


@pytest.mark.ci
@pytest.mark.parametrize(("family", "is_tied"), [("qwen3", True), ("llama", False)])
def test_two_ranks_take_the_steps_of_one(tiny_model, tmp_path, family, is_tied) -> None:
    model_dir = tiny_model(family, is_tied=is_tied)
    alone = TorchPolicy.from_pretrained(model_dir, CONFIG)
    wanted = run_steps(alone, 0, 1)
    spawn_ranks(tmp_path, model_dir)
    reports = [json.loads((tmp_path / f"rank{rank}.json").read_text()) for rank in (0, 1)]
    assert reports[0]["steps"] == reports[1]["steps"], "metrics are equal on every rank"
    for got, expected in zip(reports[0]["steps"], wanted, strict=True):
        assert got == pytest.approx(expected, rel=1e-4, abs=1e-6)
    both = TorchPolicy.from_pretrained(tmp_path / "export", CONFIG)
    for (name, one), two in zip(alone.causal_lm.named_parameters(), both.causal_lm.parameters(), strict=True):
        torch.testing.assert_close(one, two, rtol=0, atol=1e-5, msg=name)
    # a sink that raises on one rank ends the stream on both, at the same tensor
    assert [report["sink"] for report in reports] == ["RuntimeError", "KeyError"]
    assert [report["streamed"] for report in reports] == [3, 3]
    assert all(report["is_equal"] for report in reports)
    restored = TorchPolicy.from_pretrained(model_dir, CONFIG)
    restored.restore(tmp_path / "checkpoint")  # written by two ranks, read by one
    assert restored.version == 3


if __name__ == "__main__":
    rank_main(int(sys.argv[3]), sys.argv[1], sys.argv[2])
    # The report is written and the group is gone. Now and then a thread of torch's aborts the interpreter's
    # own end ("terminate called without an active exception"), which says nothing about the ranks.
    os._exit(0)
