"""The only file of the app that names concrete classes of the wheels.

Heavy packages are imported inside the functions: an actor pays for what it builds, no more.
"""

from __future__ import annotations

import os
import socket
import tempfile
from datetime import timedelta
from importlib import import_module, resources
from importlib.util import find_spec
from pathlib import Path
from typing import Any, cast

from dockyard_core import ConfigError, Policy, Sandbox, WeightChunk
from dockyard_core.optimizer_config import LoraConfig, OptimizerConfig
from dockyard_core.refit import TensorSpec
from dockyard_grpo.config import Config
from dockyard_grpo.seams import Engine, RankPolicy, SandboxServer, Sender

_BUNDLED = "quickstart:"
_TRAINER_DISTRIBUTIONS = {"torch": "dockyard-trainer-torch", "jax": "dockyard-grpo[jax]"}


def model_path(config: Config) -> str:
    """policy.model, with ``quickstart:policy`` resolved to the bundled policy."""
    assert config.policy.model is not None, "validated"
    return str(_resolve(config.policy.model, "policy.model"))


def data_path(value: str) -> Path:
    """data.train or data.validation, with ``quickstart:FILE`` resolved to the bundled file."""
    return Path(_resolve(value, "data"))


def build_policy(config: Config, *, rank: int, num_ranks: int, rendezvous: str) -> RankPolicy:
    """The trainable policy of `policy.backend`; with several ranks they meet at ``rendezvous``."""
    build = _build_jax_policy if config.policy.backend == "jax" else _build_torch_policy
    return build(config, rank=rank, num_ranks=num_ranks, rendezvous=rendezvous)


def _build_torch_policy(config: Config, *, rank: int, num_ranks: int, rendezvous: str) -> RankPolicy:
    from dockyard_trainer_torch import TorchPolicy, TorchPolicyConfig

    process_group = None
    if num_ranks > 1:
        from torch import distributed

        distributed.init_process_group(
            "nccl" if _torch_device() == "cuda" else "gloo",
            init_method=rendezvous,
            rank=rank,
            world_size=num_ranks,
            timeout=timedelta(seconds=config.policy.collective_timeout_s),
        )
        process_group = distributed.group.WORLD
    values = _values_for(TorchPolicyConfig, config) | {
        "num_threads": config.policy.num_threads or config.cluster.threads_per_worker,
        "device": _torch_device(),
    }
    return TorchPolicy.from_pretrained(model_path(config), TorchPolicyConfig(**values), process_group=process_group)


def _build_jax_policy(config: Config, *, rank: int, num_ranks: int, rendezvous: str) -> RankPolicy:
    import jax

    from dockyard_trainer_jax import JaxPolicy, JaxPolicyConfig
    from dockyard_trainer_jax.ranks import join

    join(rendezvous.removeprefix("tcp://"), num_ranks, rank, timeout_s=config.policy.collective_timeout_s)
    # Ray names the GPUs of an actor here, and none with an empty value.
    if os.environ.get("CUDA_VISIBLE_DEVICES") and jax.default_backend() == "cpu":
        raise ConfigError(
            "policy.backend=jax on a GPU needs JAX's build for it, got one for CPUs only; install jax[cuda13] or "
            "jax[cuda12] beside it, or set cluster.trainer_gpus=0"
        )
    values = _values_for(JaxPolicyConfig, config) | {"fsdp_size": None}
    return JaxPolicy.from_pretrained(model_path(config), JaxPolicyConfig(**values))


def _values_for(kind: type[OptimizerConfig], config: Config) -> dict[str, Any]:
    """What the backends have in common, and every key of the section that this one has too."""
    section = config.policy
    shared = {name: getattr(section, name) for name in kind.model_fields.keys() & type(section).model_fields.keys()}
    return shared | {
        "warmup_steps": min(section.warmup_steps, config.run.max_steps),
        "total_steps": config.run.max_steps,
        "loss": config.loss,
        "updates_per_batch": config.grpo.updates_per_batch,
        "lora": None if section.lora_rank is None else LoraConfig(rank=section.lora_rank, alpha=section.lora_alpha),
        "seed": config.run.seed,
    }


def weight_manifest(config: Config, policy: Policy) -> tuple[TensorSpec, ...]:
    """Names, dtypes and shapes of what the policy streams."""
    wheel = import_module(f"dockyard_trainer_{config.policy.backend}")
    return cast(tuple[TensorSpec, ...], wheel.weight_manifest(policy))


def process_metrics(config: Config, policy: Policy) -> dict[str, float]:
    """What the trainer's process has spent beside its steps, since it started."""
    if config.policy.backend == "torch":
        return {}
    from dockyard_trainer_jax import JaxPolicy

    assert isinstance(policy, JaxPolicy)
    return {"num_compiled": float(policy.num_compiled), "compile_s": policy.compile_s}


def check_trainer_installed(config: Config) -> None:
    """Raise ConfigError unless what ``policy.backend`` names is there; nothing of it is imported."""
    backend = config.policy.backend
    missing = [name for name in (f"dockyard_trainer_{backend}", backend) if find_spec(name) is None]
    if missing:
        raise ConfigError(
            f"policy.backend={backend} needs the module {missing[0]}, which is not installed; install "
            f"{_TRAINER_DISTRIBUTIONS[backend]}"
        )


