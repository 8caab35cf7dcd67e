"""Loading a Hugging Face causal language model, and the one forward pass that training needs.

Shape legend: B = rows, L = row length, M = trained positions of a micro-batch.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from dockyard_core.errors import ConfigError
from dockyard_trainer_torch.logprobs import chunked_logprobs

if TYPE_CHECKING:
    from transformers import PreTrainedModel

FAMILIES = ("llama", "qwen2", "qwen3")
"""``model_type`` of the families whose names, ties and packing are tested."""

_FILES = ["*.json", "*.safetensors", "*.jinja", "*.model", "*.txt"]


def resolve_model_dir(model: str | Path) -> Path:
    """Return the local directory of ``model``: a directory, or a hub id in or for the hub's cache.

    Raises ConfigError when there is no such directory and it cannot be a hub id.
    """
    path = Path(model).expanduser()
    if path.is_dir():
        return path
    looks_like_path = path.is_absolute() or str(model).startswith((".", "~")) or str(model).count("/") > 1
    if looks_like_path or path.exists():
        raise ConfigError(
            f"policy.model must be a directory with config.json and *.safetensors, got {str(model)!r}; "
            "check the path, or give a hub id such as 'owner/name'"
        )
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import HfHubHTTPError, HFValidationError, LocalEntryNotFoundError

    try:
        return Path(snapshot_download(str(model), allow_patterns=_FILES))
    except (HfHubHTTPError, HFValidationError, LocalEntryNotFoundError, OSError) as error:
        raise ConfigError(
            f"policy.model is neither a directory nor a model the hub serves, got {str(model)!r} "
            f"({type(error).__name__}); check the path or the network"
        ) from error


def load_causal_lm(model_dir: Path) -> PreTrainedModel:
    """Load the model in float32 with scaled-dot-product attention and no dropout.

    Raises ConfigError for a directory without a model or a family outside ``FAMILIES``.
    """
    from transformers import AutoConfig, AutoModelForCausalLM

    if not (model_dir / "config.json").is_file():
        raise ConfigError(
            f"policy.model has no config.json, got {str(model_dir)!r}; point it at a saved Hugging Face model"
        )
    config = AutoConfig.from_pretrained(model_dir)
    if config.model_type not in FAMILIES:
        raise ConfigError(
            f"policy.model must be of a family {', '.join(FAMILIES)}, got {config.model_type!r}; "
            "choose a checkpoint of one of them"
        )
    config.attention_dropout = 0.0
    try:
        with _without_progress_bar():
            model: PreTrainedModel = AutoModelForCausalLM.from_pretrained(
                model_dir, config=config, dtype=torch.float32, attn_implementation="sdpa", use_safetensors=True
            )
    except OSError as error:
        raise ConfigError(
            f"policy.model has no readable *.safetensors, got {str(model_dir)!r} ({error}); "
            "save it with save_pretrained"
        ) from error
    return model.eval()


@contextmanager
def _without_progress_bar() -> Iterator[None]:
    from transformers.utils import logging

    was_enabled = logging.is_progress_bar_enabled()
    logging.disable_progress_bar()
    try:
        yield
    finally:
        if was_enabled:
            logging.enable_progress_bar()


class TokenScorer(nn.Module):
    """Log-probabilities of a causal language model at chosen positions.

    Everything a step needs from the weights happens inside ``forward``, so that sharding can
    gather the weights around it.
    """

    def __init__(self, causal_lm: PreTrainedModel, *, chunk_tokens: int) -> None:
        super().__init__()
        self.causal_lm = causal_lm
        self.chunk_tokens = chunk_tokens

    def forward(
        self, token_ids_BL: Tensor, position_ids_BL: Tensor, targets_M: Tensor, *, temperature: float
    ) -> tuple[Tensor, Tensor]:
        """Return (logprobs_M, entropy_M) of the tokens at flat indices ``targets_M`` of [B, L].

        ``position_ids_BL`` restart at 0 where a new sequence starts; with no attention mask at all
        that is what keeps the sequences of a row apart, exactly. (An all-ones mask would not.)
        """
        causal_lm: Any = self.causal_lm
        hidden_BLD = causal_lm.model(
            input_ids=token_ids_BL, position_ids=position_ids_BL, attention_mask=None, use_cache=False
        ).last_hidden_state
        # Token t is predicted at t - 1; token 0 of a sequence is never trained, so t - 1 is in the row.
        hidden_MD = hidden_BLD.flatten(0, 1)[targets_M - 1]
        if torch.is_autocast_enabled(hidden_MD.device.type):
            hidden_MD = hidden_MD.to(torch.get_autocast_dtype(hidden_MD.device.type))
        return chunked_logprobs(
            hidden_MD,
            causal_lm.lm_head.weight,
            token_ids_BL.flatten()[targets_M],
            temperature=temperature,
            chunk_tokens=self.chunk_tokens,
        )
