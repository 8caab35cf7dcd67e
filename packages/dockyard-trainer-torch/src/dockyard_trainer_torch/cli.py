"""The command ``dockyard-train-torch``: sft and grpo on rows of a file, on one process or under torchrun."""

from __future__ import annotations

import os
import re
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING

from dockyard_core.errors import ConfigError
from dockyard_core.hub import resolve_model_dir
from dockyard_core.offline import run_command
from dockyard_trainer_torch.config import TorchPolicyConfig

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup

    from dockyard_trainer_torch.policy import TorchPolicy


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command and return its exit code."""
    code = run_command(argv, TorchBackend())
    if _world_size() > 1:
        # The ranks are through and the files written. Now and then a thread of torch's process group aborts
        # the interpreter's own end, which torchrun would report as a failed run.
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)
    return code


@dataclass(frozen=True)
class TorchSession:
    """A policy on this process."""

    policy: TorchPolicy

    @property
    def data_rank(self) -> int:
        """Which shard of a batch this process takes."""
        return self.policy.data_rank

    @property
    def num_data_ranks(self) -> int:
        """Number of shards."""
        return self.policy.num_data_ranks

    def any(self, flag: bool) -> bool:
        """Whether the flag is set on any rank."""
        return self.policy.ranks.any(flag)


class TorchBackend:
    """Implements ``dockyard_core.offline.OfflineBackend``; torch is loaded with the model."""

    prog = "dockyard-train-torch"
    policy_config = TorchPolicyConfig
    free_policy_fields = frozenset(
        {
            "activation_checkpointing",
            "cpu_offload",
            "device",
            "logprob_chunk_tokens",
            "num_threads",
            "optimizer_offload",
            "reduce_every_micro_batch",
            "reference_offload",
            "share_prefixes",
            "tensor_parallel_size",
        }
    )

    @property
    def is_lead(self) -> bool:
        """Rank 0 of torchrun, or the only process."""
        return int(os.environ.get("RANK", "0")) == 0

    def vocab_size(self, model: str) -> int:
        """Of the model's config.json. Raises ConfigError when there is none."""
        from dockyard_trainer_torch.model import read_config_json

        directory = resolve_model_dir(model)
        size = read_config_json(directory).get("vocab_size")
        if not isinstance(size, int):
            raise ConfigError(
                f"--model must have a config.json with vocab_size, got {str(directory)!r}; "
                "point it at a saved Hugging Face model"
            )
        return size

    def policy_defaults(self) -> dict[str, str]:
        """This process's GPU, if there is one."""
        import torch

        return {"device": f"cuda:{os.environ.get('LOCAL_RANK', '0')}"} if torch.cuda.is_available() else {}

    @contextmanager
    def open(self, model: str, config: TorchPolicyConfig) -> Iterator[TorchSession]:
        """Meet the other ranks, if torchrun started some, and load the model."""
        from dockyard_trainer_torch.policy import TorchPolicy

        with _process_group(config.device) as group:
            yield TorchSession(TorchPolicy.from_pretrained(model, config, process_group=group))


def _world_size() -> int:
    return int(os.environ.get("WORLD_SIZE", "1"))


@contextmanager
def _process_group(device: str) -> Iterator[ProcessGroup | None]:
    """The group of all ranks that torchrun started; None for a process alone."""
    import torch
    from torch import distributed

    is_cuda = device != "cpu"
    if is_cuda:
        torch.cuda.set_device(_gpu_index(device))
    if _world_size() == 1:
        yield None
        return
    distributed.init_process_group("nccl" if is_cuda else "gloo")
    try:
        yield distributed.group.WORLD
    finally:
        distributed.destroy_process_group()


def _gpu_index(device: str) -> int:
    """Of ``cuda:N``, or this process's own for ``cuda``. Raises ConfigError for what this machine does not have."""
    import torch

    matched = re.fullmatch(r"cuda(?::(\d+))?", device)
    if matched is None:
        raise ConfigError(f"--device must be cpu, cuda or cuda:N, got {device!r}; leave it out to choose")
    index = int(matched[1] or os.environ.get("LOCAL_RANK", "0"))
    count = torch.cuda.device_count()
    if index >= count:
        raise ConfigError(
            f"--device must name a GPU that torch sees, got {device!r} (number {index}) of {count}; use --device cpu, "
            "or one process per GPU"
        )
    return index
