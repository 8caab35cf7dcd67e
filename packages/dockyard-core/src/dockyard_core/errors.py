"""One exception tree for every wheel.

DockyardError
+- UserError             the user's mistake: one clear line, exit code 2
|  +- ConfigError        a configuration value or combination is refused
|  +- DataError          a dataset row is refused (file, line, field)
+- SandboxError          the sandbox could not give a verdict
|  +- SandboxTimeout     the deadline passed without an answer
|  +- SandboxUnavailable the server cannot be reached or refuses work
|     +- SandboxBusy     it has too much to do: ask again later
+- GeneratorError        the inference engine failed
|  +- EngineDead         the engine's process is gone
|  +- EngineBusy         it has too much to do: ask again later
+- RefitError            an engine does not hold the promised policy version
|  +- RefitTimeout       a refit passed its deadline; names the late rank
|  +- RefitCalledOff     another rank could not take part
|  +- WeightMismatch     a tensor is unknown, missing, misshapen or corrupt
+- RunStalled            nothing is trained because everything is dropped
+- LedgerViolation       admitted = trained + dropped + alive does not hold (a fault of ours)
"""

from __future__ import annotations

from typing import Any


class DockyardError(Exception):
    """Base of every error that Dockyard raises on purpose."""


class UserError(DockyardError):
    """The user's mistake. The message has the rule, the value and the way out, on one line."""


class ConfigError(UserError):
    """A configuration key, value or combination is refused."""


class DataError(UserError):
    """A dataset row is refused; the message starts with ``file:line: field``."""


class SandboxError(DockyardError):
    """The sandbox could not give a verdict. Never becomes a reward."""


class SandboxTimeout(SandboxError):
    """The deadline passed without a verdict."""


class SandboxUnavailable(SandboxError):
    """The sandbox server cannot be reached, or refuses work for now."""


class SandboxBusy(SandboxUnavailable):
    """The sandbox server has too much to do."""

    def __init__(self, message: str, *, retry_after_s: float = 1.0) -> None:
        super().__init__(message)
        self.retry_after_s = retry_after_s


class GeneratorError(DockyardError):
    """The inference engine failed to generate or to score."""


class EngineDead(GeneratorError):
    """The engine's process is gone; nothing can be asked of it until it is restarted."""


class EngineBusy(GeneratorError):
    """The engine has too much to do; nothing of the request was begun."""

    def __init__(self, message: str, *, retry_after_s: float = 0.1) -> None:
        super().__init__(message)
        self.retry_after_s = retry_after_s


class RefitError(DockyardError):
    """An engine does not hold the promised policy version."""

    def __init__(self, message: str, *, wanted_version: int, held_version: int | None = None) -> None:
        super().__init__(f"{message} (wanted policy version {wanted_version}, holds {held_version})")
        self.wanted_version = wanted_version
        self.held_version = held_version
        self._message = message

    def __reduce__(self) -> tuple[Any, ...]:
        """Errors travel between processes; pickle alone would call ``__init__`` without the versions."""
        return (_refit_error, (type(self), self._message, self.wanted_version, self.held_version))


class RefitTimeout(RefitError):
    """A refit passed its deadline; the message names the rank that is late."""


class RefitCalledOff(RefitError):
    """Another rank could not take part, so nobody did: this engine is not to blame, and nothing has changed."""


class WeightMismatch(RefitError):
    """A tensor is unknown, missing, misshapen, of another dtype, or its bytes are corrupt."""


class RunStalled(DockyardError):
    """Group after group is dropped and none is trained: something is broken, not slow."""


class LedgerViolation(DockyardError):
    """The conservation law of the ledger is broken; the message names the ids."""


def _refit_error(kind: type[RefitError], message: str, wanted_version: int, held_version: int | None) -> RefitError:
    return kind(message, wanted_version=wanted_version, held_version=held_version)
