"""The command ``dockyard-train-jax``: sft and grpo on rows of a file, in one process or in several that meet."""

from __future__ import annotations

import atexit
import os
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from threading import Thread
from typing import TYPE_CHECKING

from dockyard_core.errors import ConfigError, UserError
from dockyard_core.hub import resolve_model_dir
from dockyard_core.offline import run_command
from dockyard_trainer_jax.config import JaxPolicyConfig
from dockyard_trainer_jax.model_config import read_config

if TYPE_CHECKING:
    from dockyard_trainer_jax.policy import JaxPolicy

_COORDINATOR, _NUM_PROCESSES, _PROCESS_ID = "JAX_COORDINATOR_ADDRESS", "JAX_NUM_PROCESSES", "JAX_PROCESS_ID"
_PARTING_S = 5.0
"""How long a process that is refused something waits for others that are."""


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command and return its exit code."""
    code = run_command(argv, JaxBackend())
    if code and _COORDINATOR in os.environ:
        # JAX would wait at its end for the other processes, which may not come.
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)
    return code


@dataclass(frozen=True, kw_only=True, slots=True)
class Place:
    """One of several processes, and where they meet."""

    coordinator: str
    """host:port; process 0 listens there."""
    num_processes: int
    process_id: int

    @classmethod
    def of(cls, environment: Mapping[str, str]) -> Place | None:
        """What three variables say; None for a process alone.

        Raises ConfigError where one of them is missing or no number.
        """
        given = {name: environment[name] for name in (_COORDINATOR, _NUM_PROCESSES, _PROCESS_ID) if name in environment}
        if not given:
            return None
        try:
            return cls(
                coordinator=given[_COORDINATOR],
                num_processes=int(given[_NUM_PROCESSES]),
                process_id=int(given[_PROCESS_ID]),
            )
        except (KeyError, ValueError):
            said = " ".join(f"{name}={value}" for name, value in given.items())
            raise ConfigError(
                f"several processes need {_COORDINATOR}=HOST:PORT, {_NUM_PROCESSES}=N and {_PROCESS_ID}=0..N-1, got "
                f"{said}; set all three, or none for a process alone"
            ) from None


@dataclass(frozen=True)
class JaxSession:
    """A policy on the devices of this process, or its share of a policy on those of several."""

    policy: JaxPolicy

    @property
    def data_rank(self) -> int:
        """Which shard of a batch this process takes."""
        return self.policy.data_rank

    @property
    def num_data_ranks(self) -> int:
        """Number of shards."""
        return self.policy.num_data_ranks

    def any(self, flag: bool) -> bool:
        """Whether the flag is set in any process."""
        return any(self.policy.ranks.gather(flag))


class JaxBackend:
    """Implements ``dockyard_core.offline.OfflineBackend``; JAX is loaded with the model."""

    prog = "dockyard-train-jax"
    policy_config = JaxPolicyConfig
    free_policy_fields = frozenset(
        {
            "activation_checkpointing",
            "compilation_cache_dir",
            "fsdp_size",
            "logprob_chunk_tokens",
            "row_length_buckets",
            "tensor_parallel_size",
        }
    )

    @property
    def is_lead(self) -> bool:
        """Process 0, or the only one."""
        return os.environ.get(_PROCESS_ID, "0") == "0"

    def vocab_size(self, model: str) -> int:
        """Of the model's config.json. Raises ConfigError when there is none."""
        return read_config(resolve_model_dir(model)).vocab_size

    def policy_defaults(self) -> dict[str, None]:
        """All devices there are."""
        return {"fsdp_size": None}

    @contextmanager
    def open(self, model: str, config: JaxPolicyConfig) -> Iterator[JaxSession]:
        """Meet the other processes, if the environment names some, and load the model."""
        place = Place.of(os.environ)
        from dockyard_trainer_jax.policy import JaxPolicy
        from dockyard_trainer_jax.ranks import join, leave

        if place is not None:
            join(place.coordinator, place.num_processes, place.process_id)
            atexit.register(os._exit, 1)  # after a fault of ours, JAX would wait at its end for the others
        try:
            yield JaxSession(JaxPolicy.from_pretrained(model, config))
        except UserError:
            # Most refusals reach all processes, and JAX aborts those that have not left when process 0 is gone.
            parting = Thread(target=leave, daemon=True)
            parting.start()
            parting.join(_PARTING_S)
            raise
        leave()
        atexit.unregister(os._exit)
