"""What a trainer wheel adds to offline training."""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import AbstractContextManager
from typing import Any, Protocol

from dockyard_core.optimizer_config import OptimizerConfig
from dockyard_core.policy import Policy


class OfflineSession(Protocol):
    """A policy that is ready to step, and this process's place among its ranks."""

    @property
    def policy(self) -> Policy:
        """At version 0, with the weights of the model."""
        ...

    @property
    def data_rank(self) -> int:
        """Which shard of a batch this process takes."""
        ...

    @property
    def num_data_ranks(self) -> int:
        """Number of shards."""
        ...

    def any(self, flag: bool) -> bool:
        """Whether the flag is set on any rank; equal on every rank, and waits for all of them."""
        ...


class OfflineBackend(Protocol):
    """One per process; nothing heavy is loaded before it is asked for."""

    @property
    def prog(self) -> str:
        """Name of the command."""
        ...

    @property
    def policy_config(self) -> type[OptimizerConfig]:
        """Closed configuration of the policy."""
        ...

    @property
    def free_policy_fields(self) -> frozenset[str]:
        """Fields that say where and how something is computed, not what: a run may go on with others."""
        ...

    def policy_defaults(self) -> Mapping[str, Any]:
        """Policy fields that depend on the machine, such as the device; the user's choice goes before."""
        ...

    @property
    def is_lead(self) -> bool:
        """Whether this process writes the files and talks; known before ranks have met."""
        ...

    def vocab_size(self, model: str) -> int:
        """Number of token ids of a model directory or id. Raises ConfigError when there is none."""
        ...

    def open(self, model: str, config: Any) -> AbstractContextManager[OfflineSession]:
        """Meet the other ranks and load the model."""
        ...
