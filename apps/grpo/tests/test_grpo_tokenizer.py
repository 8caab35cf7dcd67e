from __future__ import annotations

from pathlib import Path

import pytest
from tokenizers import Tokenizer

from dockyard_core import ConfigError
from dockyard_grpo import compose
from dockyard_grpo.config import load_config
from dockyard_grpo.tokenizer import HuggingFaceTokenizer

TEXT = "push_boat should return minutes as seconds\ntools.py\n1|def push_boat(s):\n2|    return s * 7\n<patch>"


def test_ids_are_those_of_tokenizer_json_itself() -> None:
    model = compose.model_path(load_config(None, []))
    witness = Tokenizer.from_file(str(Path(model) / "tokenizer.json"))
    tokenizer = HuggingFaceTokenizer(model)
    assert tokenizer.encode(TEXT) == witness.encode(TEXT, add_special_tokens=False).ids
    assert tokenizer.decode(tokenizer.encode(TEXT)) == TEXT.removesuffix("<patch>")


def test_a_directory_without_a_tokenizer_is_refused_on_one_line(tmp_path: Path) -> None:
    with pytest.raises(ConfigError) as caught:
        HuggingFaceTokenizer(str(tmp_path))
    assert "must hold a tokenizer" in str(caught.value)
    assert "\n" not in str(caught.value)
