"""Runs a test file once per rank, in processes of their own that meet over gloo."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable, Sequence
from datetime import timedelta
from pathlib import Path


def run_ranks(script: str, world_size: int, directory: Path, *args: str, timeout_s: float = 240.0) -> None:
    """Run ``script RANK WORLD_SIZE DIRECTORY ARGS...`` for every rank, and wait for all of them."""
    # Ranks of an earlier run are in it, and would be waited for.
    _store_path(directory, world_size).unlink(missing_ok=True)
    ranks = [
        subprocess.Popen(
            [sys.executable, script, str(rank), str(world_size), str(directory), *args],
            stdout=subprocess.DEVNULL,
            stderr=subprocess.PIPE,
            text=True,
        )
        for rank in range(world_size)
    ]
    try:
        errors = [process.communicate(timeout=timeout_s)[1] for process in ranks]
        failed = {rank: text for rank, text in enumerate(errors) if ranks[rank].returncode}
        # The rank that fails first leaves the others with a closed connection.
        assert not failed, "\n".join(f"rank {rank}:\n{text}" for rank, text in failed.items())
    finally:
        for process in ranks:
            process.kill()
            process.wait()


def _store_path(directory: Path, world_size: int) -> Path:
    return directory / f"store-{world_size}"


def rank_main(work: Callable[[int, int, Path, Sequence[str]], None]) -> None:
    """What a script that `run_ranks` starts does under ``__main__``: meet, work, leave."""
    import torch
    from torch import distributed

    rank, world_size, directory = int(sys.argv[1]), int(sys.argv[2]), Path(sys.argv[3])
    torch.set_num_threads(1)
    store = distributed.FileStore(str(_store_path(directory, world_size)), world_size)
    distributed.init_process_group(
        "gloo", store=store, rank=rank, world_size=world_size, timeout=timedelta(seconds=120)
    )
    try:
        work(rank, world_size, directory, sys.argv[4:])
    finally:
        distributed.destroy_process_group()
    # Everything is written and the group is gone. Now and then a thread of torch's aborts the interpreter's
    # own end ("terminate called without an active exception"), which says nothing about the ranks.
    os._exit(0)
