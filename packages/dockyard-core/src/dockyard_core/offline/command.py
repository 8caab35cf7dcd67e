"""The command of a trainer wheel, from its arguments to its exit code."""

from __future__ import annotations

import sys
import time
from collections.abc import Sequence

from dockyard_core.errors import UserError
from dockyard_core.offline.backend import OfflineBackend
from dockyard_core.offline.loop import train_offline
from dockyard_core.offline.options import parse_options

_LEAD_SPEAKS_FIRST_S = 5.0


def run_command(arguments: Sequence[str] | None, backend: OfflineBackend) -> int:
    """Train; a mistake of the user is one line on standard error and exit code 2.

    Args:
        arguments: the command line; None = that of the process.
        backend: the trainer wheel.
    """
    try:
        options = parse_options(arguments, prog=backend.prog, policy_config=backend.policy_config)
        return train_offline(options, backend, sys.stderr)
    except UserError as error:
        if not backend.is_lead:
            # Usually the lead refuses the same. A launcher ends all ranks when the first one exits, so it must not be
            # this one, or nobody has said why. What only this rank refuses, it says itself.
            time.sleep(_LEAD_SPEAKS_FIRST_S)
        _say(backend, " ".join(str(error).split()))
        return 2
    except KeyboardInterrupt:
        if backend.is_lead:
            _say(backend, "stopped at once; run the same command again to go on after the last checkpoint")
        return 130


def _say(backend: OfflineBackend, text: str) -> None:
    sys.stderr.write(f"{backend.prog}: {text}\n")
