"""Adapter from a Hugging Face tokenizer to `dockyard_core.tokenizer.Tokenizer`."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path

from dockyard_core import ConfigError


class HuggingFaceTokenizer:
    """Text <-> token ids of the policy's own tokenizer."""

    def __init__(self, model: str) -> None:
        from transformers import AutoTokenizer, PreTrainedTokenizerFast  # heavy: only who tokenises pays

        try:
            # AutoTokenizer picks a class by the model's family, which in transformers 5 builds its own
            # pre-tokenizer and ignores the one in tokenizer.json: other ids, silently. The file decides.
            has_file = (Path(model) / "tokenizer.json").is_file()
            loader = PreTrainedTokenizerFast if has_file else AutoTokenizer
            self._inner = loader.from_pretrained(model)
        except (OSError, ValueError) as error:
            first_line = str(error).splitlines()[0]
            raise ConfigError(f"policy.model must hold a tokenizer, got {model!r}: {first_line}") from error
        if self._inner.eos_token_id is None:
            raise ConfigError(f"the tokenizer in {model!r} has no eos token; set eos_token in tokenizer_config.json")

    @property
    def eos_token_id(self) -> int:
        """Ends a completion."""
        return int(self._inner.eos_token_id)

    def encode(self, text: str) -> list[int]:
        """Token ids of a text; a chat prompt brings its own special tokens."""
        return [int(token) for token in self._inner(text, add_special_tokens=False)["input_ids"]]

    def decode(self, token_ids: Sequence[int]) -> str:
        """Text of token ids, special tokens dropped."""
        text: str = self._inner.decode(list(token_ids), skip_special_tokens=True)
        return text

    def render_chat(self, messages: Sequence[Mapping[str, str]]) -> str | None:
        """The chat template's prompt for the next assistant turn; None without a template."""
        if not self._inner.chat_template:
            return None
        text: str = self._inner.apply_chat_template(list(messages), tokenize=False, add_generation_prompt=True)
        return text
