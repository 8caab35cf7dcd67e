"""Any mesh of ranks computes the gradients of one: FSDP2, tensor parallelism, and both on a 2-D mesh, over gloo."""

import json
import sys
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor, distributed

sys.path.append(str(Path(__file__).parents[3] / "tests"))  # also when a rank runs this file as a script

from rank_processes import rank_main, run_ranks

from dockyard_core.batch import TrainSequence, pack_batch
from dockyard_core.loss_config import LossConfig
from dockyard_trainer_torch import TorchPolicy, TorchPolicyConfig, export_hf
from dockyard_trainer_torch.ranks import whole
from dockyard_trainer_torch.step import forward_backward, score, tensor_batches, with_logprobs

LOSS = LossConfig(kl_coef=0.1, entropy_coef=0.01)
MODELS = [(family, is_tied) for family in ("qwen2", "qwen3", "llama") for is_tied in (True, False)]
MESHES = {2: (1, 2), 4: (2,)}
"""World size -> tensor-parallel sizes that its ranks try, one after another."""


def config(**changes) -> TorchPolicyConfig:
    return TorchPolicyConfig(learning_rate=1e-3, eps=1e-4, loss=LOSS, max_grad_norm=0.5, num_threads=1, **changes)


def make_sequences(seed: int, count: int) -> list[TrainSequence]:
    rng = np.random.default_rng(seed)
    made = []
    for _ in range(count):
        num_tokens = int(rng.integers(5, 16))
        mask = np.arange(num_tokens) >= 3
        made.append(
            TrainSequence(
                token_ids_T=rng.integers(0, 64, num_tokens),
                loss_mask_T=mask,
                sampled_logprobs_T=np.where(mask, -4.0, 0).astype(np.float32),
                advantage=float(rng.normal()),
            )
        )
    return made


def gradients(policy: TorchPolicy, seed: int = 0, count: int = 7) -> tuple[dict[str, Tensor], float]:
    """Whole gradients of a batch in several micro-batches, and the loss."""
    shards = pack_batch(
        make_sequences(seed, count), num_ranks=policy.num_data_ranks, micro_batch_tokens=40, temperature=0.8
    )
    shard = shards[policy.data_rank]
    policy.optimizer.zero_grad()
    batches = tensor_batches(policy._policy, shard, policy.config, policy.ranks)
    reference = policy._reference
    batches = with_logprobs(
        batches, "ref_logprobs_M", score(reference, batches, shard.temperature, policy.config, policy.ranks)
    )
    sums = forward_backward(policy._policy, batches, shard, policy.config, policy.ranks)
    named = {name: whole(param.grad).clone() for name, param in policy.causal_lm.named_parameters()}
    policy.optimizer.zero_grad()
    return named, sums.loss


def steps(policy: TorchPolicy) -> list[dict[str, float]]:
    taken = []
    for seed, count in ((0, 7), (1, 1), (2, 7)):  # with one sequence, all data ranks but one have only padding
        shards = pack_batch(make_sequences(seed, count), num_ranks=policy.num_data_ranks, micro_batch_tokens=40)
        metrics = policy.train_step(shards[policy.data_rank])
        taken.append({name: getattr(metrics, name) for name in ("loss", "grad_norm", "entropy", "kl_ref")})
    return taken


def work(rank: int, world_size: int, directory: Path, models: Sequence[str]) -> None:
    for tensor_size in MESHES[world_size]:
        for index, model in enumerate(models):
            name = f"{world_size}-{tensor_size}-{index}"
            policy = TorchPolicy.from_pretrained(
                model, config(tensor_parallel_size=tensor_size), process_group=distributed.group.WORLD
            )
            named, loss = gradients(policy)
            report = {"loss": loss, "steps": steps(policy)}
            (directory / f"{name}-{rank}.json").write_text(json.dumps(report))
            export_hf(policy, directory / f"{name}-export")
            if rank == 0:
                save_file(named, directory / f"{name}.safetensors")
    distributed.barrier()


def assert_equal_gradients(got: dict[str, Tensor], wanted: dict[str, Tensor], rtol: float = 1e-5) -> None:
    """||g - g'|| <= rtol * max(||g||, 1e-3 ||g_all||) for each parameter."""
    total = torch.stack([tensor.norm() for tensor in wanted.values()]).norm()
    assert total > 0
    assert got.keys() == wanted.keys()
    for name, tensor in wanted.items():
        bound = rtol * max(tensor.norm(), 1e-3 * total)
        assert (got[name] - tensor).norm() <= bound, name


CI = pytest.mark.ci


@pytest.mark.parametrize(
    ("world_size", "cases"),
    [
        pytest.param(2, [("qwen3", True)], id="2"),
        pytest.param(2, [case for case in MODELS if case != ("qwen3", True)], id="2-others", marks=CI),
        pytest.param(4, MODELS, id="4", marks=CI),
    ],
)
def test_ranks_compute_the_gradients_and_take_the_steps_of_one(tiny_model, tmp_path, world_size, cases) -> None:
    models = [tiny_model(family, is_tied=is_tied) for family, is_tied in cases]
    run_ranks(__file__, world_size, tmp_path, *map(str, models))
    for index, model in enumerate(models):
        alone = TorchPolicy.from_pretrained(model, config())
        wanted, loss = gradients(alone)
        wanted_steps = steps(alone)
        for tensor_size in MESHES[world_size]:
            name = f"{world_size}-{tensor_size}-{index}"
            assert_equal_gradients(load_file(tmp_path / f"{name}.safetensors"), wanted)
            reports = [json.loads((tmp_path / f"{name}-{rank}.json").read_text()) for rank in range(world_size)]
            assert all(report == reports[0] for report in reports), "metrics are equal on every rank"
            assert reports[0]["loss"] == pytest.approx(loss, rel=1e-5)
            for got, expected in zip(reports[0]["steps"], wanted_steps, strict=True):
                assert got == pytest.approx(expected, rel=1e-4, abs=1e-6), name
            exported = TorchPolicy.from_pretrained(tmp_path / f"{name}-export", config()).causal_lm
            for param_name, param in alone.causal_lm.named_parameters():
                torch.testing.assert_close(exported.get_parameter(param_name), param, rtol=0, atol=1e-5, msg=param_name)


if __name__ == "__main__":
    rank_main(work)
