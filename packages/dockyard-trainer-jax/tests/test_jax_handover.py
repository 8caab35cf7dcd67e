"""A run goes from one trainer to the other and back, whatever ranks and meshes wrote and read it."""

import json
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.numpy import load_file, save_file

sys.path.append(str(Path(__file__).parent))  # also when a rank runs this file as a script
sys.path.append(str(Path(__file__).parents[3] / "tests"))

from checkpoint_material import MOMENTS, OPTIONS, WIDE, assert_equal, counters_of, make_shard, state_of
from rank_processes import rank_main, run_ranks

from dockyard_trainer_torch import TorchPolicy, TorchPolicyConfig
from dockyard_trainer_torch.names import parts_of
from dockyard_trainer_torch.ranks import whole

FAMILIES = [("qwen2", True), ("qwen3", False), ("llama", True), ("llama", False), ("qwen3_moe", False)]


def make_torch(model_dir: Path | str, *, group: Any = None, **changes: Any) -> TorchPolicy:
    config = TorchPolicyConfig(**{**OPTIONS, "num_threads": 1, **changes})
    return TorchPolicy.from_pretrained(model_dir, config, process_group=group)


def make_jax(model_dir: Path, fsdp: int = 1, tp: int = 1, **changes: Any) -> Any:
    from dockyard_trainer_jax import JaxPolicy, JaxPolicyConfig  # the ranks of torch need none of it

    return JaxPolicy.from_pretrained(
        model_dir, JaxPolicyConfig(**OPTIONS, fsdp_size=fsdp, tensor_parallel_size=tp, **changes)
    )


def step(policy: Any, seed: int) -> float:
    """The loss of a step on this rank's share of a batch."""
    metrics = policy.train_step(make_shard(seed, num_ranks=policy.num_data_ranks, rank=policy.data_rank))
    assert metrics.learning_rate > 0
    return float(metrics.loss)


def torch_state(policy: TorchPolicy) -> dict[str, np.ndarray]:
    """Copies of whole weights and moments by Hugging Face name (collective)."""
    state = {}
    for name, param in policy.causal_lm.named_parameters():
        if not param.requires_grad:
            continue
        held = {"": param} | {f"{moment}.": policy.optimizer.state[param][moment] for moment in MOMENTS}
        for prefix, tensor in held.items():
            array = whole(tensor).detach().numpy().copy()
            for part in parts_of(name, array.shape):
                state[prefix + part.name] = array if part.row is None else array[part.row, part.start : part.stop]
    return state


@pytest.mark.parametrize(
    ("family", "is_tied"), [FAMILIES[0], *(pytest.param(*one, marks=pytest.mark.ci) for one in FAMILIES[1:])]
)
def test_from_torch_to_jax_to_torch(tiny_model, tmp_path, family, is_tied) -> None:
    model_dir = tiny_model(family, is_tied=is_tied, **WIDE)
    theirs, ours = make_torch(model_dir), make_jax(model_dir)
    for seed in range(3):
        step(theirs, seed)
    theirs.num_skipped_steps = 2
    theirs.save(tmp_path / "of torch")
    # Nothing of what it held stays: another start, and moments that are not zero.
    ours.params = {name: param + 1 for name, param in ours.params.items()}
    ours.state = ours.state._replace(exp_avg=dict(ours.params), exp_avg_sq=dict(ours.params))
    ours.restore(tmp_path / "of torch")
    assert_equal(state_of(ours), torch_state(theirs))
    assert counters_of(ours) == counters_of(theirs) == (3, 3, 2)
    assert step(ours, 5) == pytest.approx(step(theirs, 5), abs=1e-5)
    assert_equal(state_of(ours), torch_state(theirs), atol=1e-5)
    ours.save(tmp_path / "of jax")
    again = make_torch(model_dir)
    step(again, 8)
    random_state = torch.get_rng_state()
    again.restore(tmp_path / "of jax")
    assert torch.equal(torch.get_rng_state(), random_state), "there is none in the checkpoint"
    assert_equal(torch_state(again), state_of(ours))
    assert counters_of(again) == (4, 4, 2)
    assert {float(state["step"]) for state in again.optimizer.state.values()} == {4.0}
    assert step(again, 6) == pytest.approx(step(ours, 6), abs=1e-5)
    assert_equal(torch_state(again), state_of(ours), atol=1e-5)


# What the ranks of torch do. A kind is (model, tensor_parallel_size).


def write(policy: TorchPolicy, kind: str, rank: int, directory: Path) -> None:
    """Two steps, a save, and one more step alone: what whoever takes over must get."""
    for seed in range(2):
        step(policy, seed)
    policy.save(directory / f"{kind} of torch")
    keep(policy, step(policy, 5), directory / f"{kind} wanted", rank)


def read(policy: TorchPolicy, kind: str, rank: int, directory: Path) -> None:
    """One step after what the other trainer wrote."""
    policy.restore(directory / f"{kind} of jax")
    assert counters_of(policy) == (3, 3, 0)
    keep(policy, step(policy, 6), directory / f"{kind} back", rank)


def keep(policy: TorchPolicy, loss: float, path: Path, rank: int) -> None:
    state = torch_state(policy)
    if rank == 0:
        save_file(state | {"loss": np.asarray([loss])}, path)


def work(rank: int, _: int, directory: Path, args: Sequence[str]) -> None:
    from torch import distributed

    task, kinds = args
    for kind, (model_dir, tensor_size) in json.loads(kinds).items():
        policy = make_torch(model_dir, group=distributed.group.WORLD, tensor_parallel_size=tensor_size)
        {"write": write, "read": read}[task](policy, kind, rank, directory)
    distributed.barrier()  # nobody leaves while another still waits for it


@pytest.mark.ci
@pytest.mark.parametrize("world_size", [2, pytest.param(4, marks=pytest.mark.nightly)])
def test_from_ranks_of_torch_to_a_mesh_of_jax_and_back(tiny_model, tmp_path, world_size) -> None:
    dense, experts = tiny_model("qwen3", **WIDE), tiny_model("qwen3_moe", is_tied=False, **WIDE)
    # Tensor parallelism, FSDP2 whose ranks share the experts, both together.
    models = {2: {"tp": (dense, 2), "moe": (experts, 1)}, 4: {"2d": (dense, 2)}}
    kinds = json.dumps({kind: (str(model), size) for kind, (model, size) in models[world_size].items()})
    run_ranks(__file__, world_size, tmp_path, "write", kinds)
    wanted_back = {}
    for kind, (model_dir, _) in models[world_size].items():
        ours = make_jax(model_dir, 2, 4)
        ours.restore(tmp_path / f"{kind} of torch")
        assert counters_of(ours) == (2, 2, 0)
        found, wanted = step(ours, 5), load_file(tmp_path / f"{kind} wanted")
        assert found == pytest.approx(float(wanted.pop("loss")[0]), abs=1e-5)
        assert_equal(state_of(ours), wanted, atol=1e-5)
        ours.save(tmp_path / f"{kind} of jax")
        wanted_back[kind] = step(ours, 6), state_of(ours)
    run_ranks(__file__, world_size, tmp_path, "read", kinds)
    for kind, (loss, state) in wanted_back.items():
        back = load_file(tmp_path / f"{kind} back")
        assert float(back.pop("loss")[0]) == pytest.approx(loss, abs=1e-5)
        assert_equal(back, state, atol=1e-5)


if __name__ == "__main__":
    rank_main(work)
