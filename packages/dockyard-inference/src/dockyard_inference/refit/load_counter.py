"""What an engine really loaded, beside what it was promised."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from math import prod
from typing import TYPE_CHECKING

from dockyard_core.errors import WeightMismatch
from dockyard_core.refit import RefitReport, RefitUpdate, elements_per_layer, layer_of

if TYPE_CHECKING:
    import torch


class LoadCounter:
    """Counts what was really loaded, to be compared with what the manifest promised."""

    def __init__(self) -> None:
        self.num_tensors = 0
        self.num_bytes = 0
        self.per_layer: Counter[str] = Counter()

    def add(self, tensors: list[tuple[str, torch.Tensor]]) -> None:
        """Count tensors that the engine has taken."""
        for name, tensor in tensors:
            self.num_tensors += 1
            self.num_bytes += tensor.numel() * tensor.element_size()
            self.per_layer[layer_of(name)] += prod(tensor.shape)

    def check(self, update: RefitUpdate) -> None:
        """Raise WeightMismatch unless every layer took the elements that were announced."""
        wanted = elements_per_layer(update.manifest)
        if dict(self.per_layer) != wanted:
            layers = sorted(k for k in wanted.keys() | self.per_layer.keys() if wanted.get(k) != self.per_layer[k])
            raise WeightMismatch(
                f"layers {', '.join(layers[:4])} took another number of elements than was sent",
                wanted_version=update.policy_version,
            )

    def report(self, update: RefitUpdate, seconds: Mapping[str, float]) -> RefitReport:
        """What an engine attests that has loaded all of this."""
        return RefitReport(
            policy_version=update.policy_version,
            num_tensors=self.num_tensors,
            num_elements=sum(self.per_layer.values()),
            num_bytes=self.num_bytes,
            elements_per_layer=dict(self.per_layer),
            seconds=seconds,
        )