def check_jax_model(config: Config, model: Path) -> None:
    """Raise ConfigError for a model that the JAX trainer would refuse when it loads; JAX is not imported."""
    from dockyard_trainer_jax.model_config import check_divides, read_config

    tp = config.policy.tensor_parallel_size
    check_divides(read_config(model), fsdp=config.num_trainer_devices // tp, tp=tp)


def build_sender(config: Config, num_engine_ranks: int) -> Sender:
    """The sending side of `refit.transport`, rank 0 of its group."""
    from dockyard_inference.sender import RefitSender

    section = config.refit
    return RefitSender(
        _own_address(config),
        0,
        num_engine_ranks + 1,
        device=_torch_device(),
        timeout_s=section.timeout_s,
        transport=section.transport,
        directory=section.directory,
        staging=section.staging,
    )


def null_sink(chunk: WeightChunk) -> None:
    """Ranks other than 0 gather with the others and send nothing."""


async def start_generator(config: Config, *, engine_index: int) -> Engine:
    """Start the engine of `generation.backend` in this process; one by import path gets the generic values."""
    from dockyard_inference import load_generator

    section = config.generation
    values: dict[str, Any] = {
        "model": model_path(config),
        "dtype": config.policy.dtype,
        "max_model_len": section.max_model_len,
        "max_num_seqs": section.max_num_seqs,
        "seed": config.run.seed * 1000 + engine_index,
    }
    if section.max_queued is not None:
        values["max_queued"] = section.max_queued
    if section.backend == "vllm":
        values |= {
            "kv_cache_gib": section.kv_cache_gib,
            "tensor_parallel_size": section.tensor_parallel_size,
            "pipeline_parallel_size": section.pipeline_parallel_size,
            "enforce_eager": section.enforce_eager,
            "num_threads": section.num_threads or config.cluster.threads_per_worker,
        }
    else:
        values["device"] = _torch_device()
    if section.backend == "sglang":
        values |= section.sglang.model_dump() | {
            "kv_cache_gib": section.kv_cache_gib,
            "num_threads": section.num_threads or config.cluster.threads_per_worker,
        }
    generator = cast(Engine, load_generator(section.backend, values))
    await generator.start()
    return generator


def build_sandbox_client(config: Config, url: str, token: str | None) -> Sandbox:
    """HTTP client of one server; ``token`` is the driver's to know: nodes need no copy of sandbox.token_file."""
    from dockyard_sandbox import SandboxClient

    return SandboxClient(url, token=token, timeout_s=config.sandbox.timeout_s, raises_busy=True)


def start_sandbox_server(config: Config, root: Path, token_file: Path, port: int = 0) -> SandboxServer:
    """A `dockyard-sandbox serve` process on this node, which the other nodes reach; port 0 = a free one."""
    from dockyard_sandbox import start_server

    return start_server(
        root,
        host=_own_address(config),
        port=port,
        workers=config.sandbox.num_workers,
        min_isolation=config.sandbox.min_isolation,
        token_file=token_file,
    )


def local_isolation(minimum: str | None) -> str:
    """The strongest isolation that this machine gives, found by a real run in it.

    Raises ConfigError below ``minimum``; None = anything but ``unsafe``.
    """
    from dockyard_sandbox.serve import find_jailer

    with tempfile.TemporaryDirectory(prefix="dockyard-probe-") as folder:
        Path(folder).chmod(0o755)  # a run may have a user of its own
        try:
            jailer = find_jailer(Path(folder), minimum)
        except ConfigError as error:
            raise ConfigError(f"sandbox.min_isolation: {error}; see: uv run apps/grpo doctor") from error
        jailer.close()
        return jailer.isolation.level


def isolation_levels() -> tuple[str, ...]:
    """Names of the sandbox's isolation levels, weakest first."""
    from dockyard_sandbox.isolation import LEVELS

    return LEVELS


def check_engine_installed(config: Config) -> None:
    """Raise ConfigError unless what ``generation.backend`` names is there.

    A known name is looked up without importing its engine; a ``package.module:Class`` is imported, so
    that its mistakes show now.
    """
    from dockyard_inference import BACKENDS
    from dockyard_inference.registry import find_engine_class

    backend = BACKENDS.get(config.generation.backend)
    if backend is None:
        find_engine_class(config.generation.backend)
        return
    if find_spec(backend.requires) is None:
        raise ConfigError(
            f"generation.backend={config.generation.backend} needs the module {backend.requires}, which is not "
            f"installed; install dockyard-inference{backend.extra}"
        )


def read_token(config: Config) -> str | None:
    """The bearer token of ``sandbox.token_file``. Raises ConfigError when there is none to read."""
    path = config.sandbox.token_file
    if path is None:
        return None
    try:
        token = path.expanduser().read_text(encoding="utf-8").strip()
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(
            f"sandbox.token_file must be a readable file, got {str(path)!r}: {error}; check the path"
        ) from error
    if not token:
        raise ConfigError(
            f"sandbox.token_file must hold the server's token, got an empty {str(path)!r}; write it there"
        )
    return token


def _resolve(value: str, key: str) -> str | Path:
    if not value.startswith(_BUNDLED):
        return value
    path = Path(str(resources.files("dockyard_grpo").joinpath("quickstart", value.removeprefix(_BUNDLED))))
    if not path.exists():
        raise ConfigError(f"{key} names no bundled file: {value!r}; bundled are quickstart:policy and the task files")
    return path


def free_address(config: Config) -> str:
    """``tcp://host:port`` of this node, with a port that was free a moment ago."""
    host = _own_address(config)
    with socket.socket() as probe:
        probe.bind((host, 0))
        return f"tcp://{host}:{probe.getsockname()[1]}"


def _own_address(config: Config) -> str:
    if config.cluster.address is None:
        return "127.0.0.1"
    import ray

    return str(ray.util.get_node_ip_address())


def _torch_device() -> str:
    import torch

    return "cuda" if torch.cuda.is_available() else "cpu"
