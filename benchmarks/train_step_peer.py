"""The peer of `benchmarks.train_step`: the step of TRL's `GRPOTrainer` on sequences that are given.

    PYTHON -m benchmarks.train_step_peer OPTIONS     in the environment of tools/trl_env.py; OPTIONS as JSON

Everything from the prepared inputs on is TRL's and its libraries': `training_step` with `_compute_loss`, accelerate's
clipping, the optimizer that the trainer makes, its schedule. Only generation is left out.
"""

from __future__ import annotations

import json
import sys
import tempfile
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import torch
from datasets import Dataset  # type: ignore[import-not-found]
from torch import Tensor
from transformers import PreTrainedTokenizerFast
from trl import GRPOConfig, GRPOTrainer  # type: ignore[import-not-found]

from benchmarks.train_step_worker import Step, Subject, claim_stdout, serve


class GivenSequences(GRPOTrainer):
    """`GRPOTrainer` whose inputs are prepared already."""

    def _prepare_inputs(self, generation_batch: dict[str, Tensor]) -> dict[str, Tensor]:
        return generation_batch


def make_trainer(options: Mapping[str, Any], num_sequences: int, output_dir: str) -> GRPOTrainer:
    """The trainer as a user would configure it for a CPU: float32, nothing recomputed, no KL."""
    rows = options["rows"]
    model_dir = Path(options["model"])
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_file=str(model_dir / "tokenizer.json"), pad_token="<pad>", eos_token="<eos>"
    )
    args = GRPOConfig(
        output_dir=output_dir,
        use_cpu=True,
        bf16=False,
        gradient_checkpointing=False,
        model_init_kwargs={"dtype": "float32"},
        per_device_train_batch_size=rows,
        gradient_accumulation_steps=num_sequences // rows,
        num_generations=options["group_size"],
        max_completion_length=64,
        beta=0.0,
        epsilon=options["clip"],
        epsilon_high=options["clip"],
        loss_type="dapo",
        temperature=1.0,
        learning_rate=options["learning_rate"],
        adam_beta1=options["betas"][0],
        adam_beta2=options["betas"][1],
        weight_decay=0.0,
        max_grad_norm=options["max_grad_norm"],
        lr_scheduler_type="constant",
        max_steps=1_000_000,
        save_strategy="no",
        report_to="none",
    )
    return GivenSequences(
        model=str(model_dir),
        reward_funcs=lambda completions, **_: [0.0] * len(completions),
        args=args,
        train_dataset=Dataset.from_dict({"prompt": ["-"] * num_sequences}),
        processing_class=tokenizer,
    )


def micro_batches(batch: Mapping[str, np.ndarray], rows: int) -> list[dict[str, Tensor]]:
    """What the trainer prepares from rollouts: prompts padded on the left, completions on the right, shuffled."""
    lengths, prompts = batch["lengths"], batch["prompt_lengths"]
    completions = lengths - prompts
    count = len(lengths)
    prompt_mask = np.arange(prompts.max()) >= prompts.max() - prompts[:, None]
    completion_mask = np.arange(completions.max()) < completions[:, None]
    prompt_ids, completion_ids = np.zeros(prompt_mask.shape, np.int64), np.zeros(completion_mask.shape, np.int64)
    old = np.zeros(completion_mask.shape, np.float32)
    is_prompt = np.arange(lengths.sum()) - np.repeat(np.cumsum(lengths) - lengths, lengths) < np.repeat(
        prompts, lengths
    )
    prompt_ids[prompt_mask] = batch["token_ids"][is_prompt]
    completion_ids[completion_mask] = batch["token_ids"][~is_prompt]
    old[completion_mask] = batch["old_logprobs"]
    order = np.random.default_rng(0).permutation(count)
    arrays = {
        "prompt_ids": prompt_ids,
        "prompt_mask": prompt_mask.astype(np.int64),
        "completion_ids": completion_ids,
        "completion_mask": completion_mask.astype(np.int64),
        "old_per_token_logps": old,
        "advantages": batch["advantages"],
    }
    total = torch.tensor(int(completion_mask.sum()))
    return [
        {name: torch.from_numpy(array[order[start : start + rows]]) for name, array in arrays.items()}
        | {"num_items_in_batch": total}
        for start in range(0, count, rows)
    ]


def stepper(trainer: GRPOTrainer, inputs: list[dict[str, Tensor]]) -> Callable[[], Step]:
    """The body of the trainer's inner loop, between two batches of its data loader."""
    trainer.create_optimizer_and_scheduler(num_training_steps=1_000_000)
    model, optimizer = trainer.accelerator.prepare(trainer.model, trainer.optimizer)
    trainer.model_wrapped = model
    trainer.current_gradient_accumulation_steps = len(inputs)
    # Moments exist before memory is looked at, as they do in our policy.
    for parameter in model.parameters():
        parameter.grad = torch.zeros_like(parameter)
    optimizer.step()
    optimizer.zero_grad()

    def step() -> Step:
        total = 0.0
        for index, part in enumerate(inputs):
            trainer.accelerator.gradient_state._set_sync_gradients(index + 1 == len(inputs))
            total += float(trainer.training_step(model, part, None))
        norm = trainer.accelerator.clip_grad_norm_(model.parameters(), trainer.args.max_grad_norm)
        optimizer.step()
        trainer.lr_scheduler.step()
        model.zero_grad()
        return Step(total, float(norm))

    return step


def no_gemm() -> dict[str, float]:
    """The product is measured elsewhere."""
    raise NotImplementedError("the peak is measured by another subject, with the same threads")


def main() -> None:
    """Serve the trainer's step."""
    channel, options = claim_stdout(), json.loads(sys.argv[1])
    torch.set_num_threads(options["threads"])
    with np.load(options["batch"]) as arrays:
        batch = dict(arrays)
    with tempfile.TemporaryDirectory(prefix="dockyard-trl-") as folder:
        trainer = make_trainer(options, len(batch["lengths"]), folder)
        serve(Subject(stepper(trainer, micro_batches(batch, options["rows"])), no_gemm), channel)


if __name__ == "__main__":
    main()
