"""Checkpoints that several ranks write and other ranks read: real processes over gloo, one thread each."""

import errno
import json
import resource
import sys
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file, save_file
from torch import distributed, nn

sys.path.append(str(Path(__file__).parents[3] / "tests"))  # also when a rank runs this file as a script

from rank_processes import rank_main, run_ranks

from dockyard_core.batch import TrainSequence, pack_batch
from dockyard_core.checkpoint_format import file_name
from dockyard_core.errors import UserError
from dockyard_core.model_files import deal
from dockyard_core.regions import Region
from dockyard_trainer_torch import TorchPolicy, TorchPolicyConfig
from dockyard_trainer_torch.checkpoint import save
from dockyard_trainer_torch.ranks import whole
from dockyard_trainer_torch.sharded_files import ShardFiles, TensorShard, is_first_copy, region_of, save_shards
from dockyard_trainer_torch.weights import weight_manifest

MOMENTS = ("exp_avg", "exp_avg_sq")


def make(model_dir: Path | str, *, tensor_size: int = 1, group=None) -> TorchPolicy:
    config = TorchPolicyConfig(learning_rate=1e-2, eps=1e-4, tensor_parallel_size=tensor_size, num_threads=1)
    return TorchPolicy.from_pretrained(model_dir, config, process_group=group)


def step(policy: TorchPolicy, seed: int) -> dict[str, float]:
    rng = np.random.default_rng(seed)
    mask = np.arange(12) > 3
    sequences = [
        TrainSequence(
            token_ids_T=rng.integers(0, 64, 12),
            loss_mask_T=mask,
            sampled_logprobs_T=np.where(mask, -4.0, 0).astype(np.float32),
            advantage=float(rng.normal()),
        )
        for _ in range(4)
    ]
    shard = pack_batch(sequences, num_ranks=policy.num_data_ranks)[policy.data_rank]
    metrics = policy.train_step(shard)
    return {"loss": metrics.loss, "grad_norm": metrics.grad_norm}


def whole_state(policy: TorchPolicy) -> dict[str, torch.Tensor]:
    """Weights and moments under the names of a checkpoint (collective)."""
    state = {}
    for name, param in policy.causal_lm.named_parameters():
        state[name] = whole(param).detach().clone()
        for moment in MOMENTS:
            state[f"{moment}.{name}"] = whole(policy.optimizer.state[param][moment]).clone()
    return state


def is_equal(one: dict[str, torch.Tensor], other: dict[str, torch.Tensor]) -> bool:
    return one.keys() == other.keys() and all(torch.equal(one[name], other[name]) for name in one)


def steps_are(policy: TorchPolicy, wanted: int) -> bool:
    return {float(state["step"]) for state in policy.optimizer.state.values()} == {float(wanted)}


# What the ranks do. Each returns what the test looks at.


def two_ranks_write(rank: int, directory: Path, model_dir: str) -> dict:
    policy = make(model_dir, group=distributed.group.WORLD)
    policy.restore(directory / "one")  # written by one rank
    report = {"is_restored": is_equal(whole_state(policy), load_state(directory / "one"))}
    report["steps"] = steps_are(policy, 2) and (policy.version, policy.num_updates) == (2, 2)
    report["metrics"] = step(policy, 2)
    state = whole_state(policy)
    if rank == 0:
        save_file(state, directory / "wanted.safetensors")
    torch.manual_seed(100 + rank)
    snapshot = policy.snapshot()
    report["held_bytes"] = sum(shard.tensor.nbytes for shard in snapshot._state.weights.values())
    report["exported_bytes"] = sum(tensor.nbytes for tensor in snapshot._exported.tensors.values())
    # Nothing waits for the other rank: this is collective only in what the main thread does meanwhile.
    writer = threading.Thread(target=lambda: (snapshot.write(directory / "two"), snapshot.export(directory / "hf")))
    writer.start()
    after = step(policy, 3)
    writer.join()
    drawn = torch.rand(3).tolist()
    distributed.barrier()
    policy.restore(directory / "two")
    report["is_same_random_state"] = torch.rand(3).tolist() == drawn
    report["is_same_step"] = step(policy, 3) == after
    save(policy, directory / "saved")
    save(policy, directory / "saved")  # replaces
    report["refusal"] = caught(lambda: snapshot.write(directory / "saved"))
    return report


