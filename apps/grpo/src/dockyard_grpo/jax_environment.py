"""Environment variables of a process that runs JAX: it reads them once, when it meets its devices."""

from __future__ import annotations

import os


def jax_environment(*, num_threads: int, num_gpus: int) -> dict[str, str]:
    """Variables of a trainer rank. Where the driver has one of the GPU's set, that value counts.

    Args:
        num_threads: threads that compute on the CPU.
        num_gpus: of the rank; 0 = it stays on the CPU, as one device.
    """
    # XLA's CPU client has as many threads as there are cores, but for this variable.
    threads = {"NPROC": str(num_threads)}
    if num_gpus == 0:
        return threads | {"JAX_PLATFORMS": "cpu", "JAX_NUM_CPU_DEVICES": "1"}
    # By default JAX takes three quarters of a GPU at its start. The refit's sender has buffers there too, and
    # perhaps an engine.
    name = "XLA_PYTHON_CLIENT_PREALLOCATE"
    return threads | {name: os.environ.get(name, "false")}
