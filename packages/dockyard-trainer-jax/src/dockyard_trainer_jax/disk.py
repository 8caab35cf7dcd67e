"""Writes arrays as safetensors, with errors of the disk as OSError."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import numpy as np
from safetensors import SafetensorError, safe_open
from safetensors.numpy import save_file

from dockyard_core.directories import disk_error


def save_tensors(tensors: Mapping[str, np.ndarray], path: Path, metadata: Mapping[str, str] | None = None) -> None:
    """Write arrays as safetensors, with text in the header.

    Raises OSError when the disk does not take them all, with the errno that the library puts in words only.
    """
    contiguous = {name: np.ascontiguousarray(array) for name, array in tensors.items()}
    try:
        # Other readers look for this word before they read anything else.
        save_file(contiguous, path, metadata={"format": "pt", **(metadata or {})})
        with safe_open(path, "np"):  # compares the length with the header: a write cut short is found here
            pass
    except SafetensorError as error:
        raise disk_error(error, path) from error
