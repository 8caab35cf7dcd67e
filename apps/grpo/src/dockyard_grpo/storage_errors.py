"""What to call a file that could not be written."""

from __future__ import annotations

import errno


def reason_of(error: OSError) -> str:
    """One line that begins with the errno's name: ``ENOSPC: No space left on device``."""
    name = errno.errorcode.get(error.errno or 0, type(error).__name__)
    return f"{name}: {error.strerror or error}"
