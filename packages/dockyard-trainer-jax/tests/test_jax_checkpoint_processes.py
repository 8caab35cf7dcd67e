"""Checkpoints that several processes of JAX write together, and that others read: gloo on the CPU."""

import errno
import json
import sys
import threading
from collections.abc import Callable, Sequence
from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

sys.path.append(str(Path(__file__).parent))  # also when a process runs this file as a script

from checkpoint_material import OPTIONS, WIDE, assert_equal, counters_of, files_no_larger_than, make_shard, state_of
from jax_processes import process_main, run_processes

from dockyard_core.errors import UserError
from dockyard_trainer_jax import JaxPolicy, JaxPolicyConfig, export_hf, restore_orbax, save_orbax


def make(model_dir: Path | str, fsdp: int = 1, tp: int = 1) -> JaxPolicy:
    return JaxPolicy.from_pretrained(model_dir, JaxPolicyConfig(**OPTIONS, fsdp_size=fsdp, tensor_parallel_size=tp))


def step(policy: JaxPolicy, seed: int) -> float:
    return policy.train_step(make_shard(seed, num_ranks=policy.num_data_ranks, rank=policy.data_rank)).loss


def caught(function: Callable[[], object]) -> list:
    """What the call raised: its type, its message, its errno."""
    try:
        function()
    except (OSError, UserError) as error:
        return [type(error).__name__, str(error), getattr(error, "errno", None)]
    return []


def holds(policy: JaxPolicy, state: dict[str, np.ndarray], *, atol: float = 0.0) -> bool:
    """Whether every device of this process holds its part of a state."""
    kinds = {"": policy.params, "exp_avg.": policy.state.exp_avg, "exp_avg_sq.": policy.state.exp_avg_sq}
    for prefix, params in kinds.items():
        for name, param in params.items():
            stem, _, rest = name.partition("layers.")
            whole = (
                np.stack([state[f"{prefix}{stem}layers.{number}.{rest}"] for number in range(param.shape[0])])
                if rest
                else state[prefix + name]
            )
            if not all(np.allclose(s.data, whole[s.index], rtol=0, atol=atol) for s in param.addressable_shards):
                return False
    return int(policy.state.count.addressable_data(0)) == policy.num_updates


def two_processes(rank: int, directory: Path, args: Sequence[str]) -> None:
    """Read what one wrote, step, write; each of two meshes that deal otherwise."""
    (model_dir,) = args
    one, wanted = (load_file(directory / f"{name}.safetensors") for name in ("one", "wanted"))
    report: dict[str, object] = {}
    for fsdp, tp in ((2, 4), (8, 1)):
        policy, mark = make(model_dir, fsdp, tp), f" {fsdp}x{tp}"
        policy.restore(directory / "one")
        report["is_restored" + mark] = holds(policy, one) and counters_of(policy) == (2, 2, 0)
        report["loss" + mark] = step(policy, 5)
        report["is_stepped" + mark] = holds(policy, wanted, atol=1e-5)
        policy.save(directory / f"saved{mark}")
        policy.save(directory / f"saved{mark}")  # replaces
        policy.restore(directory / f"saved{mark}")
        report["is_restored again" + mark] = holds(policy, wanted, atol=1e-5) and counters_of(policy) == (3, 3, 0)
    snapshot = policy.snapshot()
    # Nothing waits for the other process: what is collective is what the main thread does meanwhile.
    writer = threading.Thread(target=lambda: (snapshot.write(directory / "two"), snapshot.export(directory / "hf")))
    writer.start()
    step(policy, 6)
    writer.join()
    policy.ranks.gather(None)
    policy.restore(directory / "two")
    report["is_of_its_moment"] = holds(policy, wanted, atol=1e-5)
    report["refusal"] = caught(lambda: snapshot.write(directory / "two"))
    export_hf(policy, directory / "exported")
    save_orbax(policy, directory / "orbax of two")
    restore_orbax(policy, directory / "orbax of one")
    report["is_restored from orbax"] = holds(policy, one) and counters_of(policy) == (2, 2, 0)
    before = sorted(path.name for path in directory.iterdir())
    policy.ranks.gather(None)
    with files_no_larger_than(1000 if rank == 1 else 1 << 40):
        report["full disk"] = caught(lambda: policy.save(directory / "saved 2x4"))
    policy.ranks.gather(None)  # the first one tidies up
    report["is_clean"] = before == sorted(path.name for path in directory.iterdir())
    # Only one process is given a folder without a checkpoint, and none restores.
    report["no checkpoint"] = caught(lambda: policy.restore(directory / ("hf" if rank == 1 else "two")))
    report["is_unchanged"] = holds(policy, one)
    (directory / f"report-{rank}.json").write_text(json.dumps(report))


