"""The batches of `benchmarks.train_step`: recorded rollouts of the quickstart, and what is made of them.

`train_step_rollouts.json` holds whole steps of a real run as text. Its prompts, completions, lengths and advantages are
the run's; the old logprobs are those of the policy that is trained here, plus noise, so that some ratios are clipped.
"""

from __future__ import annotations

import itertools
import json
from collections import defaultdict
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

ROOT = Path(__file__).resolve().parent.parent
RECORDED = ROOT / "benchmarks" / "train_step_rollouts.json"
POLICY = ROOT / "apps" / "grpo" / "src" / "dockyard_grpo" / "quickstart" / "policy"
EOS = 1
FIRST_TEXT_TOKEN = 3  # of the quickstart's vocabulary: what comes before has a meaning of its own
STEPS = (10, 60)
NOISE = 0.15
"""Standard deviation of old logprobs around the policy's own, nats."""
DENSE_ROW = 512
DENSE_LENGTHS = (512, 384, 128, 320, 192, 256, 256, 448, 64)
"""Fill rows without padding, in turn."""


class Sampled(NamedTuple):
    """One sampled sequence."""

    token_ids: np.ndarray
    prompt_length: int
    advantage: float


class Batch(NamedTuple):
    """One optimizer step's sequences."""

    sequences: list[Sampled]
    old_logprobs: list[np.ndarray]
    """Of the completion's tokens."""

    def save(self, path: Path) -> None:
        """Write it for the workers."""
        np.savez(
            path,
            token_ids=np.concatenate([one.token_ids for one in self.sequences]),
            lengths=np.array([len(one.token_ids) for one in self.sequences]),
            prompt_lengths=np.array([one.prompt_length for one in self.sequences]),
            advantages=np.array([one.advantage for one in self.sequences], np.float32),
            old_logprobs=np.concatenate(self.old_logprobs).astype(np.float32),
        )


def record(run_dir: Path) -> None:
    """Write `train_step_rollouts.json` from the rollouts of a finished run of the quickstart."""
    by_step: dict[int, list[dict[str, Any]]] = defaultdict(list)
    for line in (run_dir / "rollouts.jsonl").read_text().splitlines():
        row = json.loads(line)
        if row["step"] in STEPS and row["dropped"] is None:
            by_step[row["step"]].append(row)
    steps = {}
    for step in STEPS:
        groups: dict[str, dict[str, Any]] = {}
        for row in by_step[step]:
            group = groups.setdefault(row["task"], {"prompt": row["prompt"], "completions": [], "rollouts": []})
            completion = [row["completion"], row["finish_reason"] == "stop"]
            if completion not in group["completions"]:
                group["completions"].append(completion)
            group["rollouts"].append([group["completions"].index(completion), row["advantage"]])
        steps[str(step)] = list(groups.values())
    RECORDED.write_text(json.dumps(steps, indent=1) + "\n")


def recorded(step: int, num_groups: int | None = None) -> list[Sampled]:
    """The sequences of one recorded step, or of its first groups."""
    from tokenizers import Tokenizer

    tokenizer = Tokenizer.from_file(str(POLICY / "tokenizer.json"))
    sequences = []
    for group in json.loads(RECORDED.read_text())[str(step)][:num_groups]:
        prompt = tokenizer.encode(group["prompt"]).ids
        for index, advantage in group["rollouts"]:
            text, has_ended = group["completions"][index]
            token_ids = np.array([*prompt, *tokenizer.encode(text).ids, *([EOS] if has_ended else [])], np.int64)
            sequences.append(Sampled(token_ids, len(prompt), advantage))
    return sequences


def all_distinct(sequences: Sequence[Sampled], seed: int = 0) -> list[Sampled]:
    """The same prompts and lengths, no two completions alike, no advantage 0.

    Where a completion occurred before, tokens of it are replaced until it is new. Advantages are drawn and centred
    over each prompt's sequences.
    """
    rng = np.random.default_rng(seed)
    vocabulary = np.unique(np.concatenate([one.token_ids for one in sequences]))
    vocabulary = vocabulary[vocabulary >= FIRST_TEXT_TOKEN]
    drawn = rng.normal(size=len(sequences))
    groups = np.unique([one.token_ids[: one.prompt_length].tobytes() for one in sequences], return_inverse=True)[1]
    means = np.bincount(groups, drawn) / np.bincount(groups)
    seen: set[bytes] = set()
    found = []
    for one, advantage in zip(sequences, drawn - means[groups], strict=True):
        token_ids = one.token_ids.copy()
        while token_ids.tobytes() in seen:
            token_ids[rng.integers(one.prompt_length, len(token_ids) - 1)] = rng.choice(vocabulary)
        seen.add(token_ids.tobytes())
        found.append(Sampled(token_ids, one.prompt_length, float(advantage)))
    return found


