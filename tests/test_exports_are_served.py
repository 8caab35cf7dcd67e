"""What the torch trainer exports is a model for transformers and vLLM: greedy tokens are the same."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM, Qwen2Config, Qwen3MoeConfig

from dockyard_core.batch import TrainSequence, pack_batch
from dockyard_trainer_torch import LoraConfig, TorchPolicy, TorchPolicyConfig, export_hf

pytest.importorskip("vllm")
pytestmark = [pytest.mark.ci, pytest.mark.timeout(600)]

PROMPT = [3, 9, 27, 5]
NUM_TOKENS = 16
SHAPE: dict[str, Any] = {
    "vocab_size": 64,
    "hidden_size": 64,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "head_dim": 32,
    "max_position_embeddings": 256,
    "initializer_range": 0.2,
}
SERVE = f"""
import json, sys
from vllm import LLM, SamplingParams

greedy = SamplingParams(temperature=0, max_tokens={NUM_TOKENS}, detokenize=False, ignore_eos=True)
for directory in sys.argv[1:]:
    llm = LLM(
        directory, dtype="float32", skip_tokenizer_init=True, enforce_eager=True, max_model_len=128, max_num_seqs=4
    )
    (answer,) = llm.generate([{{"prompt_token_ids": {PROMPT}}}], greedy, use_tqdm=False)
    print(json.dumps(list(answer.outputs[0].token_ids)), flush=True)
    del llm
"""


def trained_export(directory: Path, config: Any, policy_config: TorchPolicyConfig) -> Path:
    torch.manual_seed(7)
    AutoModelForCausalLM.from_config(config, dtype=torch.float32).save_pretrained(directory / "before")
    policy = TorchPolicy.from_pretrained(directory / "before", policy_config)
    mask = np.arange(12) >= 3
    sequences = [
        TrainSequence(
            token_ids_T=np.random.default_rng(seed).integers(0, 64, 12),
            loss_mask_T=mask,
            sampled_logprobs_T=np.where(mask, -4.0, 0.0).astype(np.float32),
            advantage=advantage,
        )
        for seed, advantage in enumerate((1.0, -1.0))
    ]
    policy.train_step(pack_batch(sequences)[0])
    export_hf(policy, directory / "after")
    return directory / "after"


def greedy_in_transformers(directory: Path) -> list[int]:
    model = AutoModelForCausalLM.from_pretrained(directory, dtype=torch.float32)
    with torch.no_grad():
        ids = model.generate(
            torch.tensor([PROMPT]),
            max_new_tokens=NUM_TOKENS,
            min_new_tokens=NUM_TOKENS,
            do_sample=False,
        )
    return [int(token) for token in ids[0, len(PROMPT) :]]


def test_vllm_and_transformers_continue_an_export_with_the_same_tokens(tmp_path: Path) -> None:
    moe = Qwen3MoeConfig(
        **SHAPE, moe_intermediate_size=32, num_experts=4, num_experts_per_tok=2, tie_word_embeddings=False
    )
    plain = TorchPolicyConfig(learning_rate=1e-2, num_threads=1)
    adapted = plain.model_copy(update={"lora": LoraConfig(rank=4)})
    exports = [
        trained_export(tmp_path / "tied", Qwen2Config(**SHAPE, tie_word_embeddings=True), plain),
        trained_export(tmp_path / "adapted", Qwen2Config(**SHAPE, tie_word_embeddings=False), adapted),
        trained_export(tmp_path / "moe", moe, plain),
    ]
    quiet = {"VLLM_LOGGING_LEVEL": "ERROR", "VLLM_ENABLE_V1_MULTIPROCESSING": "0", "VLLM_CPU_KVCACHE_SPACE": "1"}
    served = subprocess.run(
        [sys.executable, "-c", SERVE, *map(str, exports)],
        capture_output=True,
        text=True,
        timeout=400,
        env=os.environ | quiet | {"HF_HUB_OFFLINE": "1"},
        check=False,
    )
    assert served.returncode == 0, served.stderr[-3000:]
    answers = [json.loads(line) for line in served.stdout.splitlines() if line.startswith("[")]
    assert answers == [greedy_in_transformers(directory) for directory in exports]
