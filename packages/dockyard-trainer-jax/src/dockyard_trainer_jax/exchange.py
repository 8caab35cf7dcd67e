"""What the processes of a policy tell each other on their hosts: rounds in which each says one thing and hears all.

Rounds go through the key-value store of ``jax.distributed``. Nothing is compiled for them and no device takes part, so
that a process that fails can still tell the others, and one that never comes ends the wait of the others.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import jax
from jax._src.distributed import global_state  # JAX has no public name for its store

DEFAULT_TIMEOUT_S = 600.0
_timeout_s = DEFAULT_TIMEOUT_S
"""Of the process, as the store is."""


def set_timeout(timeout_s: float) -> None:
    """How long rounds that begin from now on wait for a process."""
    global _timeout_s
    _timeout_s = timeout_s


class Exchange:
    """Rounds in one order, the same on every process; a process alone hears itself.

    Threads that run at the same time need one each, since their rounds have no common order.
    """

    def __init__(self, name: str) -> None:
        self._prefix = f"dockyard/{name}"
        self._num_rounds = 0
        self._broken: str | None = None
        self.rank: int = jax.process_index()
        self.world_size: int = jax.process_count()

    def gather(self, value: Any) -> list[Any]:
        """What every process said in this round, in the order of ranks (collective).

        Args:
            value: what ``json`` can write; tuples come back as lists.

        Raises RuntimeError on every process when one does not come in time; from then on at once.
        """
        if self.world_size == 1:
            return [json.loads(json.dumps(value))]
        if self._broken is not None:
            raise RuntimeError(self._broken)
        client = global_state.client
        assert client is not None
        here, before = (f"{self._prefix}/{number}" for number in (self._num_rounds, self._num_rounds - 1))
        self._num_rounds += 1
        client.key_value_set(f"{here}/{self.rank}", json.dumps(value))
        try:
            client.wait_at_barrier(here, int(_timeout_s * 1000))
        except jax.errors.JaxRuntimeError as error:
            self._broken = self._absence(here, error)
            raise RuntimeError(self._broken) from error
        said = {int(key.rpartition("/")[2]): text for key, text in client.key_value_dir_get(here)}
        if self._num_rounds > 1:  # whoever is in this round has heard the one before
            client.key_value_delete(f"{before}/{self.rank}")
        return [json.loads(said[rank]) for rank in range(self.world_size)]

    def _absence(self, here: str, error: jax.errors.JaxRuntimeError) -> str:
        assert global_state.client is not None
        present = {int(key.rpartition("/")[2]) for key, _ in global_state.client.key_value_dir_get(here)}
        absent = sorted(set(range(self.world_size)) - present)
        found = f"no call of ranks {absent}" if absent else f"that of rank {self.rank} too late"
        return (
            f"all {self.world_size} processes of a policy must make the same calls within {_timeout_s:g} s of each "
            f"other, got {found} ({str(error).splitlines()[0].partition('. ')[0]}); see what it waited for or died of, "
            "and start all again"
        )

    @contextmanager
    def together(self, elsewhere: Exception) -> Iterator[None]:
        """Run this process's own part of something; when it raises on any, every process raises (collective).

        Raises what the body raised on the process where it did, ``elsewhere`` on the others.
        """
        is_failed = True
        try:
            yield
            is_failed = False
        finally:
            is_failed_anywhere = any(self.gather(is_failed))
        if is_failed_anywhere:
            raise elsewhere
