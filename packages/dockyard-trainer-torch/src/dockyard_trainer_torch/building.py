"""Builds a scorer over the ranks: described on the meta device, sharded, given memory, and filled from files."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from dockyard_trainer_torch.config import TorchPolicyConfig
from dockyard_trainer_torch.loading import load_weights, materialise
from dockyard_trainer_torch.lora import apply_lora, initialise_adapters
from dockyard_trainer_torch.model import TokenScorer, build_causal_lm, read_config
from dockyard_trainer_torch.parallel import check_divides, checkpoint_activations, fully_sharded, tensor_parallel
from dockyard_trainer_torch.ranks import Ranks


def build_scorer(
    model_dir: Path, config: TorchPolicyConfig, ranks: Ranks, *, is_reference: bool = False
) -> TokenScorer:
    """The model of a directory, sharded over the ranks; none of them ever holds more than its part.

    Args:
        model_dir: config.json and safetensors.
        config: parallelism, adapters and precision.
        ranks: those that share the model.
        is_reference: frozen, without adapters, and in host memory if ``reference_offload`` says so.

    Raises ConfigError for another family or other tensors than config.json says, and for sizes that do not divide.
    """
    model_config = read_config(model_dir)
    check_divides(model_config, ranks.tensor_size)
    causal_lm: Any = build_causal_lm(model_config)
    if config.lora is not None and not is_reference:
        apply_lora(causal_lm, config.lora, seed=config.seed)
    if ranks.tensor_size > 1:
        assert ranks.mesh is not None
        tensor_parallel(causal_lm, ranks.mesh["tp"])
    if config.activation_checkpointing and not is_reference:
        checkpoint_activations(causal_lm)
    scorer = TokenScorer(causal_lm, chunk_tokens=config.logprob_chunk_tokens, vocab_group=ranks.tensor_group)
    if is_reference:
        scorer.requires_grad_(False)
    is_offloaded = config.reference_offload if is_reference else config.cpu_offload
    fully_sharded(scorer, list(causal_lm.model.layers), ranks, dtype=config.dtype, offload=is_offloaded)
    is_on_host = is_offloaded and (ranks.data_size > 1 or is_reference)
    materialise(scorer, "cpu" if is_on_host else config.device)
    causal_lm.model.rotary_emb.to(config.device)
    load_weights(causal_lm, model_dir)
    if config.lora is not None and not is_reference:
        initialise_adapters(causal_lm, seed=config.seed)
    return scorer
