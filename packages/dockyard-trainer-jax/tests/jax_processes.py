"""Runs a test file once per process of ``jax.distributed``, each with its own pretended devices."""

from __future__ import annotations

import os
import socket
import sys
from collections.abc import Callable, Sequence
from pathlib import Path

sys.path.append(str(Path(__file__).parents[3] / "tests"))  # also when a process runs a test file as a script

from rank_processes import run_ranks


def free_address() -> str:
    """A port of this host that nobody listens on."""
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        return f"127.0.0.1:{taken.getsockname()[1]}"


def run_processes(script: str, world_size: int, directory: Path, *args: str, num_devices: int = 1) -> None:
    """Let ``script`` call `process_main` in every process, and wait for all of them."""
    run_ranks(script, world_size, directory, free_address(), str(num_devices), *args)


def process_main(work: Callable[[int, Path, Sequence[str]], None], *, timeout_s: float = 120.0) -> None:
    """What a script that `run_processes` starts does under ``__main__``: meet, work, part.

    ``work`` is given the process, the directory and the arguments.
    """
    rank, world_size, directory, address, num_devices = sys.argv[1:6]
    # In time until a device is touched.
    os.environ["XLA_FLAGS"] = f"--xla_force_host_platform_device_count={num_devices}"
    from dockyard_trainer_jax.ranks import join, leave

    join(address, int(world_size), int(rank), timeout_s=timeout_s)
    work(int(rank), Path(directory), sys.argv[6:])
    leave()
