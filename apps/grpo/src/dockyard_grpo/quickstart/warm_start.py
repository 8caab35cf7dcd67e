"""Build `policy/`: a tiny policy that writes diffs of the right form and does not know what plain issues mean.

    python -m dockyard_grpo.quickstart.warm_start --out policy

Half of the problems are plain and have as target an edit drawn evenly from the four plausible ones: they teach the
form of a diff (which file, which lines, one piece replaced) and carry no signal about which edit is right. The others
have their issue in the invented jargon and the right edit as target: they build the path from a word of the issue to a
filling, which the tests later connect to plain words. Only training names are drawn.

The numbers of steps and the seed are fixed and nothing depends on the clock. One thread makes a rerun on the same
machine and library versions equal bit for bit.
"""

from __future__ import annotations

import argparse
import logging
import random
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from dockyard_grpo.quickstart.family import draw_problem
from dockyard_grpo.quickstart.tokenizer import EOS_ID, PAD_ID, build_tokenizer, render_prompt

if TYPE_CHECKING:
    import torch
    from transformers import PreTrainedTokenizerFast, Qwen2ForCausalLM

__all__ = ["PHASES", "Phase", "build_model", "main", "train"]

logger = logging.getLogger(__name__)

MUON_LR = 0.02
ADAM_LR = 4e-3
WARMUP_STEPS = 30
PROMPT_WEIGHT = 0.1
"""Weight of a prompt token in the loss; a diff token weighs 1."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Phase:
    """A stretch of steps with its own schedule, random stream and fresh optimizer state."""

    num_steps: int
    batch_size: int
    peak: float = 1.0
    """Factor on both learning rates after the warm-up."""
    decay_share: float = 1.0
    """The learning rates fall linearly to zero over this last share of the steps."""
    jargon_shares: tuple[float, float] = (0.5, 0.5)
    """Share of jargon problems at the first step and from half of the steps on; linear between."""
    single_share: float = 0.0
    """Probability that a step sees modules of one function only."""
    num_single_steps: int = 0
    """So many first steps do so in any case."""

    def rate(self, step: int) -> float:
        """Return the factor on the learning rates at `step` (from 0)."""
        warmup = min(1.0, (step + 1) / WARMUP_STEPS)
        return self.peak * warmup * min(1.0, (1.0 - step / self.num_steps) / self.decay_share)

    def jargon_share(self, step: int) -> float:
        """Return the probability that a problem of `step` is jargon."""
        first, last = self.jargon_shares
        return first + (last - first) * min(1.0, 2 * step / self.num_steps)


PHASES = (Phase(num_steps=3000, batch_size=32, decay_share=0.5, single_share=0.25, num_single_steps=100),)
"""Twice the steps, the last ones with larger batches, made 97 % of the diffs apply instead of 88 %, but GRPO ended no
higher from there (mean reward of the last ten of 80 steps, seeds 0 to 2: 0.82 to 0.89)."""

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
    rng: random.Random, tokenizer: PreTrainedTokenizerFast, phase: Phase
) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
    """Yield one batch a step; every problem is new."""
    for step in range(phase.num_steps):
        single = step < phase.num_single_steps or rng.random() < phase.single_share
        num_functions = 1 if single else 2
        share = phase.jargon_share(step)
        rows = [
            draw_row(rng, tokenizer, num_functions=num_functions, jargon=rng.random() < share)
            for _ in range(phase.batch_size)
        ]
        yield collate(rows)


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


def run_phase(model: Qwen2ForCausalLM, tokenizer: PreTrainedTokenizerFast, phase: Phase, rng: random.Random) -> None:
    """Train `model` in place: Muon on the matrices, AdamW without weight decay on the rest."""
    import torch

    from dockyard_grpo.quickstart.muon import Muon

    matrices = [p for name, p in model.named_parameters() if p.ndim == 2 and "embed" not in name]
    others = [p for name, p in model.named_parameters() if p.ndim != 2 or "embed" in name]
    optimizers: list[tuple[torch.optim.Optimizer, float]] = [
        (Muon(matrices, lr=MUON_LR), MUON_LR),
        (torch.optim.AdamW(others, lr=ADAM_LR, betas=(0.9, 0.95), weight_decay=0.0), ADAM_LR),
    ]
    recent: list[float] = []
    for step, batch in enumerate(draw_batches(rng, tokenizer, phase)):
        for optimizer, base_lr in optimizers:
            for group in optimizer.param_groups:
                group["lr"] = base_lr * phase.rate(step)
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


def train(out: Path, *, phases: Sequence[Phase] = PHASES, seed: int = 0) -> None:
    """Run the phases one after the other and write the policy and its tokenizer to `out`."""
    import torch

    torch.set_num_threads(1)
    torch.manual_seed(seed)
    tokenizer = build_tokenizer()
    model = build_model(len(tokenizer))
    for index, phase in enumerate(phases):
        logger.info("phase %d of %d: %d steps", index + 1, len(phases), phase.num_steps)
        run_phase(model, tokenizer, phase, random.Random(seed + 1000 * index))
    out.mkdir(parents=True, exist_ok=True)
    tokenizer.save_pretrained(out)
    model.save_pretrained(out)


def main(argv: Sequence[str] | None = None) -> None:
    """Run the warm start from the command line."""
    parser = argparse.ArgumentParser(description="Build the quickstart's warm-started policy.")
    parser.add_argument("--out", type=Path, default=Path(__file__).parent / "policy")
    parser.add_argument("--seed", type=int, default=0)
    arguments = parser.parse_args(argv)
    logging.basicConfig(level=logging.INFO, format="%(message)s")
    train(arguments.out, seed=arguments.seed)


if __name__ == "__main__":
    main()
