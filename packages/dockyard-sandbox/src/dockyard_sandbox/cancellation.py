"""Lets one thread stop what another is waiting for."""

from __future__ import annotations

import os
import threading
from collections.abc import Callable


class Cancellation:
    """Lets another thread stop a run; safe to call at any time, and more than once."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._control: int | None = None
        self._stop: Callable[[], None] | None = None
        self.is_cancelled = False

    def cancel(self) -> None:
        """Stop the run, now or as soon as it starts."""
        with self._lock:
            self.is_cancelled = True
            self._close()
            if self._stop is not None:
                self._stop()

    def stop_with(self, stop: Callable[[], None] | None) -> None:
        """Call ``stop`` on cancellation, at once if that has been; None = what it stops has ended."""
        with self._lock:
            self._stop = stop
            if stop is not None and self.is_cancelled:
                stop()

    def attach(self, control: int) -> None:
        """Own the write end of a run's control pipe."""
        with self._lock:
            self._control = control
            if self.is_cancelled:
                self._close()

    def release(self) -> None:
        """Close the control pipe of a finished run."""
        with self._lock:
            self._close()

    def _close(self) -> None:
        if self._control is not None:
            os.close(self._control)
            self._control = None