def dense(vocab_size: int, num_rows: int, seed: int = 0) -> list[Sampled]:
    """Random sequences of which every token but the first is trained; they fill rows and share nothing."""
    rng = np.random.default_rng(seed)
    lengths: list[int] = []
    for size in itertools.cycle(DENSE_LENGTHS):
        if sum(lengths) == DENSE_ROW * num_rows:
            break
        lengths.append(size)
    return [Sampled(rng.integers(FIRST_TEXT_TOKEN, vocab_size, size), 1, float(rng.normal())) for size in lengths]


def dense_model(directory: Path, num_layers: int, vocab_size: int = 512) -> dict[str, Any]:
    """Write a model of SmolLM2-135M's layers with random weights, by default a small vocabulary; returns its shape."""
    import torch
    from transformers import LlamaConfig, LlamaForCausalLM

    shape = {
        "hidden_size": 576,
        "intermediate_size": 1536,
        "num_hidden_layers": num_layers,
        "num_attention_heads": 9,
        "num_key_value_heads": 3,
        "vocab_size": vocab_size,
        "max_position_embeddings": DENSE_ROW,
        "tie_word_embeddings": True,
    }
    torch.manual_seed(0)
    model = LlamaForCausalLM(LlamaConfig(**shape))
    model.save_pretrained(directory)
    return shape | {"parameters": sum(parameter.numel() for parameter in model.parameters())}


def with_old_logprobs(model_dir: Path, sequences: Sequence[Sampled], seed: int = 0, rows: int = 16) -> Batch:
    """Score the sequences with the policy and add noise."""
    import torch
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(model_dir, dtype=torch.float32).eval()
    rng = np.random.default_rng(seed)
    old_logprobs = []
    for start in range(0, len(sequences), rows):
        part = sequences[start : start + rows]
        ids_BL = torch.zeros(len(part), max(len(one.token_ids) for one in part), dtype=torch.int64)
        for row, one in enumerate(part):
            ids_BL[row, : len(one.token_ids)] = torch.from_numpy(one.token_ids)
        with torch.no_grad():
            # Causal attention never looks ahead at the padding on the right.
            logprobs_BLV = model(input_ids=ids_BL).logits[:, :-1].log_softmax(-1)
        scored_BL = logprobs_BLV.gather(-1, ids_BL[:, 1:, None])[..., 0].numpy()
        for row, one in enumerate(part):
            exact = scored_BL[row, one.prompt_length - 1 : len(one.token_ids) - 1]
            old_logprobs.append(exact + rng.normal(scale=NOISE, size=exact.shape))
    return Batch(list(sequences), old_logprobs)


def describe(sequences: Sequence[Sampled]) -> dict[str, int]:
    """Counts that say what can be shared or left out."""
    alive = [one for one in sequences if one.advantage]
    return {
        "sequences": len(sequences),
        "tokens": sum(len(one.token_ids) for one in sequences),
        "trained_tokens": sum(len(one.token_ids) - one.prompt_length for one in sequences),
        "prompts": len({one.token_ids[: one.prompt_length].tobytes() for one in sequences}),
        "distinct_sequences": len({one.token_ids.tobytes() for one in sequences}),
        "sequences_with_advantage": len(alive),
        "distinct_with_advantage": len({one.token_ids.tobytes() for one in alive}),
    }


def gflop(config: Mapping[str, Any], sequences: Sequence[Sampled]) -> float:
    """Forward and backward of every sequence by itself: 6 x parameters x tokens, and causal attention.

    The output embedding counts where a token is trained, the input embedding nowhere. Attention over s tokens is two
    products of s^2 / 2 pairs, 2 floating-point operations each, three times over: 6 s^2 x width per layer.
    """
    width, inner, layers = config["hidden_size"], config["intermediate_size"], config["num_hidden_layers"]
    head = config.get("head_dim") or width // config["num_attention_heads"]
    queries, keys = config["num_attention_heads"] * head, config["num_key_value_heads"] * head
    per_layer = 2 * width * queries + 2 * width * keys + 3 * width * inner
    total = 0.0
    for one in sequences:
        size = len(one.token_ids)
        total += layers * (6 * per_layer * size + 6 * size**2 * queries)
        total += 6 * width * config["vocab_size"] * (size - one.prompt_length)
    return total / 1e9
