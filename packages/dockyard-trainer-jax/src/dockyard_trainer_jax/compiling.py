"""Programs that are compiled once for each shape: counted, timed, and kept for the next process."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Hashable
from pathlib import Path
from typing import Any

import jax

_LOG = logging.getLogger(__name__)
_PROGRAMS: dict[Hashable, Any] = {}
"""Of the process, as JAX's own cache is: a second policy of the same model compiles nothing."""


class Compiler:
    """Compiles ahead of the call, so that nothing is compiled that is not counted here.

    Args:
        meet: returns when every process has compiled. Collectives of a running program wait for the others for half a
            minute only, and one may compile for much longer than another.
    """

    def __init__(self, meet: Callable[[], object]) -> None:
        self._meet = meet
        self.num_compiled = 0
        """Programs that did not exist in this process."""
        self.compile_s = 0.0
        """Seconds spent on them, tracing included."""

    def run(self, key: Hashable, lower: Callable[..., Any], *args: Any) -> Any:
        """Call the program of ``key``.

        Args:
            key: hashable; decides the function and every shape, dtype and placement of its arguments. A call with
                others raises TypeError or ValueError, instead of compiling anew.
            lower: ``lower`` of a jitted function.
            args: without static ones.
        """
        if key not in _PROGRAMS:
            start = time.perf_counter()
            _PROGRAMS[key] = lower(*args).compile()
            self.compile_s += time.perf_counter() - start
            self.num_compiled += 1
            self._meet()
        return _PROGRAMS[key](*args)


def keep_programs(directory: str | None) -> None:
    """Let JAX keep compiled programs in a folder, unless it has been told where, or ``directory`` is None."""
    if directory is None or jax.config.jax_compilation_cache_dir is not None:
        return
    try:
        folder = Path(directory).expanduser()
    except RuntimeError as error:  # a container's user may have no home
        _LOG.warning("compiled programs are not kept in %s: %s", directory, error)
        return
    jax.config.update("jax_compilation_cache_dir", str(folder))
