"""policy.backend=jax, short of a run: which keys it takes, and what a trainer's process has from its start."""

from __future__ import annotations

import json
import os
import subprocess
import sys

import pytest

from dockyard_core import ConfigError
from dockyard_grpo import compose
from dockyard_grpo.cluster import plan_fleets
from dockyard_grpo.config import load_config
from dockyard_grpo.config.sections import PolicySection
from dockyard_trainer_jax import JaxPolicyConfig
from dockyard_trainer_torch import TorchPolicyConfig

JAX = "policy.backend=jax"
# One multiplication that is worth several threads, and what computes in this process afterwards.
PROGRAM = """
import json, pathlib
import jax, jax.numpy as jnp
jax.block_until_ready(jax.jit(lambda x: x @ x)(jnp.ones((512, 512))))
names = [(task / "comm").read_text().strip() for task in pathlib.Path("/proc/self/task").iterdir()]
print(json.dumps([names.count("tf_XLAEigen"), jax.device_count(), jax.default_backend()]))
"""
WITHOUT_A_GPU = """
from dockyard_core import ConfigError
from dockyard_core import ConfigError
from dockyard_grpo import compose
from dockyard_grpo.config import load_config
try:
    compose.build_policy(load_config(None, ["policy.backend=jax"]), rank=0, num_ranks=1, rendezvous="tcp://h:1")
except ConfigError as error:
    print(error)
"""


def run(program: str, environment: dict[str, str]) -> str:
    """What the program prints in a process of its own."""
    inherited = {name: value for name, value in os.environ.items() if not name.startswith(("XLA_", "JAX_"))}
    done = subprocess.run(
        [sys.executable, "-c", program], env=inherited | environment, capture_output=True, text=True, check=True
    )
    return done.stdout


def test_a_key_is_refused_by_the_backend_that_does_not_know_it() -> None:
    torch, jax = TorchPolicyConfig.model_fields.keys(), JaxPolicyConfig.model_fields.keys()
    only_torch = PolicySection.model_fields.keys() & (torch - jax) - {"num_threads"}
    refused = set()
    for name, field in PolicySection.model_fields.items():
        if field.annotation is bool:
            try:
                load_config(None, [JAX, f"policy.{name}=true", "policy.num_ranks=2"])
            except ConfigError:
                refused.add(name)
    assert refused == only_torch
    assert PolicySection.model_fields.keys() & (jax - torch) == {"row_length_buckets"}


def test_the_jax_policy_gets_every_value_that_the_torch_policy_gets() -> None:
    words = ["run.max_steps=7", "loss.kl_coef=0.1", "policy.lora_rank=4", "policy.activation_checkpointing=true"]
    torch = TorchPolicyConfig(**compose._values_for(TorchPolicyConfig, load_config(None, words)))
    jax = JaxPolicyConfig(
        **compose._values_for(JaxPolicyConfig, load_config(None, [*words, JAX, "policy.row_length_buckets=[64,256]"]))
    )
    shared = TorchPolicyConfig.model_fields.keys() & JaxPolicyConfig.model_fields.keys()
    assert {name: getattr(jax, name) for name in shared} == {name: getattr(torch, name) for name in shared}
    assert jax.total_steps == 7
    assert jax.lora is not None
    assert jax.row_length_buckets == (64, 256)


def test_layers_are_shared_by_the_gpus_of_a_rank_and_adapters_may_be_there() -> None:
    words = [JAX, "policy.lora_rank=4", "policy.tensor_parallel_size=4", "policy.num_ranks=2"]
    config = load_config(None, [*words, "cluster.trainer_gpus=4"])
    assert config.num_trainer_devices == 8
    for refused in (words, [*words[1:], "policy.backend=torch", "cluster.trainer_gpus=4"]):
        with pytest.raises(ConfigError, match=r"policy\.tensor_parallel_size"):
            load_config(None, refused)


def test_a_trainer_on_a_gpu_takes_its_memory_as_it_needs_it(monkeypatch: pytest.MonkeyPatch) -> None:
    config = load_config(None, [JAX, "cluster.trainer_gpus=1"])
    monkeypatch.delenv("XLA_PYTHON_CLIENT_PREALLOCATE", raising=False)
    trainer, *others = plan_fleets(config, num_gpus=1)
    assert trainer.environment["XLA_PYTHON_CLIENT_PREALLOCATE"] == "false"
    assert "JAX_PLATFORMS" not in trainer.environment
    assert [dict(fleet.environment) for fleet in others] == [{}, {}]
    monkeypatch.setenv("XLA_PYTHON_CLIENT_PREALLOCATE", "true")
    assert plan_fleets(config, num_gpus=1)[0].environment["XLA_PYTHON_CLIENT_PREALLOCATE"] == "true"
    assert plan_fleets(load_config(None, []), num_gpus=0)[0].environment == {}


@pytest.mark.ci
def test_a_trainer_on_the_cpu_is_one_device_with_the_threads_that_it_may_use() -> None:
    trainer, *_ = plan_fleets(load_config(None, [JAX, "policy.num_threads=3"]), num_gpus=0)
    # What a driver has set for itself is inherited, and does not count.
    driver = {"XLA_FLAGS": "--xla_force_host_platform_device_count=8"}
    assert json.loads(run(PROGRAM, driver | dict(trainer.environment))) == [3, 1, "cpu"]


@pytest.mark.ci
def test_a_gpu_that_jax_cannot_use_is_refused_in_one_line() -> None:
    line = run(WITHOUT_A_GPU, {"JAX_PLATFORMS": "cpu", "CUDA_VISIBLE_DEVICES": "0"})
    assert line.count("\n") == 1
    assert "needs JAX's build for it, got one for CPUs only; install jax[cuda13]" in line
