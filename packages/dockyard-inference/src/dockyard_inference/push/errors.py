"""
PushError                 the weights were not pushed; carries the command's exit code
+- CheckpointError     2  the directory is no checkpoint that can be pushed
+- Unreachable         3  nothing answers there
+- Unsuitable          4  something answers that cannot take weights as it was started
+- NamesDiffer         5  the checkpoint's tensors are not those of the served model
+- PushTimeout         6  the deadline passed
+- TransferFailed      7  the server refused or failed when it had begun to take weights
"""

from __future__ import annotations

from dockyard_core.errors import DockyardError


class PushError(DockyardError):
    """The weights were not pushed. The message is one line and says what to do."""

    exit_code = 1


class CheckpointError(PushError):
    """The directory is no checkpoint that can be pushed."""

    exit_code = 2


class Unreachable(PushError):
    """Nothing answers at the address."""

    exit_code = 3


class Unsuitable(PushError):
    """What answers is no server for this, or was not started so that it can take weights."""

    exit_code = 4


class NamesDiffer(PushError):
    """The checkpoint's tensors are not those of the served model; nothing was changed."""

    exit_code = 5


class PushTimeout(PushError):
    """The deadline passed."""

    exit_code = 6


class TransferFailed(PushError):
    """The server refused or failed when it had begun to take weights."""

    exit_code = 7
