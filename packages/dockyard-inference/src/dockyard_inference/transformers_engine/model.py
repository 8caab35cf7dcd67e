"""What the engine's thread does with the model besides sampling: taking weights and scoring."""

from __future__ import annotations

import time
from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING, Any

from dockyard_core.refit import RefitUpdate
from dockyard_inference.refit.load_counter import LoadCounter

if TYPE_CHECKING:
    import torch

    Buckets = Iterable[list[tuple[str, torch.Tensor]]]


def load_buckets(model: Any, buckets: Buckets, update: RefitUpdate, seconds: dict[str, float]) -> LoadCounter:
    """Copy an update's buckets into the model; returns what was loaded.

    Raises:
        RefitError: of the buckets, see ``BucketReceiver.receive``; or a layer took another number of elements.
    """
    import torch

    counter, parameters = LoadCounter(), dict(model.named_parameters())
    with torch.no_grad():
        for tensors in buckets:
            started = time.perf_counter()
            for name, tensor in tensors:
                parameters[name].copy_(tensor)
            counter.add(tensors)
            seconds["load"] += time.perf_counter() - started
    counter.check(update)
    return counter


def score_tokens(model: Any, token_ids: Sequence[int]) -> tuple[float, ...]:
    """Logprobs at temperature 1 of tokens 1..T-1; [T-1]."""
    import torch

    ids = torch.tensor([list(token_ids)], device=model.device)
    with torch.no_grad():
        logprobs = torch.log_softmax(model(input_ids=ids).logits[0, :-1].float(), dim=-1)
    return tuple(logprobs.gather(-1, ids[0, 1:, None])[:, 0].tolist())
