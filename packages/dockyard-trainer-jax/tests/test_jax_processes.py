"""Several processes of one policy compute what one does, and what fails on one ends the call on all: gloo."""

import dataclasses
import functools
import json
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest

sys.path.append(str(Path(__file__).parent))  # also when a process runs this file as a script

from jax_processes import process_main, run_processes

from dockyard_core.batch import BatchShard, TrainSequence, pack_batch
from dockyard_core.errors import ConfigError
from dockyard_core.loss_config import LossConfig
from dockyard_core.testing.policy_ranks_contract import check_ranks, report_of_rank
from dockyard_trainer_jax import JaxPolicy, JaxPolicyConfig
from dockyard_trainer_jax.exchange import Exchange, set_timeout
from dockyard_trainer_jax.ranks import _rows_of_processes, join

VALUES = (
    "loss",
    "grad_norm",
    "entropy",
    "clip_fraction",
    "kl_ref",
    "offpolicy_abs_diff_mean",
    "offpolicy_abs_diff_max",
)
# Ratios of whole sequences, to logprobs of before; a second update, KL and entropy: all depend on the parameters.
FULL = LossConfig(
    variant="gspo",
    clip_low=0.9,
    clip_high=9.0,
    proximal="given",
    correction="none",
    kl_coef=0.1,
    entropy_coef=0.01,
)
# The first is that of the contract of one process, which has its programs.
CONFIGS = {
    "simple": JaxPolicyConfig(learning_rate=1e-3, eps=1e-4, weight_decay=0.1, max_grad_norm=1.0),
    "full": JaxPolicyConfig(learning_rate=1e-3, eps=1e-4, max_grad_norm=0.5, loss=FULL, updates_per_batch=2),
}


def sequences(seed: int, count: int, longest: int | None = None) -> list[TrainSequence]:
    """Of 12 tokens, or of 5 to ``longest``."""
    rng = np.random.default_rng(seed)
    made = []
    for _ in range(count):
        num_tokens = 12 if longest is None else int(rng.integers(5, longest + 1))
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


BATCHES = {
    "simple": [[sequences(0, 2), sequences(1, 2)]],
    # Two micro-batches of two rows, and one of one; nothing at all.
    "full": [[sequences(0, 4), sequences(1, 1, 16)], [sequences(2, 2), []]],
}
"""Batches, each as what goes to the first half of the processes, and to the second."""


def shards(halves: Sequence[Sequence[TrainSequence]], num_ranks: int) -> list[BatchShard]:
    """One shard for each rank, whose numbers of micro-batches may differ; the counts are those of all."""
    every = [one for half in halves for one in half]
    dealt = [every] if num_ranks == 1 else halves
    packed = [pack_batch(part, micro_batch_tokens=32, temperature=0.8)[0] for part in dealt]
    (whole,) = pack_batch(every)
    counts = ("num_valid_tokens", "num_sequences", "num_trained_sequences")
    return [dataclasses.replace(one, **{name: getattr(whole, name) for name in counts}) for one in packed]


def trained(policy: JaxPolicy, kind: str) -> dict[str, np.ndarray]:
    """What there is after a step on each batch: metrics, parameters and first moments, NaN where others have them."""
    found: dict[str, np.ndarray] = {}
    for number, halves in enumerate(BATCHES[kind]):
        metrics = policy.train_step(shards(halves, policy.num_data_ranks)[policy.data_rank])
        found[f"metrics.{number}"] = np.array([getattr(metrics, name) for name in VALUES])
    for what, params in (("params", policy.params), ("exp_avg", policy.state.exp_avg)):
        for name, array in params.items():
            held = np.full(array.shape, np.nan, np.float32)
            for block in array.addressable_shards:
                held[block.index] = block.data
            found[f"{what}.{name}"] = held
    if kind == "full":
        first = shards(BATCHES[kind][0], policy.num_data_ranks)[policy.data_rank]
        found["logprobs"] = np.sum([array.sum(dtype=np.float64) for array in policy.logprobs(first)])
        policy.stream_weights(lambda chunk: found.update({f"streamed.{chunk.name}": np.asarray(chunk.array)}))
    return found


def outcome(call: Callable[[], object]) -> str:
    try:
        call()
    except (ConfigError, RuntimeError, ValueError) as error:
        return f"{type(error).__name__}: {error}"
    return "nothing was raised"


def work(rank: int, directory: Path, args: Sequence[str]) -> None:
    kind, fsdp, tp, model, other = args
    sizes = {"fsdp_size": int(fsdp), "tensor_parallel_size": int(tp)}
    own = CONFIGS[kind].model_copy(update=sizes)
    policy, twin = (JaxPolicy.from_pretrained(model, own) for _ in range(2))
    said = {}
    if kind == "simple":
        said = refusals(rank, model, other, own, policy) | report_of_rank(
            policy,
            twin,
            rank=rank,
            data_rank=policy.data_rank,
            num_data_ranks=policy.num_data_ranks,
            vocab_size=64,
            measured=("num_compiled", "compile_s"),
        )
        said["absent"] = absence(rank, directory / "gave-up")
        policy = JaxPolicy.from_pretrained(model, own)
    (directory / f"{rank}.json").write_text(json.dumps(said))
    np.savez(directory / f"{rank}.npz", **trained(policy, kind), data_rank=policy.data_rank)


def absence(rank: int, gave_up: Path) -> str:
    """What becomes of a round to which process 1 comes too late."""
    set_timeout(1.0)
    exchange = Exchange("absence")
    while rank and not gave_up.exists():
        time.sleep(0.01)
    said = outcome(lambda: exchange.gather(rank))
    gave_up.touch()
    assert outcome(lambda: exchange.gather(rank)) == said, "there is no way back into a broken order"
    set_timeout(120.0)
    return said


