"""Build `policy/`: a tiny policy that writes diffs of the right form and does not know what plain issues mean.

    python -m dockyard_grpo.quickstart.warm_start --out policy

Plain problems, one in ten at the start and half of them in the end, have as target an edit drawn evenly from the four
plausible ones: they teach the form of a diff (which file, which lines, one piece replaced) and carry no signal about
which edit is right. The others have their issue in the invented jargon and the right edit as target: they build the
path from a word of the issue to a filling, which the tests later connect to plain words. Only training names are drawn.

The number of steps and the seed are fixed and nothing depends on the clock. One thread makes a rerun on the same
machine and library versions equal bit for bit.
"""

from __future__ import annotations

import argparse
import logging
import random
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from dockyard_grpo.quickstart.family import draw_problem
from dockyard_grpo.quickstart.tokenizer import EOS_ID, PAD_ID, build_tokenizer, render_prompt

if TYPE_CHECKING:
    import torch
    from transformers import PreTrainedTokenizerFast, Qwen2ForCausalLM

__all__ = ["NUM_STEPS", "build_model", "main", "train"]

logger = logging.getLogger(__name__)

NUM_STEPS = 5000
BATCH_SIZE = 32
MUON_LR = 0.02
ADAM_LR = 4e-3
WARMUP_STEPS = 30
DECAY_SHARE = 0.75
"""The learning rates fall linearly to zero over this last share of the steps."""
PROMPT_WEIGHT = 0.1
"""Weight of a prompt token in the loss; a diff token weighs 1."""
JARGON_SHARES = (0.9, 0.5)
"""Share of jargon problems at the first step and from half of the steps on; linear between."""
SINGLE_FUNCTION_SHARE = 0.25
SINGLE_FUNCTION_STEPS = 200
"""The first steps see modules of one function only."""

Row = tuple[list[int], list[int]]


def build_model(vocab_size: int) -> Qwen2ForCausalLM:
    """Return the randomly initialised policy: Qwen2, 4 layers, width 128, tied embeddings, float32."""
    from transformers import Qwen2Config, Qwen2ForCausalLM

    config = Qwen2Config(
        vocab_size=vocab_size,
        hidden_size=128,
        intermediate_size=256,
        num_hidden_layers=4,
        num_attention_heads=4,
        num_key_value_heads=4,
        max_position_embeddings=512,
        rope_theta=10000.0,
        tie_word_embeddings=True,
        eos_token_id=EOS_ID,
        pad_token_id=PAD_ID,
        bos_token_id=None,
        attn_implementation="sdpa",
    )
    return Qwen2ForCausalLM(config)


def jargon_share(step: int, num_steps: int) -> float:
    """Return the probability that a problem of this step is jargon."""
    first, last = JARGON_SHARES
    return first + (last - first) * min(1.0, 2 * step / num_steps)


def draw_row(rng: random.Random, tokenizer: PreTrainedTokenizerFast, *, num_functions: int, jargon: bool) -> Row:
    """Draw one problem and return (prompt ids, target diff ids with the end of sequence)."""
    problem = draw_problem(rng, num_functions=num_functions, jargon=jargon)
    filling = problem.function.right if jargon else rng.choice(problem.plausible_fillings)
    prompt_ids: list[int] = tokenizer(render_prompt(problem))["input_ids"]
    target_ids: list[int] = tokenizer(problem.patch(filling))["input_ids"]
    return prompt_ids, [*target_ids, EOS_ID]


def collate(rows: Sequence[Row]) -> tuple[torch.Tensor, torch.Tensor]:
    """Pad rows on the right; return token ids [B, T] and loss weights [B, T]."""
    import torch

    length = max(len(prompt) + len(target) for prompt, target in rows)
    ids_BT = torch.full((len(rows), length), PAD_ID)
    weights_BT = torch.zeros(len(rows), length)
    for index, (prompt, target) in enumerate(rows):
        end = len(prompt) + len(target)
        ids_BT[index, :end] = torch.tensor(prompt + target)
        weights_BT[index, : len(prompt)] = PROMPT_WEIGHT
        weights_BT[index, len(prompt) : end] = 1.0
    return ids_BT, weights_BT


