"""The processes and devices of a policy, and which share of a batch a process takes.

Every process runs the same programs in the same order on one mesh of all devices; what they must agree about first
goes through `exchange`.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from typing import TYPE_CHECKING, Any

import jax
import numpy as np

from dockyard_core.errors import ConfigError
from dockyard_trainer_jax import exchange
from dockyard_trainer_jax.exchange import DEFAULT_TIMEOUT_S, Exchange
from dockyard_trainer_jax.sharding import batch_sharding, make_mesh, sharding_of

if TYPE_CHECKING:
    from jax import Array
    from jax.sharding import Mesh, Sharding

    from dockyard_trainer_jax.config import JaxPolicyConfig
    from dockyard_trainer_jax.layout import PaddedBatch

_NUMBERS = itertools.count()
"""Policies of a process, numbered alike on all since all build them in one order."""


def join(
    coordinator: str,
    num_processes: int,
    process_id: int,
    *,
    timeout_s: float = DEFAULT_TIMEOUT_S,
    local_devices: Sequence[int] | None = None,
) -> None:
    """Meet the other processes of a policy; call it before any device is touched. One process alone has none to meet.

    Args:
        coordinator: ``host:port`` on which process 0 listens, and the others reach it.
        num_processes: how many there are.
        process_id: which one this is, from 0.
        timeout_s: how long a process waits for the others, here and in every call that all make.
        local_devices: which GPUs of its host this process takes; None = all that it sees.

    Raises ConfigError for numbers that make no sense, after a device was touched, and when not all come in time.
    """
    if not 0 <= process_id < num_processes:
        raise ConfigError(
            f"process_id must be in [0, num_processes), got {process_id} of {num_processes}; number them from 0"
        )
    if timeout_s <= 0:
        raise ConfigError(f"timeout_s must be > 0, got {timeout_s}; leave it out for {DEFAULT_TIMEOUT_S:g}")
    if num_processes == 1:
        return
    host, _, port = coordinator.rpartition(":")
    if not host or not port.isdecimal():
        raise ConfigError(f"coordinator must be host:port, got {coordinator!r}; give an address of process 0's host")
    exchange.set_timeout(timeout_s)
    jax.config.update("jax_cpu_collectives_implementation", "gloo")
    jax.config.update("jax_enable_preemption_service", False)  # it would take the program's SIGTERM
    try:
        jax.distributed.initialize(
            coordinator,
            num_processes,
            process_id,
            local_device_ids=local_devices,
            cluster_detection_method="deactivate",
            initialization_timeout=max(int(timeout_s), 1),
            shutdown_timeout_seconds=max(int(timeout_s), 1),
        )
    except RuntimeError as error:  # JAX's own has this class too
        raise ConfigError(
            f"{num_processes} processes must meet at {coordinator} within {timeout_s:g} s, before a device is "
            f"touched, got in process {process_id}: {str(error).splitlines()[0]}; start all with one address, that of "
            "process 0's host"
        ) from error


def leave() -> None:
    """Part from the other processes, when all have done their work; nothing where `join` had nothing to do."""
    jax.distributed.shutdown()


class Ranks:
    """One process with one device, or all processes with a mesh of all their devices.

    A process takes a shard of a batch for the rows of the mesh that it has devices in; processes that have devices in
    the same row share its layers, and take the same shard.

    Raises ConfigError on every process for sizes that are not the number of devices, or do not fit the processes.
    """

    def __init__(self, config: JaxPolicyConfig) -> None:
        self._exchange = Exchange(f"policy-{next(_NUMBERS)}")
        self.rank = self._exchange.rank
        self.world_size = self._exchange.world_size
        """Processes."""
        tp = config.tensor_parallel_size
        fsdp = config.fsdp_size if config.fsdp_size is not None else max(jax.device_count() // tp, 1)
        is_one_device = self.world_size == fsdp == tp == 1
        elsewhere = ConfigError("another rank could not make a mesh of its devices; see that rank's error")
        with self.together(elsewhere):
            self.mesh: Mesh | None = None if is_one_device else make_mesh(fsdp, tp)
            rows_of = [range(1)] if self.mesh is None else _rows_of_processes(self.mesh)
        shares = sorted(set(rows_of), key=lambda rows: rows.start)
        self.data_rank_of = [shares.index(rows) for rows in rows_of]
        """Which shard of a batch each process takes."""
        self.data_rank = self.data_rank_of[self.rank]
        self.data_size = len(shares)
        """Into how many shards a batch is split; a process deals the rows of its own to its devices."""
        own = shares[self.data_rank]
        self.num_row_blocks = len(own)
        """Into how many blocks a process deals its rows."""
        self.first_block = own.start

    @property
    def batch_sharding(self) -> Sharding:
        """Where the rows of a batch lie."""
        return sharding_of("", None) if self.mesh is None else batch_sharding(self.mesh)

    def gather(self, value: Any) -> list[Any]:
        """What every process gives, in the order of ranks (collective); see `Exchange.gather`."""
        return self._exchange.gather(value)

    def together(self, elsewhere: Exception) -> AbstractContextManager[None]:
        """When the body raises on any process, every process raises (collective); see `Exchange.together`."""
        return self._exchange.together(elsewhere)

    def difference(self, facts: Mapping[str, Any], part: Mapping[str, Any]) -> str | None:
        """What the ranks do not agree about, in words; None = they agree. Equal on every rank (collective).

        Args:
            facts: to be the same on every rank.
            part: to be the same on the ranks that take the same shard.
        """
        told = self.gather([facts, part])
        shared = [said[0] for said in told]
        parts: dict[int, list[Mapping[str, Any]]] = {}
        for data_rank, said in zip(self.data_rank_of, told, strict=True):
            parts.setdefault(data_rank, []).append(said[1])
        found = [*_differences(shared), *(words for given in parts.values() for words in _differences(given))]
        return "; ".join(found) or None

    def placed(self, batch: PaddedBatch) -> PaddedBatch:
        """This process's rows as its part of a batch over all devices."""
        placed: PaddedBatch = (
            jax.device_put(batch, self.batch_sharding) if self.world_size == 1 else jax.tree.map(self._placed, batch)
        )
        return placed

    def _placed(self, rows: np.ndarray) -> Array:
        per_block = len(rows) // self.num_row_blocks
        start = self.first_block * per_block
        assert self.mesh is not None
        shape = (per_block * self.mesh.shape["fsdp"], *rows.shape[1:])

        def block(index: tuple[slice, ...]) -> np.ndarray:
            first, stop, _ = index[0].indices(shape[0])
            return rows[first - start : stop - start]

        return jax.make_array_from_callback(shape, self.batch_sharding, block)

    def own_rows(self, array: Array) -> np.ndarray:
        """This process's part of an array whose rows lie as those of a batch."""
        if self.world_size == 1:
            return np.asarray(array)
        blocks = {shard.index[0].indices(len(array))[0]: shard.data for shard in array.addressable_shards}
        return np.concatenate([np.asarray(blocks[start]) for start in sorted(blocks)])