def refusals(rank: int, model: str, other: str, own: JaxPolicyConfig, policy: JaxPolicy) -> dict[str, str]:
    def loading(path: str = model, **changes) -> str:
        return outcome(lambda: JaxPolicy.from_pretrained(path, own.model_copy(update=changes)))

    shard = shards(BATCHES["simple"][0], policy.num_data_ranks)[policy.data_rank]
    return {
        "missing": loading(model if rank else f"{model}/no"),
        "model": loading(other if rank else model),
        "config": loading(learning_rate=0.1 + rank),
        "sizes": loading(fsdp_size=own.fsdp_size + 8 * rank),
        "call": outcome(lambda: policy.train_step(shard) if rank else policy.logprobs(shard)),
    }


@pytest.fixture(scope="module")
def by_one_process(tiny_model) -> Callable[[str], dict[str, np.ndarray]]:
    @functools.cache
    def train(kind: str) -> dict[str, np.ndarray]:
        return trained(JaxPolicy.from_pretrained(tiny_model("qwen2"), CONFIGS[kind]), kind)

    return train


@pytest.mark.ci
@pytest.mark.parametrize(
    ("kind", "num_devices", "fsdp", "tp"),
    [
        pytest.param("simple", 1, 2, 1, marks=pytest.mark.nightly),  # in ci "full" has two data ranks
        ("simple", 1, 1, 2),
        ("full", 2, 2, 2),
    ],
)
def test_two_processes_are_one_policy(tiny_model, by_one_process, tmp_path, kind, num_devices, fsdp, tp) -> None:
    models = tiny_model("qwen2"), tiny_model("qwen2", initializer_range=0.1)
    run_processes(__file__, 2, tmp_path, *map(str, (kind, fsdp, tp, *models)), num_devices=num_devices)
    reports = [json.loads((tmp_path / f"{rank}.json").read_text()) for rank in range(2)]
    if kind == "simple":
        check_refusals(reports)
        check_ranks(reports)
    found = [dict(np.load(tmp_path / f"{rank}.npz")) for rank in range(2)]
    data_ranks = [int(one.pop("data_rank")) for one in found]
    assert data_ranks == ([0, 0] if tp > num_devices else [0, 1])
    wanted = dict(by_one_process(kind))
    if kind == "full":  # each has the logprobs of its own shard; one process has all
        np.testing.assert_allclose(sum(one.pop("logprobs") for one in found), wanted.pop("logprobs"), rtol=1e-5)
    assert found[0].keys() == found[1].keys() == wanted.keys()
    for name, value in wanted.items():
        one, other = (held[name] for held in found)
        together = np.where(np.isnan(one), other, one)
        # Of what both have, they have the same.
        np.testing.assert_array_equal(np.where(np.isnan(other), one, other), together, err_msg=name)
        assert np.linalg.norm(together - value) <= 1e-5 * np.linalg.norm(value), name


def check_refusals(reports: list[dict[str, str]]) -> None:
    first, second = reports
    assert "must be a directory" in first["missing"]
    assert second["missing"] == "ConfigError: another rank could not load policy.model; see that rank's error"
    assert first["sizes"] == "ConfigError: another rank could not make a mesh of its devices; see that rank's error"
    assert "must be the number of devices = 2, got" in second["sizes"]
    assert "within 1 s of each other, got no call of ranks [1]" in first["absent"]
    assert "within 1 s of each other, got that of rank 1 too late" in second["absent"]
    for said in reports:
        assert said["config"].startswith("ConfigError: all ranks must load one model with one config, got")
        assert "config.learning_rate 0.1 and 1.1; start all" in said["config"]
        assert "got weights with the checksum" in said["model"]
        assert said["call"].startswith("ValueError: the shards of a step must be of one batch")
        assert "got call 'current logprobs' and 'train_step'; take" in said["call"]


def mesh(process_at: list[list[int]]) -> SimpleNamespace:
    devices = np.array([[SimpleNamespace(process_index=one) for one in row] for row in process_at])
    return SimpleNamespace(devices=devices, shape={"fsdp": len(process_at), "tp": len(process_at[0])})


def test_processes_take_the_rows_that_they_have_devices_in() -> None:
    assert _rows_of_processes(mesh([[0], [0], [1], [1]])) == [range(2), range(2, 4)]
    assert _rows_of_processes(mesh([[0, 1], [2, 3]])) == [range(1), range(1), range(1, 2), range(1, 2)]
    with pytest.raises(ConfigError, match=r"must divide the devices of a process = 3, or be a multiple of them, got 2"):
        _rows_of_processes(mesh([[0, 0], [0, 1], [1, 1]]))
    with pytest.raises(ConfigError, match=r"as many devices as the others, got \[3, 1\]"):
        _rows_of_processes(mesh([[0, 0], [0, 1]]))


@pytest.mark.parametrize(
    ("given", "message"),
    [
        (("host:1", 2, 2), r"process_id must be in \[0, num_processes\), got 2 of 2; number them from 0"),
        (("host", 2, 0), "coordinator must be host:port, got 'host'; give an address"),
    ],
)
def test_processes_that_cannot_meet_are_refused(given, message) -> None:
    with pytest.raises(ConfigError, match=message):
        join(*given)


def test_one_process_has_nobody_to_meet() -> None:
    join("", 1, 0)


if __name__ == "__main__":
    process_main(work)
