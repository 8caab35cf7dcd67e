"""Which bytes a digest is of."""

from __future__ import annotations

import hashlib
from dataclasses import replace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from dockyard_core.refit import RefitUpdate
from dockyard_inference.refit.hashing import digest_of, hashed_part

PAGE = 4096
FULL = RefitUpdate(policy_version=1, manifest=())
SAMPLED = replace(FULL, hashes="sampled")


def bucket(num_bytes: int, seed: int = 0) -> torch.Tensor:
    return torch.randint(0, 256, (num_bytes,), dtype=torch.uint8, generator=torch.Generator().manual_seed(seed))


def digest(buffer: torch.Tensor, update: RefitUpdate = SAMPLED, number: int = 0) -> bytes:
    part = hashed_part(buffer, update, number)
    return digest_of(part, part.numel())


def test_a_full_digest_is_that_of_all_bytes() -> None:
    buffer = bucket(100 * PAGE + 7)
    assert digest(buffer, FULL) == hashlib.sha256(buffer.numpy().tobytes()).digest()


@given(num_bytes=st.integers(0, 900 * PAGE), version=st.integers(0, 40), number=st.integers(0, 9))
@settings(max_examples=60, deadline=None)
def test_a_sample_is_the_first_page_every_sixteenth_and_the_end(num_bytes: int, version: int, number: int) -> None:
    buffer = (torch.arange(num_bytes) // PAGE).to(torch.int16)  # every element is the number of its page
    part = hashed_part(buffer, replace(SAMPLED, policy_version=version), number)
    if num_bytes <= 1 << 20:
        assert part.numel() == num_bytes
        return
    num_pages, rest = divmod(num_bytes, PAGE)
    wanted = [0, *range((version + number) % 16, num_pages, 16)]
    assert part[: part.numel() - rest].view(-1, PAGE).unique(dim=1).flatten().tolist() == wanted
    assert part[part.numel() - rest :].tolist() == [num_pages] * rest


def test_sixteen_versions_in_a_row_see_every_page() -> None:
    buffer = torch.arange(700, dtype=torch.int16).repeat_interleave(PAGE)
    updates = [replace(SAMPLED, policy_version=version) for version in range(5, 21)]
    seen = [set(hashed_part(buffer, update, 3).tolist()) for update in updates]
    assert set().union(*seen) == set(range(700))
    assert sum(map(len, seen)) <= 700 + len(seen)


@pytest.mark.parametrize("fault", ["stale", "shifted", "cut", "swapped halves"])
def test_a_sample_tells_whole_faults_apart(fault: str) -> None:
    good = bucket(400 * PAGE)
    faulty = {
        "stale": bucket(400 * PAGE, seed=1),
        "shifted": good.roll(8),
        "cut": torch.cat([good[: 200 * PAGE], torch.zeros(200 * PAGE, dtype=torch.uint8)]),
        "swapped halves": torch.cat([good[200 * PAGE :], good[: 200 * PAGE]]),
    }[fault]
    assert digest(faulty) != digest(good)
