"""The seam to a tokenizer. Core imports no tokenizer library; the app writes the adapter."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Protocol

ChatMessage = Mapping[str, str]
"""``{"role": "user", "content": …}``."""


class Tokenizer(Protocol):
    """Text to token ids and back, for one policy."""

    @property
    def eos_token_id(self) -> int:
        """The token that ends a completion."""
        ...

    def encode(self, text: str) -> list[int]:
        """Token ids of ``text``. Nothing is added: a chat template writes its own special tokens."""
        ...

    def decode(self, token_ids: Sequence[int]) -> str:
        """The text of ``token_ids``, special tokens dropped, white space kept as it is."""
        ...

    def render_chat(self, messages: Sequence[ChatMessage]) -> str | None:
        """The conversation up to where the policy answers; None when there is no chat template."""
        ...
