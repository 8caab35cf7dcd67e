"""The sections of a run's configuration: closed, frozen, every field with its unit and default.

Defaults suit a real model; the quickstart's own values are in `quickstart.yaml`.
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import Annotated, Literal

from annotated_types import Ge, Gt, Le, Lt
from pydantic import AfterValidator, BaseModel, ConfigDict, Field, field_validator, model_validator

from dockyard_grpo.deadline import SaveBy

Count = Annotated[int, Ge(1)]
Seconds = Annotated[float, Gt(0)]
Decay = Annotated[float, Ge(0), Lt(1)]


def _whole_path(value: str) -> str:
    """A local path with its home and its root, so that config.yaml means the same from any folder.

    What is no path here (a hub id, ``quickstart:…``, a mistake) stays as it was written.
    """
    path = Path(value).expanduser()
    return str(path.absolute()) if path.exists() else value


LocalOrName = Annotated[str, AfterValidator(_whole_path)]
WholePath = Annotated[Path, AfterValidator(lambda path: path.expanduser().absolute())]


_KEYS_OF_ONE_BACKEND = {
    "torch": ("cpu_offload", "optimizer_offload", "reference_offload"),
    "jax": ("row_length_buckets",),
}
"""Of the section policy; every other key means the same to both."""


class Section(BaseModel):
    """A closed, immutable part of the configuration."""

    model_config = ConfigDict(extra="forbid", frozen=True, allow_inf_nan=False)


class PolicySection(Section):
    """The model that is trained, and its optimizer."""

    model: LocalOrName | None = Field(None, description="Directory or hub id of a Hugging Face causal LM.")
    backend: Literal["torch", "jax"] = Field("torch", description="Trainer: PyTorch, or JAX and Flax NNX.")
    dtype: Literal["float32", "bfloat16"] = Field("float32", description="Parameter dtype.")
    learning_rate: Annotated[float, Ge(0)] = Field(1e-6, description="Peak learning rate of AdamW.")
    betas: tuple[Decay, Decay] = Field((0.9, 0.95), description="AdamW's exponential decays.")
    eps: Annotated[float, Gt(0)] = Field(1e-8, description="AdamW's epsilon.")
    weight_decay: Annotated[float, Ge(0)] = Field(0.0, description="AdamW's decoupled weight decay.")
    warmup_steps: Annotated[int, Ge(0)] = Field(3, description="Steps of linear warm-up.")
    schedule: Literal["constant", "linear", "cosine"] = Field("constant", description="Schedule after warm-up.")
    min_lr_ratio: Annotated[float, Ge(0), Le(1)] = Field(0.0, description="Final learning rate / peak.")
    max_grad_norm: Annotated[float, Gt(0)] = Field(1.0, description="Global gradient norm is clipped to this.")
    micro_batch_tokens: Count = Field(4096, description="Upper bound of tokens in one forward-backward.")
    row_length: Count | None = Field(
        None, description="Tokens per packed row; null = as long as each micro-batch needs."
    )
    row_length_buckets: tuple[Count, ...] | None = Field(
        None, description="jax: lengths that rows are padded to, one program each; null = powers of two and between."
    )
    logprob_chunk_tokens: Count | None = Field(
        None, description="Trained positions per chunk of the logprob kernel; null = by the size of the vocabulary."
    )
    num_ranks: Count = Field(1, description="Trainer ranks; weights are sharded over them.")
    tensor_parallel_size: Count = Field(
        1, description="Trainer ranks, with jax devices, that share each layer; divides their number."
    )
    activation_checkpointing: bool = Field(
        False, description="Compute each block again in the backward pass instead of keeping its activations."
    )
    cpu_offload: bool = Field(False, description="torch: weights, gradients and moments stay in host memory.")
    optimizer_offload: bool = Field(False, description="torch: keep AdamW's moments in host memory.")
    reference_offload: bool = Field(
        False, description="torch: keep the reference in host memory while it is not asked."
    )
    lora_rank: Count | None = Field(None, description="Train adapters of this rank on a frozen base; null = all.")
    lora_alpha: Annotated[float, Gt(0)] = Field(32.0, description="The adapters' product counts alpha / rank times.")
    num_threads: Count | None = Field(None, description="CPU threads of a trainer rank; null = the fleet's share.")
    collective_timeout_s: Seconds = Field(1800.0, description="Deadline of a collective between trainer ranks.")

    @field_validator("row_length_buckets")
    @classmethod
    def _refuse_unsorted(cls, lengths: tuple[int, ...] | None) -> tuple[int, ...] | None:
        if lengths is not None and (not lengths or sorted(set(lengths)) != list(lengths)):
            raise ValueError(f"must be growing lengths, got {list(lengths)}; sort them, or leave the key out")
        return lengths

    @model_validator(mode="after")
    def _refuse_keys_of_the_other_backend(self) -> PolicySection:
        for backend, names in _KEYS_OF_ONE_BACKEND.items():
            for name in names if backend != self.backend else ():
                if (given := getattr(self, name)) != type(self).model_fields[name].default:
                    raise ValueError(
                        f"policy.{name} is for policy.backend={backend}, got {given} with policy.backend="
                        f"{self.backend}; leave it out, or change the backend"
                    )
        return self


class SandboxSection(Section):
    """Where patches become verdicts."""

    url: str | None = Field(None, description="A running server; null = the sandbox fleet starts one per node.")
    token_file: WholePath | None = Field(None, description="File with the server's bearer token.")
    num_workers: Count | None = Field(None, description="Verdicts at once per server; null = CPUs.")
    min_isolation: Literal["namespaces", "bwrap", "landlock", "unsafe"] | None = Field(
        None, description="Refuse weaker isolation; null = the strongest the probe finds."
    )
    timeout_s: Seconds = Field(300.0, description="Client deadline for one verdict, queueing included.")


class GrpoSection(Section):
    """Group sizes, staleness and advantages."""

    num_prompts_per_step: Count = Field(16, description="Groups trained per optimizer step.")
    num_generations_per_prompt: Annotated[int, Ge(2)] = Field(16, description="Rollouts per group.")
    max_staleness: Annotated[int, Ge(0)] = Field(1, description="Versions a rollout may lag; 0 = synchronous.")
    updates_per_batch: Count = Field(
        1, description="Optimizer updates on each consumed batch; 2 or more need loss.proximal=given or bypass."
    )
    baseline: Literal["leave_one_out", "mean"] = Field("leave_one_out", description="Advantage baseline.")
    scale: Literal["std", "none"] = Field("std", description="Advantage scale.")
    rollout_timeout_s: Seconds = Field(600.0, description="Wall-clock deadline of a rollout; past it: invalid.")
    dynamic_sampling: bool = Field(
        False, description="Replace groups whose unshaped rewards are all equal: they carry no signal (DAPO)."
    )
    max_replaced_per_step: Count | None = Field(
        None, description="Groups that dynamic sampling replaces per step at most; null = 2 num_prompts_per_step."
    )


class DataSection(Section):
    """Tasks and how they become prompts."""

    train: LocalOrName | None = Field(None, description="JSONL of SWE-bench-style rows.")
    validation: LocalOrName | None = Field(None, description="JSONL of held-out rows; null = no evaluation.")
    prompt_template: Literal["auto", "numbered", "plain", "chat"] = Field("auto", description="Prompt renderer.")
    max_prompt_tokens: Count | None = Field(None, description="null = max_model_len - max_new_tokens.")
    limit: Count | None = Field(None, description="Use the first so many training rows.")
    accept_change: bool = Field(
        False, description="Resume with other tasks than before; groups of tasks that are gone are dropped."
    )


class EvaluationSection(Section):
    """Held-out evaluation; uses no slots."""

    mode: Literal["pinned", "live"] = Field(
        "pinned", description="pinned: a refit waits for it; live: it runs on, its versions are recorded."
    )
    every_steps: Count | None = Field(None, description="Steps between evaluations; null = start and end only.")
    num_tasks: Count = Field(64, description="Held-out tasks per evaluation.")
    num_generations: Count = Field(1, description="Rollouts per held-out task.")
    temperature: Annotated[float, Ge(0)] = Field(1.0, description="0 = greedy.")


class ClusterSection(Section):
    """What the fleets take from Ray."""

    address: str | None = Field(None, description="Ray cluster to join; null = start one on this machine.")
    trainer_cpus: Count = Field(1, description="CPUs per trainer rank.")
    trainer_gpus: Annotated[int, Ge(0)] | None = Field(None, description="GPUs per rank; null = 1 if there are any.")
    inference_cpus: Count = Field(1, description="CPUs per engine.")
    inference_gpus: Annotated[int, Ge(0)] | None = Field(None, description="GPUs per engine; null = as above.")
    num_sandboxes: Count = Field(1, description="Sandbox servers.")
    sandbox_cpus: Count = Field(1, description="CPUs per sandbox server.")
    object_store_mib: Annotated[int, Ge(80)] = Field(256, description="Shared memory of a Ray started here, MiB.")

    @property
    def threads_per_worker(self) -> int:
        """CPU threads of a trainer rank or an engine unless it says otherwise: half of the cores."""
        return max(1, (os.cpu_count() or 1) // 2)


class CheckpointSection(Section):
    """What is kept of a run."""

    every_steps: Count | None = Field(None, description="Steps between checkpoints; null = at the end only.")
    keep_last: Count = Field(2, description="Newest complete checkpoints that are kept.")
    keep_best: Annotated[int, Ge(0)] = Field(0, description="Further ones kept for their best_metric; 0 = none.")
    best_metric: str = Field("val_reward_mean", description="Field of metrics.jsonl that keep_best looks at.")
    best_mode: Literal["max", "min"] = Field("max", description="Whether more or less of best_metric is better.")
    must_save_by: str | None = Field(
        None, description="[[DD:]HH:]MM:SS since the start; the run saves and stops in time for it (exit code 75)."
    )

    @field_validator("must_save_by", mode="before")
    @classmethod
    def _check_time(cls, value: object) -> object:
        if isinstance(value, int | float):  # before pydantic says that a number is no string
            raise ValueError(
                f"must be quoted in YAML, got {value!r}: YAML reads 1:30:00 as a number; write must_save_by: '1:30:00'"
            )
        if isinstance(value, str):
            SaveBy.parse(value)
        return value


class RecoverySection(Section):
    """What happens when a part dies while the run goes on. Every death is an event of the ledger."""

    trainer: Literal["recover", "stop"] = Field("recover", description="recover: go on from the last checkpoint.")
    engine: Literal["recover", "stop"] = Field("recover", description="recover: restart it, run its groups again.")
    sandbox: Literal["recover", "stop"] = Field("recover", description="recover: restart the server, ask again.")
    max_per_hour: Annotated[int, Ge(1)] = Field(6, description="More deaths within an hour stop the run.")
    timeout_s: Seconds = Field(300.0, description="Deadline of bringing one part back, a new node included.")


class RefitSection(Section):
    """How engines get new weights."""

    transport: Literal["auto", "collective", "shared_memory", "filesystem"] = Field(
        "auto", description="auto = shared memory when every engine is on the trainer's host and CPUs, else collective."
    )
    directory: WholePath | None = Field(
        None, description="For refit.transport=filesystem: a directory that the trainer and every engine see."
    )
    bucket_mib: Count = Field(64, description="Upper bound of what is sent at once, MiB.")
    timeout_s: Seconds = Field(120.0, description="Deadline of one refit; with mode wait of the slowest request too.")
    mode: Literal["keep", "wait", "abort"] = Field(
        "keep", description="Live requests go on with the new weights, end before, or their groups run anew."
    )
    staging: Literal["none", "host"] = Field(
        "none", description="host: verify all in host memory, engines serving, before any loads; undo a failed load."
    )
    hashes: Literal["auto", "full", "sampled"] = Field(
        "auto", description="Bytes that are hashed: all, or a page of 16; auto = all up to 8 GiB of weights."
    )
    num_probes: Annotated[int, Ge(8)] = Field(8, description="Prompts scored by both sides after a refit.")
    probe_tokens: Annotated[int, Ge(32)] = Field(64, description="Tokens per probe.")
    max_probe_abs_diff: Annotated[float, Gt(0)] | None = Field(
        None, description="Mean logprob difference that fails a refit; null = 1e-3 in fp32, 0.3 in bf16."
    )

    @model_validator(mode="after")
    def _check_directory(self) -> RefitSection:
        if (self.transport == "filesystem") != (self.directory is not None):
            raise ValueError(
                f"refit.directory is what refit.transport=filesystem needs, and nothing else: got {self.directory} for "
                f"{self.transport}; set both, or neither"
            )
        return self


class LoggingSection(Section):
    """What a person sees."""

    console: Literal["auto", "bar", "plain"] = Field("auto", description="bar on a terminal, else plain lines.")
    trackers: tuple[Literal["tensorboard"], ...] = Field(
        ("tensorboard",), description="Where scalars go besides metrics.jsonl: <run.dir>/tensorboard; [] = nowhere."
    )


class RunSection(Section):
    """The run itself."""

    name: str = Field("grpo", description="Used in the default run directory.")
    dir: WholePath | None = Field(None, description="Run directory; null = runs/<name>-<timestamp>.")
    seed: int = Field(0, description="Seeds the sampler, the engines and the trainer.")
    resume: str | None = Field(
        None, description="A run directory to go on with, or auto: go on with run.dir if it holds a run."
    )
    max_steps: Count = Field(100, description="Optimizer steps.")