def draw_batches(
    rng: random.Random, tokenizer: PreTrainedTokenizerFast, *, num_steps: int
) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
    """Yield one batch a step; every problem is new."""
    for step in range(num_steps):
        single = step < SINGLE_FUNCTION_STEPS or rng.random() < SINGLE_FUNCTION_SHARE
        num_functions = 1 if single else 2
        share = jargon_share(step, num_steps)
        rows = [
            draw_row(rng, tokenizer, num_functions=num_functions, jargon=rng.random() < share)
            for _ in range(BATCH_SIZE)
        ]
        yield collate(rows)


def rate(step: int, num_steps: int) -> float:
    """Return the factor on the learning rates: linear warm-up, constant, linear decay."""
    warmup = min(1.0, (step + 1) / WARMUP_STEPS)
    return warmup * min(1.0, (1.0 - step / num_steps) / DECAY_SHARE)


def batch_loss(
    model: Qwen2ForCausalLM, ids_BT: torch.Tensor, weights_BT: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return (weighted mean cross-entropy, mean over diff tokens), both in nats per token."""
    import torch

    next_weights_BT = weights_BT[:, 1:]
    is_kept_BT = next_weights_BT > 0
    hidden_BTD = model.model(input_ids=ids_BT).last_hidden_state[:, :-1]
    logits_KV = model.lm_head(hidden_BTD[is_kept_BT])
    losses_K = torch.nn.functional.cross_entropy(logits_KV, ids_BT[:, 1:][is_kept_BT], reduction="none")
    weights_K = next_weights_BT[is_kept_BT]
    loss = (losses_K * weights_K).sum() / weights_K.sum()
    return loss, losses_K[weights_K == 1.0].mean().detach()


def train(out: Path, *, num_steps: int = NUM_STEPS, seed: int = 0) -> None:
    """Train for `num_steps` and write the policy and its tokenizer to `out`."""
    import torch

    from dockyard_grpo.quickstart.muon import Muon

    torch.set_num_threads(1)
    torch.manual_seed(seed)
    tokenizer = build_tokenizer()
    model = build_model(len(tokenizer))
    matrices = [p for name, p in model.named_parameters() if p.ndim == 2 and "embed" not in name]
    others = [p for name, p in model.named_parameters() if p.ndim != 2 or "embed" in name]
    optimizers: list[tuple[torch.optim.Optimizer, float]] = [
        (Muon(matrices, lr=MUON_LR), MUON_LR),
        (torch.optim.AdamW(others, lr=ADAM_LR, betas=(0.9, 0.95), weight_decay=0.0), ADAM_LR),
    ]
    recent: list[float] = []
    for step, batch in enumerate(draw_batches(random.Random(seed), tokenizer, num_steps=num_steps)):
        for optimizer, base_lr in optimizers:
            for group in optimizer.param_groups:
                group["lr"] = base_lr * rate(step, num_steps)
        loss, diff_loss = batch_loss(model, *batch)
        loss.backward()
        torch.nn.utils.clip_grad_norm_(others, 1.0)
        for optimizer, _ in optimizers:
            optimizer.step()
            optimizer.zero_grad()
        recent.append(float(diff_loss))
        if len(recent) == 50:
            logger.info("step %d: %.4f nats per diff token", step + 1, sum(recent) / len(recent))
            recent.clear()
    out.mkdir(parents=True, exist_ok=True)
    tokenizer.save_pretrained(out)
    model.save_pretrained(out)


def main(argv: Sequence[str] | None = None) -> None:
    """Run the warm start from the command line."""
    parser = argparse.ArgumentParser(description="Build the quickstart's warm-started policy.")
    parser.add_argument("--out", type=Path, default=Path(__file__).parent / "policy")
    parser.add_argument("--steps", type=int, default=NUM_STEPS)
    parser.add_argument("--seed", type=int, default=0)
    arguments = parser.parse_args(argv)
    logging.basicConfig(level=logging.INFO, format="%(message)s")
    train(arguments.out, num_steps=arguments.steps, seed=arguments.seed)


if __name__ == "__main__":
    main()