def four_ranks_read(rank: int, directory: Path, model_dir: str) -> dict:
    wanted = load_file(directory / "wanted.safetensors")
    report = {}
    for tensor_size in (1, 2):
        policy = make(model_dir, tensor_size=tensor_size, group=distributed.group.WORLD)
        step(policy, 9)
        policy.restore(directory / "two")
        report[f"is_restored {tensor_size}"] = is_equal(whole_state(policy), wanted) and steps_are(policy, 3)
        policy.snapshot().export(directory / f"hf {tensor_size}")
        save(policy, directory / f"four {tensor_size}")
    before = sorted(path.name for path in directory.iterdir())
    with files_no_larger_than(1000 if rank == 2 else None):
        report["full disk"] = caught(lambda: save(policy, directory / "four 2"))
    distributed.barrier()
    report["is_clean"] = before == sorted(path.name for path in directory.iterdir())
    # Only one rank is given a folder without a checkpoint, and none restores.
    report["no checkpoint"] = caught(lambda: policy.restore(directory / ("hf 1" if rank == 1 else "two")))
    report["is_unchanged"] = is_equal(whole_state(policy), wanted)
    return report


def meshes(rank: int, directory: Path, _: str) -> dict:
    """FSDP2 over tensor parallelism with sizes that nothing divides: strided shards, and ranks without a part."""
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard
    from torch.distributed.tensor import Replicate, Shard, distribute_tensor
    from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
    model = small_model()
    truth = {name: param.detach().clone() for name, param in model.named_parameters()}
    parallelize_module(model, mesh["tp"], {"0": ColwiseParallel(), "1": RowwiseParallel(), "2": ColwiseParallel()})
    fully_shard(model, mesh=mesh["dp"])
    tensors = dict(model.named_parameters()) | {"whole": nn.Parameter(torch.arange(5.0))}
    blocks = {
        name: TensorShard(region_of(param), getattr(param, "to_local", lambda p=param: p)().detach().contiguous())
        for name, param in tensors.items()
        if is_first_copy(param, mesh)
    }
    blocks = {name: block for name, block in blocks.items() if block.region.num_elements}
    path = directory / file_name("model", rank, 4)
    save_shards(blocks, path, {})
    distributed.barrier()
    others = {
        "rows": (init_device_mesh("cpu", (4,)), [Shard(0)]),
        "columns": (init_device_mesh("cpu", (4,)), [Shard(-1)]),
        "two ways": (mesh, [Shard(0), Shard(-1)]),
        "twice": (mesh, [Shard(0), Shard(0)]),
        "replicas": (mesh, [Replicate(), Shard(0)]),
    }
    report = {"written": sorted(blocks), "strided": [str(p.placements) for p in model.parameters()]}
    with ShardFiles([directory / file_name("model", other, 4) for other in range(4)]) as files:
        for kind, (other_mesh, placements) in others.items():
            targets = {name: distribute_tensor(tensor, other_mesh, placements) for name, tensor in truth.items()}
            report[kind] = all(
                torch.equal(files.read(name, region_of(target)), target.to_local()) for name, target in targets.items()
            )
        report["own"] = all(
            torch.equal(files.read(name, region_of(param)), param.to_local())
            for name, param in model.named_parameters()
        )
    return report


def small_model() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(7, 10), nn.Linear(10, 7, bias=False), nn.Linear(5, 3), nn.LayerNorm(3))


@contextmanager
def files_no_larger_than(num_bytes: int | None) -> Iterator[None]:
    """The kernel refuses to let any file of this rank grow beyond this."""
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (soft if num_bytes is None else num_bytes, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))


def caught(function: Callable[[], object]) -> list:
    """What the call raised: its type, its message, its errno."""
    try:
        function()
    except (OSError, UserError) as error:
        return [type(error).__name__, str(error), getattr(error, "errno", None)]
    return []


SCENARIOS = {function.__name__: function for function in (two_ranks_write, four_ranks_read, meshes)}


