"""The server's side of a run whose jail does not do its part."""

from __future__ import annotations

import os
import threading
import time

import pytest

from dockyard_sandbox import jailer
from dockyard_sandbox.cancellation import Cancellation


@pytest.mark.parametrize("obeys", [True, False])
def test_a_supervisor_that_hangs_costs_a_bounded_time(obeys: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its pipes stay open past every deadline; letting go of the control pipe ends it, or does not."""
    monkeypatch.setattr(jailer, "_SETUP_S", 0.2)
    monkeypatch.setattr(jailer, "_STOP_S", 0.2)
    pipes = [os.pipe() for _ in range(3)]
    control_read, control_write = os.pipe()
    cancellation = Cancellation()
    cancellation.attach(control_write)

    def supervisor() -> None:
        os.read(control_read, 1)  # returns when the server lets go
        if obeys:
            for _, write in pipes:
                os.close(write)

    thread = threading.Thread(target=supervisor)
    thread.start()
    began = time.monotonic()
    result = jailer._pump([read for read, _ in pipes], cancellation, 1024, 0.2)
    thread.join()
    assert result.end == "launcher_died"
    assert 0.3 < time.monotonic() - began < 30
    for fd in (control_read, *(read for read, _ in pipes), *(() if obeys else (write for _, write in pipes))):
        os.close(fd)