def _differences(said: Sequence[Mapping[str, Any]]) -> Iterator[str]:
    """The names under which not all say the same, each with what is said."""
    for name in said[0]:
        values = [one[name] for one in said]
        distinct = [value for index, value in enumerate(values) if value not in values[:index]]
        if len(distinct) > 1:
            yield f"{name} {' and '.join(map(repr, distinct))}"


def _rows_of_processes(mesh: Mesh) -> list[range]:
    """Rows of the mesh, along ``fsdp``, in which each process has devices.

    Raises ConfigError unless each process has as many devices, in rows that it has whole or shares with others alike.
    """
    process_at = np.vectorize(lambda device: device.process_index)(mesh.devices)
    counts = np.bincount(process_at.reshape(-1)).tolist()
    if len(set(counts)) > 1:
        raise ConfigError(
            f"every process must have as many devices as the others, got {counts}; give each the same number"
        )
    if counts[0] % mesh.shape["tp"] and mesh.shape["tp"] % counts[0]:
        raise ConfigError(
            f"tensor_parallel_size must divide the devices of a process = {counts[0]}, or be a multiple of them, got "
            f"{mesh.shape['tp']}; change one of them"
        )
    rows_of = [np.flatnonzero((process_at == rank).any(axis=1)) for rank in range(len(counts))]
    ranges = [range(int(rows[0]), int(rows[-1]) + 1) for rows in rows_of]
    assert all(len(rows) == len(held) for rows, held in zip(ranges, rows_of, strict=True)), "devices are out of order"
    return ranges
