"""vLLM's exceptions, and the failures its workers report, as Dockyard's errors."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager

from dockyard_core.errors import EngineDead, GeneratorError, RefitCalledOff, RefitError, RefitTimeout, WeightMismatch

_KINDS: dict[str, type[RefitError]] = {
    kind.__name__: kind for kind in (WeightMismatch, RefitTimeout, RefitError, RefitCalledOff)
}
"""The most telling kind first: a rank that refused explains the ranks that were called off."""


def raise_failure(failures: Sequence[tuple[str, str] | None], wanted_version: int, held_version: int) -> None:
    """Raise what a worker reported as (error class, message), if any did."""
    for name, kind in _KINDS.items():
        for failure in failures:
            if failure is not None and failure[0] == name:
                raise kind(failure[1], wanted_version=wanted_version, held_version=held_version)


@contextmanager
def engine_errors() -> Iterator[None]:
    """Turn vLLM's exceptions into ours."""
    from vllm.exceptions import VLLMValidationError
    from vllm.v1.engine.exceptions import EngineDeadError, EngineGenerateError

    try:
        yield
    except EngineDeadError as error:
        raise EngineDead("vLLM's engine process is gone: restart the engine") from error
    except (EngineGenerateError, VLLMValidationError, ValueError) as error:
        raise GeneratorError(f"vLLM refused: {error}") from error
    except Exception as error:
        # A call that failed inside vLLM's process comes back as a bare Exception with its message.
        if type(error) is not Exception:
            raise
        raise GeneratorError(f"vLLM's process failed: {error}") from error
