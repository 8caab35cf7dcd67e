"""Which bytes of a bucket are hashed, and how."""

from __future__ import annotations

from typing import TYPE_CHECKING

from dockyard_core.refit import RefitUpdate, bucket_digest

if TYPE_CHECKING:
    import torch

_PAGE_BYTES = 4096
_EVERY = 16
_WHOLE_BYTES = 1 << 20
"""Smaller buckets are hashed whole."""


def hashed_part(buffer: torch.Tensor, update: RefitUpdate, number: int) -> torch.Tensor:
    """What of bucket ``number`` its digest is of: all, or with sampled hashes one page of 16.

    Sampled are every 16th page, beginning with another one for each version, the first page, and the end
    that fills no page. So a fault that stays in place is found within 16 versions. A stale, cut, shifted
    or swapped bucket differs in nearly every page; a bit that flips once is found with a chance of 1 in 16.

    Args:
        buffer: uint8 [num_bytes], on any device; of a GPU's only the chosen pages are copied out.
        update: names the version and the kind of hash.
        number: of the bucket.
    """
    import torch

    if update.hashes == "full" or buffer.numel() <= _WHOLE_BYTES:
        return buffer
    num_pages = buffer.numel() // _PAGE_BYTES
    pages = buffer[: num_pages * _PAGE_BYTES].view(num_pages, _PAGE_BYTES)
    chosen = pages[(update.policy_version + number) % _EVERY :: _EVERY]
    return torch.cat([pages[0], chosen.reshape(-1), buffer[num_pages * _PAGE_BYTES :]])


def digest_of(buffer: torch.Tensor, num_bytes: int) -> bytes:
    """SHA-256 of the first ``num_bytes`` of a uint8 buffer on any device."""
    return bucket_digest(memoryview(buffer[:num_bytes].cpu().numpy()))
