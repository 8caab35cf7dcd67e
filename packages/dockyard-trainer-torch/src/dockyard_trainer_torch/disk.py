"""Writes tensors as safetensors, with errors of the disk as OSError."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

from torch import Tensor

from dockyard_core.directories import disk_error


def save_tensors(tensors: Mapping[str, Tensor], path: Path, metadata: Mapping[str, str] | None = None) -> None:
    """Write contiguous CPU tensors as safetensors, with text in the header.

    Raises OSError when the disk does not take them all, with the errno that the library puts in words only.
    """
    from safetensors import SafetensorError, safe_open
    from safetensors.torch import save_file

    try:
        save_file(dict(tensors), path, metadata={"format": "pt", **(metadata or {})})
        with safe_open(path, "pt"):  # compares the length with the header: a write cut short is found here
            pass
    except SafetensorError as error:
        raise disk_error(error, path) from error