def spawn(scenario: Callable, num_ranks: int, directory: Path, model_dir: Path | str = "") -> list[dict]:
    """Run this file once per rank, wait, and return the reports."""
    run_ranks(__file__, num_ranks, directory, scenario.__name__, str(model_dir))
    names = [f"{scenario.__name__}-{rank}.json" for rank in range(num_ranks)]
    return [json.loads((directory / name).read_text()) for name in names]


def work(rank: int, _: int, directory: Path, args: Sequence[str]) -> None:
    scenario, model_dir = args
    report = SCENARIOS[scenario](rank, directory, model_dir)
    (directory / f"{scenario}-{rank}.json").write_text(json.dumps(report))
    distributed.barrier()  # nobody leaves while another still waits for it


def load_state(directory: Path) -> dict[str, torch.Tensor]:
    """What one rank wrote, without the random state."""
    state = load_file(directory / "model.safetensors") | load_file(directory / "optimizer.safetensors")
    return {name: tensor for name, tensor in state.items() if not name.startswith("rng")}


def read_by_torch(directory: Path, wanted: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """The same names, read by torch's own distributed checkpoint."""
    from torch.distributed.checkpoint import HuggingFaceStorageReader, load

    state = {name: torch.full_like(tensor, torch.nan) for name, tensor in wanted.items()}
    load(state, storage_reader=HuggingFaceStorageReader(str(directory)), no_dist=True)
    return state


@pytest.fixture(scope="module")
def written(tiny_model, tmp_path_factory) -> tuple[Path, list[dict]]:
    """A folder with one/ (one rank, 2 steps), two/, hf/, saved/ (two ranks) and what two/ must hold."""
    torch.set_num_threads(1)
    directory = tmp_path_factory.mktemp("checkpoints")
    alone = make(tiny_model("qwen3"))
    step(alone, 0)
    step(alone, 1)
    save(alone, directory / "one")
    metrics = step(alone, 2)
    reports = spawn(two_ranks_write, 2, directory, tiny_model("qwen3"))
    for report in reports:
        assert report.pop("metrics") == pytest.approx(metrics, rel=1e-4)
    return directory, reports


@pytest.mark.ci
def test_each_of_two_ranks_writes_its_part_and_goes_on_from_it(written) -> None:
    directory, reports = written
    total = sum(tensor.nbytes for name, tensor in load_wanted(directory).items() if not name.startswith(MOMENTS))
    for report in reports:
        assert report["is_restored"], "two ranks read what one wrote"
        assert report["steps"]
        assert report["is_same_step"], "the next step is the one after the snapshot, bit for bit"
        assert report["is_same_random_state"]
        assert report["held_bytes"] == total / 2, "no rank copies more than its part"
        assert 0.3 * total < report["exported_bytes"] < 0.7 * total
        kind, message, number = report["refusal"]
        assert (kind, number) == ("FileExistsError", errno.EEXIST)
        assert "give another one" in message
    assert {path.suffix for path in (directory / "two").iterdir()} == {".safetensors", ".json"}
    assert len(list((directory / "two").iterdir())) == 5


@pytest.mark.ci
def test_the_files_of_two_ranks_are_what_torch_and_one_rank_read(written, tiny_model) -> None:
    directory, _ = written
    wanted = load_wanted(directory)
    assert is_equal(read_by_torch(directory / "two", wanted), wanted)
    assert is_equal(read_by_torch(directory / "one", load_state(directory / "one")), load_state(directory / "one"))
    policy = make(tiny_model("qwen3"))
    policy.restore(directory / "two")
    assert is_equal(whole_state(policy), wanted)
    assert (policy.version, policy.num_updates) == (3, 3)
    assert steps_are(policy, 3)


@pytest.mark.ci
def test_an_export_of_two_ranks_is_one_hugging_face_model(written, tiny_model) -> None:
    directory, _ = written
    assert_exported(directory / "hf", directory, num_files=2)
    policy = make(directory / "hf")  # and our own loader takes it
    wanted = load_wanted(directory)
    assert all(torch.equal(param, wanted[name]) for name, param in policy.causal_lm.named_parameters())


@pytest.mark.ci
def test_four_ranks_of_any_mesh_go_on_from_two(written, tiny_model) -> None:
    directory, _ = written
    reports = spawn(four_ranks_read, 4, directory, tiny_model("qwen3"))
    for rank, report in enumerate(reports):
        assert report["is_restored 1"]
        assert report["is_restored 2"]
        kind, message, number = report["full disk"]
        wanted = (errno.EFBIG, "too large") if rank == 2 else (errno.EIO, "another rank could not write")
        assert (number, wanted[1] in message) == (wanted[0], True), (kind, message)
        assert report["is_clean"], "nothing half-written stays, and the checkpoint before does"
        kind, message, _ = report["no checkpoint"]
        assert kind == "UserError"
        assert ("has trainer.json" if rank == 1 else "another rank could not read") in message
        assert report["is_unchanged"]
    wanted_state = load_wanted(directory)
    assert is_equal(read_by_torch(directory / "four 2", wanted_state), wanted_state)
    policy = make(tiny_model("qwen3"))
    policy.restore(directory / "four 2")
    assert is_equal(whole_state(policy), wanted_state)
    for tensor_size in (1, 2):
        assert_exported(directory / f"hf {tensor_size}", directory, num_files=4)


@pytest.mark.ci
def test_blocks_of_strided_and_uneven_shards_are_put_together_on_any_mesh(tmp_path) -> None:
    reports = spawn(meshes, 4, tmp_path)
    assert any("Strided" in placements for placements in reports[0]["strided"])
    assert "2.weight" not in reports[3]["written"], "three rows over four ranks leave one without"
    assert [("whole" in report["written"]) for report in reports] == [True, False, False, False]
    assert [("3.bias" in report["written"]) for report in reports] == [True, False, True, False], "held twice, once"
    for report in reports:
        assert all(report[kind] for kind in ("rows", "columns", "two ways", "twice", "replicas", "own"))
    wanted = {name: param.detach() for name, param in small_model().named_parameters()}
    assert is_equal(read_by_torch(tmp_path, wanted), wanted)
    with ShardFiles(sorted(tmp_path.glob("*.safetensors"))) as files:
        assert files.blocks.shapes == {name: tuple(tensor.shape) for name, tensor in wanted.items()} | {"whole": (5,)}
        assert files.blocks.incomplete == []
        for name, tensor in wanted.items():
            assert torch.equal(files.read(name, Region((0,) * tensor.ndim, tuple(tensor.shape))), tensor)


def test_whole_tensors_are_dealt_by_bytes(tiny_model) -> None:
    manifest = weight_manifest(make(tiny_model("llama", is_tied=False)))
    sizes = {spec.name: int(np.prod(spec.shape)) for spec in manifest}
    for num_ranks in (1, 2, 3, 5):
        owners = deal(manifest, num_ranks)
        loads = [sum(sizes[name] for name, rank in owners.items() if rank == each) for each in range(num_ranks)]
        assert sum(loads) == sum(sizes.values())
        assert max(loads) - min(loads) <= max(sizes.values())
    assert sorted(set(deal(manifest[:3], 8).values())) == [0, 1, 2], "files are numbered without gaps"


def assert_exported(hf: Path, directory: Path, *, num_files: int) -> None:
    from transformers import AutoModelForCausalLM

    wanted = load_wanted(directory)
    index = json.loads((hf / "model.safetensors.index.json").read_text())
    files = sorted(path.name for path in hf.glob("*.safetensors"))
    assert len(files) == num_files
    assert sorted(set(index["weight_map"].values())) == files
    for name, file in index["weight_map"].items():
        with safe_open(hf / file, "pt") as opened:
            assert torch.equal(opened.get_tensor(name), wanted[name]), "each file holds whole tensors"
    assert index["metadata"]["total_size"] == sum(wanted[name].nbytes for name in index["weight_map"])
    loaded = AutoModelForCausalLM.from_pretrained(hf)
    assert all(torch.equal(param, wanted[name]) for name, param in loaded.named_parameters())
    assert (hf / "tokenizer.json").is_file()
    assert not [path.name for path in hf.iterdir() if path.name.startswith(".")]


def load_wanted(directory: Path) -> dict[str, torch.Tensor]:
    return load_file(directory / "wanted.safetensors")


if __name__ == "__main__":
    rank_main(work)
