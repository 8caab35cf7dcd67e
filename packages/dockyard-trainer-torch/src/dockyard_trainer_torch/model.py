"""Loading a Hugging Face causal language model, and the one forward pass that training needs.

Shape legend: B = rows, L = row length, D = hidden width, M = trained tokens of a micro-batch; P, N, S
and U as in `layout`.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from dockyard_core.errors import ConfigError
from dockyard_trainer_torch.layout import Layout, PackedLayout, PrefixLayout
from dockyard_trainer_torch.logprobs import chunked_logprobs
from dockyard_trainer_torch.sharded_files import region_of

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup
    from transformers import PretrainedConfig, PreTrainedModel

FAMILIES = ("llama", "qwen2", "qwen3", "qwen3_moe")
"""``model_type`` of the families whose names, ties and packing are tested."""


def read_config_json(model_dir: Path) -> dict[str, Any]:
    """What config.json says, of a family of ``FAMILIES``.

    Raises ConfigError for a directory without one, one that is no JSON object, or another family.
    """
    path = model_dir / "config.json"
    if not path.is_file():
        raise ConfigError(
            f"policy.model has no config.json, got {str(model_dir)!r}; point it at a saved Hugging Face model"
        )
    try:
        fields = json.loads(path.read_bytes())
    except (OSError, ValueError) as error:
        raise ConfigError(
            f"policy.model must have a config.json that can be read, got {str(path)!r} ({error}); save the model again"
        ) from error
    family = fields.get("model_type") if isinstance(fields, dict) else None
    if family not in FAMILIES:
        raise ConfigError(
            f"policy.model must be of a family {', '.join(FAMILIES)}, got {family!r}; "
            "choose a checkpoint of one of them"
        )
    return dict(fields)


def read_config(model_dir: Path) -> PretrainedConfig:
    """The model's configuration, without dropout.

    Raises ConfigError for a directory without one, a family outside ``FAMILIES``, or rotary frequencies that
    depend on the batch.
    """
    read_config_json(model_dir)  # before transformers loads, which warns about other families or knows them not
    from transformers import AutoConfig

    config = AutoConfig.from_pretrained(model_dir)
    rope_type = (getattr(config, "rope_parameters", None) or {}).get("rope_type", "default")
    if rope_type in ("dynamic", "longrope"):
        raise ConfigError(
            f"policy.model must have rotary frequencies that do not follow the longest sequence of a batch, got "
            f"rope_type={rope_type!r}: logprobs would depend on what else is packed; choose yarn, llama3 or linear"
        )
    config.attention_dropout = 0.0
    return config


def build_causal_lm(config: PretrainedConfig) -> PreTrainedModel:
    """The model in float32 with scaled-dot-product attention, without memory for its parameters."""
    from transformers import AutoModelForCausalLM

    with torch.device("meta"):
        model: Any = AutoModelForCausalLM.from_config(config, dtype=torch.float32, attn_implementation="sdpa")
    # With one, torch drops the gradient of that token's embedding; where it is the end of a turn too, it is trained.
    model.model.embed_tokens.padding_idx = None
    # No checkpoint holds the frequencies: they follow from the configuration.
    model.model.rotary_emb = type(model.model.rotary_emb)(config=config)
    built: PreTrainedModel = model.eval()
    return built


class TokenScorer(nn.Module):
    """Log-probabilities of a causal language model at chosen positions.

    Everything a step needs from the weights happens inside ``forward``, so that sharding can
    gather the weights around it.
    """

    def __init__(
        self, causal_lm: PreTrainedModel, *, chunk_tokens: int | None = None, vocab_group: ProcessGroup | None = None
    ) -> None:
        super().__init__()
        self.causal_lm = causal_lm
        self._chunk_tokens = chunk_tokens
        self._vocab_group = vocab_group
        """Ranks that hold a part of the output embedding each; None = this one holds it all."""

    @property
    def can_share_prefixes(self) -> bool:
        """Whether every layer attends to all of the past, which `PrefixLayout` takes for granted."""
        # Not `layer_types`: a mixture of experts has a window without naming its layers' kinds.
        return getattr(self.causal_lm.config, "sliding_window", None) is None

    def forward(self, layout: Layout, *, temperature: float, with_entropy: bool = True) -> tuple[Tensor, Tensor | None]:
        """Return (logprobs_M, entropy_M) of the layout's trained tokens, float32, nats; None for no entropy."""
        if isinstance(layout, PackedLayout):
            hidden, targets = self._packed_hidden(layout), layout.target_ids_M
        else:
            hidden, targets = self._prefix_hidden(layout), layout.target_ids_U
        if torch.is_autocast_enabled(hidden.device.type):
            hidden = hidden.to(torch.get_autocast_dtype(hidden.device.type))
        weight, offset = self._local_vocabulary()
        logprobs, entropy = chunked_logprobs(
            hidden,
            weight,
            targets,
            temperature=temperature,
            chunk_tokens=self._chunk_tokens,
            with_entropy=with_entropy,
            vocab_group=self._vocab_group,
            vocab_offset=offset,
        )
        if isinstance(layout, PackedLayout):
            return logprobs, entropy
        return logprobs[layout.distinct_M], None if entropy is None else entropy[layout.distinct_M]

    def _local_vocabulary(self) -> tuple[Tensor, int]:
        """This rank's rows of the output embedding, and the first one's token id."""
        causal_lm: Any = self.causal_lm
        weight = causal_lm.lm_head.weight
        if self._vocab_group is None:
            return weight, 0
        return weight.to_local(), region_of(weight).offset[0]

    def _packed_hidden(self, layout: PackedLayout) -> Tensor:
        """Hidden states [M, D] at the predicting positions.

        Restarting position ids and no attention mask at all is what keeps the sequences of a row
        apart, exactly. (An all-ones mask would not.)
        """
        causal_lm: Any = self.causal_lm
        hidden_BLD: Tensor = causal_lm.model(
            input_ids=layout.token_ids_BL,
            position_ids=layout.position_ids_BL,
            attention_mask=None,
            use_cache=False,
        ).last_hidden_state
        return hidden_BLD.flatten(0, 1)[layout.predictors_M]

    def _prefix_hidden(self, layout: PrefixLayout) -> Tensor:
        """Hidden states [U, D] at the predicting positions; gradients flow through the cached prefix."""
        from transformers import DynamicCache

        causal_lm: Any = self.causal_lm
        cache = DynamicCache()
        prefix_PLD: Tensor = causal_lm.model(
            input_ids=layout.prefix_ids_PL, past_key_values=cache, use_cache=True
        ).last_hidden_state
        hidden = prefix_PLD.flatten(0, 1)
        if layout.suffix_ids_NS.shape[1]:
            for layer in cache.layers:
                layer.keys = _rows_of(layer.keys, layout.prefix_of_N)
                layer.values = _rows_of(layer.values, layout.prefix_of_N)
            suffix_NSD: Tensor = causal_lm.model(
                input_ids=layout.suffix_ids_NS,
                position_ids=layout.suffix_position_ids_NS,
                attention_mask=layout.suffix_attention_mask,
                past_key_values=cache,
                use_cache=True,
            ).last_hidden_state
            hidden = torch.cat([hidden, suffix_NSD.flatten(0, 1)])
        return hidden[layout.predictors_U]


def _rows_of(states: Tensor, rows_N: Tensor) -> Tensor:
    """Rows by index; as a matrix, because the gradient of a selection of more dimensions is added up slowly."""
    return states.flatten(1).index_select(0, rows_N).unflatten(1, states.shape[1:])
