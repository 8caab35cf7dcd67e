"""The devices of a policy, and which share of a batch a process takes."""

from __future__ import annotations

from typing import TYPE_CHECKING

import jax

from dockyard_core.errors import ConfigError
from dockyard_trainer_jax.sharding import batch_sharding, make_mesh, sharding_of

if TYPE_CHECKING:
    from jax.sharding import Mesh, Sharding

    from dockyard_trainer_jax.config import JaxPolicyConfig


class Ranks:
    """One process with one device, or with a mesh of all of its devices.

    Raises ConfigError for sizes that are not the number of devices, and for several processes.
    """

    def __init__(self, config: JaxPolicyConfig) -> None:
        if jax.process_count() > 1:
            raise ConfigError(
                f"a JAX policy runs in one process, got {jax.process_count()}; start one with all devices of the host"
            )
        is_one_device = config.fsdp_size == config.tensor_parallel_size == 1
        self.mesh: Mesh | None = None if is_one_device else make_mesh(config.fsdp_size, config.tensor_parallel_size)
        self.rank = 0
        self.world_size = 1
        self.data_rank = 0
        self.data_size = 1
        """Into how many shards a batch is split: one for each process, which deals its rows to the devices."""
        self.num_row_blocks = config.fsdp_size

    @property
    def batch_sharding(self) -> Sharding:
        """Where the rows of a batch lie."""
        return sharding_of("", None) if self.mesh is None else batch_sharding(self.mesh)
