"""Spreads a model over ranks: tensor parallelism inside its blocks, FSDP2 over the data-parallel ranks."""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from dockyard_core.errors import ConfigError
from dockyard_trainer_torch.ranks import Ranks, local

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh

_HEAD_NORMS = ("q_norm.weight", "k_norm.weight")
"""Each tensor-parallel rank applies them to its own heads only, so that their gradients are parts of a sum."""


def check_divides(config: Any, tensor_size: int) -> None:
    """Raise ConfigError unless heads and intermediate width can be dealt over ``tensor_size`` ranks."""
    if tensor_size == 1:
        return
    if config.model_type == "qwen3_moe":
        raise ConfigError(
            f"tensor_parallel_size must be 1 for a mixture of experts, got {tensor_size}; shard it over data ranks"
        )
    for name in ("num_attention_heads", "num_key_value_heads", "intermediate_size"):
        if getattr(config, name) % tensor_size:
            raise ConfigError(
                f"tensor_parallel_size must divide the model's {name} = {getattr(config, name)}, got {tensor_size}; "
                "lower it"
            )


def checkpoint_activations(causal_lm: Any) -> None:
    """Keep a block's input only, and compute the block again in the backward pass (arXiv:1604.06174)."""
    from torch.utils.checkpoint import checkpoint

    for block in causal_lm.model.layers:
        block.forward = partial(checkpoint, block.forward, use_reentrant=False, preserve_rng_state=False)


def tensor_parallel(causal_lm: Any, mesh: DeviceMesh) -> None:
    """Deal heads, intermediate width and vocabulary over the ranks of a one-dimensional mesh.

    Linear layers come in pairs, the first split by outputs and the second by inputs, with one all-reduce after
    each pair (Megatron-LM, arXiv:1909.08053). The output embedding is split by tokens; `TokenScorer` reads it.
    """
    from torch.distributed.tensor import Replicate, Shard, distribute_tensor
    from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

    by_output, by_input = ColwiseParallel(), RowwiseParallel()
    plan = {
        "self_attn.q_proj": by_output,
        "self_attn.k_proj": by_output,
        "self_attn.v_proj": by_output,
        "self_attn.o_proj": by_input,
        "mlp.gate_proj": by_output,
        "mlp.up_proj": by_output,
        "mlp.down_proj": by_input,
    }
    for block in causal_lm.model.layers:
        parallelize_module(block, mesh, plan)
    is_tied = causal_lm.lm_head.weight is causal_lm.model.embed_tokens.weight
    parallelize_module(causal_lm.model, mesh, {"embed_tokens": RowwiseParallel(input_layouts=Replicate())})
    causal_lm.lm_head.weight = (
        causal_lm.model.embed_tokens.weight
        if is_tied
        else nn.Parameter(distribute_tensor(causal_lm.lm_head.weight, mesh, [Shard(0)]))
    )


def fully_sharded(root: nn.Module, blocks: list[Any], ranks: Ranks, *, dtype: str, offload: bool) -> None:
    """Shard parameters over the data-parallel ranks (FSDP2), block by block; nothing to do for one rank.

    Under bfloat16 the gathered weights are bfloat16; gradients are reduced in float32.
    """
    if ranks.data_size == 1:
        return
    from torch.distributed.fsdp import CPUOffloadPolicy, MixedPrecisionPolicy, OffloadPolicy, fully_shard

    assert ranks.mesh is not None
    precision = MixedPrecisionPolicy()
    if dtype == "bfloat16":
        precision = MixedPrecisionPolicy(torch.bfloat16, torch.float32, cast_forward_inputs=False)
    options: dict[str, Any] = {
        "mesh": ranks.mesh["dp"],
        "mp_policy": precision,
        "offload_policy": CPUOffloadPolicy(pin_memory=ranks.device.type == "cuda") if offload else OffloadPolicy(),
    }
    for block in blocks:
        fully_shard(block, **options)
    fully_shard(root, **options)


def reduce_in_last(root: nn.Module, *, is_last: bool) -> None:
    """Let a backward pass reduce gradients over ranks only if it is the step's last one."""
    from torch.distributed.fsdp import FSDPModule

    if isinstance(root, FSDPModule):
        root.set_requires_gradient_sync(is_last)
        root.set_is_last_backward(is_last)


def reshard(root: nn.Module) -> None:
    """Free what a forward pass gathered.

    A backward pass does so by itself; after a forward alone the root's parameters would stay
    whole, as other objects than those that the optimizer and the checkpoint know.
    """
    from torch.distributed.fsdp import FSDPModule

    for module in root.modules():
        if isinstance(module, FSDPModule):
            module.reshard()


@torch.no_grad()
def complete_gradients(root: nn.Module, ranks: Ranks) -> None:
    """Give each rank its part of the gradients, summed over the tensor-parallel ranks that share a parameter."""
    if ranks.tensor_size == 1:
        return
    from torch import distributed
    from torch.distributed.tensor import DTensor

    for name, param in root.named_parameters():
        if param.grad is None:
            continue
        if isinstance(param, DTensor) and param.grad.placements != param.placements:
            param.grad = param.grad.redistribute(placements=param.placements)  # of an embedding it is a sum's part
        elif name.endswith(_HEAD_NORMS):
            part = local(param.grad)
            total = part.to(ranks.device)  # offloaded gradients are on the host, out of NCCL's reach
            distributed.all_reduce(total, group=ranks.tensor_group)
            part.copy_(total)
