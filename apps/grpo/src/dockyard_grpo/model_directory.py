"""Reads a Hugging Face model directory without loading it: headers and JSON only."""

from __future__ import annotations

import json
import math
from functools import cached_property
from pathlib import Path
from typing import Any

from dockyard_core import ConfigError

FAMILIES = ("qwen2", "qwen3", "llama")
_MAX_HEADER_BYTES = 100 << 20
_SCALED_ROPE = ("yarn", "linear", "dynamic", "longrope", "su")


class ModelDirectory:
    """What a model directory says of itself; every property may raise ConfigError with one line."""

    def __init__(self, path: Path) -> None:
        self.path = path

    @cached_property
    def config(self) -> dict[str, Any]:
        """config.json of a known family."""
        if not (self.path / "config.json").is_file():
            raise ConfigError(
                f"policy.model must hold config.json, got {str(self.path)!r}; export it with save_pretrained"
            )
        config = self._read_json("config.json")
        if config.get("model_type") not in FAMILIES:
            raise ConfigError(
                f"policy.model must be of a family {', '.join(FAMILIES)}, got {config.get('model_type')!r} in "
                f"{str(self.path)!r}; choose a checkpoint of one of them"
            )
        return config

    @property
    def max_positions(self) -> int | None:
        """Longest sequence that the model was made for, tokens; None = scaled or unsaid."""
        rope = self.config.get("rope_parameters") or self.config.get("rope_scaling") or {}
        if rope.get("rope_type", rope.get("type")) in _SCALED_ROPE:
            return None
        positions = self.config.get("max_position_embeddings")
        return positions if isinstance(positions, int) else None

    @cached_property
    def num_parameters(self) -> int:
        """Elements of all tensors, from the headers of complete safetensors files."""
        files = sorted(self.path.glob("*.safetensors"))
        if (self.path / "model.safetensors.index.json").is_file():
            names = set(self._read_json("model.safetensors.index.json").get("weight_map", {}).values())
            if missing := sorted(names - {file.name for file in files}):
                raise ConfigError(
                    f"policy.model must hold every file of model.safetensors.index.json, got no {missing[0]} in "
                    f"{str(self.path)!r}; copy or download it"
                )
        if not files:
            raise ConfigError(
                f"policy.model must hold safetensors weights, got none in {str(self.path)!r}; save it with "
                "save_pretrained"
            )
        return sum(_count_elements(file) for file in files)

    @cached_property
    def tokenizer_config(self) -> dict[str, Any]:
        """tokenizer_config.json, completed by the older special_tokens_map.json."""
        if not (self.path / "tokenizer.json").is_file() and not (self.path / "tokenizer_config.json").is_file():
            raise ConfigError(
                f"policy.model must hold its tokenizer, got none in {str(self.path)!r}; save it beside the weights"
            )
        merged: dict[str, Any] = {}
        for name in ("special_tokens_map.json", "tokenizer_config.json"):
            if (self.path / name).is_file():
                merged |= {key: value for key, value in self._read_json(name).items() if value is not None}
        return merged

    @property
    def eos_token(self) -> str:
        """The token that ends a completion."""
        eos = self.tokenizer_config.get("eos_token")
        text = eos.get("content") if isinstance(eos, dict) else eos
        if not isinstance(text, str):
            raise ConfigError(
                f"policy.model needs a tokenizer with an eos token, got none in {str(self.path)!r}; set eos_token in "
                "tokenizer_config.json"
            )
        return text

    @property
    def has_chat_template(self) -> bool:
        """Whether the tokenizer brings a chat template."""
        files = ("chat_template.jinja", "chat_template.json")
        return bool(self.tokenizer_config.get("chat_template")) or any((self.path / name).is_file() for name in files)

    def check_vocabulary(self) -> None:
        """Every token id must have a row of the embedding. Raises ConfigError."""
        eos = self.eos_token
        if not (self.path / "tokenizer.json").is_file():
            return  # an older format, which its own library reads
        ids = _token_ids(self._read_json("tokenizer.json"))
        if eos not in ids:
            raise ConfigError(
                f"policy.model needs its eos token in the vocabulary, got {eos!r}, which tokenizer.json in "
                f"{str(self.path)!r} does not hold; set eos_token in tokenizer_config.json"
            )
        vocab_size, largest = self.config.get("vocab_size"), max(ids.values())
        if isinstance(vocab_size, int) and largest >= vocab_size:
            raise ConfigError(
                f"policy.model needs a row for every token, got vocab_size {vocab_size} and a tokenizer with ids up "
                f"to {largest} in {str(self.path)!r}; use the model's own tokenizer, or resize the embeddings"
            )

    def _read_json(self, name: str) -> dict[str, Any]:
        try:
            content = json.loads((self.path / name).read_text(encoding="utf-8"))
        except (OSError, ValueError) as error:
            raise ConfigError(
                f"policy.model must hold a readable {name}, got {str(self.path)!r}: {error}; export it again"
            ) from error
        if not isinstance(content, dict):
            raise ConfigError(
                f"policy.model must hold a JSON object in {name}, got a {type(content).__name__} in "
                f"{str(self.path)!r}; export it again"
            )
        return content


def _token_ids(tokenizer: dict[str, Any]) -> dict[str, int]:
    vocabulary = tokenizer.get("model", {}).get("vocab", {})
    if isinstance(vocabulary, list):  # Unigram: [piece, score] in the order of the ids
        vocabulary = {piece[0]: index for index, piece in enumerate(vocabulary)}
    added = {token["content"]: token["id"] for token in tokenizer.get("added_tokens", [])}
    return {**vocabulary, **added} or {"": -1}


def _count_elements(file: Path) -> int:
    """Elements of a safetensors file. Raises ConfigError unless it is one, whole."""
    with file.open("rb") as stream:
        length = int.from_bytes(stream.read(8), "little")
        raw = stream.read(length) if 2 <= length <= _MAX_HEADER_BYTES else b""
    try:
        header = json.loads(raw)
        tensors = [value for name, value in header.items() if name != "__metadata__"]
        end = 8 + length + max((tensor["data_offsets"][1] for tensor in tensors), default=0)
        elements: int = sum(math.prod(tensor["shape"]) for tensor in tensors)
    except (ValueError, AttributeError, LookupError, TypeError) as error:
        raise ConfigError(
            f"policy.model must hold safetensors weights, got {file.name} in {str(file.parent)!r}, which is none "
            "(a pointer of git-lfs?); download it"
        ) from error
    if file.stat().st_size < end:
        raise ConfigError(
            f"policy.model must hold whole weights, got {file.stat().st_size} of {end} bytes of {file.name} in "
            f"{str(file.parent)!r}; copy or download it again"
        )
    return elements
