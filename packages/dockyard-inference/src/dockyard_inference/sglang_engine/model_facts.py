"""What must be known of the served model before anything is sent to it."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from dockyard_core.errors import GeneratorError
from dockyard_inference.refit.checkpoint import held_tensors


@dataclass(frozen=True, kw_only=True)
class ModelFacts:
    """Vocabulary and tensors of a checkpoint."""

    vocab_size: int
    """SGLang's scheduler dies of a token id beyond it."""
    held: dict[str, tuple[int, ...]]
    """Name -> shape of every tensor that a refit must bring; SGLang passes over unknown names in silence."""


def read_facts(model: str) -> ModelFacts:
    """From a directory's files, or from the configuration of a hub id.

    Raises:
        GeneratorError: they cannot be read.
    """
    try:
        values = _config(model)
        text = values.get("text_config", values)
        is_tied = bool(values.get("tie_word_embeddings", text.get("tie_word_embeddings", False)))
        return ModelFacts(vocab_size=int(text["vocab_size"]), held=held_tensors(model, is_tied=is_tied))
    except (OSError, ValueError, KeyError) as error:
        raise GeneratorError(f"cannot read the configuration of {model}: {error!r}") from error


def _config(model: str) -> dict[str, Any]:
    path = Path(model) / "config.json"
    if Path(model).is_dir():
        values: dict[str, Any] = json.loads(path.read_text())
        return values
    from transformers import AutoConfig

    return dict(AutoConfig.from_pretrained(model).to_dict())
