"""Checks that cost nothing and spare the user a late failure."""

from __future__ import annotations

import json
from pathlib import Path

from dockyard_core import ConfigError
from dockyard_grpo import compose
from dockyard_grpo.config import Config

FAMILIES = ("qwen2", "qwen3", "llama")


def check_model(config: Config) -> None:
    """Raise ConfigError unless policy.model is a loadable directory of a known family, or a hub id."""
    path = Path(compose.model_path(config))
    if not path.exists():
        if path.is_absolute() or str(path).startswith(".") or str(path).count("/") > 1:
            raise ConfigError(f"policy.model must be a directory or a hub id, got {str(path)!r}: no such directory")
        return  # a hub id: transformers resolves it, and says why when it cannot
    config_file = path / "config.json"
    if not config_file.is_file():
        raise ConfigError(f"policy.model must hold config.json, got {str(path)!r}; export it with save_pretrained")
    try:
        model_type = json.loads(config_file.read_text()).get("model_type")
    except (json.JSONDecodeError, UnicodeDecodeError) as error:
        raise ConfigError(f"policy.model must hold a readable config.json, got {str(path)!r}: {error}") from error
    if model_type not in FAMILIES:
        raise ConfigError(f"policy.model must be one of {', '.join(FAMILIES)}, got {model_type!r} in {str(path)!r}")
    if not any(path.glob("*.safetensors")):
        raise ConfigError(f"policy.model must hold safetensors weights, got none in {str(path)!r}")
    if not (path / "tokenizer.json").is_file() and not (path / "tokenizer_config.json").is_file():
        raise ConfigError(
            f"policy.model must hold its tokenizer, got none in {str(path)!r}; save it beside the weights"
        )
