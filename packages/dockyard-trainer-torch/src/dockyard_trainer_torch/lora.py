"""Low-rank adapters (LoRA, Hu et al., arXiv:2106.09685): a frozen base and two small trained matrices per layer.

A target layer computes W x + b + scale * B A x. Its weight and bias keep their Hugging Face names; the
adapters stand beside them as ``...q_proj.lora_A`` [r, in] and ``...q_proj.lora_B`` [out, r]. B starts at 0,
so that the first forward pass is the base's, bit for bit. There is no dropout: the same tokens must have
the same log-probabilities in every forward pass of a step.

The order of construction, with FSDP2: `apply_lora` (also on the meta device), shard, materialise, load the
base, `initialise_adapters`.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn
from torch.nn import functional

from dockyard_core.errors import ConfigError
from dockyard_core.regions import Region
from dockyard_trainer_torch.ranks import local, whole
from dockyard_trainer_torch.sharded_files import region_of

if TYPE_CHECKING:
    from transformers import PreTrainedModel

    from dockyard_core.optimizer_config import LoraConfig


class LoraLinear(nn.Linear):
    """A linear layer with a low-rank term; takes over the weight and the bias of the layer it replaces."""

    lora_A: nn.Parameter  # [r, in]
    lora_B: nn.Parameter  # [out, r]

    def __init__(self, base: nn.Linear, config: LoraConfig) -> None:
        super().__init__(base.in_features, base.out_features, bias=base.bias is not None, device="meta")
        self.weight, self.bias = base.weight, base.bias
        # Small steps would be lost in the rounding of a base kept in bfloat16.
        where = {"device": base.weight.device, "dtype": torch.promote_types(base.weight.dtype, torch.float32)}
        self.lora_A = nn.Parameter(torch.empty(config.rank, base.in_features, **where))
        self.lora_B = nn.Parameter(torch.empty(base.out_features, config.rank, **where))
        self.scale = config.scale
        self.is_disabled = False
        self.train(base.training)

    def forward(self, input: Tensor) -> Tensor:
        """W x + b + scale * B A x; without the last term inside `adapters_disabled`."""
        base = functional.linear(input, self.weight, self.bias)
        if self.is_disabled:
            return base
        low_rank = functional.linear(functional.linear(input, self.lora_A), self.lora_B)
        return torch.add(base, low_rank, alpha=self.scale)


def apply_lora(causal_lm: PreTrainedModel, config: LoraConfig, *, seed: int) -> None:
    """Freeze the model and give each target layer adapters, in place.

    Comes before sharding. On the meta device nothing is drawn: call `initialise_adapters` once the
    model has memory.

    Raises ConfigError for a target of which the model has no plain linear layer.
    """
    layers = {
        name: module
        for name, module in causal_lm.named_modules()
        # A subclass (quantised, sharded, with adapters already) computes something else than W x + b.
        if type(module) is nn.Linear and name.rpartition(".")[2] in config.target_modules
    }
    absent = sorted(set(config.target_modules) - {name.rpartition(".")[2] for name in layers})
    if absent:
        raise ConfigError(
            f"lora.target_modules must name plain linear layers of the model, got {absent}, "
            f"which this {causal_lm.config.model_type!r} lacks; leave them out"
        )
    for name, layer in layers.items():
        causal_lm.set_submodule(name, LoraLinear(layer, config))
    freeze_base(causal_lm)
    if not any(module.lora_A.is_meta for module in lora_layers(causal_lm)):
        initialise_adapters(causal_lm, seed=seed)


@torch.no_grad()
def initialise_adapters(causal_lm: nn.Module, *, seed: int) -> None:
    """Draw every A (Kaiming-uniform: U(±1/sqrt(in))) and set every B to 0; freeze the base again.

    Values are drawn whole, on the CPU, in the model's order: they depend on the seed, and neither on the
    device nor on how many ranks share them. Not collective: each rank takes its part of the same draw.
    """
    generator = torch.Generator().manual_seed(seed)
    for layer in lora_layers(causal_lm):
        drawn = torch.empty(layer.lora_A.shape, dtype=torch.float32)
        nn.init.kaiming_uniform_(drawn, a=math.sqrt(5), generator=generator)
        _copy_part(layer.lora_A, drawn)
        layer.lora_B.zero_()
    # A loader that assigns new parameters instead of filling the old ones has made them trainable.
    freeze_base(causal_lm)


def freeze_base(causal_lm: nn.Module) -> None:
    """Let the adapters have gradients and nothing else."""
    causal_lm.requires_grad_(False)
    for layer in lora_layers(causal_lm):
        layer.lora_A.requires_grad_(True)
        layer.lora_B.requires_grad_(True)


def lora_layers(model: nn.Module) -> Iterator[LoraLinear]:
    """The layers with adapters, in the model's order."""
    return (module for module in model.modules() if isinstance(module, LoraLinear))


def lora_parents(model: nn.Module) -> dict[str, LoraLinear]:
    """The layers with adapters by the name of their base weight (``...q_proj.weight``), in the model's order.

    Names are those of ``model.named_parameters()``.
    """
    owners = {id(layer.weight): layer for layer in lora_layers(model)}
    return {name: owners[id(param)] for name, param in model.named_parameters() if id(param) in owners}


def is_adapter(name: str) -> bool:
    """Whether a parameter of this name is A or B of a layer: trained, but no weight of the exported model."""
    return name.endswith((".lora_A", ".lora_B"))


@contextmanager
def adapters_disabled(model: nn.Module) -> Iterator[None]:
    """Compute the base alone inside the context: the reference policy without a copy of the model.

    May be nested, and ends however the body ends. The forward pass inside should be without gradient:
    activation checkpointing would recompute it in the backward pass, when the adapters are back.
    """
    layers = [(layer, layer.is_disabled) for layer in lora_layers(model)]
    try:
        for layer, _ in layers:
            layer.is_disabled = True
        yield
    finally:
        for layer, was_disabled in layers:
            layer.is_disabled = was_disabled


@torch.no_grad()
def merged_weight(layer: LoraLinear) -> Tensor:
    """W + scale * B A, whole and in float32; the layer is unchanged.

    Collective when the layer is sharded: its own three tensors are gathered, and nothing else.
    """
    weight, lora_A, lora_B = (whole(param.detach()).float() for param in (layer.weight, layer.lora_A, layer.lora_B))
    return torch.addmm(weight, lora_B, lora_A, alpha=layer.scale)


def _copy_part(target: Tensor, source: Tensor) -> None:
    """Copy a whole tensor that every rank holds into a possibly sharded one, without communication."""
    everything = Region.whole(tuple(source.shape))
    local(target).copy_(source[region_of(target).slices_in(everything)])
