"""Binds an engine's processes to the process that owns them.

A process that dies by a signal cannot tell its children; they would be re-parented and keep their
memory and their devices. So every engine worker watches its owner instead.
"""

from __future__ import annotations

import os
import select
import signal
import threading


def die_with(owner_pid: int) -> None:
    """Kill this process, without cleaning up, as soon as ``owner_pid`` is gone.

    A watch, not ``PR_SET_PDEATHSIG``: that fires when the *thread* which forked exits.
    """
    try:
        owner = os.pidfd_open(owner_pid)
    except ProcessLookupError:
        os.kill(os.getpid(), signal.SIGKILL)
        return
    threading.Thread(target=_watch, args=(owner,), name="dockyard-owner-watch", daemon=True).start()


def _watch(owner: int) -> None:
    poll = select.poll()
    poll.register(owner, select.POLLIN)
    poll.poll()
    os.kill(os.getpid(), signal.SIGKILL)
