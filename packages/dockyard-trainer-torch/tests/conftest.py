from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM, LlamaConfig, Qwen2Config, Qwen3Config
from transformers.utils import logging

logging.disable_progress_bar()  # or saving a model writes between the lines that tests of the command read

CONFIGS = {"qwen2": Qwen2Config, "qwen3": Qwen3Config, "llama": LlamaConfig}
VOCAB_SIZE = 64


@pytest.fixture(autouse=True)
def _one_thread():
    torch.set_num_threads(1)


@pytest.fixture(scope="session")
def tiny_model(tmp_path_factory) -> Callable[..., Path]:
    """Directory of a tiny random model of a family, with a stand-in tokenizer file."""
    made: dict[tuple[str, bool], Path] = {}

    def make(family: str = "qwen2", *, is_tied: bool = True) -> Path:
        key = (family, is_tied)
        if key not in made:
            torch.manual_seed(sum(map(ord, family)) + is_tied)
            config = CONFIGS[family](
                vocab_size=VOCAB_SIZE,
                hidden_size=32,
                intermediate_size=48,
                num_hidden_layers=2,
                num_attention_heads=4,
                num_key_value_heads=2,
                head_dim=8,
                max_position_embeddings=256,
                tie_word_embeddings=is_tied,
                initializer_range=0.2,  # large enough that attention matters to the log-probabilities
            )
            directory = tmp_path_factory.mktemp(f"{family}-{'tied' if is_tied else 'untied'}")
            model = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
            for name, param in model.named_parameters():
                if name.endswith("bias"):  # 0 in a fresh model, where nobody would miss them
                    param.data.copy_(torch.linspace(-0.5, 0.5, len(param)))
            model.save_pretrained(directory)
            (directory / "tokenizer.json").write_text("{}")
            made[key] = directory
        return made[key]

    return make