@pytest.fixture(scope="module")
def written(tiny_model, tmp_path_factory) -> tuple[Path, list[dict], float]:
    """A folder with what two processes wrote, what they say, and the loss they must have found."""
    directory, model_dir = tmp_path_factory.mktemp("processes"), tiny_model("qwen3", **WIDE)
    alone = make(model_dir)
    for seed in range(2):
        step(alone, seed)
    alone.save(directory / "one")
    save_orbax(alone, directory / "orbax of one")
    export_hf(alone, directory / "exported")  # whose one file others would load instead of two
    save_file(state_of(alone), directory / "one.safetensors")
    loss = step(alone, 5)
    save_file(state_of(alone), directory / "wanted.safetensors")
    run_processes(__file__, 2, directory, str(model_dir), num_devices=4)
    return directory, [json.loads((directory / f"report-{rank}.json").read_text()) for rank in range(2)], loss


@pytest.mark.ci
def test_two_processes_go_on_from_one_and_from_what_they_wrote(written) -> None:
    _, reports, loss = written
    for rank, report in enumerate(reports):
        for name, found in report.items():
            if name.startswith("is_"):
                assert found, (rank, name)
            if name.startswith("loss"):
                assert found == pytest.approx(loss, abs=1e-5), name
        kind, message, number = report["refusal"]
        assert (kind, number) == ("FileExistsError", errno.EEXIST)
        assert "give another one" in message
        wanted = (errno.EFBIG, "too large") if rank == 1 else (errno.EIO, "another rank could not write")
        kind, message, number = report["full disk"]
        assert (number, wanted[1] in message) == (wanted[0], True), (kind, message)
        kind, message, _ = report["no checkpoint"]
        assert kind == "UserError"
        assert ("has trainer.json" if rank == 1 else "another rank could not read") in message


@pytest.mark.ci
@pytest.mark.parametrize("name", ["saved 2x4", "saved 8x1", "two"])
def test_what_two_processes_wrote_is_read_by_either_trainer(written, tiny_model, name) -> None:
    from torch.distributed.checkpoint import HuggingFaceStorageReader, load

    from dockyard_trainer_torch import TorchPolicy, TorchPolicyConfig

    directory, _, _ = written
    wanted = load_file(directory / "wanted.safetensors")
    assert len(list((directory / name).iterdir())) == 8 * 2 + 1, "two files for each device, and trainer.json"
    restored = make(tiny_model("qwen3", **WIDE))
    restored.restore(directory / name)
    assert counters_of(restored) == (3, 3, 0)
    found = state_of(restored)
    assert_equal(found, wanted, atol=1e-5)
    theirs = TorchPolicy.from_pretrained(tiny_model("qwen3", **WIDE), TorchPolicyConfig(**OPTIONS))
    theirs.restore(directory / name)
    assert counters_of(theirs) == (3, 3, 0)
    for param_name, param in theirs.causal_lm.named_parameters():
        np.testing.assert_array_equal(param.detach().numpy(), found[param_name])
        moment = theirs.optimizer.state[param]["exp_avg_sq"]
        np.testing.assert_array_equal(moment.numpy(), found[f"exp_avg_sq.{param_name}"])
    state = {key: moment.new_full(array.shape, float("nan")) for key, array in found.items()}
    load(state, storage_reader=HuggingFaceStorageReader(str(directory / name)), no_dist=True)
    assert_equal({key: tensor.numpy() for key, tensor in state.items()}, found)


@pytest.mark.ci
@pytest.mark.parametrize("name", ["hf", "exported"])
def test_an_export_of_two_processes_is_one_hugging_face_model(written, tiny_model, name) -> None:
    from transformers import AutoModelForCausalLM

    directory, _, _ = written
    restored = make(tiny_model("qwen3", **WIDE))
    restored.restore(directory / "two")
    wanted = state_of(restored)
    assert len(list((directory / name).glob("*.safetensors"))) == 2
    assert (directory / name / "tokenizer.json").is_file()
    for key, param in AutoModelForCausalLM.from_pretrained(directory / name).named_parameters():
        np.testing.assert_array_equal(param.detach().numpy(), wanted[key])


@pytest.mark.ci
def test_an_orbax_checkpoint_of_two_processes_is_read_by_one(written, tiny_model) -> None:
    directory, _, _ = written
    restored = make(tiny_model("qwen3", **WIDE))
    restore_orbax(restored, directory / "orbax of two")
    assert counters_of(restored) == (3, 3, 0)
    assert_equal(state_of(restored), load_file(directory / "wanted.safetensors"), atol=1e-5)


if __name__ == "__main__":
    process_main(two_processes)
